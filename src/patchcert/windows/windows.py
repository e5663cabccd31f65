"""Bounds carried as differences from the clean pass, on the small window that a patch can reach.

Where a placement can change a value it is kept as `deviation` (centre of the interval minus the clean value)
and `radius`; everywhere else both are zero and nothing is computed. An affine layer maps them by W and |W|
without its offset, which the clean pass holds already; a monotone layer looks up the clean values on the
window.

Rounding. The clean image lies in every box, so |deviation| <= radius holds at every step, and the error
gamma |W||deviation| of a product is at most gamma |W| radius: widening the radius by the factor
(1 + gamma) / (1 - gamma) pays for the products of both. At a monotone layer the sums with the clean value z
cost a few units of |z| and of the radius, and the clean value itself may be off by its slack; both are added
to the radius before and after the function.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from patchcert.bounds import Rounding
from patchcert.bounds.geometry import Window
from patchcert.bounds.network import Step
from patchcert.bounds.rounding import blocked_product
from patchcert.windows.clean import Clean
from patchcert.windows.fused import is_fused
from patchcert.windows.groups import Cells, Group
from patchcert.windows.layout import Layout

_LARGE_WINDOW = 2**20
"""From so many weights under a window on, a CPU reads them where they lie instead of gathering them."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Deviation and radius (p, n, h, w, c) on each placement's window, or (p, n, features) without windows.

    The radius may have p = 1 or n = 1 where it is the same for all. The radius meant is `radius * factor +
    extra`, and cells outside the feature map count as zero, whatever they hold: `settled` carries both out, a
    monotone layer does it in passing.
    """

    deviation: Tensor
    radius: Tensor
    factor: float = 1.0
    extra: float = 0.0
    is_ragged: bool = False

    def map(self, function: Callable[[Tensor], Tensor]) -> "Windows":
        """Both parts, each changed by the same function."""
        return replace(self, deviation=function(self.deviation), radius=function(self.radius))

    def slice(self, start: int, stop: int) -> "Windows":
        """Those of some of the placements."""
        return self.map(lambda part: part if len(part) == 1 else part[start:stop])

    def settled(self, outside: Tensor | None) -> "Windows":
        """The same windows with nothing left to apply."""
        deviation, radius = self.deviation, self.radius
        if self.factor != 1 or self.extra:
            radius = radius * self.factor + self.extra
        if self.is_ragged and outside is not None:
            deviation, radius = (_emptied(part, outside) for part in (deviation, radius))
        return Windows(deviation, radius)

    def widened(self, roundings: int, rounding: Rounding) -> "Windows":
        """With a radius that pays for products whose terms are rounded so many times."""
        if not rounding.is_outward:
            return self
        gamma = rounding.gamma(roundings)
        factor = 1 + 2 * gamma * (1 + 2 * gamma) + 4 * rounding.unit
        return replace(self, factor=factor, extra=rounding.tiny / rounding.unit)


def _emptied(part: Tensor, outside: Tensor) -> Tensor:
    """With zeros outside; where nothing looks back for a gradient the tensor itself, unless it stands for several."""
    is_shared = part.shape[0] != outside.shape[0]
    return (
        part.masked_fill(outside, 0.0)
        if torch.is_grad_enabled() or is_shared
        else part.masked_fill_(outside, 0.0)
    )


@dataclass(frozen=True, slots=True)
class Shared:
    """What the sweeps of all groups share: the clean pass, and weights in the forms that windows need."""

    layout: Layout
    clean: Clean
    rounding: Rounding
    weights: dict[tuple, tuple[Tensor, Tensor]] = field(default_factory=dict)
    slacks: dict[tuple, Tensor] = field(default_factory=dict)

    def slack(self, index: int, units: int, extra: float) -> Tensor:
        """What the clean value `index` may be off by, with some units of rounding in sums with it, (n,), plus extra."""
        key = (index, units, extra)
        if key not in self.slacks:
            assert self.clean.slack is not None
            assert self.clean.largest is not None
            slack = self.clean.slack[index] + self.clean.largest[index] * (units * self.rounding.unit)
            self.slacks[key] = slack * (1 + 8 * self.rounding.unit) + (2 * self.rounding.tiny + 2 * extra)
        return self.slacks[key]


class WindowPass(ABC):
    """Placements on their way through the network; who they are decides where their windows lie."""

    shared: Shared
    windows: tuple[Window | None, ...]

    @abstractmethod
    def outside(self, index: int) -> Tensor | None:
        """Which cells of the windows on value `index` lie outside the feature map; None where none does."""

    @abstractmethod
    def clean_windows(self, index: int) -> Tensor:
        """The clean value `index` on the windows (p, n, h, w, c); the value itself where it has no places."""

    @abstractmethod
    def surroundings(self, position: int, height: int, width: int) -> Tensor:
        """The clean values that the step at `position` looks at, and its padding outside the feature map."""

    @abstractmethod
    def flat_product(self, part: Tensor, columns: Tensor, index: int) -> Tensor:
        """Windows (p, n, h, w, c) times the weights (places, c, out) of the layer after value `index`."""

    @abstractmethod
    def signed_cells(self, index: int) -> Tensor | None:
        """The cells (p, cells) or (p, n, cells) of the windows on value `index`, -1 outside; None without places."""

    def spans(self, index: int) -> Tensor | None:
        """Which part of the windows on value `index` lies in the map, and where, as `Cells` say it; where all images
        have windows alike, else None."""
        return None

    is_fused: bool
    has_gradient: bool = False

    @property
    def layout(self) -> Layout:
        return self.shared.layout

    @property
    def clean(self) -> Clean:
        return self.shared.clean

    @property
    def rounding(self) -> Rounding:
        return self.shared.rounding

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.layout.network.steps

    def window(self, index: int) -> Window:
        """The window on value `index`, which must have places."""
        window = self.windows[index]
        assert window is not None
        return window


@final
class GroupPass(WindowPass):
    """A slice of one group: the same placements for every image, aligned alike to the strides of the network."""

    def __init__(self, shared: Shared, group: Group, start: int, stop: int) -> None:
        self.shared, self.windows = shared, group.windows
        self.group, self.start, self.stop = group, start, stop
        self.is_fused = is_fused(shared.clean.values[0])

    def cells(self, index: int) -> Cells | None:
        """The cells of the windows on value `index`."""
        cells = self.group.cells[index]
        return None if cells is None else cells.slice(self.start, self.stop)

    def signed_cells(self, index: int) -> Tensor | None:
        cells = self.cells(index)
        return None if cells is None else cells.signed

    def spans(self, index: int) -> Tensor | None:
        cells = self.cells(index)
        return None if cells is None else cells.spans

    def outside(self, index: int) -> Tensor | None:
        cells = self.cells(index)
        return None if cells is None else cells.outside

    def clean_windows(self, index: int) -> Tensor:
        cells = self.cells(index)
        if cells is None:
            return self.clean.values[index].flatten(1)
        window = self.window(index)
        return self._gather(index, cells.index).unflatten(2, (window.height, window.width))

    def surroundings(self, position: int, height: int, width: int) -> Tensor:
        cells = self.group.surroundings[position]
        assert cells is not None
        chosen = cells.slice(self.start, self.stop)
        values = self._gather(self.steps[position].inputs[0], chosen.index).unflatten(2, (height, width))
        if chosen.outside is None:
            return values
        return values.masked_fill(chosen.outside, self.steps[position].operation.padding)

    def flat_product(self, part: Tensor, columns: Tensor, index: int) -> Tensor:
        cells, window = self.cells(index), self.window(index)
        assert cells is not None
        if not part.is_cuda and cells.index.shape[1] * columns[0].numel() >= _LARGE_WINDOW:
            rows = cells.signed.view(-1, window.height, window.width).numpy()
            return torch.stack(
                [self._by_rows(part[min(one, len(part) - 1)], columns, rows[one]) for one in range(len(rows))]
            )
        chosen = columns.index_select(0, cells.index.flatten()).reshape(
            len(cells.index), -1, columns.shape[2]
        )
        return product(part.flatten(2), chosen, self.rounding)

    def _by_rows(self, part: Tensor, columns: Tensor, cells: np.ndarray) -> Tensor:
        """One placement's window (n, h, w, c) times its weights, row by row: those of a row lie side by side."""
        total = part.new_zeros(len(part), columns.shape[2])
        for row, places in enumerate(cells):
            inside = np.flatnonzero(places >= 0)
            if len(inside):
                first, count = int(inside[0]), len(inside)
                weights = columns[int(places[first]) :][:count].flatten(0, 1)
                total += product(part[:, row, first : first + count].flatten(1), weights, self.rounding)
        return total

    def _gather(self, index: int, cells: Tensor) -> Tensor:
        places = self.clean.places(index, self.layout)
        return places.index_select(1, cells.flatten()).unflatten(1, cells.shape).transpose(0, 1)


def product(left: Tensor, right: Tensor, rounding: Rounding, terms: int | None = None) -> Tensor:
    """The matrix product, in the form whose rounding is known where bounds must be sound.

    `terms` is how many products of a sum can differ from zero, where that is fewer than all.
    """
    return blocked_product(left, right, terms) if rounding.is_outward else left @ right
