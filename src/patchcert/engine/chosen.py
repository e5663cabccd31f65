"""Margins at a few placements of each image's own, with a gradient: the differentiable half of training.

Windows as in the sweep over all placements, but every image has its own. So that one geometry serves them
all, each window is drawn back to the next multiple of the network's strides, and reaches as much further.
"""

import logging
import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from patchcert.bounds import NEAREST, Network
from patchcert.engine.clean import clean_pass
from patchcert.engine.fused import is_fused
from patchcert.engine.geometry import Cells, FeatureMap, Layout, NotCovered, Window, seen_by_pool
from patchcert.engine.rules import before_head
from patchcert.engine.windows import Shared, WindowPass, Windows, product
from patchcert.threats import Patch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenPlacements:
    """The common geometry of all placements of one patch on one network and image size."""

    layout: Layout
    threat: Patch
    stamp: Tensor
    windows: tuple[Window | None, ...]
    step: tuple[int, int]

    @staticmethod
    def of(network: Network, images: Tensor, threat: Patch) -> "ChosenPlacements":
        """Raises NotCovered where the network holds a step that windows cannot follow."""
        with torch.no_grad():
            layout = Layout.of(network, network.values(images[:1]))
        known = [window for window in layout.windows(Window(0, 0, threat.height, threat.width)) if window]
        rows, columns = math.lcm(*(w.row_step for w in known)), math.lcm(*(w.column_step for w in known))
        start = Window(0, 0, threat.height + rows - 1, threat.width + columns - 1)
        stamp = threat.stamp.to(images.device)
        return ChosenPlacements(layout, threat, stamp, layout.windows(start), (rows, columns))

    def margins(
        self,
        images: Tensor,
        labels: Tensor,
        corners: Tensor,
        epsilon: float | Tensor,
        classes: Tensor | None = None,
    ) -> Tensor:
        """Margins (n, k, classes) at the corners (n, k, 2); with `classes` (n, k) only against that class, (n, k)."""
        clean = clean_pass(self.layout.network, images, labels)
        base = torch.stack([self._drawn_back(corners[..., axis], axis) for axis in (0, 1)], dim=-1)
        chosen = _ChosenPass(Shared(self.layout, clean, NEAREST), self.windows, base.transpose(0, 1))
        state = before_head(chosen, self._start(chosen, (corners - base).transpose(0, 1), epsilon))
        return _margins(chosen, state, labels, classes)

    def _drawn_back(self, starts: Tensor, axis: int) -> Tensor:
        return torch.div(starts, self.step[axis], rounding_mode="floor") * self.step[axis]

    def _start(self, chosen: "_ChosenPass", offset: Tensor, epsilon: float | Tensor) -> Windows:
        pixels = chosen.clean_windows(0)
        mask = self._covered(offset, pixels.shape[2], pixels.shape[3]).unsqueeze(-1)
        lower, upper = (pixels - epsilon).clamp(min=0), (pixels + epsilon).clamp(max=1)
        return Windows(((upper + lower) * 0.5 - pixels) * mask, (upper - lower) * 0.5 * mask)

    def _covered(self, offset: Tensor, height: int, width: int) -> Tensor:
        """True (k, n, h, w) on the pixels of the window that the stamp covers when it lies at the offset in it."""
        rows = torch.arange(height, device=offset.device) - offset[..., :1]
        columns = torch.arange(width, device=offset.device) - offset[..., 1:]
        inside_rows = (rows >= 0) & (rows < self.threat.height)
        inside_columns = (columns >= 0) & (columns < self.threat.width)
        inside = inside_rows[..., :, None] & inside_columns[..., None, :]
        if self.threat.is_solid:
            return inside
        place = rows.clamp(0, self.threat.height - 1)[..., :, None] * self.threat.width
        return inside & self.stamp.flatten()[place + columns.clamp(0, self.threat.width - 1)[..., None, :]]


def covering_placements(network: Network, images: Tensor, threat: Patch) -> ChosenPlacements | None:
    """The windows of chosen placements, or None where only the dense way goes."""
    try:
        return ChosenPlacements.of(network, images, threat)
    except NotCovered as reason:
        logger.debug("the dense path takes over: %s", reason)
        return None


@final
class _ChosenPass(WindowPass):
    """The same number k of placements for every image, each image's own; `base` (k, n, 2) are their window corners."""

    has_gradient = True

    def __init__(self, shared: Shared, windows: tuple[Window | None, ...], base: Tensor) -> None:
        self.shared, self.windows, self.base = shared, windows, base
        self.is_fused = is_fused(shared.clean.values[0])
        self._cells: dict[tuple[Window, FeatureMap], tuple[Tensor, Tensor]] = {}

    def outside(self, index: int) -> Tensor | None:
        window = self.windows[index]
        return None if window is None else self._places(window, index)[1]

    def clean_windows(self, index: int) -> Tensor:
        window = self.windows[index]
        return self.clean.values[index].flatten(1) if window is None else self._gather(window, index)

    def surroundings(self, position: int, height: int, width: int) -> Tensor:
        step = self.steps[position]
        window = seen_by_pool(step.operation, self.windows[step.inputs[0]], self.windows[position + 1])
        assert window is not None
        outside = self._places(window, step.inputs[0])[1]
        return self._gather(window, step.inputs[0]).masked_fill(outside, -torch.inf)

    def flat_product(self, part: Tensor, columns: Tensor, index: int) -> Tensor:
        return product(self.flattened(part, index).flatten(0, 1), columns.flatten(0, 1), NEAREST).unflatten(
            0, part.shape[:2]
        )

    def flattened(self, part: Tensor, index: int) -> Tensor:
        """The whole map with the window in it, (k, n, places * channels); cells outside hold zeros and add nothing."""
        area, cells = self.layout.maps[index], self._places(self.window(index), index)[0]
        assert area is not None
        whole = part.new_zeros(*part.shape[:2], area.height * area.width, area.channels)
        where = cells.unsqueeze(-1).expand(*cells.shape, area.channels)
        return whole.scatter_add(
            2, where, part.expand(*cells.shape[:2], *part.shape[2:]).flatten(2, 3)
        ).flatten(2)

    def fused_cells(self, index: int) -> Cells | None:
        window = self.windows[index]
        if window is None:
            return None
        cells, outside = self._places(window, index)
        signed = cells.masked_fill(outside.flatten(2), -1).int()
        return Cells(cells, signed, outside)

    def _gather(self, window: Window, index: int) -> Tensor:
        cells = self._places(window, index)[0]
        places = self.clean.places(index, self.layout)
        where = cells.unsqueeze(-1).expand(*cells.shape, places.shape[-1])
        chosen = places.unsqueeze(0).expand(len(cells), *places.shape).gather(2, where)
        return chosen.unflatten(2, (window.height, window.width))

    def _places(self, window: Window, index: int) -> tuple[Tensor, Tensor]:
        """Flat indices (k, n, cells) of the window on its map, and which are outside (k, n, h, w, 1)."""
        area = self.layout.maps[index]
        assert area is not None
        key = (window, area)
        if key not in self._cells:
            rows = self._axis(window.top, window.height, self.base[..., 0], window.row_step)
            columns = self._axis(window.left, window.width, self.base[..., 1], window.column_step)
            beyond_rows, beyond_columns = (
                (rows < 0) | (rows >= area.height),
                (columns < 0) | (columns >= area.width),
            )
            outside = beyond_rows[..., :, None] | beyond_columns[..., None, :]
            cells = rows.clamp(0, area.height - 1)[..., :, None] * area.width
            cells = cells + columns.clamp(0, area.width - 1)[..., None, :]
            self._cells[key] = (cells.flatten(2), outside.unsqueeze(-1))
        return self._cells[key]

    @staticmethod
    def _axis(origin: int, extent: int, base: Tensor, step: int) -> Tensor:
        starts = origin + torch.div(base, step, rounding_mode="floor")
        return starts.unsqueeze(-1) + torch.arange(extent, device=base.device)


def _margins(chosen: _ChosenPass, state: Windows, labels: Tensor, classes: Tensor | None) -> Tensor:
    """The clean margins moved by the deviation and lowered by the radius."""
    head, index = chosen.layout.network.head, chosen.steps[-1].inputs[0]
    assert head is not None
    weight, area = head.weight(), chosen.layout.maps[index]
    deviation, radius = state.deviation, state.radius.expand_as(state.deviation)
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
