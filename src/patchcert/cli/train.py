"""`patchcert train SPEC`."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcert.cli.output import print_json, say
from patchcert.cli.parsing import parse_device

if TYPE_CHECKING:
    import torch

    from patchcert.train.spec import Spec

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
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run.")] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data; else $PATCHCERT_DATA, else the cache.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")
    ] = False,
) -> None:
    """Train a model that can be certified. A killed or interrupted run goes on with --resume."""
    import torch

    from patchcert.train.distributed import local_device
    from patchcert.train.training import Interrupted

    wanted, folder = _request(spec, changes or [], scale, out)
    _warn_of_half_a_threat(wanted)
    if resume and not folder.exists():
        say(f"there is no {folder} to go on with; a new run begins")
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
    from patchcert.cli.training_view import Several, tensorboard_view, training_view
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
