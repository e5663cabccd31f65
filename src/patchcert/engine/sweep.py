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
from patchcert.engine.windows import Sweep, Windows, product
from patchcert.threats import Patch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """The margins (n, p, classes) of some placements, and their indices (p,)."""

    members: Tensor
    margins: Tensor


@dataclass(frozen=True, slots=True)
class Least:
    """Margins (n, classes), each the least over the placements seen so far; per image the weakest placement."""

    margins: Tensor
    weakest: Tensor
    weakest_margin: Tensor

    @staticmethod
    def none(like: Tensor) -> "Least":
        """Before any placement was seen."""
        margins = torch.full_like(like, torch.inf)
        return Least(margins, torch.zeros_like(margins[:, 0], dtype=torch.long), margins[:, 0].clone())

    def lowered_by(self, part: Part, labels: Tensor) -> "Least":
        """With the placements of the part seen too; NaN counts as the weakest of all and stays."""
        others = part.margins.scatter(2, labels[:, None, None].expand(-1, part.margins.shape[1], 1), torch.inf)
        worst, position = others.amin(dim=2).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).min(dim=1)
        lower = worst < self.weakest_margin
        return Least(
            torch.minimum(self.margins, part.margins.amin(dim=1)),
            torch.where(lower, part.members[position], self.weakest),
            torch.where(lower, worst, self.weakest_margin),
        )


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
        stamp = threat.stamp.to(images.device)
        return PlacementSweep(layout, threat, stamp, tuple(made), len(placements), memory_budget)

    def parts(
        self, clean: Clean, labels: Tensor, epsilon: float | Tensor = 1.0, rounding: Rounding = NEAREST
    ) -> Iterator[Part]:
        """The margins of all placements, as many at a time as the memory budget allows."""
        weights = _head_differences(self.layout.network, labels)
        shared: dict[tuple, tuple[Tensor, Tensor]] = {}
        for group in self.groups:
            size = self.chunk(group, len(labels), rounding)
            for start in range(0, len(group), size):
                stop = min(start + size, len(group))
                sweep = Sweep(self.layout, clean, group, start, stop, rounding, shared)
                state = sweep.run(self._start(sweep, epsilon))
                margins = _margins(sweep, state, weights)
                yield Part(group.members[start:stop], zero_at_label(margins, labels[:, None]))

    def margins(
        self, clean: Clean, labels: Tensor, epsilon: float | Tensor = 1.0, rounding: Rounding = NEAREST
    ) -> Tensor:
        """Margins (n, placements, classes)."""
        classes = clean.margins.shape[1]
        margins = clean.values[0].new_empty(len(labels), self.placements, classes)
        for part in self.parts(clean, labels, epsilon, rounding):
            margins[:, part.members] = part.margins
        return margins

    def worst(self, clean: Clean, labels: Tensor, epsilon: float | Tensor = 1.0) -> Tensor:
        """The placement (n, classes) with the least margin for each class; the first of several equal ones."""
        least = torch.full_like(clean.margins, torch.inf)
        worst = torch.zeros_like(least, dtype=torch.long)
        for part in self.parts(clean, labels, epsilon):
            margins, position = part.margins.min(dim=1)
            lower = margins < least
            least, worst = least.where(~lower, margins), worst.where(~lower, part.members[position])
        return worst

    def least(self, clean: Clean, labels: Tensor, rounding: Rounding) -> "Least":
        """The least margin per class over all placements, and the weakest placement of each image."""
        found = Least.none(clean.margins.to(clean.values[0].dtype))
        for part in self.parts(clean, labels, rounding=rounding):
            found = found.lowered_by(part, labels)
        return found

    def chunk(self, group: Group, images: int, rounding: Rounding) -> int:
        """How many placements of the group are swept at once."""
        state, columns = _footprint(self.layout, group, rounding)
        item = 8 if rounding.unit and rounding.unit < 1e-10 else 4
        by_state = self.memory_budget // (item * state * max(images, 1))
        by_columns = self.memory_budget // (4 * item * max(columns, 1))
        return max(1, min(by_state, by_columns, len(group)))

    def _start(self, sweep: Sweep, epsilon: float | Tensor) -> Windows:
        """The patch itself: at epsilon 1 the box is [0, 1] whatever the image, so all share one radius."""
        pixels = sweep.clean_windows(0)
        if isinstance(epsilon, float | int) and epsilon >= 1:
            radius = torch.full_like(pixels[:1, :1], 0.5)
            deviation = 0.5 - pixels
        else:
            lower, upper = (pixels - epsilon).clamp(min=0), (pixels + epsilon).clamp(max=1)
            radius, deviation = (upper - lower) * 0.5, (upper + lower) * 0.5 - pixels
        if sweep.rounding.is_outward:
            radius = radius * (1 + 16 * sweep.rounding.unit) + 4 * sweep.rounding.unit
        return Windows(deviation, radius).map(lambda part: part * self.stamp[:, :, None])


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


def _head_differences(network: Network, labels: Tensor) -> Tensor:
    """Row label minus row class of the last layer's weights, (n, classes, features)."""
    head = network.head
    assert head is not None
    weight = head.weight()
    return weight[labels].unsqueeze(1) - weight


def _margins(sweep: Sweep, state: Windows, weights: Tensor) -> Tensor:
    """The clean margins moved by the deviation and lowered by the radius, through the merged last layer."""
    cells = sweep.cells(sweep.steps[-1].inputs[0])
    if cells is None:
        rounding, columns = sweep.rounding, weights.transpose(1, 2)
        shift = product(state.deviation.transpose(0, 1), columns, rounding)
        spread = product(_full(state)[1].transpose(0, 1), columns.abs(), rounding)
    else:
        columns = weights.unflatten(2, (state.deviation.shape[4], -1)).permute(0, 3, 2, 1)[:, cells.index].flatten(2, 3)
        deviation, radius = (part.transpose(0, 1).flatten(2).unsqueeze(2) for part in _full(state))  # (n, p, 1, k)
        shift = product(deviation, columns, sweep.rounding).squeeze(2)
        spread = product(radius, columns.abs(), sweep.rounding).squeeze(2)
    clean = sweep.clean.margins.unsqueeze(1)
    if not sweep.rounding.is_outward:
        return clean + shift - spread
    return _lowered(clean, shift, spread, weights.shape[2], sweep.rounding)


def _full(state: Windows) -> tuple[Tensor, Tensor]:
    return state.deviation, state.radius.expand_as(state.deviation)


def _lowered(clean: Tensor, shift: Tensor, spread: Tensor, features: int, rounding: Rounding) -> Tensor:
    """The margins rounded down: products lose gamma, the weight differences a unit, and the sums are in float64."""
    gamma, unit = rounding.gamma(summed_roundings(features) + 3), rounding.unit
    spread = spread.double() * (1 + 2 * gamma * (1 + 2 * gamma)) + rounding.tiny / unit
    margins = clean + (shift.double() - spread)
    margins = margins - (clean.abs() + spread + shift.double().abs()) * 1e-15
    return (margins - margins.abs() * (2 * unit)).to(shift.dtype)


def covering_sweep(network: Network, images: Tensor, threat: Patch, memory_budget: int) -> PlacementSweep | None:
    """The fast engine for this network and image size, or None where only the dense way goes."""
    try:
        return PlacementSweep.of(network, images, threat, memory_budget)
    except NotCovered as reason:
        logger.debug("the dense path takes over: %s", reason)
        return None
