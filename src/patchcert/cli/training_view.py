"""How training shows itself while it runs: a bar on a terminal, lines elsewhere, TensorBoard where asked."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from patchcert.cli.output import say, stderr_console
from patchcert.errors import InvalidInput
from patchcert.train.loop import Position
from patchcert.train.training import Listener

REDRAW_SECONDS = 0.1


@contextmanager
def training_view(epochs: int) -> Iterator[Listener]:
    """A listener that draws a progress bar, or writes a line per check where stderr is no terminal."""
    console = stderr_console()
    if not console.is_terminal:
        yield Lines(epochs)
        return
    columns = (
        BarColumn(bar_width=24),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield Bar(progress, epochs)


class Bar:
    """One bar over all batches of all epochs, with the latest figures beside it."""

    def __init__(self, progress: Progress, epochs: int) -> None:
        self.progress = progress
        self.epochs = epochs
        self.task = progress.add_task("preparing", total=None)
        self.figures = Figures()
        self.drawn_at = 0.0

    def on_batch(self, position: Position, batches: int) -> None:
        """Move the bar, a few times a second at most."""
        now = time.monotonic()
        if now - self.drawn_at < REDRAW_SECONDS and position.batch:
            return
        self.drawn_at = now
        done, total = position.epoch * batches + position.batch, self.epochs * batches
        text = f"epoch {min(position.epoch + 1, self.epochs)}/{self.epochs}{self.figures.text()}"
        self.progress.update(self.task, completed=done, total=total, description=text)

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """Remember the epoch's figures."""
        self.figures.update(row)


class Lines:
    """One line on stderr for every epoch that was checked."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.figures = Figures()

    def on_batch(self, position: Position, batches: int) -> None:
        """Batches are not worth a line."""

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """A line, if the epoch ended with a check."""
        self.figures.update(row)
        if "checked_on" in row:
            say(f"epoch {row['epoch'] + 1}/{self.epochs}{self.figures.text()}")


class Figures:
    """The latest value of every figure worth showing."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {}

    def update(self, row: Mapping[str, Any]) -> None:
        """Take over a row of metrics; figures it lacks keep their last value."""
        self.row.update(row)

    def text(self) -> str:
        """The figures known so far, in a line."""
        shown = {"epsilon": "  eps {:.2f}", "loss": "  loss {:.3f}"}
        percent = {"clean_accuracy": "  clean {:.1%}", "certified_accuracy": "  certified {:.1%}"}
        return "".join(
            form.format(self.row[key]) for key, form in (shown | percent).items() if key in self.row
        )


class ScalarWriter(Protocol):
    """The part of TensorBoard's writer that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Add one point to a curve."""
        ...


class TensorBoard:
    """Every number of every epoch's row as a TensorBoard scalar."""

    def __init__(self, writer: ScalarWriter) -> None:
        self.writer = writer

    def on_batch(self, position: Position, batches: int) -> None:
        """Only epochs are written."""

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """One point per number."""
        for key, value in row.items():
            if key != "epoch" and isinstance(value, int | float):
                self.writer.add_scalar(key, value, row["epoch"])


@contextmanager
def tensorboard_view(folder: Path) -> Iterator[Listener]:
    """A listener that writes TensorBoard events into the run folder; the package is needed only here."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InvalidInput(
            "--tensorboard needs the package tensorboard, which is not installed",
            hint="pip install 'patchcert[tensorboard]', or read the figures from metrics.jsonl",
        ) from error
    with SummaryWriter(str(folder / "tensorboard")) as writer:
        yield TensorBoard(writer)


class Several:
    """Passes everything on to several listeners."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.listeners = listeners

    def on_batch(self, position: Position, batches: int) -> None:
        """To each in turn."""
        for listener in self.listeners:
            listener.on_batch(position, batches)

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """To each in turn."""
        for listener in self.listeners:
            listener.on_epoch(row)
