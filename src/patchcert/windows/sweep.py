"""Margins for every placement of a patch, on windows."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds import NEAREST, Network, Rounding
from patchcert.bounds.network import zero_at_label
from patchcert.bounds.operations import ChannelScale, Convolution, Linear, Reshape, is_relu
from patchcert.tensors import Images, Labels, Margins, PlacementMargins
from patchcert.threats import Patch
from patchcert.windows.blocks import PlacementBlocks, RepeatedPass, masked
from patchcert.windows.clean import Clean
from patchcert.windows.groups import Group, GroupPass, groups
from patchcert.windows.head import MarginChanges, MergedHead
from patchcert.windows.kernels import is_fused
from patchcert.windows.layout import Layout
from patchcert.windows.memory import patches_within, placements_within
from patchcert.windows.passes import SharedByPasses, Windows, if_covered
from patchcert.windows.rules import propagate


@dataclass(frozen=True, slots=True)
class PlacementSweep:
    """The windows of all placements of one patch on one network and image size, ready to be swept many times.

    `order` says where each placement stands when the groups follow one another. With `blocks`, these are the
    placements.
    """

    layout: Layout
    threat: Patch
    stamp: Annotated[Tensor, "h w 1"]
    groups: tuple[Group, ...]
    order: Annotated[Tensor, "p"]
    memory_budget: int
    blocks: PlacementBlocks | None = None

    @staticmethod
    def of(
        network: Network,
        images: Images,
        threat: Patch,
        memory_budget: int,
        blocks: PlacementBlocks | None = None,
    ) -> "PlacementSweep":
        """Raises NotCovered where the network holds a step that windows cannot follow."""
        with torch.no_grad():
            layout = Layout.of(network, network.values(images[:1]))
        if blocks is not None:
            threat = blocks.whole()
        placements = threat.placements(images.shape[-2], images.shape[-1])
        made = groups(layout, placements, images.device)
        stamp = threat.stamp.to(images.device, images.dtype)[:, :, None]
        order = torch.cat([group.members for group in made]).argsort()
        return PlacementSweep(layout, threat, stamp, tuple(made), order, memory_budget, blocks)

    def margins(
        self,
        clean: Clean,
        labels: Labels,
        epsilon: float | Tensor = 1.0,
        rounding: Rounding = NEAREST,
        dtype: torch.dtype | None = None,
    ) -> PlacementMargins:
        """Margins at every placement, as many of them at a time as the memory budget allows.

        `dtype` is that of the windows, by default the images'. Half precision, for margins that need not be
        sound, has the digits of TF32 at half the memory; `takes_half_precision` says where it can be used.
        """
        shared = SharedByPasses(self.layout, clean, rounding)
        head = MergedHead.of(self.layout.network, clean, labels)
        changes = [
            change for group in self.groups for change in self._changes(shared, head, group, epsilon, dtype)
        ]
        margins = head.margins(MarginChanges.joined(changes), rounding)
        if len(self.groups) > 1:
            margins = margins.index_select(1, self.order)
        return zero_at_label(margins, labels[:, None])

    def group_margins(self, group: Group, clean: Clean, labels: Labels, rounding: Rounding) -> Margins:
        """Margins, each the least over the placements of one group; 1 at the label."""
        shared = SharedByPasses(self.layout, clean, rounding)
        head = MergedHead.of(self.layout.network, clean, labels)
        parts = [
            head.margins(change, rounding).amin(dim=1)
            for change in self._changes(shared, head, group, 1.0, None)
        ]
        return torch.stack(parts).amin(dim=0).scatter(1, labels.unsqueeze(1), 1.0)

    def takes_half_precision(self, images: Images) -> bool:
        """Whether windows may be of half precision: kernels are fused, and every layer is one they know."""
        *before, last = self.layout.network.steps[:-1]
        on_features = is_relu(last.operation) and self.layout.maps[last.inputs[0]] is None
        known = (Convolution, Linear, ChannelScale, Reshape)
        return (
            is_fused(images)
            and on_features
            and all(isinstance(step.operation, known) or is_relu(step.operation) for step in before)
        )

    def placements_at_once(
        self, group: Group, images: int, rounding: Rounding, dtype: torch.dtype | None = None
    ) -> int:
        """How many placements of the group are swept at once; with a `dtype` of their own, in slices about even."""
        item = (dtype or self.stamp.dtype).itemsize
        most = placements_within(
            self.memory_budget // item, self.layout, group, images, rounding, self.blocks, dtype
        )
        return most if dtype is None else -(-len(group) // -(-len(group) // most))

    def _changes(
        self,
        shared: SharedByPasses,
        head: MergedHead,
        group: Group,
        epsilon: float | Tensor,
        dtype: torch.dtype | None,
    ) -> Iterator[MarginChanges]:
        """The changes by one slice of the group after another; the patches themselves are made for many slices."""
        images = len(head.labels)
        size = self.placements_at_once(group, images, shared.rounding, dtype)
        budget = self.memory_budget // self.stamp.element_size()
        at_once = size * max(1, patches_within(budget, self.layout, group, images) // size)
        for first in range(0, len(group), at_once):
            last = min(first + at_once, len(group))
            patches = self._patches(GroupPass(shared, group, first, last), epsilon, dtype)
            for start in range(first, last, size):
                sweep = GroupPass(shared, group, start, min(start + size, last))
                yield self._slice_changes(sweep, head, patches.slice(start - first, sweep.stop - first))

    def _patches(self, sweep: GroupPass, epsilon: float | Tensor, dtype: torch.dtype | None) -> Windows:
        """What the windows begin with, on value `_first`."""
        state = self._start(sweep, epsilon).map(lambda part: part if dtype is None else part.to(dtype))
        return propagate(sweep, state, self._first()).map(Tensor.contiguous)

    def _first(self) -> int:
        """The value behind the scales of channels that a network may begin with; the image where a later step looks
        back before them, and with blocks."""
        steps = () if self.blocks else self.layout.network.steps[:-1]
        scales = takewhile(lambda step: isinstance(step.operation, ChannelScale), steps)
        first = sum(1 for _ in scales)
        looks_back = any(index < first for step in steps[first:] for index in step.inputs)
        return 0 if looks_back or any(steps[i].inputs != (i,) for i in range(first)) else first

    def _slice_changes(self, sweep: GroupPass, head: MergedHead, state: Windows) -> MarginChanges:
        blocks = self.blocks
        if blocks is None:
            return head.changes(sweep, state, self._first())
        assert not sweep.rounding.is_outward, "merging blocks rounds to nearest"
        masks = blocks.stamps[sweep.group.members[sweep.start : sweep.stop]].unsqueeze(2)
        state = blocks.merged(masked(state, masks), lambda count: RepeatedPass(sweep, count))
        return head.changes(sweep, state, blocks.first)

    def _start(self, sweep: GroupPass, epsilon: float | Tensor) -> Windows:
        """The patch itself: at epsilon 1 the box is [0, 1] whatever the image, so all share one radius."""
        pixels = sweep.clean_windows(0)
        if isinstance(epsilon, float | int) and epsilon >= 1:
            box = Windows(0.5 - pixels, 0.5 * self.stamp[None, None].expand_as(pixels[:1, :1]))
        else:
            box = Windows.within(epsilon, pixels)
        deviation, radius, unit = box.deviation, box.radius, sweep.rounding.unit
        if sweep.rounding.is_outward:
            # An end of the box is rounded once, their mean and its distance from the pixel once each; all are at most 1
            # or, the distance, 1/2: 2.5 units. The radius is rounded when it is made, multiplied and added to: 3 units.
            radius = radius * (1 + 16 * unit) + 4 * unit
        if not self.threat.is_solid:
            deviation, radius = deviation * self.stamp, radius * self.stamp
        return Windows(deviation, radius)


def covering_sweep(
    network: Network, images: Images, threat: Patch, memory_budget: int
) -> PlacementSweep | None:
    """The sweep of this patch on this network and image size, or None where only the dense way is left."""
    return if_covered(lambda: PlacementSweep.of(network, images, threat, memory_budget))
