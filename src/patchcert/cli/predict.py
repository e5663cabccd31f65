"""`patchcert predict`: what a deployed classifier says of images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcert.cli import options
from patchcert.cli.output import print_json, progress_bar, say
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
    from patchcert.tensors import Images, Labels


def predict(
    target: options.Target,
    pictures: Annotated[
        list[Path] | None,
        typer.Argument(help="Picture files of the model's size; without any, images of the data set."),
    ] = None,
    method: options.Method = None,
    setting: options.Settings = None,
    masks: options.Masks = None,
    weights: options.Weights = None,
    normalise: options.Normalise = None,
    image_size: options.ImageSize = None,
    patch: options.Patch = None,
    shape: options.Shape = None,
    placements: options.Placements = None,
    patches: options.Patches = None,
    camera: options.Camera = None,
    data: options.Data = None,
    data_dir: options.DataFolder = None,
    split: options.Split = "test",
    limit: options.Limit = None,
    device: options.Device = "auto",
) -> None:
    """Say what the classifier of a kind of proof predicts: the function that its certificates are about.

    The answer is JSON on stdout, a class for each image; null where the classifier abstains or raises an alert.
    """
    opened = open_target(target, data_dir, weights, normalise, image_size)
    resized, threat = through_camera(opened, camera, data, data_dir), None
    if any(each is not None for each in (patch, shape, placements, patches, camera, opened.threat)):
        threat = options.parse_threat(patch, shape, None, None, placements, opened.threat, patches, resized)
    place = options.parse_device(device)
    opened.model.to(place)
    classifier = choose_classifier(opened, threat, method, options.with_masks(setting, masks))
    images, labels, names = _images(opened, pictures or [], data, data_dir, split, limit)
    say(f"predicting {len(images)} images by {type(classifier).__name__} on {place}")
    with progress_bar("predicting", "images") as report:
        found = classifier.predict(images.to(place), report).cpu()
    answer = _answer(found, labels, names)
    print_json(answer | {"classifier": classifier.describe()})
    right = "" if labels is None else f", {answer['correct']} of them right"
    say(f"{len(found) - answer['abstained']} of {len(found)} images have a prediction{right}")


def _images(
    target: Target,
    pictures: list[Path],
    data: str | None,
    data_dir: Path | None,
    split: str,
    limit: int | None,
) -> "tuple[Images, Labels | None, list[str]]":
    """The images, their labels where they are known, and what to call them."""
    if pictures:
        return read_pictures(target, pictures).floats(), None, [str(picture) for picture in pictures]
    dataset = open_data(target, data, data_dir)
    selection = select_images(target, dataset, split, limit)
    whole = dataset.split(selection.split)
    positions = selection.positions(len(whole))
    chosen = whole[positions]
    return chosen.floats(), chosen.labels, [str(position) for position in positions.tolist()]


def read_pictures(target: Target, pictures: list[Path]) -> "Split":
    """Pictures of no known class, as they are: none is resized, since threats are about the pixels that one has."""
    import numpy as np
    import torch
    from PIL import Image, UnidentifiedImageError

    from patchcert.data import Split
    from patchcert.data.folder import check_bits

    shape, rows = target.image_shape, []
    size = None if shape is None else shape[1:]
    for picture in pictures:
        try:
            with Image.open(picture) as opened:
                check_bits(picture, opened)
                grey = shape is not None and shape[0] == 1
                pixels = np.asarray(opened.convert("L" if grey else "RGB"), dtype=np.uint8)
        except (OSError, UnidentifiedImageError) as error:
            raise InvalidInput(f"{picture} cannot be read as a picture: {error}") from error
        size = size or pixels.shape[:2]
        if pixels.shape[:2] != size:
            raise InvalidInput(
                f"{picture} is {pixels.shape[0]}x{pixels.shape[1]} pixels; expected {size[0]}x{size[1]}",
                hint="resize it first: threats are about the pixels that the model is given.",
            )
        rows.append(torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1).copy()).movedim(2, 0))
    if shape is None:
        found = "x".join(str(length) for length in rows[0].shape)
        say(
            f"pictures are taken as they are, {found}: what was certified of other sizes says nothing of them"
        )
    return Split(torch.stack(rows), torch.full((len(rows),), -1))


def _answer(found: "Labels", labels: "Labels | None", names: list[str]) -> dict[str, Any]:
    from patchcert.certificates import ABSTAINED

    said = [None if label == ABSTAINED else label for label in found.tolist()]
    answer: dict[str, Any] = {"images": len(said), "abstained": said.count(None)}
    if labels is not None:
        answer["correct"] = int((found == labels).sum())
    return answer | {"predictions": dict(zip(names, said, strict=True))}
