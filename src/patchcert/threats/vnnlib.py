"""What a certificate claims of one image and one placement, as a VNN-LIB property that any verifier can check.

A property asserts what must not happen: `unsat` proves the image with the patch there, `sat` comes with a patch that
breaks it. Inputs are the pixels in the order (channels, height, width), outputs the logits.
"""

from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated

import torch
from torch import Tensor

from patchcert.threats.patch import Patch


def vnnlib_property(
    image: Annotated[Tensor, "c h w"],
    label: int,
    classes: int,
    threat: Patch,
    corner: tuple[int, int],
    name: str,
) -> str:
    """The text of a file: some class reaches the label, for the image with the patch at a corner.

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
