"""The corners at which a stamp may lie in images of one size, and the pixels it covers there."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Generator, Tensor

from patchcert.errors import InvalidThreat


@final
@dataclass(frozen=True, eq=False)
class Placements:
    """The top-left corners (p, 2), row by row, at which a stamp of one size may lie in images of one size."""

    corners: Tensor
    height: int
    width: int
    image_height: int
    image_width: int

    def __len__(self) -> int:
        return self.corners.shape[0]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placements):
            return NotImplemented
        same_frame = (self.height, self.width, self.image_height, self.image_width) == (
            other.height,
            other.width,
            other.image_height,
            other.image_width,
        )
        return same_frame and torch.equal(self.corners.cpu(), other.corners.cpu())

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @property
    def rows(self) -> int:
        """How many top edges fit."""
        return self.image_height - self.height + 1

    @property
    def columns(self) -> int:
        """How many left edges fit."""
        return self.image_width - self.width + 1

    @property
    def complete(self) -> bool:
        """Whether these are all positions at which the stamp fits."""
        return len(self) == self.rows * self.columns

    @property
    def flat(self) -> Tensor:
        """The corners as indices (p,) into the rows x columns grid of all positions that fit."""
        return self.corners[:, 0] * self.columns + self.corners[:, 1]

    def to(self, device: torch.device | str) -> "Placements":
        """The same placements with corners on another device."""
        corners = self.corners.to(device)
        return Placements(corners, self.height, self.width, self.image_height, self.image_width)

    def masks(self, stamp: Tensor) -> Tensor:
        """True (p, H, W) on the pixels that the stamp covers at each placement."""
        if tuple(stamp.shape) != (self.height, self.width):
            raise InvalidThreat(
                f"these placements are for a {self.height}x{self.width} stamp, got {tuple(stamp.shape)}",
                hint="take the placements from the same Patch as the stamp",
            )
        stamp = stamp.to(self.corners.device)
        return stamp_masks(
            stamp, (self.height, self.width), self.corners, (self.image_height, self.image_width)
        )

    def sample(self, shape: tuple[int, ...], generator: Generator) -> Tensor:
        """Corners (*shape, 2) drawn uniformly and independently, on the device of `corners`."""
        index = torch.randint(len(self), shape, generator=generator, device=generator.device)
        return self.corners[index.to(self.corners.device)]


def stamp_masks(
    stamp: Tensor | None, box: tuple[int, int], corners: Tensor, image: tuple[int, int]
) -> Tensor:
    """True (..., H, W) on the pixels covered at each of the corners (..., 2), without waiting for the device.

    No stamp means that the whole (height, width) box is covered, which needs no table of offsets.
    """
    rows = torch.arange(image[0], device=corners.device) - corners[..., 0, None]
    columns = torch.arange(image[1], device=corners.device) - corners[..., 1, None]
    row_inside = (rows >= 0) & (rows < box[0])
    column_inside = (columns >= 0) & (columns < box[1])
    inside = row_inside[..., :, None] & column_inside[..., None, :]
    if stamp is None:
        return inside
    row_offsets = rows.clamp(0, box[0] - 1)[..., :, None] * box[1]
    return inside & stamp.flatten()[row_offsets + columns.clamp(0, box[1] - 1)[..., None, :]]
