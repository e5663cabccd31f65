"""Named stamps: the boolean masks of patches that are not just squares.

Text and pictures of a stamp use '#' or white for covered pixels, '.' or black for free ones.
"""

import re
from collections.abc import Callable, Iterable
from itertools import chain, combinations
from math import isqrt
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from patchcert.errors import InvalidThreat
from patchcert.threats.stamp import from_rows, solid, to_rows, trim


def square(side: int) -> Tensor:
    """A square, all covered."""
    return solid(side, side)


def rectangle(height: int, width: int) -> Tensor:
    """A rectangle, all covered."""
    return solid(height, width)


def line(length: int, vertical: bool = False) -> Tensor:
    """A line one pixel thick, lying or standing."""
    return solid(length, 1) if vertical else solid(1, length)


def diamond(pixels: int) -> Tensor:
    """A diamond of exactly so many pixels.

    For 1, 5, 13, 25, 41, ... it is the ball of the city-block distance. For 4 it is the four neighbours of a
    free centre, a 2x2 lattice turned by 45 degrees. For any other square number side^2 it has rows of
    1, 2, ..., side, ..., 2, 1 pixels, each centred as far as whole pixels allow, leaning left.
    """
    radius = (isqrt(max(2 * pixels - 1, 0)) - 1) // 2
    if pixels >= 1 and 2 * radius * (radius + 1) + 1 == pixels:
        return _ball(radius)
    if pixels == 4:
        return from_rows((".#.", "#.#", ".#."))
    side = _root(pixels, "diamond")
    widths = [*range(1, side), *range(side, 0, -1)]
    stamp = torch.zeros(len(widths), side, dtype=torch.bool)
    for row, width in enumerate(widths):
        offset = (side - width) // 2
        stamp[row, offset : offset + width] = True
    return stamp


def parallelogram(pixels: int, mirrored: bool = False, transposed: bool = False) -> Tensor:
    """A square of so many pixels, sheared one pixel per row; mirrored: to the left; transposed: by column."""
    side = _root(pixels, "parallelogram")
    rows, columns = torch.arange(side)[:, None], torch.arange(2 * side - 1)[None, :]
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
    return {name: _distinct(stamps) for name, stamps in found.items() if stamps}


def from_text(text: str) -> Tensor:
    """The stamp drawn with '#' and '.', one line per row; blank lines and outer spaces do not count."""
    rows = [row.strip() for row in text.splitlines() if row.strip()]
    if not rows:
        raise InvalidThreat(
            "the text of the stamp is empty", hint="draw covered pixels as '#', free ones as '.'"
        )
    return trim(from_rows(rows, "the text of the stamp"))


def from_file(path: str | Path) -> Tensor:
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


def parse(text: str) -> Tensor:
    """The stamp that a user names: '5', '2x8', 'diamond:25', 'line:16:vertical', or the path of a file."""
    size = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip())
    if size:
        return solid(int(size[1]), int(size[2] or size[1]))
    named = re.fullmatch(r"([A-Za-z-]+):(\d+)((?::[a-z]+)*)", text.strip())
    if named and not Path(text).exists():
        return _named(named[1].lower(), int(named[2]), tuple(named[3].split(":")[1:]))
    if not Path(text).is_file():
        raise InvalidThreat(
            f"{text!r} is neither a size, a shape nor a file",
            hint=f"write 5, 2x8, a path, or SHAPE:PIXELS with one of {', '.join(NAMED)}",
        )
    return from_file(text)


def name_of(stamp: Tensor) -> str | None:
    """The words that `parse` reads this stamp from; None for one that only a file can hold."""
    height, width, pixels = *stamp.shape, int(stamp.sum())
    if pixels == height * width:
        return f"{height}x{width}"
    for kind, (_, variants) in NAMED.items():
        if not _has(kind, pixels):
            continue
        for options in chain.from_iterable(
            combinations(variants, count) for count in range(len(variants) + 1)
        ):
            if torch.equal(_named(kind, pixels, options), stamp):
                return ":".join((kind, str(pixels), *options))
    return None


def render(stamp: Tensor) -> str:
    """The stamp drawn with '#' and '.', as `from_text` reads it."""
    return "\n".join(to_rows(stamp))


def describe(stamp: Tensor) -> str:
    """A few words for people: '5x5 square', 'diamond of 25 pixels', or the size of the box and the count."""
    height, width, pixels = *stamp.shape, int(stamp.sum())
    if pixels == height * width:
        kind = "square" if height == width else "line" if 1 in (height, width) else "rectangle"
        return f"{height}x{width} {kind}"
    name = name_of(stamp)
    if name is None:
        return f"stamp of {pixels} pixels in {height}x{width}"
    return f"{name.partition(':')[0]} of {pixels} pixels"


NAMED: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "square": (lambda pixels: square(_root(pixels, "square")), ()),
    "line": (line, ("vertical",)),
    "diamond": (diamond, ()),
    "parallelogram": (parallelogram, ("mirrored", "transposed")),
}


def _named(name: str, pixels: int, options: tuple[str, ...]) -> Tensor:
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


def _ball(radius: int) -> Tensor:
    distance = torch.arange(-radius, radius + 1).abs()
    return distance[:, None] + distance[None, :] <= radius


def _has(kind: str, pixels: int) -> bool:
    try:
        NAMED[kind][0](pixels)
    except InvalidThreat:
        return False
    return True


def _distinct(stamps: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple({to_rows(stamp): stamp for stamp in stamps}.values())


def _from_picture(path: Path) -> Tensor:
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
