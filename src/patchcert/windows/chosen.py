"""Margins at a few placements of each image's own, with a gradient: the differentiable half of training.

Windows as in the sweep over all placements, but every image has its own. So that one geometry serves them
all, each window is drawn back to the next multiple of the network's strides, and reaches as much further.
"""

import logging
import math
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from torch import Tensor

from patchcert.bounds import NEAREST, Network
from patchcert.bounds.geometry import FeatureMap, NotCovered, Window
from patchcert.threats import Patch
from patchcert.windows.clean import Clean, clean_pass
from patchcert.windows.fused import is_fused, placed
from patchcert.windows.groups import cells
from patchcert.windows.layout import Layout
from patchcert.windows.merging import Merging, covered_pixels, masked, repeated
from patchcert.windows.rules import before_head
from patchcert.windows.sparse_rows import is_sparse, sparse_product
from patchcert.windows.windows import Shared, WindowPass, Windows, product

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenPlacements:
    """The common geometry of all placements of one patch on one network and image size.

    `bases` are the corners (b, 2) that windows can be drawn back to, in rows; what depends on them or on the
    rest of the way alone is tabled once, so that a step only looks it up: `covered` (offsets, 1, h, w, 1) says
    which pixels the stamp covers. With a merging, placements are its blocks, and `covered` (blocks, members, h,
    w, 1) those of its members.
    """

    layout: Layout
    windows: tuple[Window | None, ...]
    step: tuple[int, int]
    bases: np.ndarray
    covered: Tensor
    merging: Merging | None = None
    _cells: dict[tuple[Window, FeatureMap], Tensor] = field(default_factory=dict)
    _shifts: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @staticmethod
    def of(
        network: Network, images: Tensor, threat: Patch, merging: Merging | None = None
    ) -> "ChosenPlacements":
        """Raises NotCovered where the network holds a step that windows cannot follow."""
        with torch.no_grad():
            layout = Layout.of(network, network.values(images[:1]))
        known = [window for window in layout.windows(Window(0, 0, threat.height, threat.width)) if window]
        rows, columns = math.lcm(*(w.row_step for w in known)), math.lcm(*(w.column_step for w in known))
        covered = (
            covered_pixels(threat, rows, columns).unsqueeze(1).to(images.device)
            if merging is None
            else merging.drawn_back(rows, columns)
        )
        windows = layout.windows(Window(0, 0, covered.shape[2], covered.shape[3]))
        bases = np.mgrid[0 : images.shape[2] : rows, 0 : images.shape[3] : columns].reshape(2, -1).T
        return ChosenPlacements(layout, windows, (rows, columns), bases, covered, merging)

    def margins(
        self,
        images: Tensor,
        labels: Tensor,
        corners: Tensor,
        epsilon: float | Tensor,
        classes: Tensor | None = None,
        dtype: torch.dtype | None = None,
        clean: Clean | None = None,
    ) -> Tensor:
        """Margins (n, k, classes) at the corners (n, k, 2); with `classes` (n, k) only against that class, (n, k).

        `dtype` is that of the windows, by default the images'; the margins are the images' in any case. `clean` is
        the clean pass where the caller has it already.
        """
        clean = self.clean(images, labels, dtype) if clean is None else clean
        rows, columns = (corners[..., axis].T for axis in (0, 1))
        in_row = -(-images.shape[3] // self.step[1])
        base = rows // self.step[0] * in_row + columns // self.step[1]
        chosen = _ChosenPass(Shared(self.layout, clean, NEAREST), self, base)
        state, first = self._start(chosen, rows, columns, epsilon)
        if dtype is not None:
            state = state.map(lambda part: part.to(dtype))
        return _margins(chosen, before_head(chosen, state, first), labels, classes)

    def clean(self, images: Tensor, labels: Tensor, dtype: torch.dtype | None = None) -> Clean:
        """The clean pass that windows of this type stand on.

        Windows of fewer digits are for wide networks, whose clean pass is faster with the channels last, as
        windows are.
        """
        if dtype is not None:
            images = images.contiguous(memory_format=torch.channels_last)
        return clean_pass(self.layout.network, images, labels)

    def _start(
        self, chosen: "_ChosenPass", rows: Tensor, columns: Tensor, epsilon: float | Tensor
    ) -> tuple[Windows, int]:
        """Bounds where the windows begin, and the value they are of: the image, or that of the last merging."""
        pixels, merging = chosen.clean_windows(0), self.merging
        lower, upper = (pixels - epsilon).clamp(min=0), (pixels + epsilon).clamp(max=1)
        box = Windows((upper + lower) * 0.5 - pixels, (upper - lower) * 0.5)
        if merging is None:
            offset = rows % self.step[0] * self.step[1] + columns % self.step[1]
            return masked(box, self.covered[offset.unsqueeze(1), 0]), 0
        members = torch.arange(self.covered.shape[1], device=rows.device).unsqueeze(1)
        state = masked(box, self.covered[merging.index[rows, columns].unsqueeze(1), members])
        return merging.merged(state, chosen.repeated), merging.first

    def cells(self, window: Window, area: FeatureMap) -> Tensor:
        """The cells (bases, cells) of a window on its map from every base; -1 outside."""
        if (window, area) not in self._cells:
            self._cells[window, area] = cells(window, self.bases, area, self.covered.device).signed
        return self._cells[window, area]

    def shifts(self, window: Window) -> Tensor:
        """How far down and right (bases, 2) a window lies on its map from every base."""
        step = (window.row_step, window.column_step)
        if step not in self._shifts:
            self._shifts[step] = torch.from_numpy(self.bases // step).int().to(self.covered.device)
        return self._shifts[step]


def covering_placements(network: Network, images: Tensor, threat: Patch) -> ChosenPlacements | None:
    """The windows of chosen placements, or None where only the dense way goes."""
    try:
        return ChosenPlacements.of(network, images, threat)
    except NotCovered as reason:
        logger.debug("the dense path takes over: %s", reason)
        return None


@final
class _ChosenPass(WindowPass):
    """The same number k of placements for every image, each image's own; `base` (k, n) says which base each has."""

    has_gradient = True

    def __init__(self, shared: Shared, placements: ChosenPlacements, base: Tensor) -> None:
        self.shared, self.windows = shared, placements.windows
        self.placements, self.base = placements, base
        self.is_fused = is_fused(shared.clean.values[0])
        self._cells: dict[tuple[Window, FeatureMap], Tensor] = {}

    def repeated(self, count: int) -> "_ChosenPass":
        """Each placement so many times in a row."""
        return _ChosenPass(self.shared, self.placements, repeated(self.base, count))

    def outside(self, index: int) -> Tensor | None:
        window = self.windows[index]
        return None if window is None else self._outside(window, index)

    def clean_windows(self, index: int) -> Tensor:
        window = self.windows[index]
        return self.clean.values[index].flatten(1) if window is None else self._gather(window, index)

    def surroundings(self, position: int, height: int, width: int) -> Tensor:
        step = self.steps[position]
        window = self.layout.seen(position, self.windows)
        assert window is not None
        outside = self._outside(window, step.inputs[0])
        return self._gather(window, step.inputs[0]).masked_fill(outside, step.operation.padding)

    def flat_product(self, part: Tensor, columns: Tensor, index: int) -> Tensor:
        if is_sparse(part, columns):
            part = part.expand(*self.base.shape, *part.shape[2:])
            return sparse_product(part, columns, self._inside(self.window(index), index))
        return product(self.flattened(part, index).flatten(0, 1), columns.flatten(0, 1), NEAREST).unflatten(
            0, part.shape[:2]
        )

    def flattened(self, part: Tensor, index: int) -> Tensor:
        """The whole map with the window in it, (k, n, places * channels); cells outside hold zeros and add nothing."""
        area, window = self.layout.maps[index], self.window(index)
        assert area is not None
        part = part.expand(*self.base.shape, *part.shape[2:])
        if self.is_fused:
            shifts = self.placements.shifts(window)[self.base]
            return placed(part, (area.height, area.width), (window.top, window.left), shifts).flatten(2)
        inside = self._inside(window, index)
        whole = part.new_zeros(*part.shape[:2], area.height * area.width, area.channels)
        where = inside.unsqueeze(-1).expand(*inside.shape, area.channels)
        return whole.scatter_add(2, where, part.flatten(2, 3)).flatten(2)

    def signed_cells(self, index: int) -> Tensor | None:
        window = self.windows[index]
        return None if window is None else self._signed(window, index)

    def _gather(self, window: Window, index: int) -> Tensor:
        inside = self._inside(window, index)
        places = self.clean.places(index, self.layout)
        where = inside.unsqueeze(-1).expand(*inside.shape, places.shape[-1])
        chosen = places.unsqueeze(0).expand(len(inside), *places.shape).gather(2, where)
        return chosen.unflatten(2, (window.height, window.width))

    def _inside(self, window: Window, index: int) -> Tensor:
        """The cells (k, n, cells) of the window, some cell of the map for those outside."""
        return self._signed(window, index).clamp(min=0).long()

    def _outside(self, window: Window, index: int) -> Tensor:
        """Which cells of the window (k, n, h, w, 1) lie outside the map."""
        return (self._signed(window, index) < 0).unflatten(2, (window.height, window.width)).unsqueeze(-1)

    def _signed(self, window: Window, index: int) -> Tensor:
        """The cells (k, n, cells) of the window on its map as flat indices, -1 outside."""
        area = self.layout.maps[index]
        assert area is not None
        if (window, area) not in self._cells:
            self._cells[window, area] = self.placements.cells(window, area)[self.base]
        return self._cells[window, area]


def _margins(chosen: _ChosenPass, state: Windows, labels: Tensor, classes: Tensor | None) -> Tensor:
    """The clean margins moved by the deviation and lowered by the radius."""
    head, index = chosen.layout.network.head, chosen.steps[-1].inputs[0]
    assert head is not None
    weight, area = head.weight(), chosen.layout.maps[index]
    deviation = state.deviation.to(weight.dtype)
    radius = state.radius.to(weight.dtype).expand_as(deviation)
    if area is not None:
        deviation, radius = (chosen.flattened(part, index) for part in (deviation, radius))
        weight = weight.unflatten(1, (area.channels, -1)).transpose(1, 2).flatten(1)
    deviation, radius, clean = deviation.transpose(0, 1), radius.transpose(0, 1), chosen.clean.margins
    if classes is not None:
        rows = _selector(labels, classes, len(weight)).to(weight.dtype) @ weight
        return clean.gather(1, classes) + (deviation * rows - radius * rows.abs()).sum(dim=2)
    scores = deviation @ weight.T
    pairs = (weight.unsqueeze(1) - weight).abs()
    spread = (radius @ pairs.flatten(0, 1).T).unflatten(2, pairs.shape[:2])
    own = labels.reshape(-1, 1, 1)
    spread = spread.gather(2, own.unsqueeze(-1).expand(*spread.shape[:2], 1, spread.shape[3])).squeeze(2)
    shift = scores.gather(2, own.expand(*scores.shape[:2], 1)) - scores
    return clean.unsqueeze(1) + shift - spread


def _selector(labels: Tensor, classes: Tensor, count: int) -> Tensor:
    """Rows (n, k, count) with 1 at the label and -1 at the class: times the weights, their exact difference."""
    numbers = torch.arange(count, device=labels.device)
    return (labels.reshape(-1, 1, 1) == numbers).int() - (classes.unsqueeze(-1) == numbers).int()
