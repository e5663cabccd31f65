"""`patchcert trim RUN`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchcert.cli import options
from patchcert.cli.output import print_json, progress_bar, say
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    from patchcert.data import Split
    from patchcert.train.run_folder import Run


def trim(
    run: Annotated[Path, typer.Argument(help="A finished run folder.")],
    out: Annotated[Path, typer.Option(help="The run folder to be made.", file_okay=False)],
    half: Annotated[
        bool, typer.Option("--half", help="Round the weights to half precision: a file of half the size.")
    ] = False,
    keep_units: Annotated[
        bool, typer.Option("--keep-units", help="Remove nothing: only round the weights, with --half.")
    ] = False,
    data_dir: options.DataFolder = None,
    device: options.Device = "auto",
) -> None:
    """Remove channels and units that are zero on every image the run was trained on.

    The trimmed model is a model of its own, smaller and faster to certify. What was proven of the whole one does not
    hold for it: certify it next.
    """
    from patchcert.cli.target import open_run
    from patchcert.files import sha256
    from patchcert.train.run_folder import trim_run

    if keep_units and not half:
        raise InvalidInput("--keep-units leaves nothing to do", hint="add --half, or leave it out.")
    whole = open_run(run)
    images = (
        None if keep_units else _training_images(whole, data_dir).to(options.parse_device(device)).floats()
    )
    with progress_bar("looking for units that open", "images") as report:
        made = trim_run(whole, out, images, half, report)
    before, after = (_parameters(each) for each in (whole, made))
    say(f"{after:,} of {before:,} parameters are left; next: patchcert certify {made.path}")
    print_json(
        {
            "run": str(whole.path),
            "out": str(made.path),
            "widths": list(made.model_spec().widths),
            "parameters": after,
            "parameters_before": before,
            "bytes": made.weights.stat().st_size,
            "half": half,
            "weights_sha256": sha256(made.weights),
        }
    )


def _training_images(run: "Run", data_dir: Path | None) -> "Split":
    from patchcert.cli.target import open_data, open_target, select_images

    target = open_target(str(run.path))
    dataset = open_data(target, None, data_dir)
    select_images(target, dataset, "train", 1)
    return run.spec.data.split(dataset)[0]


def _parameters(run: "Run") -> int:
    from patchcert.work import parameter_count

    return parameter_count(run.model())
