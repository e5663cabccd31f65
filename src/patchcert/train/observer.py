"""What happens beside the training loop: checks, metrics, checkpoints, and an orderly end on Ctrl-C."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from torch import Tensor

from patchcert.errors import RunError
from patchcert.train.checkpoint import save_state
from patchcert.train.loop import EpochSummary, Position
from patchcert.train.run_folder import Run
from patchcert.train.step import Trainee

SAVE_SHARE = 0.02


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop; its state is saved in the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"nothing is lost; go on with: patchcert train {folder} --resume")
        self.folder = folder


class Listener(Protocol):
    """Hears how a training goes on, to show it."""

    def on_batch(self, position: Position, batches: int) -> None:
        """Between two batches; `position` is what comes next."""
        ...

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """After an epoch, with its row of metrics."""
        ...


@dataclass(slots=True)
class StopRequest:
    """Set by the first Ctrl-C; a second one interrupts at once."""

    is_made: bool = False


@contextmanager
def stop_on_interrupt() -> Iterator[StopRequest]:
    """While this lasts the first Ctrl-C only asks to stop, so that no step is cut in half."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        request.is_made = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class Best:
    """The weights with the highest certified accuracy on the validation images so far, and that accuracy."""

    accuracy: float = -1.0
    epoch: int = -1
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class RunObserver:
    """Writes one run. Other processes than the main one check along, but write nothing.

    The state is saved when `checkpoint_seconds` have passed, but never so often that it costs more than 2 %
    of the time; the row of an epoch is always written before a state that lies behind it.
    """

    run: Run
    trainee: Trainee
    batches: int
    checkpoint_seconds: float
    check: Callable[[EpochSummary], dict[str, Any]]
    stop: StopRequest
    best: Best
    writes: bool = True
    listener: Listener | None = None

    def __post_init__(self) -> None:
        self._saved_at, self._save_took = time.monotonic(), 0.0

    def after_batch(self, position: Position) -> None:
        """Save if it is time or if the training is to stop."""
        if self.listener is not None:
            self.listener.on_batch(position, self.batches)
        if self.stop.is_made and self.writes:
            self.save(position)
            raise Interrupted(self.run.path)
        waited = time.monotonic() - self._saved_at
        if waited >= max(self.checkpoint_seconds, self._save_took / SAVE_SHARE):
            self.save(position)

    def after_epoch(self, summary: EpochSummary) -> None:
        """Check the model where a check is due, and write the epoch's row."""
        row = asdict(summary) | self.check(summary)
        if self.writes:
            self.run.append_metrics(row)
        if self.listener is not None:
            self.listener.on_epoch(row)

    def save(self, position: Position) -> None:
        """Write the state from which the run can go on at this position, once queued steps are done."""
        if not self.writes:
            return
        self.trainee.sums.cpu()
        began = time.monotonic()
        notes = {"best_accuracy": self.best.accuracy, "best_epoch": self.best.epoch}
        try:
            save_state(self.run.state, self.trainee, position, notes, self.best.weights)
        except OSError as error:
            raise RunError(f"the state of {self.run.path} cannot be saved: {error}") from error
        self._saved_at = time.monotonic()
        self._save_took = self._saved_at - began
