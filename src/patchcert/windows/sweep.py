"""Margins for every placement of a patch: the fast engine where it covers the network, the dense way elsewhere."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from patchcert.bounds import NEAREST, Network, Rounding
from patchcert.bounds.geometry import NotCovered
from patchcert.bounds.network import zero_at_label
from patchcert.bounds.operations import ChannelScale, Convolution, Linear, Reshape, is_relu
from patchcert.threats import Patch
from patchcert.windows.clean import Clean
from patchcert.windows.fused import is_fused
from patchcert.windows.groups import Group, groups
from patchcert.windows.head import Head, Moves
from patchcert.windows.joint import is_read_in_place
from patchcert.windows.layout import Layout
from patchcert.windows.merging import Merging, RepeatedPass, masked
from patchcert.windows.rules import propagate
from patchcert.windows.windows import GroupPass, Shared, Windows

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
            move for group in self.groups for move in self._group_moves(shared, head, group, epsilon, dtype)
        ]
        margins = head.margins(Moves.joined(moves), rounding)
        if len(self.groups) > 1:
            margins = margins.index_select(1, self.order)
        return zero_at_label(margins, labels[:, None])

    def group_margins(self, group: Group, clean: Clean, labels: Tensor, rounding: Rounding) -> Tensor:
        """Margins (n, classes), each the least over the placements of one group; 1 at the label."""
        shared, head = Shared(self.layout, clean, rounding), Head.of(self.layout.network, clean, labels)
        parts = [
            head.margins(move, rounding).amin(dim=1)
            for move in self._group_moves(shared, head, group, 1.0, None)
        ]
        return torch.stack(parts).amin(dim=0).scatter(1, labels.unsqueeze(1), 1.0)

    def _group_moves(
        self, shared: Shared, head: Head, group: Group, epsilon: float | Tensor, dtype: torch.dtype | None
    ) -> Iterator[Moves]:
        """The moves of one slice of the group after another; the patches themselves are made for many slices."""
        size = self.chunk(group, len(head.labels), shared.rounding, dtype)
        at_once = size * max(1, self._most_patches(group, len(head.labels)) // size)
        for first in range(0, len(group), at_once):
            last = min(first + at_once, len(group))
            patches = self._patches(GroupPass(shared, group, first, last), epsilon, dtype)
            for start in range(first, last, size):
                sweep = GroupPass(shared, group, start, min(start + size, last))
                yield self._moves(sweep, head, patches.slice(start - first, sweep.stop - first))

    def _most_patches(self, group: Group, images: int) -> int:
        """How many placements' patches take a sixteenth of the memory that windows may take."""
        numbers = _size(self.layout, group, 0) * max(images, 1) * self.stamp.element_size()
        return self.memory_budget // (16 * _LIVE_COPIES * numbers)

    def _patches(self, sweep: GroupPass, epsilon: float | Tensor, dtype: torch.dtype | None) -> Windows:
        """What the windows begin with, on value `_first`."""
        state = self._start(sweep, epsilon).map(lambda part: part if dtype is None else part.to(dtype))
        return propagate(sweep, state, self._first()).map(Tensor.contiguous)

    def _first(self) -> int:
        """The value behind the scales of channels that a network may begin with; the image where more than they take
        it, and with a merging."""
        steps = () if self.merging else self.layout.network.steps[:-1]
        scales = takewhile(lambda step: isinstance(step.operation, ChannelScale), steps)
        first = sum(1 for _ in scales)
        looks_back = any(index < first for step in steps[first:] for index in step.inputs)
        return 0 if looks_back or any(steps[i].inputs != (i,) for i in range(first)) else first

    def _moves(self, sweep: GroupPass, head: Head, state: Windows) -> Moves:
        merging = self.merging
        if merging is None:
            return head.moves(sweep, state, self._first())
        masks = merging.stamps[sweep.group.members[sweep.start : sweep.stop]].unsqueeze(2)
        state = merging.merged(masked(state, masks), lambda count: RepeatedPass(sweep, count))
        return head.moves(sweep, state, merging.first)

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

    def chunk(self, group: Group, images: int, rounding: Rounding, dtype: torch.dtype | None = None) -> int:
        """How many placements of the group are swept at once; of a type of windows' own, in slices about even."""
        numbers, columns = _footprint(self.layout, group, rounding, self.merging, dtype)
        item = (dtype or self.stamp.dtype).itemsize
        by_state = self.memory_budget // (item * numbers * max(images, 1))
        by_columns = self.memory_budget // (4 * item * max(columns, 1))
        most = max(1, min(by_state, by_columns, len(group)))
        return most if dtype is None else -(-len(group) // -(-len(group) // most))

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


def _footprint(
    layout: Layout, group: Group, rounding: Rounding, merging: Merging | None, dtype: torch.dtype | None
) -> tuple[int, int]:
    """Numbers held per placement and image, and numbers of gathered weights per placement."""
    sizes, columns, unfolded = [1], 1, 0
    for position, step in enumerate(layout.network.steps):
        inputs, outputs = (_size(layout, group, index) for index in (step.inputs[0], position + 1))
        operation = step.operation
        if isinstance(operation, Linear):
            outputs = operation.weight().shape[0]
            if not is_read_in_place(operation.weight(), layout.maps[step.inputs[0]], dtype):
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
