"""`patchcert train SPEC`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from patchcert.cli.options import parse_device
from patchcert.cli.output import print_json, say, stderr_console
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from patchcert.train.loop import Position
    from patchcert.train.spec import Spec
    from patchcert.train.training import Listener

INTERRUPTED = 130


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
    device: Annotated[str, typer.Option(help="`cpu`, `cuda`, `cuda:1` or `auto`.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Resume an unfinished run.")] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data; else $PATCHCERT_DATA, else the cache.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")
    ] = False,
) -> None:
    """Train a model that can be certified. --resume continues a killed or interrupted run."""
    import torch

    from patchcert.train.distributed import local_device
    from patchcert.train.training import Interrupted

    wanted, folder = _request(spec, changes or [], scale, out)
    _warn_of_half_a_threat(wanted)
    if resume and not folder.exists():
        say(f"there is no {folder} to resume; starting a new run")
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        summary = _carry_out(
            wanted, folder, local_device(parse_device(device)), data_dir, resume, tensorboard
        )
    except Interrupted as interruption:
        say(str(interruption))
        raise typer.Exit(INTERRUPTED) from interruption
    if summary:
        print_json(summary)


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
        listeners = [stack.enter_context(training_view(spec.schedule.epochs))]
        if tensorboard:
            listeners.append(stack.enter_context(tensorboard_view(folder)))
        return summarise(train_run(spec, folder, place, resume, Several(listeners)))


def _warn_of_half_a_threat(spec: "Spec") -> None:
    """Fewer epochs than epsilon needs to grow are allowed, but hardly meant."""
    epochs = spec.schedule.epochs
    reached = spec.schedule.epsilon.end(epochs - 1)
    if reached < 1 and spec.strategy.kind not in ("natural", "ablated"):
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


REDRAW_SECONDS = 0.1


@contextmanager
def training_view(epochs: int) -> "Iterator[Listener]":
    """A listener that draws a progress bar, or writes a line per check where stderr is not a terminal."""
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

    def on_batch(self, position: "Position", batches: int) -> None:
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

    def on_batch(self, position: "Position", batches: int) -> None:
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

    def on_batch(self, position: "Position", batches: int) -> None:
        """Only epochs are written."""

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """One point per number."""
        for key, value in row.items():
            if key != "epoch" and isinstance(value, int | float):
                self.writer.add_scalar(key, value, row["epoch"])


@contextmanager
def tensorboard_view(folder: Path) -> "Iterator[Listener]":
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

    def __init__(self, listeners: "Sequence[Listener]") -> None:
        self.listeners = listeners

    def on_batch(self, position: "Position", batches: int) -> None:
        """To each in turn."""
        for listener in self.listeners:
            listener.on_batch(position, batches)

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """To each in turn."""
        for listener in self.listeners:
            listener.on_epoch(row)
