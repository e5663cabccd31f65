"""Real processes for tests of training: a server with everything imported forks each in milliseconds."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from other_processes import environment

SERVER = Path(__file__).with_name("fork_server.py")


class Forks:
    """Talks to the process that forks; each command becomes a real process that can be killed."""

    def __init__(self, folder):
        self.folder = folder
        known = environment(NO_COLOR="1")
        alone = {key: value for key, value in known.items() if key not in ("RANK", "WORLD_SIZE")}
        pipe = subprocess.PIPE
        command = [sys.executable, str(SERVER)]
        self.server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=alone)
        self.started = 0
        assert self.answer() == "ready"

    def answer(self):
        assert self.server.stdout is not None
        return self.server.stdout.readline().strip()

    def ask(self, order):
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        return int(self.answer())

    def start(self, environment, **what):
        self.started += 1
        output, errors = (self.folder / f"{self.started}.{kind}" for kind in ("out", "err"))
        order = {"environment": environment, "output": str(output), "errors": str(errors)} | what
        return Process(self, self.ask(order), output, errors)

    def train(self, out, changes, *options, **environment):
        settings = [part for change in changes for part in ("--set", change)]
        arguments = ["train", "paper-mnist", "--out", str(out), *settings, *options]
        return self.start(environment, arguments=arguments)


@dataclass
class Process:
    forks: Forks
    pid: int
    output: Path
    errors: Path

    def send(self, number):
        os.kill(self.pid, number)

    def finish(self):
        """The exit code, what was written to stdout, and what to stderr."""
        code = self.forks.ask({"wait": self.pid})
        return code, self.output.read_text(), self.errors.read_text()


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    found = Forks(tmp_path_factory.mktemp("forks"))
    yield found
    found.server.stdin.close()
    found.server.stdout.close()
    assert found.server.wait(timeout=30) == 0
