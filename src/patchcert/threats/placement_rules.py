"""Where a patch may be, as chosen with the threat and before the size of the images is known."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor

from patchcert.errors import InvalidThreat
from patchcert.threats.stamp import Rows, as_boolean, as_whole, describe_value, from_rows, to_rows
from patchcert.threats.threat import Plain

PlacementsLike = str | Sequence[tuple[int, int]] | Sequence[Sequence[bool]] | np.ndarray | Tensor


class PlacementRule(Protocol):
    """Which corners are allowed, before the image size is known."""

    def corners(self, rows: int, columns: int, image: tuple[int, int]) -> Tensor:
        """Allowed corners (p, 2) in row-major order, where rows x columns positions fit the image."""
        ...

    def to_plain(self) -> Plain:
        """The rule in plain types, as `read_rule` understands it."""
        ...


@final
@dataclass(frozen=True)
class Everywhere:
    """Every position at which the stamp lies wholly inside the image."""

    def corners(self, rows: int, columns: int, image: tuple[int, int]) -> Tensor:
        """Allowed corners (p, 2) in row-major order."""
        return torch.cartesian_prod(torch.arange(rows), torch.arange(columns))

    def to_plain(self) -> Plain:
        """The rule in plain types."""
        return "everywhere"

    def __str__(self) -> str:
        return "everywhere"


@final
@dataclass(frozen=True)
class Corners:
    """The four corners of the image; fewer where the stamp is as high or as wide as the image."""

    def corners(self, rows: int, columns: int, image: tuple[int, int]) -> Tensor:
        """Allowed corners (p, 2) in row-major order."""
        tops, lefts = sorted({0, rows - 1}), sorted({0, columns - 1})
        return torch.cartesian_prod(torch.tensor(tops), torch.tensor(lefts))

    def to_plain(self) -> Plain:
        """The rule in plain types."""
        return "corners"

    def __str__(self) -> str:
        return "corners"


@final
@dataclass(frozen=True)
class Listed:
    """Exactly the corners given, kept in row-major order."""

    positions: tuple[tuple[int, int], ...]

    def corners(self, rows: int, columns: int, image: tuple[int, int]) -> Tensor:
        """Allowed corners (p, 2) in row-major order."""
        for top, left in self.positions:
            if not (0 <= top < rows and 0 <= left < columns):
                raise _outside(top, left, rows, columns, image)
        return torch.tensor(self.positions)

    def to_plain(self) -> Plain:
        """The rule in plain types."""
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

    def corners(self, rows: int, columns: int, image: tuple[int, int]) -> Tensor:
        """Allowed corners (p, 2) in row-major order."""
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
        """The rule in plain types."""
        return {"map": list(self.map)}

    def __str__(self) -> str:
        return f"{''.join(self.map).count('#')} mapped placements"


WORDS: dict[str, PlacementRule] = {"everywhere": Everywhere(), "corners": Corners()}


def read_rule(value: PlacementsLike | Plain) -> PlacementRule:
    """The rule meant by a word, a list of (top, left), a boolean map, or what `to_plain` returned."""
    if isinstance(value, str):
        if value not in WORDS:
            raise InvalidThreat(
                f"unknown placements {value!r}, expected one of {', '.join(map(repr, WORDS))}",
                hint="or give a list of (top, left) corners or a boolean map",
            )
        return WORDS[value]
    if isinstance(value, dict):
        rows = value.get("map")
        if set(value) != {"map"} or not isinstance(rows, list):
            raise InvalidThreat(f"placements given as a table need the one key 'map', got {sorted(value)}")
        return _mapped(from_rows([str(row) for row in rows], "the placement map"))
    allowed = as_boolean(value, "the placement map") if len(_rows_of(value)) else None
    return _mapped(allowed) if allowed is not None else _listed(value)


def _mapped(allowed: Tensor) -> Mapped:
    if not allowed.any():
        raise _none_allowed()
    return Mapped(to_rows(allowed))


def _listed(value: object) -> Listed:
    positions = [_position(pair) for pair in _rows_of(value)]
    if not positions:
        raise _none_allowed()
    for first, second in zip(sorted(positions), sorted(positions)[1:], strict=False):
        if first == second:
            raise InvalidThreat(f"placement {first} is listed twice", hint="list every (top, left) once")
    return Listed(tuple(sorted(positions)))


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
    whole = [as_whole(number) for number in pair] if isinstance(pair, list | tuple) else []
    if len(whole) != 2 or whole[0] is None or whole[1] is None:
        raise InvalidThreat(
            f"a placement is a pair (top, left) of whole numbers, got {describe_value(pair)}",
            hint="give a list such as [(0, 0), (3, 5)], or a map of dtype bool",
        )
    return whole[0], whole[1]


def _none_allowed() -> InvalidThreat:
    return InvalidThreat(
        "no placement is allowed, so the threat would be empty", hint="allow at least one placement"
    )


def _outside(top: int, left: int, rows: int, columns: int, image: tuple[int, int]) -> InvalidThreat:
    return InvalidThreat(
        f"placement ({top}, {left}) is outside the {image[0]}x{image[1]} image: the patch fits only with "
        f"top in 0..{rows - 1} and left in 0..{columns - 1}",
        hint="a placement is the top-left corner of the patch's bounding box",
    )
