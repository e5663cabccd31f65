"""One run in a process of its own: trained to its end, then every question about it answered.

Started as `python -m patchcert.papers.chiang2020.worker RUN ...`; its output goes to a log. It stops
cleanly, with its state saved, when a file named `.stop` appears in the folder or when its parent is gone.
"""

import _thread
import json
import os
import signal
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from patchcert.data import load_dataset
from patchcert.errors import PatchcertError
from patchcert.evidence import EvidenceFolder
from patchcert.files import sha256
from patchcert.papers.chiang2020.answering import answer
from patchcert.papers.chiang2020.runner import STOP_FILE, read_questions
from patchcert.report.statistics import in_words
from patchcert.train.run_folder import EVIDENCE, Run
from patchcert.train.training import Workplace, train_run

MISTAKEN, INTERRUPTED = 2, 130
LOOK_EVERY = 0.3
LOG_EVERY = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of one run: 0 done, 2 a mistake, 130 interrupted with its state saved."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = _parse(arguments)
    _log(f"working on {options.run} on {options.device}")
    try:
        threading.Thread(target=_watch, args=(options.run, options.parent), daemon=True).start()
        carry_out(options.run, options.device, options.data_dir)
    except KeyboardInterrupt:
        _log("interrupted")
        return INTERRUPTED
    except PatchcertError as error:
        _log(f"error: {error}")
        return MISTAKEN
    _log("done")
    return 0


def carry_out(folder: Path, device_name: str, data_dir: Path | None) -> None:
    """Train the run in the folder to its end, and leave evidence for each question asked of it."""
    network, questions = read_questions(folder)
    device, kept = torch.device(device_name), EvidenceFolder(folder / EVIDENCE)
    if network:
        from patchcert.papers.chiang2020.imagenet import answer_corners

        answer_corners(network, questions, kept, device, data_dir, _ProgressLog().tell)
        return
    spec = Run.open(folder).spec
    run = train_run(spec, folder, Workplace(device, data_dir), resume=True, listener=_EpochLog())
    dataset = load_dataset(spec.data.name, data_dir)
    for question in questions:
        if kept.find(question, sha256(run.weights), dataset.checksums) is None:
            _log(in_words(answer(question, run, dataset, device, _ProgressLog())))


class _EpochLog:
    """One line of the log for each epoch, with everything that is known of it."""

    def on_start(self, pace: object) -> None: ...

    def on_stop(self) -> None: ...

    def on_batch(self, position: object, batches: int) -> None: ...

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        _log(json.dumps(dict(row)))


class _ProgressLog:
    """A line of the log every few seconds while images are certified or attacked."""

    def __init__(self) -> None:
        self._said, self._said_at = "", time.monotonic()

    def __call__(self, done: float, total: int) -> None:
        """Say how many images are done, unless it was said just now."""
        if time.monotonic() - self._said_at >= LOG_EVERY or done == total:
            self._said_at = time.monotonic()
            _log(f"{int(done):,} of {total:,} images")

    def tell(self, words: str) -> None:
        if words != self._said:
            self._said = words
            _log(words)


def _watch(folder: Path, parent: int) -> None:
    """Asks the main thread to stop once; runs beside it to the end of the process."""
    while not (folder / STOP_FILE).exists() and os.getppid() == parent:
        time.sleep(LOOK_EVERY)
    _thread.interrupt_main()


def _parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--parent", type=int, default=os.getppid())
    return parser.parse_args(arguments)


def _log(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
