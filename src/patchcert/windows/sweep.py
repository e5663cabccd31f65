"""Margins for every placement of a patch, on windows, as many placements at once as a memory budget allows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from patchcert.bounds import NEAREST, Network, Rounding
from patchcert.bounds.geometry import FeatureMap
from patchcert.bounds.network import zero_at_label
from patchcert.bounds.operations import (
    ChannelScale,
    Convolution,
    Linear,
    Reshape,
    TransposedConvolution,
    is_relu,
)
from patchcert.bounds.rounding import summed_roundings
from patchcert.progress import Progress
from patchcert.tensors import Epsilon, Images, Labels, Margins, PlacementMargins
from patchcert.threats import Patch, Patches, SparsePixels
from patchcert.windows.layout import Layout
from patchcert.windows.passes import (
    Clean,
    Group,
    GroupPass,
    SharedByPasses,
    Windows,
    groups,
    if_covered,
    is_fused,
)
from patchcert.windows.rules import before_head, propagate, relu_terms

if TYPE_CHECKING:
    from patchcert.windows.blocks import PlacementBlocks

_ENOUGH_IMAGES = 32
"""As many rows make a product on a CPU efficient; more images would leave room for fewer placements."""

_LIVE_COPIES, _LIVE_COPIES_FUSED = 12, 6
"""How many tensors of the size of the largest window are alive at once in a monotone layer."""

_SHARE_OF_PATCHES = 16
"""The patches themselves take this part of the memory that windows may take."""


def default_budget(device: torch.device) -> int:
    """Bytes for intermediate results: a twelfth of a GPU's memory; on a CPU as many as make products large."""
    if device.type != "cuda":
        return 2**26
    return torch.cuda.get_device_properties(device).total_memory // 12


def default_image_budget(device: torch.device) -> int:
    """Bytes for the clean pass of all images that are swept together; on a CPU enough for 32 of a wide network."""
    return default_budget(device) if device.type == "cuda" else 2**30


def images_within(
    network: Network, images: Images, threat: Patch | Patches | SparsePixels, classes: int, budget: int
) -> int:
    """How many images are certified together, at least one: their clean pass and margins fit the budget.

    Several patches have boxes enough for each image to be bounded by itself.
    """
    if isinstance(threat, Patches):
        return 1
    numbers = _image_numbers(network, images, unfolded=True)
    if isinstance(threat, SparsePixels):
        numbers += 2 * _sparse_numbers(network, images)
    else:
        numbers += 4 * classes * len(threat.placements(images.shape[-2], images.shape[-1]))
    most = max(1, budget // (16 * numbers))
    return min(most, _ENOUGH_IMAGES) if isinstance(threat, Patch) and not images.is_cuda else most


def rows_within(network: Network, images: Images, budget: int, unfolded: bool = False) -> int:
    """How many boxes of each image fit the budget when all images are bounded densely at once; at least one."""
    numbers = _image_numbers(network, images, unfolded) * max(len(images), 1)
    return max(1, budget // (images.element_size() * numbers))


def _image_numbers(network: Network, images: Images, unfolded: bool) -> int:
    """Numbers alive per image in a dense interval pass; `unfolded` where convolutions are written as products."""
    with torch.no_grad():
        values = network.values(images[:1])
    columns = [0]
    if unfolded:
        columns += [
            step.operation.weight()[0].numel() * values[position + 1][0, 0].numel()
            for position, step in enumerate(network.steps)
            if isinstance(step.operation, Convolution | TransposedConvolution)
        ]
    return 8 * max(value.numel() for value in values) + 2 * max(columns)


def _sparse_numbers(network: Network, images: Images) -> int:
    """Numbers per image in the tight sparse bound: one for each neuron of the first layer and pixel it sees."""
    from patchcert.bounds.sparse import FirstLayer

    layer = FirstLayer.of(network.steps)
    weight = layer.operation.weight()
    with torch.no_grad():
        neurons = network.values(images[:1])[layer.position + 1][0].numel()
    return neurons * weight[0].numel() // images.shape[1]


def _is_read_in_place(
    weight: Annotated[Tensor, "out features"], area: FeatureMap | None, dtype: torch.dtype | None
) -> bool:
    """Whether windows of this type on the map take the weights under them without a copy."""
    if dtype != torch.float16 or not weight.is_cuda or area is None:
        return False
    from patchcert.windows.kernels import fills_cores

    return fills_cores(area.channels, len(weight), weight.device)


@dataclass(frozen=True, slots=True)
class MarginChanges:
    """What placements do to margins: they move them by `shift`, give or take `spread`.

    Each term of the sums in them was rounded at most `roundings` times.
    """

    shift: PlacementMargins
    spread: PlacementMargins
    roundings: int

    @staticmethod
    def joined(parts: Sequence["MarginChanges"]) -> "MarginChanges":
        """The changes by one group of placements after those by another."""
        if len(parts) == 1:
            return parts[0]
        shift = torch.cat([part.shift for part in parts], dim=1)
        spread = torch.cat([part.spread for part in parts], dim=1)
        return MarginChanges(shift, spread, max(part.roundings for part in parts))


@dataclass(frozen=True, slots=True)
class MergedHead:
    """The weights of the last layer, of which rows label minus class count, and the clean margins."""

    weight: Annotated[Tensor, "k features"]
    labels: Labels
    clean: Annotated[Tensor, "n 1 k"]
    _differences: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(network: Network, clean: Clean, labels: Labels) -> "MergedHead":
        head = network.head
        assert head is not None
        return MergedHead(head.weight(), labels, clean.margins.unsqueeze(1))

    def changes(self, sweep: GroupPass, start: Windows, first: int = 0) -> MarginChanges:
        """From value `first` through all layers; on a GPU a last ReLU and the last layer are one kernel."""
        relu = _last_relu(sweep)
        if relu is None or relu < first:
            return self._changes_by_products(sweep, before_head(sweep, start, first))
        from patchcert.windows.kernels import fused_head

        state, clean = propagate(sweep, start, relu, first), sweep.clean.values[relu].flatten(1)
        terms = relu_terms(state, sweep, relu)
        shift, spread = fused_head(state.deviation, state.radius, clean, self.weight, self.labels, *terms)
        # A sum of as many terms as features in any order rounds each at most that often; one more is to spare.
        return MarginChanges(shift, spread, self.weight.shape[1] + 1)

    def _changes_by_products(self, sweep: GroupPass, state: Windows) -> MarginChanges:
        """The same without the kernel, from the input of the last layer.

        How a sum is cut into blocks depends on the terms of the window, which may be more than the map has.
        """
        index, rounding = sweep.steps[-1].inputs[0], sweep.rounding
        (weights, absolute), radius = self._merged(), state.radius.expand_as(state.deviation)
        window = sweep.windows[index]
        if window is not None:
            places = weights.unflatten(1, (radius.shape[4], -1)).transpose(1, 2)  # n places c k
            columns = places[:, sweep.cells(window, index).index].flatten(2, 3)  # n p terms k
            moved, spread = (
                part.transpose(0, 1).flatten(2).unsqueeze(2) for part in (state.deviation, radius)
            )
            shift = rounding.product(moved, columns).squeeze(2)
            spread = rounding.product(spread, columns.abs()).squeeze(2)
            return MarginChanges(shift, spread, summed_roundings(columns.shape[2]))
        shift = rounding.product(state.deviation.transpose(0, 1), weights)
        spread = rounding.product(radius.transpose(0, 1), absolute)
        return MarginChanges(shift, spread, summed_roundings(self.weight.shape[1]))

    def _merged(self) -> list[Annotated[Tensor, "n features k"]]:
        """Row label minus row class, and its absolute values."""
        if not self._differences:
            difference = self.weight[self.labels].unsqueeze(2) - self.weight.T
            self._differences.extend((difference, difference.abs()))
        return self._differences

    def margins(self, changes: MarginChanges, rounding: Rounding) -> PlacementMargins:
        """The clean margins moved, and lowered by the spread; rounded down where they must be sound."""
        if not rounding.is_outward:
            return (self.clean + changes.shift).sub_(changes.spread)
        # A weight difference is rounded once before the products are; counts of roundings have one to spare, this two.
        gamma, unit = rounding.gamma(changes.roundings + 3), rounding.unit
        # As in `Windows.widened`: (1 + gamma) / (1 - gamma), and at most 4 roundings of the factor and what it is for.
        spread = changes.spread * (1 + 2 * gamma * (1 + 2 * gamma) + 8 * unit)
        # Underflow of products, of the clean margin in its new type and of the sizes below: far below tiny / unit.
        spread += rounding.tiny / unit
        clean = self.clean.to(spread.dtype)
        margins = (changes.shift - spread).add_(clean)
        sizes = spread.add_(changes.shift.abs()).add_(clean.abs())
        # The clean margin in its new type and the first sum above cost a unit of all sizes, the second sum one more,
        # the difference below a third; the sum of the sizes is short of 2 units of itself at most. So 4 would suffice.
        return margins.sub_(sizes, alpha=8 * unit)


def _last_relu(sweep: GroupPass) -> int | None:
    """The value that a ReLU on features takes to the last layer, where kernels are fused; else None."""
    index = sweep.steps[-1].inputs[0] - 1
    if not sweep.is_fused or index < 0 or sweep.windows[index] is not None:
        return None
    step = sweep.steps[index]
    return index if is_relu(step.operation) and step.inputs == (index,) else None


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
    blocks: "PlacementBlocks | None" = None

    @staticmethod
    def of(
        network: Network,
        images: Images,
        threat: Patch,
        memory_budget: int,
        blocks: "PlacementBlocks | None" = None,
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
        epsilon: Epsilon = 1.0,
        rounding: Rounding = NEAREST,
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
    ) -> PlacementMargins:
        """Margins at every placement, as many of them at a time as the memory budget allows.

        `dtype` is that of the windows, by default the images'. Half precision, for margins that need not be
        sound, has the digits of TF32 at half the memory; `takes_half_precision` says where it can be used.
        `progress` is told of placements.
        """
        shared = SharedByPasses(self.layout, clean, rounding)
        head = MergedHead.of(self.layout.network, clean, labels)
        changes, done = list[MarginChanges](), 0
        for group in self.groups:
            for change in self._changes(shared, head, group, epsilon, dtype):
                changes.append(change)
                done += change.shift.shape[1]
                if progress is not None:
                    progress(done, len(self.order))
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
        """How many placements of the group are swept at once, at least one; with a `dtype` of their own, in slices
        about even."""
        budget, steps = self.memory_budget // (dtype or self.stamp.dtype).itemsize, self.layout.network.steps
        sizes, columns, unfolded = [1], 1, 0
        for position, step in enumerate(steps):
            operation, members = step.operation, 1 if self.blocks is None else self.blocks.members(position)
            inputs, outputs = (self._numbers(group, index) for index in (step.inputs[0], position + 1))
            if isinstance(operation, Linear):
                outputs = operation.weight().shape[0]
                if not _is_read_in_place(operation.weight(), self.layout.maps[step.inputs[0]], dtype):
                    columns = max(columns, inputs * outputs)
                if inputs and position == len(steps) - 1:
                    unfolded = max(unfolded, 2 * inputs * outputs)
            if isinstance(operation, Convolution) and rounding.is_outward:
                target = group.windows[position + 1]
                assert target is not None
                unfolded = max(unfolded, 2 * operation.weight()[0].numel() * target.height * target.width)
            sizes.append(members * max(inputs, outputs))
        copies = _LIVE_COPIES_FUSED if group.members.is_cuda else _LIVE_COPIES
        by_state = budget // ((copies * max(sizes) + unfolded) * max(images, 1))
        most = max(1, min(by_state, budget // (4 * columns), len(group)))
        return most if dtype is None else -(-len(group) // -(-len(group) // most))

    def _patches_at_once(self, group: Group, images: int) -> int:
        """How many placements' patches fit their share of the budget."""
        numbers = self._numbers(group, 0) * max(images, 1)
        return self.memory_budget // self.stamp.element_size() // (_SHARE_OF_PATCHES * _LIVE_COPIES * numbers)

    def _numbers(self, group: Group, index: int) -> int:
        """Numbers in a window on value `index`; none where it has no places."""
        window, area = group.windows[index], self.layout.maps[index]
        return 0 if window is None or area is None else area.channels * window.height * window.width

    def _changes(
        self,
        shared: SharedByPasses,
        head: MergedHead,
        group: Group,
        epsilon: Epsilon,
        dtype: torch.dtype | None,
    ) -> Iterator[MarginChanges]:
        """The changes by one slice of the group after another; the patches themselves are made for many slices."""
        images = len(head.labels)
        size = self.placements_at_once(group, images, shared.rounding, dtype)
        at_once = size * max(1, self._patches_at_once(group, images) // size)
        for first in range(0, len(group), at_once):
            last = min(first + at_once, len(group))
            patches = self._patches(GroupPass(shared, group, first, last), epsilon, dtype)
            for start in range(first, last, size):
                sweep = GroupPass(shared, group, start, min(start + size, last))
                yield self._slice_changes(sweep, head, patches.slice(start - first, sweep.stop - first))

    def _patches(self, sweep: GroupPass, epsilon: Epsilon, dtype: torch.dtype | None) -> Windows:
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
        return head.changes(sweep, blocks.merged(state.masked(masks), sweep.repeated), blocks.first)

    def _start(self, sweep: GroupPass, epsilon: Epsilon) -> Windows:
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
