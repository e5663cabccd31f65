"""`patchcert train SPEC`."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from patchcert.cli import options
from patchcert.cli.output import (
    INTERRUPTED,
    NEXT_LINE,
    detail,
    duration,
    is_quiet,
    print_json,
    regular_lines,
    say,
    say_at_once,
    stderr_console,
)
from patchcert.cli.threads import describe_threads, using_threads
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    import torch
    from torch.utils.tensorboard import SummaryWriter

    from patchcert.train.loop import Position
    from patchcert.train.pace import TrainingPace
    from patchcert.train.spec import Spec

REDRAW_SECONDS = 0.1
WORTH_SAYING = 5.0
"""Seconds from which on it is said beforehand how long training takes."""


def train(
    spec: Annotated[
        str, typer.Argument(help="A SPEC.toml, the name of a preset such as `paper-mnist`, or a run folder.")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one value: model.name=cnn2."),
    ] = None,
    scale: Annotated[float, typer.Option(help="Shrink every part of the schedule by this factor.")] = 1.0,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; by default runs/NAME-FINGERPRINT.", file_okay=False)
    ] = None,
    device: options.Device = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Resume an unfinished run.")] = False,
    data_dir: options.DataFolder = None,
    threads: options.Threads = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")
    ] = False,
) -> None:
    """Train a model that can be certified. --resume continues a killed or interrupted run."""
    from patchcert.train.distributed import local_device
    from patchcert.train.training import Interrupted

    wanted, folder = _request(spec, changes or [], scale, out)
    _warn_of_half_a_threat(wanted)
    if resume and not folder.exists():
        say(f"there is no {folder} to resume; starting a new run")
    place = local_device(options.parse_device(device))
    try:
        with using_threads(threads):
            detail(f"training on {place} into {folder}, {describe_threads()}")
            summary = _carry_out(wanted, folder, place, data_dir, resume, tensorboard)
    except Interrupted as interruption:
        say(str(interruption))
        raise typer.Exit(INTERRUPTED) from interruption
    if summary:
        print_json(summary)
        say(_in_words(summary))


def _in_words(summary: Mapping[str, Any]) -> str:
    """The result for people, and what to do with it."""
    checked = ""
    if "certified_accuracy" in summary:
        checked = (
            f"; of {summary['checked_images']} {summary['checked_on']} images "
            f"{summary['clean_accuracy']:.1%} are right and {summary['certified_accuracy']:.1%} proven"
        )
    spent = f"trained for {summary['epochs']} epochs in {duration(summary['seconds'])}"
    return f"{spent}{checked}; next: patchcert certify {summary['run']}"


def _carry_out(
    spec: "Spec", folder: Path, device: "torch.device", data_dir: Path | None, resume: bool, tensorboard: bool
) -> dict[str, Any]:
    """The summary of the finished run; empty in all processes but the main one."""
    from patchcert.train.distributed import joined_world
    from patchcert.train.training import Workplace, summarise, train_run

    with ExitStack() as stack:
        world = stack.enter_context(joined_world(device))
        place = Workplace(device, data_dir, world)
        if not world.is_main:
            train_run(spec, folder, place, resume)
            return {}
        curves = folder / "tensorboard" if tensorboard else None
        view = stack.enter_context(training_view(spec.schedule.epochs, curves))
        return summarise(train_run(spec, folder, place, resume, view))


def _warn_of_half_a_threat(spec: "Spec") -> None:
    """Fewer epochs than epsilon needs to grow are allowed, but hardly meant."""
    epochs = spec.schedule.epochs
    reached = spec.schedule.epsilon.end(epochs - 1)
    if reached < 1 and spec.strategy.kind != "natural":
        say(
            f"epsilon grows to {reached:.2f} of 1 in {epochs} epochs; --scale shortens the ramp with the rest"
        )


def _request(source: str, changes: list[str], scale: float, out: Path | None) -> tuple["Spec", Path]:
    """The specification asked for and the folder for it; a run folder stands for its own specification."""
    from patchcert.train.run_folder import SPEC
    from patchcert.train.spec import read_spec

    path = Path(source)
    is_run = (path / SPEC).is_file()
    spec = read_spec(path / SPEC if is_run else source, changes)
    spec = spec if scale == 1.0 else spec.scaled(scale)
    default = path if is_run else Path("runs") / f"{path.stem}-{spec.fingerprint()[:8]}"
    return spec, out or default


class TrainingView:
    """A bar over all batches of all epochs, or else a line now and then; with a writer, TensorBoard's curves too."""

    def __init__(
        self, epochs: int, progress: Progress | None = None, writer: "SummaryWriter | None" = None
    ) -> None:
        self.epochs, self.progress, self.writer = epochs, progress, writer
        self.task = TaskID(0) if progress is None else progress.add_task("preparing", total=None, left="")
        self.pace: TrainingPace | None = None
        self.latest: dict[str, Any] = {}
        self.drawn_at = 0.0

    def on_start(self, pace: "TrainingPace") -> None:
        """Say how long it is expected to take, where a trial tells that."""
        self.pace, left = pace, pace.remaining
        if left is not None and left > WORTH_SAYING:
            say(f"training is expected to take about {duration(left)}")

    def on_stop(self) -> None:
        """Answer Ctrl-C at once."""
        say_at_once("stopping after this batch, whose state is kept; Ctrl-C again stops at once")

    def line(self) -> str:
        """Where the training stands, for a log."""
        if self.pace is None:
            return "preparing"
        epoch = min(self.pace.position.epoch + 1, self.epochs)
        return (
            f"epoch {epoch}/{self.epochs}, {self.pace.share:.1%} after {duration(self.pace.elapsed)}"
            f"{self.figures}  {self.left}"
        )

    @property
    def left(self) -> str:
        """How long it still takes, in words; nothing where that is not known."""
        seconds = None if self.pace is None else self.pace.remaining
        return "" if seconds is None else f"about {duration(seconds)} to go"

    def on_batch(self, position: "Position", batches: int) -> None:
        """Move the bar, a few times a second at most."""
        if self.pace is not None:
            self.pace.note(position)
        now = time.monotonic()
        if self.progress is None or (now - self.drawn_at < REDRAW_SECONDS and position.batch):
            return
        self.drawn_at = now
        done, total = position.epoch * batches + position.batch, self.epochs * batches
        text = f"epoch {min(position.epoch + 1, self.epochs)}/{self.epochs}{self.figures}"
        self.progress.update(self.task, completed=done, total=total, description=text, left=self.left)

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """Remember the epoch's figures; without a bar, say them if the epoch ended with a check."""
        self.latest.update(row)
        if self.progress is None and "checked_on" in row:
            say(f"epoch {row['epoch'] + 1}/{self.epochs}{self.figures}")
        for key, value in row.items():
            if self.writer is not None and key != "epoch" and isinstance(value, int | float):
                self.writer.add_scalar(key, value, row["epoch"])

    @property
    def figures(self) -> str:
        """The latest value of every figure worth showing, in a line."""
        shown = {"epsilon": "  eps {:.2f}", "loss": "  loss {:.3f}"}
        percent = {"clean_accuracy": "  clean {:.1%}", "certified_accuracy": "  certified {:.1%}"}
        return "".join(
            form.format(self.latest[key]) for key, form in (shown | percent).items() if key in self.latest
        )


@contextmanager
def training_view(epochs: int, curves: Path | None = None) -> "Iterator[TrainingView]":
    """A view on stderr, with a bar where that is a terminal; TensorBoard events go to the folder of curves."""
    console = stderr_console()
    columns = (
        BarColumn(bar_width=24),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with ExitStack() as stack:
        writer = None if curves is None else stack.enter_context(_scalar_writer(curves))
        progress = None
        if console.is_terminal and not is_quiet():
            progress = stack.enter_context(Progress(*columns, console=console))
        view = TrainingView(epochs, progress, writer)
        if progress is None:
            stack.enter_context(regular_lines(view.line, first=NEXT_LINE))
        yield view


def _scalar_writer(folder: Path) -> "SummaryWriter":
    """TensorBoard's writer; the package is needed only here."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InvalidInput(
            "--tensorboard needs the package tensorboard, which is not installed",
            hint="pip install 'patchcert[tensorboard]', or read the figures from metrics.jsonl",
        ) from error
    return SummaryWriter(str(folder))
