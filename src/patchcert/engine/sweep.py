"""Margins for every placement of a patch: the fast engine where it covers the network, the dense way elsewhere."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from patchcert.bounds import NEAREST, Network, Rounding
from patchcert.bounds.network import zero_at_label
from patchcert.bounds.operations import ChannelScale, Convolution, Linear, Reshape, is_relu
from patchcert.engine.clean import Clean
from patchcert.engine.fused import is_fused
from patchcert.engine.geometry import Group, Layout, NotCovered, groups
from patchcert.engine.head import Head, Moves
from patchcert.engine.merging import Merging, RepeatedPass, masked
from patchcert.engine.windows import GroupPass, Shared, Windows
from patchcert.threats import Patch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlacementSweep:
    """The windows of all placements of one patch on one network and image size, ready to be swept many times.

    `order` says where each placement stands when the groups follow one another. With a merging, the placements
    are its blocks.
    """

    layout: Layout
    threat: Patch
    stamp: Tensor
    groups: tuple[Group, ...]
    order: Tensor
    placements: int
    memory_budget: int
    merging: Merging | None = None

    @staticmethod
    def of(
        network: Network, images: Tensor, threat: Patch, memory_budget: int, merging: Merging | None = None
    ) -> "PlacementSweep":
        """Raises NotCovered where the network holds a step that windows cannot follow."""
        with torch.no_grad():
            layout = Layout.of(network, network.values(images[:1]))
        if merging is not None:
            threat = merging.whole()
        placements = threat.placements(images.shape[-2], images.shape[-1])
        made = groups(layout, placements, images.device)
        stamp = threat.stamp.to(images.device, images.dtype)[:, :, None]
        order = torch.cat([group.members for group in made]).argsort()
        return PlacementSweep(
            layout, threat, stamp, tuple(made), order, len(placements), memory_budget, merging
        )

    def margins(
        self,
        clean: Clean,
        labels: Tensor,
        epsilon: float | Tensor = 1.0,
        rounding: Rounding = NEAREST,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Margins (n, placements, classes), swept as many placements at a time as the memory budget allows.

        `dtype` is that of the windows, by default the images'. Half precision, for margins that need not be
        sound, has the digits of TF32 at half the memory; `takes_half` says where it goes.
        """
        shared, head = Shared(self.layout, clean, rounding), Head.of(self.layout.network, clean, labels)
        moves = [
            self._moves(shared, head, group, start, stop, epsilon, dtype)
            for group in self.groups
            for start, stop in self._slices(group, len(labels), rounding)
        ]
        margins = head.margins(Moves.joined(moves), rounding)
        if len(self.groups) > 1:
            margins = margins.index_select(1, self.order)
        return zero_at_label(margins, labels[:, None])

    def group_margins(self, group: Group, clean: Clean, labels: Tensor, rounding: Rounding) -> Tensor:
        """Margins (n, classes), each the least over the placements of one group; 1 at the label."""
        shared, head = Shared(self.layout, clean, rounding), Head.of(self.layout.network, clean, labels)
        parts = [
            head.margins(self._moves(shared, head, group, start, stop, 1.0), rounding).amin(dim=1)
            for start, stop in self._slices(group, len(labels), rounding)
        ]
        return torch.stack(parts).amin(dim=0).scatter(1, labels.unsqueeze(1), 1.0)

    def _moves(
        self,
        shared: Shared,
        head: Head,
        group: Group,
        start: int,
        stop: int,
        epsilon: float | Tensor,
        dtype: torch.dtype | None = None,
    ) -> Moves:
        sweep, merging = GroupPass(shared, group, start, stop), self.merging
        state = self._start(sweep, epsilon).map(lambda part: part if dtype is None else part.to(dtype))
        if merging is None:
            return head.moves(sweep, state)
        masks = merging.stamps[group.members[start:stop]].unsqueeze(2)
        state = merging.merged(masked(state, masks), lambda count: RepeatedPass(sweep, count))
        return head.moves(sweep, state, merging.first)

    def _slices(self, group: Group, images: int, rounding: Rounding) -> Iterator[tuple[int, int]]:
        size = self.chunk(group, images, rounding)
        for start in range(0, len(group), size):
            yield start, min(start + size, len(group))

    def worst(
        self, clean: Clean, labels: Tensor, epsilon: float | Tensor = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The placement (n, classes) with the least margin for each class."""
        return self.margins(clean, labels, epsilon, dtype=dtype).argmin(dim=1)

    def takes_half(self, images: Tensor) -> bool:
        """Whether windows may be of half precision: kernels are fused, and every layer is one they know."""
        *before, last = self.layout.network.steps[:-1]
        on_features = is_relu(last.operation) and self.layout.maps[last.inputs[0]] is None
        known = (Convolution, Linear, ChannelScale, Reshape)
        return (
            is_fused(images)
            and on_features
            and all(isinstance(step.operation, known) or is_relu(step.operation) for step in before)
        )

    def chunk(self, group: Group, images: int, rounding: Rounding) -> int:
        """How many placements of the group are swept at once."""
        numbers, columns = _footprint(self.layout, group, rounding, self.merging)
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


def _footprint(layout: Layout, group: Group, rounding: Rounding, merging: Merging | None) -> tuple[int, int]:
    """Numbers held per placement and image, and numbers of gathered weights per placement."""
    sizes, columns, unfolded = [1], 1, 0
    for position, step in enumerate(layout.network.steps):
        inputs, outputs = (_size(layout, group, index) for index in (step.inputs[0], position + 1))
        operation = step.operation
        if isinstance(operation, Linear):
            outputs = operation.weight().shape[0]
            columns = max(columns, inputs * outputs)
            if inputs and position == len(layout.network.steps) - 1:
                unfolded = max(unfolded, 2 * inputs * outputs)
        if isinstance(operation, Convolution) and rounding.is_outward:
            target = group.windows[position + 1]
            assert target is not None
            unfolded = max(unfolded, 2 * operation.weight()[0].numel() * target.height * target.width)
        sizes.append((1 if merging is None else merging.members(position)) * max(inputs, outputs))
    copies = _LIVE_COPIES_FUSED if group.members.is_cuda else _LIVE_COPIES
    return copies * max(sizes) + unfolded, columns


def _size(layout: Layout, group: Group, index: int) -> int:
    """Numbers in a window on value `index`; none where it has no places."""
    window, area = group.windows[index], layout.maps[index]
    return 0 if window is None or area is None else area.channels * window.height * window.width


def covering_sweep(
    network: Network, images: Tensor, threat: Patch, memory_budget: int
) -> PlacementSweep | None:
    """The fast engine for this network and image size, or None where only the dense way goes."""
    try:
        return PlacementSweep.of(network, images, threat, memory_budget)
    except NotCovered as reason:
        logger.debug("the dense path takes over: %s", reason)
        return None
