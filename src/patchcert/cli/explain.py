"""`patchcert explain`: why one image is or is not proven, in words and as a page."""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import patchcert as pc
from patchcert.cli import options
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
    from patchcert.data import Split
    from patchcert.report.explaining import Explanation


def explain(
    target: options.Target,
    image: Annotated[
        str,
        typer.Argument(help="The number of an image in its split, from 0, or a picture of the model's size."),
    ],
    weights: options.Weights = None,
    normalise: options.Normalise = None,
    image_size: options.ImageSize = None,
    patch: options.Patch = None,
    shape: options.Shape = None,
    sparse: options.Sparse = None,
    placements: options.Placements = None,
    patches: options.Patches = None,
    camera: options.Camera = None,
    data: options.Data = None,
    data_dir: options.DataFolder = None,
    split: options.Split = "test",
    label: Annotated[
        int | None, options.number_option("Of a picture: its class; by default what is predicted.", least=0)
    ] = None,
    method: options.Method = None,
    setting: options.Settings = None,
    masks: options.Masks = None,
    refine: options.Refine = None,
    device: options.Device = "auto",
    out: Annotated[Path, typer.Option(help="The page to write.", dir_okay=False)] = Path("explanation.html"),
) -> None:
    """Draw why an image is or is not proven: the weakest placement, bounds layer by layer, masks, votes.

    What is drawn depends on the kind of proof. The page is self-contained HTML; its facts are JSON on stdout, and the
    reasons with what to try next are said on stderr.
    """
    from patchcert.report.explaining import explain as explain_image
    from patchcert.report.explaining import write_explanation

    options.check_suffix("--out", out, "an HTML file", ".html", ".htm")
    opened = open_target(target, data_dir, weights, normalise, image_size)
    resized = through_camera(opened, camera, data, data_dir)
    threat = options.parse_threat(patch, shape, sparse, None, placements, opened.threat, patches, resized)
    place = options.parse_device(device)
    opened.model.to(place)
    settings = options.with_masks(setting, masks)
    classifier = choose_classifier(opened, threat, method, settings, {"refine": refine})
    if image.isdecimal() and label is not None:
        raise InvalidInput(
            f"--label {label} is for pictures; image {image} has its own", hint="leave it out."
        )
    if image.isdecimal():
        shown, classes = _of_data(opened, int(image), data, data_dir, split)
        name = f"{split} image {image}"
    else:
        shown, classes = _of_picture(opened, Path(image), data)
        name = Path(image).name
    shown = shown.to(place)
    if not image.isdecimal():
        shown = replace(shown, labels=shown.labels.new_tensor([_label(classifier, shown, label)]))
    found = explain_image(classifier, shown, threat, name, classes)
    shared = _shared_words(
        target,
        {
            "weights": weights,
            "normalise": normalise,
            "image-size": image_size,
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
    kind = [("method", method), *(("setting", word) for word in setting or ()), ("masks", masks)]
    commands = next_commands(found, image, shared, [(name, word) for name, word in kind if word is not None])
    page = write_explanation(found, out, commands)
    print_json({**_facts(found), "page": str(page), "next": [command for _, command in commands]})
    for sentence in found.sentences:
        say(sentence)
    for why, command in commands:
        say(f"next: {command}   ({why})")
    say(f"the page is {page.resolve()}")


def _shared_words(target: str, options: Mapping[str, object]) -> list[str]:
    return [target, *_words((name, str(value)) for name, value in options.items() if value is not None)]


def _words(options: Iterable[tuple[str, str]]) -> list[str]:
    return [word for name, value in options for word in (f"--{name}", value)]


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


def _of_picture(target: Target, path: Path, data: str | None) -> "tuple[Split, tuple[str, ...]]":
    from patchcert.data import class_names

    if not path.is_file():
        raise InvalidInput(
            f"there is no picture {path}", hint="give the number of an image of the data, or a picture file."
        )
    known = data or target.data
    return read_pictures(target, [path]), tuple(class_names(known) or ()) if known else ()


def _label(classifier: "pc.Classifier", picture: "Split", given: int | None) -> int:
    """The class of a picture; where none is given, what the classifier predicts is what can be proven."""
    label = int(classifier.predict(picture.floats())[0]) if given is None else given
    if label < 0:
        raise InvalidInput("the classifier abstains on the picture", hint="say what it shows with --label.")
    return label


def next_commands(
    found: "Explanation", image: str, shared: Sequence[str], kind: Sequence[tuple[str, str]] = ()
) -> list[tuple[str, str]]:
    """What to try next, each with the reason; `shared` are the words of the command that others take too, and `kind`
    the options that name the kind of proof."""
    is_bounded = isinstance(found.classifier, pc.IntervalBounds)
    same_kind = _words(each for each in kind if each[0] == "method" or not is_bounded)

    def command(name: str, *options: str) -> str:
        target, *rest = shared
        return shlex.join(
            ["patchcert", name, target, *([image] if name == "explain" else []), *rest, *options]
        )

    if found.verdict == "certified":
        again = command("attack", *same_kind, "--certified-only", "--images", "100")
        return [("try to break what is proven", again)]
    if found.verdict != "not certified":
        return []
    if not isinstance(found.threat, pc.Patch):
        what = "pixels" if isinstance(found.threat, pc.SparsePixels) else "patches"
        return [(f"look for {what} that change predictions", command("attack", *same_kind))]
    attack = command("attack", *same_kind, "--search", "sweep")
    steps = [("look for patches that change predictions", attack)]
    if isinstance(found.classifier, pc.DoubleMasking | pc.MaskedDetection):
        more = _more_masks(found.classifier, found.image.shape[1:])
        kept = [each for each in kind if each[0] != "masks" and not each[1].startswith("masks=")]
        again = command("explain", *_words(kept), "--masks", more)
        return [("more masks hide less each", again), *steps] if more else steps
    steps = [("prove it behind masks", command("explain", "--method", "masking", "--masks", "6")), *steps]
    if isinstance(found.classifier, pc.IntervalBounds) and not found.classifier.refine and found.wide is None:
        refined = command("explain", *same_kind, "--refine", "split")
        steps = [("tighter bounds prove it, or break it", refined), *steps]
    return steps


def _more_masks(classifier: "pc.DoubleMasking | pc.MaskedDetection", size: tuple[int, int]) -> str:
    """Two more along each axis, as `--masks` takes them, where that makes more masks than there are; else ""."""
    from patchcert.threats.masks import masks_per_axis

    rows, columns = (count + 2 for count in masks_per_axis(classifier.masks))
    more = replace(classifier, masks=(rows, columns))
    if len(more.mask_set(*size)) == len(classifier.mask_set(*size)):
        return ""
    return str(rows) if rows == columns else f"{rows},{columns}"


def _facts(found: "Explanation") -> dict[str, Any]:
    """The explanation for programs; numbers that JSON does not have are null."""
    weakest = found.map.weakest if found.map is not None and found.map.has_margins else None
    hidden = found.hidden
    return {
        "image": found.name,
        "label": found.label,
        "prediction": None if found.prediction < 0 else found.prediction,
        "verdict": found.verdict,
        "threat": found.threat.to_dict(),
        "classifier": found.classifier.describe(),
        "weakest_placement": None if weakest is None else [weakest.top, weakest.left],
        "margins": {str(label): _number(value) for label, value in found.margins.items()},
        "votes": {str(label): int(count) for label, count in found.votes.items()},
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
