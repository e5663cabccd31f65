"""`patchcert explain`: why one image is or is not proven, in words and as a page."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcert.cli.options import (
    CameraOption,
    DataFolderOption,
    DataOption,
    DeviceOption,
    NormaliseOption,
    PatchesOption,
    PatchOption,
    PlacementsOption,
    ShapeOption,
    SparseOption,
    SplitOption,
    TargetArgument,
    WeightsOption,
    number_option,
    parse_device,
    parse_threat,
)
from patchcert.cli.output import print_json, say
from patchcert.cli.predict import read_pictures
from patchcert.cli.target import (
    Target,
    choose_classifier,
    open_data,
    open_target,
    select_images,
    through_camera,
)
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    from patchcert.certificates import Classifier
    from patchcert.data import Split
    from patchcert.report.explaining import Explanation


def explain(
    target: TargetArgument,
    image: Annotated[
        str,
        typer.Argument(help="The number of an image in its split, from 0, or a picture of the model's size."),
    ],
    weights: WeightsOption = None,
    normalise: NormaliseOption = None,
    patch: PatchOption = None,
    shape: ShapeOption = None,
    sparse: SparseOption = None,
    placements: PlacementsOption = None,
    patches: PatchesOption = None,
    camera: CameraOption = None,
    data: DataOption = None,
    data_dir: DataFolderOption = None,
    split: SplitOption = "test",
    label: Annotated[
        int | None, number_option("Of a picture: its class; by default what is predicted.", least=0)
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Kind of proof: interval, masking, detection, ...; by default that of the run."),
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option(help="Setting of the method, like retained=45; repeatable.")
    ] = None,
    masks: Annotated[
        str | None, typer.Option(help="Masking and detection: masks per axis, K or ROWS,COLUMNS: 6.")
    ] = None,
    refine: Annotated[
        str | None,
        typer.Option(help="Interval bounds: go on with linear bounds (linear), then split (split)."),
    ] = None,
    device: DeviceOption = "auto",
    out: Annotated[Path, typer.Option(help="The page to write.", dir_okay=False)] = Path("explanation.html"),
) -> None:
    """Draw why an image is or is not proven: the weakest placement, bounds layer by layer, masks, votes.

    What is drawn depends on the kind of proof. The page is self-contained HTML; its facts are JSON on stdout, and the
    reasons with what to try next are said on stderr.
    """
    from patchcert.report.explaining import explain as explain_image
    from patchcert.report.explaining import write_explanation

    if out.suffix not in (".html", ".htm"):
        raise InvalidInput(f"--out {out} is no name of an HTML file", hint="end it with .html.")
    opened = open_target(target, weights=weights, normalise=normalise)
    resized = through_camera(opened, camera, data, data_dir)
    threat = parse_threat(patch, shape, sparse, None, placements, opened.threat, patches, resized)
    place = parse_device(device)
    opened.model.to(place)
    given = [*(setting or ()), *([] if masks is None else [f"masks={masks}"])]
    classifier = choose_classifier(opened, threat, method, given, {"refine": refine})
    if image.isdecimal():
        if label is not None:
            raise InvalidInput(
                f"--label {label} is for pictures; image {image} has its own", hint="leave it out."
            )
        shown, classes = _of_data(opened, int(image), data, data_dir, split)
        name = f"{split} image {image}"
    else:
        shown, classes = _of_picture(opened, Path(image), classifier, label, data)
        name = Path(image).name
    found = explain_image(classifier, shown, threat, name, classes)
    shared = _shared_words(
        target,
        {
            "weights": weights,
            "normalise": normalise,
            "patch": patch,
            "shape": shape,
            "sparse": sparse,
            "placements": placements,
            "patches": patches,
            "camera": camera,
            "data": data,
            "data-dir": data_dir,
            "split": None if split == "test" else split,
        },
    )
    commands = next_commands(found, image, shared)
    page = write_explanation(found, out, commands)
    print_json({**_facts(found), "page": str(page), "next": [command for _, command in commands]})
    for sentence in found.sentences:
        say(sentence)
    for why, command in commands:
        say(f"next: {command}   ({why})")
    say(f"the page is {page.resolve()}")


def _shared_words(target: str, options: Mapping[str, object]) -> list[str]:
    given = [(name, str(value)) for name, value in options.items() if value is not None]
    return [target, *(word for name, value in given for word in (f"--{name}", value))]


def _of_data(
    target: Target, number: int, data: str | None, data_dir: Path | None, split: str
) -> "tuple[Split, tuple[str, ...]]":
    dataset = open_data(target, data, data_dir)
    selection = select_images(target, dataset, split, None)
    whole = dataset.split(selection.split)
    if number >= len(whole):
        raise InvalidInput(
            f"there is no image {number}: {dataset.name} has {len(whole)} {split} images",
            hint=f"give a number from 0 to {len(whole) - 1}.",
        )
    return whole[number : number + 1], dataset.classes


def _of_picture(
    target: Target, path: Path, classifier: "Classifier", label: int | None, data: str | None
) -> "tuple[Split, tuple[str, ...]]":
    """The picture; where its class is not given, what the classifier predicts of it is what can be proven."""
    import torch

    from patchcert.data import Split, class_names

    if not path.is_file():
        raise InvalidInput(
            f"there is no picture {path}", hint="give the number of an image of the data, or a picture file."
        )
    pixels = read_pictures(target, [path])
    device = next((each.device for each in classifier.model.parameters()), torch.device("cpu"))
    if label is None:
        label = int(classifier.predict(pixels.to(device))[0])
        if label < 0:
            raise InvalidInput(f"the classifier abstains on {path}", hint="say what it shows with --label.")
    known = data or target.data
    classes = (class_names(known) or ()) if known else ()
    return Split((255 * pixels).round().to(torch.uint8), torch.tensor([label])), tuple(classes)


def next_commands(found: "Explanation", image: str, shared: Sequence[str]) -> list[tuple[str, str]]:
    """What to try next, each with the reason; `shared` are the words of the command that others take too."""
    from patchcert.certificates import IntervalBounds
    from patchcert.threats import Patch

    def command(name: str, *options: str) -> str:
        target, *rest = shared
        return shlex.join(
            ["patchcert", name, target, *([image] if name == "explain" else []), *rest, *options]
        )

    if found.verdict == "certified":
        return [("try to break what is proven", command("attack", "--certified-only", "--images", "100"))]
    if found.verdict != "not certified":
        return []
    if not isinstance(found.threat, Patch):
        return [("look for pixels that change predictions", command("attack"))]
    steps = [("look for patches that change predictions", command("attack", "--search", "sweep"))]
    if found.hidden is not None:
        more = command("explain", "--method", "masking", "--masks", "8")
        return [("more masks hide less each", more), *steps]
    steps = [("prove it behind masks", command("explain", "--method", "masking", "--masks", "6")), *steps]
    is_close = (
        isinstance(found.classifier, IntervalBounds)
        and found.classifier.refine is None
        and found.wide is None
    )
    if is_close:
        steps = [("tighter bounds prove it, or break it", command("explain", "--refine", "split")), *steps]
    return steps


def _facts(found: "Explanation") -> dict[str, Any]:
    """The explanation for programs; numbers that JSON does not have are null."""
    weakest = None if found.map is None else found.map.weakest
    hidden = found.hidden
    return {
        "image": found.name,
        "label": found.label,
        "prediction": None if found.prediction < 0 else found.prediction,
        "verdict": found.verdict,
        "threat": found.threat.to_dict(),
        "classifier": found.classifier.describe(),
        "weakest_placement": None if weakest is None else [weakest.top, weakest.left],
        "margins": {str(score.label): _number(score.value) for score in found.margins},
        "votes": {str(score.label): int(score.value) for score in found.votes},
        "layers": [
            {
                "name": layer.name,
                "reached": layer.reached,
                "width": _number(layer.width),
                "unstable": layer.undecided,
            }
            for layer in found.layers
        ],
        "masks": None if hidden is None else {"weakest": list(hidden.masks), "lead": _number(hidden.lead)},
        "reasons": list(found.sentences),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
