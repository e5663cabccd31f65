"""Margins for every placement of a patch: the fast engine where it covers the network, the dense way elsewhere."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from patchcert.bounds import NEAREST, Network, Rounding
from patchcert.bounds.network import zero_at_label
from patchcert.bounds.operations import Convolution, Linear
from patchcert.bounds.rounding import summed_roundings
from patchcert.engine.clean import Clean
from patchcert.engine.geometry import Group, Layout, NotCovered, groups
from patchcert.engine.rules import propagate
from patchcert.engine.windows import GroupPass, Shared, Windows, product
from patchcert.threats import Patch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlacementSweep:
    """The windows of all placements of one patch on one network and image size, ready to be swept many times."""

    layout: Layout
    threat: Patch
    stamp: Tensor
    groups: tuple[Group, ...]
    placements: int
    memory_budget: int

    @staticmethod
    def of(network: Network, images: Tensor, threat: Patch, memory_budget: int) -> "PlacementSweep":
        """Raises NotCovered where the network holds a step that windows cannot follow."""
        with torch.no_grad():
            layout = Layout.of(network, network.values(images[:1]))
        placements = threat.placements(images.shape[-2], images.shape[-1])
        made = groups(layout, placements, images.device)
        stamp = threat.stamp.to(images.device, images.dtype)[:, :, None]
        return PlacementSweep(layout, threat, stamp, tuple(made), len(placements), memory_budget)

    def margins(
        self, clean: Clean, labels: Tensor, epsilon: float | Tensor = 1.0, rounding: Rounding = NEAREST
    ) -> Tensor:
        """Margins (n, placements, classes), swept as many placements at a time as the memory budget allows."""
        margins = clean.values[0].new_empty(len(labels), self.placements, clean.margins.shape[1])
        shared = Shared(self.layout, clean, rounding)
        head = _Head.of(self.layout.network, clean, labels)
        for group in self.groups:
            for start, stop in self._slices(group, len(labels), rounding):
                margins[:, group.members[start:stop]] = self._swept(shared, head, group, start, stop, epsilon)
        return zero_at_label(margins, labels[:, None])

    def group_margins(self, group: Group, clean: Clean, labels: Tensor, rounding: Rounding) -> Tensor:
        """Margins (n, classes), each the least over the placements of one group; 1 at the label."""
        shared = Shared(self.layout, clean, rounding)
        head = _Head.of(self.layout.network, clean, labels)
        parts = [
            self._swept(shared, head, group, start, stop, 1.0).amin(dim=1)
            for start, stop in self._slices(group, len(labels), rounding)
        ]
        return torch.stack(parts).amin(dim=0).scatter(1, labels.unsqueeze(1), 1.0)

    def _swept(
        self, shared: Shared, head: "_Head", group: Group, start: int, stop: int, epsilon: float | Tensor
    ) -> Tensor:
        sweep = GroupPass(shared, group, start, stop)
        return head.margins(sweep, propagate(sweep, self._start(sweep, epsilon)))

    def _slices(self, group: Group, images: int, rounding: Rounding) -> Iterator[tuple[int, int]]:
        size = self.chunk(group, images, rounding)
        for start in range(0, len(group), size):
            yield start, min(start + size, len(group))

    def worst(self, clean: Clean, labels: Tensor, epsilon: float | Tensor = 1.0) -> Tensor:
        """The placement (n, classes) with the least margin for each class."""
        return self.margins(clean, labels, epsilon).argmin(dim=1)

    def chunk(self, group: Group, images: int, rounding: Rounding) -> int:
        """How many placements of the group are swept at once."""
        numbers, columns = _footprint(self.layout, group, rounding)
        item = self.stamp.element_size()
        by_state = self.memory_budget // (item * numbers * max(images, 1))
        by_columns = self.memory_budget // (4 * item * max(columns, 1))
        return max(1, min(by_state, by_columns, len(group)))

    def _start(self, sweep: GroupPass, epsilon: float | Tensor) -> Windows:
        """The patch itself: at epsilon 1 the box is [0, 1] whatever the image, so all share one radius."""
        pixels = sweep.clean_windows(0)
        if isinstance(epsilon, float | int) and epsilon >= 1:
            radius, deviation = 0.5 * self.stamp[None, None].expand_as(pixels[:1, :1]), 0.5 - pixels
        else:
            lower, upper = (pixels - epsilon).clamp(min=0), (pixels + epsilon).clamp(max=1)
            radius, deviation = (upper - lower) * 0.5, (upper + lower) * 0.5 - pixels
        unit = sweep.rounding.unit
        if sweep.rounding.is_outward:
            radius = radius * (1 + 16 * unit) + 4 * unit
        if not self.threat.is_solid:
            deviation, radius = deviation * self.stamp, radius * self.stamp
        return Windows(deviation, radius)


_LIVE_COPIES = 12
_LIVE_COPIES_FUSED = 6
"""So many tensors of the size of the largest window are alive at once in a monotone layer."""


def _footprint(layout: Layout, group: Group, rounding: Rounding) -> tuple[int, int]:
    """Numbers held per placement and image, and numbers of gathered weights per placement."""
    sizes, columns, unfolded = [1], 1, 0
    for position, step in enumerate(layout.network.steps):
        window, area = group.windows[step.inputs[0]], layout.maps[step.inputs[0]]
        inputs = 0 if window is None or area is None else area.channels * window.height * window.width
        operation = step.operation
        if isinstance(operation, Linear):
            outputs = operation.weight().shape[0]
            sizes.append(outputs)
            columns = max(columns, inputs * outputs)
            if inputs and position == len(layout.network.steps) - 1:
                unfolded = max(unfolded, 2 * inputs * outputs)
        if isinstance(operation, Convolution) and rounding.is_outward:
            target = group.windows[position + 1]
            assert target is not None
            unfolded = max(unfolded, 2 * operation.weight()[0].numel() * target.height * target.width)
        sizes.append(inputs)
    copies = _LIVE_COPIES_FUSED if group.members.is_cuda else _LIVE_COPIES
    return copies * max(sizes) + unfolded, columns


@dataclass(frozen=True, slots=True)
class _Head:
    """The last layer merged with the specification: row label minus row class, (n, features, classes)."""

    weights: Tensor
    absolute: Tensor
    clean: Tensor

    @staticmethod
    def of(network: Network, clean: Clean, labels: Tensor) -> "_Head":
        head = network.head
        assert head is not None
        weight = head.weight()
        difference = weight[labels].unsqueeze(2) - weight.T
        return _Head(difference, difference.abs(), clean.margins.unsqueeze(1))

    def margins(self, sweep: GroupPass, state: Windows) -> Tensor:
        """The clean margins moved by the deviation and lowered by the radius, (n, p, classes)."""
        cells, rounding = sweep.fused_cells(sweep.steps[-1].inputs[0]), sweep.rounding
        radius = state.radius.expand_as(state.deviation)
        if cells is not None:
            parts, columns = _by_place(state.deviation, radius, self.weights, cells.index)
            shift = product(parts[0], columns, rounding).squeeze(2)
            spread = product(parts[1], columns.abs(), rounding).squeeze(2)
        elif rounding.is_outward:
            shift = product(state.deviation.transpose(0, 1), self.weights, rounding)
            spread = product(radius.transpose(0, 1), self.absolute, rounding)
        else:
            moved = torch.baddbmm(self.clean, state.deviation.transpose(0, 1), self.weights)
            return moved.baddbmm_(radius.transpose(0, 1), self.absolute, alpha=-1)
        if not rounding.is_outward:
            return self.clean + shift - spread
        return _lowered(self.clean, shift, spread, self.weights.shape[1], rounding)


def _by_place(
    deviation: Tensor, radius: Tensor, weights: Tensor, cells: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Both parts as rows (n, p, 1, k), and for each image and placement the weights (k, classes) of its window."""
    places = weights.unflatten(1, (deviation.shape[4], -1)).transpose(1, 2)  # (n, places, c, classes)
    rows = [part.transpose(0, 1).flatten(2).unsqueeze(2) for part in (deviation, radius)]
    return rows, places[:, cells].flatten(2, 3)


def _lowered(clean: Tensor, shift: Tensor, spread: Tensor, features: int, rounding: Rounding) -> Tensor:
    """The margins rounded down: products lose gamma, the weight differences a unit, and the sums are in float64."""
    gamma, unit = rounding.gamma(summed_roundings(features) + 3), rounding.unit
    spread = spread.double() * (1 + 2 * gamma * (1 + 2 * gamma)) + rounding.tiny / unit
    margins = clean + (shift.double() - spread)
    margins = margins - (clean.abs() + spread + shift.double().abs()) * 1e-15
    return (margins - margins.abs() * (2 * unit)).to(shift.dtype)


def covering_sweep(
    network: Network, images: Tensor, threat: Patch, memory_budget: int
) -> PlacementSweep | None:
    """The fast engine for this network and image size, or None where only the dense way goes."""
    try:
        return PlacementSweep.of(network, images, threat, memory_budget)
    except NotCovered as reason:
        logger.debug("the dense path takes over: %s", reason)
        return None
