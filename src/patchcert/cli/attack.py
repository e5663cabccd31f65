"""`patchcert attack`: patches and pixels that change what a model says."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcert.cli.options import (
    USUAL_STEPS,
    DataFolderOption,
    DataOption,
    PatchOption,
    PlacementsOption,
    ShapeOption,
    SparseOption,
    SplitOption,
)
from patchcert.cli.output import print_error, print_json, say
from patchcert.cli.parsing import parse_device
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    from patchcert.cli.attack_work import Outcome

FALSE_PROOF = 1


def attack(
    targets: Annotated[
        list[str], typer.Argument(help="Run folders, .safetensors models, zoo:NAME or imagenet:NAME.")
    ],
    patch: PatchOption = None,
    shape: ShapeOption = None,
    sparse: SparseOption = None,
    placements: PlacementsOption = None,
    data: DataOption = None,
    data_dir: DataFolderOption = None,
    split: SplitOption = "test",
    images: Annotated[
        int | None, typer.Option(min=1, help="So many images, drawn at random by --seed; 400.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first N images instead of a draw.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draw of images and of the attack.")] = 0,
    steps: Annotated[int, typer.Option(help="Gradient steps per restart.")] = USUAL_STEPS,
    step_size: Annotated[float | None, typer.Option(help="Length of a step; 0.05, sparse 0.1.")] = None,
    restarts: Annotated[
        int | None, typer.Option(help="Starts per image; 80, sparse and --certified-only 20, ImageNet 4.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="cross-entropy or margin; sparse: margin.")] = None,
    search: Annotated[
        str | None, typer.Option(help="Where restarts go: random (default), sweep or certificate.")
    ] = None,
    defense: Annotated[str, typer.Option(help="none, lgs (smoothing) or dw (watermarking).")] = "none",
    setting: Annotated[
        list[str] | None, typer.Option(help="Setting of the defense, like window=7; repeatable.")
    ] = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="The attack knows the defense; without, it does not.")
    ] = False,
    tune: Annotated[
        int | None,
        typer.Option(min=1, help="Choose the defense's settings on the last N training images."),
    ] = None,
    largest_drop: Annotated[
        float, typer.Option(min=0, max=1, help="With --tune: clean accuracy that a defense may cost.")
    ] = 0.02,
    certified_only: Annotated[
        bool,
        typer.Option("--certified-only", help="Certified images only; exit code 1 if one breaks."),
    ] = False,
    save_images: Annotated[
        bool, typer.Option("--save-images", help="Keep the broken images in the evidence.")
    ] = False,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images and restarts at once.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write one row of evidence per image; a run folder keeps its own."),
    ] = None,
) -> None:
    """Look for members of a threat that change a model's predictions.

    Accuracy under attack is an upper bound of the truth; `patchcert certify` gives lower ones. The summary is
    JSON on stdout; of several targets, a list of them with the totals. With --certified-only a broken image
    refutes its proof, and the exit code is 1.
    """
    from patchcert.cli.attack_choice import AttackChoice
    from patchcert.cli.attack_work import Order, carry_out_all

    _check_output(out, targets)
    if images is not None and limit is not None:
        raise InvalidInput("--images draws at random, --limit takes the first", hint="leave one of them out.")
    choice = AttackChoice(
        steps,
        step_size,
        restarts,
        loss,
        search,
        defense,
        tuple(setting or ()),
        adaptive,
        tune,
        largest_drop,
        certified_only,
        batch_size,
    )
    order = Order(
        choice,
        (patch, shape, sparse, placements),
        data,
        data_dir,
        split,
        400 if images is None else images,
        limit,
        seed,
        save_images,
        parse_device(device),
        out,
    )
    outcomes = [_told(outcome, certified_only) for outcome in carry_out_all(order, targets)]
    print_json(outcomes[0].summary if len(outcomes) == 1 else totals(outcomes))
    if certified_only and any(outcome.broken for outcome in outcomes):
        raise typer.Exit(FALSE_PROOF)


def totals(outcomes: "list[Outcome]") -> dict[str, Any]:
    """The summaries of several targets, and their counts added up."""
    counts = ("images", "correct", "withstood", "broken", "gradient_steps")
    added = {count: sum(outcome.summary[count] for outcome in outcomes) for count in counts}
    return {"targets": [outcome.summary for outcome in outcomes], **added}


def _told(outcome: "Outcome", certified_only: bool) -> "Outcome":
    """The outcome, after what it means for proofs was said."""
    total, broken = outcome.summary["images"], outcome.broken
    if certified_only and broken:
        print_error(
            f"FALSE PROOF: {len(broken)} of {total} certified images of {outcome.target} were broken: {broken[:20]}",
            "the certificates are wrong; do not rely on any of them, and keep this evidence",
        )
    elif certified_only:
        withstood = f"all {total} certified images withstood everything"
        say(withstood if total else "none of the images is certified, so nothing was attacked")
    return outcome


def _check_output(path: Path | None, targets: list[str]) -> None:
    """Found out before the work, not after it."""
    if path is not None and (path.suffix != ".npz" or path.is_dir()):
        raise InvalidInput(f"--out {path} is no name of an evidence file", hint="end it with .npz.")
    if path is not None and len(targets) > 1:
        raise InvalidInput(
            f"--out {path} names one file for {len(targets)} targets", hint="attack them one by one."
        )
