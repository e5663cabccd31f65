"""What interval bounds claim of each image and placement, in files by which other verifiers can check it.

A VNN-LIB property asserts what must not happen: `unsat` proves the image with the patch there, `sat` comes with a patch
that breaks it. Inputs are the pixels in the order (channels, height, width), outputs the logits.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor, nn

from patchcert.bounds.network import least_over_others
from patchcert.certificates.intervals import IntervalBounds
from patchcert.files import write_text
from patchcert.tensors import Images, Labels
from patchcert.threats import Patch

CLAIMS, INSTANCES = "claims.csv", "instances.csv"
_HEADER = ["property", "image", "label", "top", "left", "margin", "claim"]
TIMEOUT = 300
"""Seconds that a verifier is allowed for a property, as lists of instances say."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The least margin of an image with the patch at a placement, and whether that is proven to be above 0.

    `image` is its number in the data, `row` its place among the images that are looked at.
    """

    row: int
    image: int
    label: int
    top: int
    left: int
    margin: float
    is_proven: bool

    @property
    def file(self) -> str:
        """The name of its property."""
        return f"image{self.image}-top{self.top}-left{self.left}.vnnlib"

    @property
    def cells(self) -> list[object]:
        """Its row in the table of claims."""
        stands = "proven" if self.is_proven else "open"
        return [self.file, self.image, self.label, self.top, self.left, self.margin, stands]


def claims_of(
    model: nn.Module, images: Images, labels: Labels, numbers: Sequence[int], threat: Patch
) -> tuple[Claim, ...]:
    """What interval bounds prove and leave open, image by image and placement by placement."""
    bounds = IntervalBounds(model)
    proven = bounds.certify(images, labels, threat).placements
    margins = bounds.placement_margins(images, labels, threat)
    least = least_over_others(margins, labels[:, None])
    corners = threat.placements(*images.shape[2:]).corners.tolist()
    assert proven is not None
    return tuple(
        Claim(row, number, int(labels[row]), top, left, float(least[row, place]), bool(proven[row, place]))
        for row, number in enumerate(numbers)
        for place, (top, left) in enumerate(corners)
    )


def write_properties(
    folder: Path, claims: Sequence[Claim], images: Images, classes: int, threat: Patch, network: str
) -> None:
    """A VNN-LIB file for each claim, a table of the claims, and the list of instances that verifiers take.

    `network` is the path of the ONNX file as seen from the folder.
    """
    for claim in claims:
        corner = (claim.top, claim.left)
        name = f"image {claim.image}, {threat}"
        text = vnnlib_property(images[claim.row], claim.label, classes, threat, corner, name)
        write_text(folder / claim.file, text)
    write_text(folder / CLAIMS, _table([_HEADER, *(each.cells for each in claims)]))
    write_text(folder / INSTANCES, _table([[network, each.file, TIMEOUT] for each in claims]))


def vnnlib_property(
    image: Annotated[Tensor, "c h w"],
    label: int,
    classes: int,
    threat: Patch,
    corner: tuple[int, int],
    name: str,
) -> str:
    """The text of a VNN-LIB file: some class reaches the label, for the image with the patch at a corner.

    `name` says which image it is. Numbers are those of the image, written so that they are read back exactly.
    """
    box = threat.boxes(image[None], torch.tensor([corner], device=image.device))
    title = f"{name}, label {label}, with a patch at top {corner[0]} and left {corner[1]}"
    lines = _lines(box.lower.flatten(), box.upper.flatten(), label, classes)
    return "\n".join([f"; {title}", *lines]) + "\n"


def _lines(
    lower: Annotated[Tensor, "values"], upper: Annotated[Tensor, "values"], label: int, classes: int
) -> Iterator[str]:
    yield "; unsat: no patch there changes the prediction away from the label"
    yield from (f"(declare-const X_{place} Real)" for place in range(len(lower)))
    yield from (f"(declare-const Y_{place} Real)" for place in range(classes))
    for place, (least, most) in enumerate(zip(lower.tolist(), upper.tolist(), strict=True)):
        yield f"(assert (>= X_{place} {_decimal(least)}))"
        yield f"(assert (<= X_{place} {_decimal(most)}))"
    others = (f"(and (>= Y_{place} Y_{label}))" for place in range(classes) if place != label)
    yield f"(assert (or {' '.join(others)}))"


def _decimal(number: float) -> str:
    """Without an exponent, which not every reader of VNN-LIB knows, and exact."""
    text = repr(number)
    return text if "e" not in text else format(Decimal(number), "f")


def _table(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
