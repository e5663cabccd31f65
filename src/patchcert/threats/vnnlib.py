"""What a certificate claims of one image and one placement, as a VNN-LIB property that any verifier can check.

A property asserts what must not happen: `unsat` proves the image with the patch there, `sat` comes with a patch that
breaks it. Inputs are the pixels in the order (channels, height, width), outputs the logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated

import torch
from torch import Tensor

from patchcert.threats.patch import Patch


@dataclass(frozen=True, eq=False)
class Property:
    """Some class reaches the label, for an image between `lower` and `upper`: at one placement of a patch."""

    lower: Annotated[Tensor, "c h w"]
    upper: Annotated[Tensor, "c h w"]
    label: int
    classes: int
    title: str

    @staticmethod
    def of(
        image: Annotated[Tensor, "c h w"],
        label: int,
        classes: int,
        threat: Patch,
        corner: tuple[int, int],
        name: str,
    ) -> "Property":
        """Of an image with the patch at a corner; `name` says which image it is."""
        box = threat.boxes(image[None], torch.tensor([corner], device=image.device))
        title = f"{name}, label {label}, with a patch at top {corner[0]} and left {corner[1]}"
        return Property(box.lower[0, 0], box.upper[0, 0], label, classes, title)

    def to_text(self) -> str:
        """The file's text. Numbers are those of the image, written so that they are read back exactly."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        lower, upper = (end.double().flatten().tolist() for end in (self.lower, self.upper))
        yield f"; {self.title}"
        yield "; unsat: no patch there changes the prediction away from the label"
        yield from (f"(declare-const X_{place} Real)" for place in range(len(lower)))
        yield from (f"(declare-const Y_{place} Real)" for place in range(self.classes))
        for place, (least, most) in enumerate(zip(lower, upper, strict=True)):
            yield f"(assert (>= X_{place} {_decimal(least)}))"
            yield f"(assert (<= X_{place} {_decimal(most)}))"
        others = (
            f"(and (>= Y_{place} Y_{self.label}))" for place in range(self.classes) if place != self.label
        )
        yield f"(assert (or {' '.join(others)}))"


def _decimal(number: float) -> str:
    """Without an exponent, which not every reader of VNN-LIB knows, and exact."""
    text = repr(number)
    return text if "e" not in text else format(Decimal(number), "f")
