"""Other processes that run this package."""

import os
import signal
import subprocess
from pathlib import Path

import patchcert


def environment(**more):
    """Variables by which another process finds this very package."""
    return {
        **os.environ,
        "PYTHONPATH": str(Path(patchcert.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def interrupted(command, at):
    """What a command says on stderr that is stopped by Ctrl-C wherever it has said a line that begins so."""
    pipe, said = subprocess.PIPE, []
    with subprocess.Popen(command, stderr=pipe, stdout=pipe, text=True, env=environment()) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if line.startswith(at):
                process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, said
    return said
