"""Stamps, the boolean masks of the pixels that a patch covers: named shapes, drawings, and what is computed under them.

Text and pictures of a stamp use '#' or white for covered pixels, '.' or black for free ones.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from math import isqrt
from pathlib import Path
from typing import Annotated, SupportsIndex

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from patchcert.errors import InvalidThreat
from patchcert.threats.threat import as_boolean, as_pair, as_whole, describe_value

Stamp = Annotated[Tensor, "height width"]
StampLike = SupportsIndex | Sequence[SupportsIndex] | Sequence[Sequence[bool]] | np.ndarray | Tensor
Rows = tuple[str, ...]

MOST_PIXELS = 2**26
"""Under a stamp: more than images have that a classifier sees, and still held in memory."""


def square(side: int) -> Stamp:
    """A square, all covered."""
    return rectangle(side, side)


def rectangle(height: int, width: int) -> Stamp:
    """A rectangle, all covered."""
    if height < 1 or width < 1:
        raise InvalidThreat(
            f"a patch needs a height and width of at least 1, got {height}x{width}",
            hint="give positive sizes",
        )
    _check_count(height * width)
    return torch.ones(height, width, dtype=torch.bool, device="cpu")


def _check_count(pixels: int) -> None:
    if pixels > MOST_PIXELS:
        raise InvalidThreat(
            f"a patch of {pixels:,} pixels is larger than any image: at most {MOST_PIXELS:,}",
            hint="sizes are in pixels of the image",
        )


def line(length: int, vertical: bool = False) -> Stamp:
    """A line one pixel thick, horizontal or vertical."""
    return rectangle(length, 1) if vertical else rectangle(1, length)


def diamond(pixels: int) -> Stamp:
    """A diamond of exactly the given number of pixels.

    For 1, 5, 13, 25, 41, ... it is the ball of the city-block distance. For 4 it is the four neighbours of a
    free centre, a 2x2 lattice turned by 45 degrees. For any other square number side^2 it has rows of
    1, 2, ..., side, ..., 2, 1 pixels, each centred as far as whole pixels allow, leaning left.
    """
    _check_count(pixels)
    radius = (isqrt(max(2 * pixels - 1, 0)) - 1) // 2
    if pixels >= 1 and 2 * radius * (radius + 1) + 1 == pixels:
        return _ball(radius)
    if pixels == 4:
        return from_rows((".#.", "#.#", ".#."))
    side = _root(pixels, "diamond")
    widths = [*range(1, side), *range(side, 0, -1)]
    stamp = torch.zeros(len(widths), side, dtype=torch.bool, device="cpu")
    for row, width in enumerate(widths):
        offset = (side - width) // 2
        stamp[row, offset : offset + width] = True
    return stamp


def parallelogram(pixels: int, mirrored: bool = False, transposed: bool = False) -> Stamp:
    """A square with the given number of pixels, sheared by one pixel per row to the right.

    `mirrored` shears it to the left, `transposed` by columns instead of rows.
    """
    _check_count(pixels)
    side = _root(pixels, "parallelogram")
    rows = torch.arange(side, device="cpu")[:, None]
    columns = torch.arange(2 * side - 1, device="cpu")[None, :]
    stamp = (columns >= rows) & (columns < rows + side)
    stamp = stamp.flip(1) if mirrored else stamp
    return stamp.T.contiguous() if transposed else stamp


def transfer_shapes(pixels: int) -> dict[str, tuple[Tensor, ...]]:
    """Every variant of every shape with side^2 pixels, on which a model trained on squares is tried.

    Where no exact rectangle exists, the next larger one is taken; a shape without variants is left out.
    """
    side = _root(pixels, "set of transfer shapes")
    rectangles = [(height, -(-pixels // height)) for height in range(2, side)]
    flags = (False, True)
    found: dict[str, list[Tensor]] = {
        "square": [square(side)],
        "line": [line(pixels), line(pixels, vertical=True)],
        "rectangle": [rectangle(*size) for pair in rectangles for size in (pair, pair[::-1])],
        "parallelogram": [parallelogram(pixels, mirror, turn) for turn in flags for mirror in flags],
        "diamond": [diamond(pixels)],
    }
    return {
        name: tuple({to_rows(stamp): stamp for stamp in stamps}.values())
        for name, stamps in found.items()
        if stamps
    }


def from_text(text: str) -> Stamp:
    """The stamp drawn with '#' and '.', one line per row; blank lines and outer spaces do not count."""
    rows = [row.strip() for row in text.splitlines() if row.strip()]
    if not rows:
        raise InvalidThreat(
            "the text of the stamp is empty", hint="draw covered pixels as '#', free ones as '.'"
        )
    return trim(from_rows(rows, "the text of the stamp"))


def from_file(path: str | Path) -> Stamp:
    """The stamp in a PNG file (white on black, nothing between) or in a text file of '#' and '.'."""
    path = Path(path)
    try:
        if path.suffix.lower() == ".png":
            return _from_picture(path)
        return from_text(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidThreat(
            f"cannot read a stamp from {path}: {error}", hint="give a PNG file or a text file of '#' and '.'"
        ) from error


def parse(text: str) -> Stamp:
    """The stamp that a user names: '5', '2x8', 'diamond:25', 'line:16:vertical', or the path of a file."""
    size = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip())
    if size:
        return rectangle(int(size[1]), int(size[2] or size[1]))
    named = re.fullmatch(r"([A-Za-z-]+):(\d+)((?::[a-z]+)*)", text.strip())
    if named and not Path(text).exists():
        return _named(named[1].lower(), int(named[2]), tuple(named[3].split(":")[1:]))
    if not Path(text).is_file():
        raise InvalidThreat(
            f"{text!r} is neither a size, a shape nor a file",
            hint=f"write 5, 2x8, a path, or SHAPE:PIXELS with one of {', '.join(NAMED)}",
        )
    return from_file(text)


def name_of(stamp: Stamp) -> str | None:
    """The name from which `parse` builds this stamp; None if only a file can hold it."""
    height, width, pixels = *stamp.shape, int(stamp.sum())
    if pixels == height * width:
        return f"{height}x{width}"
    for kind, (_, variants) in NAMED.items():
        for count in range(len(variants) + 1):
            for options in combinations(variants, count):
                with suppress(InvalidThreat):
                    if torch.equal(_named(kind, pixels, options), stamp):
                        return ":".join((kind, str(pixels), *options))
    return None


def describe(stamp: Stamp) -> str:
    """A short description for people: '5x5 square', 'diamond of 25 pixels', or the size of the box and the count."""
    height, width, pixels = *stamp.shape, int(stamp.sum())
    if pixels == height * width:
        kind = "square" if height == width else "line" if 1 in (height, width) else "rectangle"
        return f"{height}x{width} {kind}"
    name = name_of(stamp)
    if name is None:
        return f"stamp of {pixels} pixels in {height}x{width}"
    return f"{name.partition(':')[0]} of {pixels} pixels"


def read_stamp(value: StampLike) -> Stamp:
    """The boolean tensor meant by a side, a (height, width) pair or a mask; not yet trimmed."""
    side = as_whole(value)
    if side is not None:
        return square(side)
    mask = as_boolean(value, "the patch's stamp")
    if mask is not None:
        return mask
    sizes = as_pair(value)
    if sizes is not None:
        return rectangle(*sizes)
    raise InvalidThreat(
        "a patch is a side, a (height, width) pair or a two-dimensional boolean mask, "
        f"got {describe_value(value)}",
        hint="give Patch(5), Patch((2, 8)) or Patch(mask > 0)",
    )


def trim(stamp: Stamp) -> Annotated[Tensor, "_ _"]:
    """The stamp cut to the bounding box of its pixels."""
    if not stamp.any():
        raise InvalidThreat(
            f"the patch's stamp of shape {tuple(stamp.shape)} covers no pixel",
            hint="set at least one pixel to True",
        )
    rows = stamp.any(dim=1).nonzero().flatten()
    columns = stamp.any(dim=0).nonzero().flatten()
    return stamp[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].contiguous()


def to_rows(stamp: Stamp) -> Rows:
    """The stamp as one string of '#' (covered) and '.' (free) per row."""
    return tuple("".join("#" if covered else "." for covered in row) for row in stamp.tolist())


def from_rows(rows: Sequence[str], what: str = "the patch's stamp") -> Stamp:
    """The boolean tensor that `to_rows` wrote."""
    strange = sorted(set("".join(rows)) - {"#", "."})
    if strange:
        raise InvalidThreat(f"{what} may hold only '#' and '.', found {''.join(strange)!r}")
    if len({len(row) for row in rows}) != 1 or not rows[0]:
        raise InvalidThreat(f"{what} needs rows of one length, got lengths {[len(row) for row in rows]}")
    return torch.tensor([[letter == "#" for letter in row] for row in rows], device="cpu")


def sums_under(stamp: Stamp, values: Annotated[Tensor, "n h w"]) -> Annotated[Tensor, "n _ _"]:
    """The sum of the values under the stamp at every top-left corner, row by row.

    Computed from running sums, so that whole numbers stay exact: a convolution might round them.
    """
    height, width = stamp.shape
    if bool(stamp.all()):
        return _window_sums(_window_sums(values, width).mT, height).mT
    running = F.pad(values.cumsum(dim=2), (1, 0))
    tops, lefts = values.shape[1] - height + 1, values.shape[2] - width + 1
    total = running.new_zeros(values.shape[0], tops, lefts)
    for row, start, end in _runs(stamp):
        band = running[:, row : row + tops]
        total += band[:, :, end : end + lefts] - band[:, :, start : start + lefts]
    return total


NAMED: dict[str, tuple[Callable[..., Stamp], tuple[str, ...]]] = {
    "square": (lambda pixels: square(_root(pixels, "square")), ()),
    "line": (line, ("vertical",)),
    "diamond": (diamond, ()),
    "parallelogram": (parallelogram, ("mirrored", "transposed")),
}


def _named(name: str, pixels: int, options: tuple[str, ...]) -> Stamp:
    if name not in NAMED:
        raise InvalidThreat(f"unknown shape {name!r}", hint=f"known shapes are {', '.join(NAMED)}")
    build, known = NAMED[name]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise InvalidThreat(
            f"shape {name!r} has no variant {unknown[0]!r}",
            hint=f"its variants are {', '.join(known)}" if known else "write it without a variant",
        )
    return build(pixels, **dict.fromkeys(options, True))


def _root(pixels: int, name: str) -> int:
    side = isqrt(max(pixels, 0))
    if side < 1 or side * side != pixels:
        others = " or an exact city-block ball (1, 5, 13, 25, 41, ...)" if name == "diamond" else ""
        raise InvalidThreat(
            f"a {name} needs a square number of pixels (1, 4, 9, 16, 25, ...){others}, got {pixels}",
            hint=f"the nearest square numbers are {max(side, 1) ** 2} and {(side + 1) ** 2}",
        )
    return side


def _ball(radius: int) -> Stamp:
    distance = torch.arange(-radius, radius + 1, device="cpu").abs()
    return distance[:, None] + distance[None, :] <= radius


def _from_picture(path: Path) -> Stamp:
    with Image.open(path) as picture:
        grey = picture.convert("L")
    levels = torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8).view(grey.height, grey.width)
    between = int(((levels > 0) & (levels < 255)).sum())
    if between:
        raise InvalidThreat(
            f"{path} has {between} pixels that are neither black nor white, so the stamp is not boolean",
            hint="save the stamp with pure white for covered and pure black for free pixels",
        )
    return trim(levels == 255)


def _window_sums(values: Tensor, length: int) -> Tensor:
    """The sums of `length` neighbours along the last dimension."""
    running = F.pad(values.cumsum(dim=-1), (1, 0))
    return running[..., length:] - running[..., :-length]


def _runs(stamp: Stamp) -> list[tuple[int, int, int]]:
    """(row, first column, column after the last) of every unbroken run of covered pixels."""
    steps = F.pad(stamp.int(), (1, 1)).diff(dim=1)
    starts, ends = (steps == 1).nonzero().tolist(), (steps == -1).nonzero().tolist()
    return [(row, start, end) for (row, start), (_, end) in zip(starts, ends, strict=True)]
