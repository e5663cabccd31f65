"""Where a patch may be: the corners allowed in images of one size, and the rules that allow them in any images."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, final

import numpy as np
import torch
from torch import Generator, Tensor

from patchcert.errors import InvalidThreat
from patchcert.tensors import Corners
from patchcert.threats.shapes import Rows, Stamp, from_rows, to_rows
from patchcert.threats.threat import Plain, as_boolean, as_pair, check_values, describe_value

PlacementsLike = str | Sequence[tuple[int, int]] | Sequence[Sequence[bool]] | np.ndarray | Tensor


@final
@dataclass(frozen=True, eq=False)
class Placements:
    """The top-left corners, row by row, at which a stamp of one size may lie in images of one size."""

    corners: Corners
    height: int
    width: int
    image_height: int
    image_width: int

    def __len__(self) -> int:
        return self.corners.shape[0]

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
    def flat(self) -> Annotated[Tensor, "p"]:
        """The corners as indices into the rows x columns grid of all positions that fit."""
        return self.corners[:, 0] * self.columns + self.corners[:, 1]

    def masks(self, stamp: Stamp) -> Annotated[Tensor, "p h w"]:
        """True on the pixels that the stamp covers at each placement."""
        if tuple(stamp.shape) != (self.height, self.width):
            raise InvalidThreat(
                f"these placements are for a {self.height}x{self.width} stamp, got {tuple(stamp.shape)}",
                hint="take the placements from the same Patch as the stamp",
            )
        stamp = stamp.to(self.corners.device)
        return stamp_masks(
            stamp, (self.height, self.width), self.corners, (self.image_height, self.image_width)
        )

    def sample(self, shape: tuple[int, ...], generator: Generator) -> Annotated[Tensor, "... 2"]:
        """Corners of the given leading shape, drawn uniformly and independently."""
        index = torch.randint(len(self), shape, generator=generator, device=generator.device)
        return self.corners[index.to(self.corners.device)]


def stamp_masks(
    stamp: Stamp | None,
    box: tuple[int, int],
    corners: Annotated[Tensor, "... 2"],
    image: tuple[int, int],
) -> Annotated[Tensor, "... h w"]:
    """True on the pixels covered at each of the corners, without waiting for the device.

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


@final
@dataclass(frozen=True)
class Named:
    """Every position at which the whole stamp lies inside the image, or the image's corners.

    These are four; fewer where the stamp is as high or as wide as the image.
    """

    name: Literal["everywhere", "corners"]

    def corners(self, rows: int, columns: int, image: tuple[int, int]) -> Corners:
        """The allowed corners in row-major order, where rows x columns of them fit the image."""
        tops, lefts = range(rows), range(columns)
        if self.name == "corners":
            tops, lefts = sorted({0, rows - 1}), sorted({0, columns - 1})
        return torch.cartesian_prod(torch.tensor(tops, device="cpu"), torch.tensor(lefts, device="cpu"))

    def to_plain(self) -> Plain:
        """The rule in plain types, as `read_rule` understands it."""
        return self.name

    def __str__(self) -> str:
        return self.name


@final
@dataclass(frozen=True)
class Listed:
    """Exactly the corners given, kept in row-major order."""

    positions: tuple[tuple[int, int], ...]

    def corners(self, rows: int, columns: int, image: tuple[int, int]) -> Corners:
        for top, left in self.positions:
            if not (0 <= top < rows and 0 <= left < columns):
                raise _outside(top, left, rows, columns, image)
        return torch.tensor(self.positions, device="cpu")

    def to_plain(self) -> Plain:
        return [[top, left] for top, left in self.positions]

    def __str__(self) -> str:
        if len(self.positions) <= 3:
            return f"at {', '.join(map(str, self.positions))}"
        return f"{len(self.positions)} listed placements"


@final
@dataclass(frozen=True)
class Mapped:
    """The corners set in a boolean map, as large as the image or as the grid of positions that fit."""

    map: Rows

    def corners(self, rows: int, columns: int, image: tuple[int, int]) -> Corners:
        allowed = from_rows(self.map, "the placement map")
        if tuple(allowed.shape) not in (image, (rows, columns)):
            raise InvalidThreat(
                f"the placement map is {allowed.shape[0]}x{allowed.shape[1]}, expected {image[0]}x{image[1]} "
                f"(the image) or {rows}x{columns} (the corners that fit)",
                hint="build the map for images of this size",
            )
        corners = allowed.nonzero()
        bad = (corners[:, 0] >= rows) | (corners[:, 1] >= columns)
        if bad.any():
            top, left = corners[bad][0].tolist()
            raise _outside(top, left, rows, columns, image)
        return corners

    def to_plain(self) -> Plain:
        return {"map": list(self.map)}

    def __str__(self) -> str:
        return f"{''.join(self.map).count('#')} mapped placements"


PlacementRule = Named | Listed | Mapped
"""Which corners are allowed, before the image size is known."""


def read_rule(value: PlacementsLike | Plain) -> PlacementRule:
    """The rule meant by a word, a list of (top, left), a boolean map, or what `to_plain` returned."""
    if isinstance(value, str):
        if value not in ("everywhere", "corners"):
            raise InvalidThreat(
                f"unknown placements {value!r}, expected one of 'everywhere', 'corners'",
                hint="or give a list of (top, left) corners or a boolean map",
            )
        return Named(value)
    if isinstance(value, dict):
        rows = value.get("map")
        if set(value) != {"map"} or not isinstance(rows, list):
            raise InvalidThreat(f"placements given as a table need the one key 'map', got {sorted(value)}")
        return _mapped(from_rows([str(row) for row in rows], "the placement map"))
    check_values(value, "the placement map")
    allowed = as_boolean(value, "the placement map") if len(_rows_of(value)) else None
    return _mapped(allowed) if allowed is not None else _listed(value)


def _mapped(allowed: Annotated[Tensor, "rows columns"]) -> Mapped:
    _require_any(int(allowed.sum()))
    return Mapped(to_rows(allowed))


def _listed(value: object) -> Listed:
    positions = sorted(_position(pair) for pair in _rows_of(value))
    _require_any(len(positions))
    for first, second in pairwise(positions):
        if first == second:
            raise InvalidThreat(f"placement {first} is listed twice", hint="list every (top, left) once")
    return Listed(tuple(positions))


def _require_any(count: int) -> None:
    if not count:
        raise InvalidThreat(
            "no placement is allowed, so the threat would be empty", hint="allow at least one placement"
        )


def _rows_of(value: object) -> Sequence[object]:
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist() if value.ndim else []
    if isinstance(value, list | tuple):
        return value
    raise InvalidThreat(
        f"placements must be a word, a list of (top, left) or a boolean map, got {describe_value(value)}",
        hint="give 'everywhere', 'corners', [(0, 0), (3, 5)] or a boolean map of allowed top-left corners",
    )


def _position(pair: object) -> tuple[int, int]:
    position = as_pair(pair)
    if position is None:
        raise InvalidThreat(
            f"a placement is a pair (top, left) of whole numbers, got {describe_value(pair)}",
            hint="give a list such as [(0, 0), (3, 5)], or a map of dtype bool",
        )
    return position


def _outside(top: int, left: int, rows: int, columns: int, image: tuple[int, int]) -> InvalidThreat:
    return InvalidThreat(
        f"placement ({top}, {left}) is outside the {image[0]}x{image[1]} image: the patch fits only with "
        f"top in 0..{rows - 1} and left in 0..{columns - 1}",
        hint="a placement is the top-left corner of the patch's bounding box",
    )
