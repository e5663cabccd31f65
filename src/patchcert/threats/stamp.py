"""A stamp is a small boolean image: the pixels that a patch covers, cut to its bounding box."""

import operator
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from patchcert.errors import InvalidThreat

StampLike = SupportsIndex | Sequence[SupportsIndex] | Sequence[Sequence[bool]] | np.ndarray | Tensor
Rows = tuple[str, ...]


def as_boolean(value: object, what: str) -> Tensor | None:
    """The value as a two-dimensional boolean tensor, or None if it holds anything but truth values."""
    if not isinstance(value, Tensor | np.ndarray | list | tuple):
        return None
    try:
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    except ValueError as error:
        raise InvalidThreat(f"{what} has rows of unequal length: {describe_value(value)}") from error
    return torch.tensor(array) if array.dtype == np.bool_ and array.ndim == 2 else None


def as_whole(value: object) -> int | None:
    """The value as an int, or None if it is a truth value or no whole number."""
    if isinstance(value, bool | np.bool_ | str):
        return None
    if isinstance(value, Tensor | np.ndarray) and value.ndim:
        return None
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def read_stamp(value: StampLike) -> Tensor:
    """The boolean tensor meant by a side, a (height, width) pair or a mask; not yet trimmed."""
    side = as_whole(value)
    if side is not None:
        return solid(side, side)
    mask = as_boolean(value, "the patch's stamp")
    if mask is not None:
        return mask
    sizes = [as_whole(size) for size in value] if isinstance(value, list | tuple) else []
    if len(sizes) == 2 and sizes[0] is not None and sizes[1] is not None:
        return solid(sizes[0], sizes[1])
    raise InvalidThreat(
        "a patch is a side, a (height, width) pair or a two-dimensional boolean mask, "
        f"got {describe_value(value)}",
        hint="give Patch(5), Patch((2, 8)) or Patch(mask > 0)",
    )


def solid(height: int, width: int) -> Tensor:
    """A rectangle, all of whose pixels are covered."""
    if height < 1 or width < 1:
        raise InvalidThreat(
            f"a patch needs a height and width of at least 1, got {height}x{width}",
            hint="give positive sizes",
        )
    return torch.ones(height, width, dtype=torch.bool)


def trim(stamp: Tensor) -> Tensor:
    """The stamp cut to the bounding box of its pixels."""
    if not stamp.any():
        raise InvalidThreat(
            f"the patch's stamp of shape {tuple(stamp.shape)} covers no pixel",
            hint="set at least one pixel to True",
        )
    rows = stamp.any(dim=1).nonzero().flatten()
    columns = stamp.any(dim=0).nonzero().flatten()
    return stamp[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].contiguous()


def to_rows(stamp: Tensor) -> Rows:
    """The stamp as one string of '#' (covered) and '.' (free) per row."""
    return tuple("".join("#" if covered else "." for covered in row) for row in stamp.tolist())


def from_rows(rows: Sequence[str], what: str = "the patch's stamp") -> Tensor:
    """The boolean tensor that `to_rows` wrote."""
    strange = sorted(set("".join(rows)) - {"#", "."})
    if strange:
        raise InvalidThreat(f"{what} may hold only '#' and '.', found {''.join(strange)!r}")
    if len({len(row) for row in rows}) != 1 or not rows[0]:
        raise InvalidThreat(f"{what} needs rows of one length, got lengths {[len(row) for row in rows]}")
    return torch.tensor([[letter == "#" for letter in row] for row in rows])


def sums_under(stamp: Tensor, values: Tensor) -> Tensor:
    """The sum of values (n, H, W) under the stamp at every top-left corner: (n, H-h+1, W-w+1).

    Running sums, so whole numbers stay exact and no convolution algorithm can round them.
    """
    height, width = stamp.shape
    if bool(stamp.all()):
        return _window_sums(_window_sums(values, width, dim=2), height, dim=1)
    running = F.pad(values.cumsum(dim=2), (1, 0))
    tops, lefts = values.shape[1] - height + 1, values.shape[2] - width + 1
    total = running.new_zeros(values.shape[0], tops, lefts)
    for row, start, end in _runs(stamp):
        band = running[:, row : row + tops]
        total += band[:, :, end : end + lefts] - band[:, :, start : start + lefts]
    return total


def describe_value(value: object) -> str:
    """Enough of a rejected value to recognise it."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} of {value.dtype} with shape {tuple(value.shape)}"
    return repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."


def _window_sums(values: Tensor, length: int, dim: int) -> Tensor:
    running = values.cumsum(dim=dim)
    zero = torch.zeros_like(running.narrow(dim, 0, 1))
    running = torch.cat([zero, running], dim=dim)
    count = values.shape[dim] - length + 1
    return running.narrow(dim, length, count) - running.narrow(dim, 0, count)


def _runs(stamp: Tensor) -> list[tuple[int, int, int]]:
    """(row, first column, column after the last) of every unbroken run of covered pixels."""
    steps = F.pad(stamp.int(), (1, 1)).diff(dim=1)
    starts, ends = (steps == 1).nonzero().tolist(), (steps == -1).nonzero().tolist()
    return [(row, start, end) for (row, start), (_, end) in zip(starts, ends, strict=True)]
