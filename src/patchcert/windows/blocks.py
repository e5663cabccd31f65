"""Blocks of adjacent placements whose bounds are merged after some of the first layers, on windows.

One window covers all members of a block, which pass the layers side by side, each with nothing but its own
pixels. Where a member changes nothing its deviation and radius are zero, so the merged bounds are the least and
the largest over the members, and the clean value, which all share, need not be looked at.

Often no member needs to pass by itself. Every box holds the clean image, so bounds only widen with the pixels
that may change. If at every cell one member holds all pixels in sight that any member holds, as does a solid
stamp that is no smaller than what a cell sees, then the merged bounds are those of all members' pixels together.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from patchcert.bounds.geometry import NotCovered, Window
from patchcert.bounds.operations import ChannelScale, Convolution, MaxPool, Monotone, Reshape
from patchcert.threats import Patch, Placements
from patchcert.windows.layout import Layout, common_steps, covered_pixels
from patchcert.windows.passes import WindowPass, Windows
from patchcert.windows.rules import propagate


@dataclass(frozen=True, slots=True)
class PlacementBlocks:
    """Squares of adjacent placements: sides[0] x sides[0] members are merged after the layer at layers[0], sides[1] x
    sides[1] of what comes out after layers[1], and so on; layers where all pixels together do as well are left out.

    `corners` are those of the whole blocks, and `stamps` the pixels of each member, those side by side that are merged
    first. A block at the border has fewer members; the last stands in for those that are missing. `index` names the
    block that has its corner at a pixel of the image.
    """

    sides: tuple[int, ...]
    layers: tuple[int, ...]
    corners: Annotated[Tensor, "b 2"]
    stamps: Annotated[Tensor, "b members h w 1"]
    index: Annotated[Tensor, "_ _"]

    @staticmethod
    def of(
        layout: Layout,
        threat: Patch,
        placements: Placements,
        sides: Sequence[int],
        layers: Sequence[int],
        device: torch.device,
    ) -> "PlacementBlocks":
        """For all placements that fit; raises NotCovered where a block has more than there are."""
        if min(placements.rows, placements.columns) < math.prod(sides):
            raise NotCovered("a block of placements is larger than the image allows")
        tops, lefts = (_axis(count, sides) for count in (placements.rows, placements.columns))
        corners = torch.cartesian_prod(tops[0], lefts[0])
        stamps = _stamps(threat, sides, tops[1], lefts[1])
        while sides and _is_union(layout, corners, stamps, sides[0], layers[0]):
            stamps = stamps.unflatten(1, (-1, sides[0] ** 2)).any(dim=2)
            sides, layers = sides[1:], layers[1:]
        index = torch.zeros(placements.image_height, placements.image_width, dtype=torch.long)
        index[corners[:, 0], corners[:, 1]] = torch.arange(len(corners))
        return PlacementBlocks(
            tuple(sides), tuple(layers), corners.to(device), stamps.to(device), index.to(device)
        )

    @property
    def first(self) -> int:
        """The value that the merged bounds are of."""
        return self.layers[-1] + 1 if self.layers else 0

    def members(self, position: int) -> int:
        """How many boxes of a block pass the step at this position."""
        return math.prod(
            side**2 for side, layer in zip(self.sides, self.layers, strict=True) if layer >= position
        )

    def whole(self) -> Patch:
        """A patch over whole blocks, at their corners."""
        height, width = self.stamps.shape[2:4]
        return Patch((height, width), [(int(top), int(left)) for top, left in self.corners.tolist()])

    def drawn_back(self, rows: int, columns: int) -> Annotated[Tensor, "b members h w 1"]:
        """The stamps on windows drawn back to multiples of `rows` and `columns`."""
        offsets = (self.corners.cpu() % torch.tensor((rows, columns))).tolist()
        bottom, right = (max(offset) for offset in zip(*offsets, strict=True))
        return torch.stack(
            [
                F.pad(stamps, (0, 0, left, right - left, top, bottom - top))
                for stamps, (top, left) in zip(self.stamps, offsets, strict=True)
            ]
        )

    def merged(self, state: Windows, pass_of: Callable[[int], WindowPass]) -> Windows:
        """The bounds (b, ...) of value `first`, from those of all members (b * members, ...) in the image.

        `pass_of` gives the pass that has every block a given number of times in a row. Rounding is to nearest.
        """
        first = 0
        for side, layer in zip(self.sides, self.layers, strict=True):
            state = propagate(pass_of(self.members(layer)), state, layer + 1, first).settled(None)
            least = (state.deviation - state.radius).unflatten(0, (-1, side**2)).amin(dim=1)
            largest = (state.deviation + state.radius).unflatten(0, (-1, side**2)).amax(dim=1)
            state = Windows((largest + least) * 0.5, (largest - least) * 0.5, is_ragged=True)
            first = layer + 1
        return state


def _axis(count: int, sides: Sequence[int]) -> tuple[Annotated[Tensor, "b"], Annotated[Tensor, "b reach"]]:
    """The corners of the blocks along an axis of `count` placements, and their members as offsets from them."""
    counts = [count]
    for side in sides:
        counts.append(-(-counts[-1] // side))
    reach = math.prod(sides)
    corners = (torch.arange(counts[-1]) * reach).clamp(max=count - reach)
    members = torch.arange(counts[-1]).unsqueeze(1)
    for side, below in zip(reversed(sides), reversed(counts[:-1]), strict=True):
        members = (members.unsqueeze(2) * side + torch.arange(side)).clamp(max=below - 1).flatten(1)
    return corners, members - corners.unsqueeze(1)


def _stamps(
    threat: Patch,
    sides: Sequence[int],
    down: Annotated[Tensor, "rows reach"],
    right: Annotated[Tensor, "columns reach"],
) -> Annotated[Tensor, "_ members h w 1"]:
    """The pixels of the members, which lie `down` and `right` of their block's corner."""
    reach, order = math.prod(sides), torch.zeros(1, 2, dtype=torch.long)
    for side in reversed(sides):
        inner = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        order = (order.unsqueeze(1) * side + inner).flatten(0, 1)
    offsets = down[:, None, order[:, 0]] * reach + right[None, :, order[:, 1]]
    return covered_pixels(threat, reach, reach)[offsets.flatten(0, 1)]


def _is_union(
    layout: Layout,
    corners: Annotated[Tensor, "b 2"],
    stamps: Annotated[Tensor, "b members h w 1"],
    side: int,
    layer: int,
) -> bool:
    """Whether at every cell after the layer one member has all pixels in its sight that any of the merged has."""
    height, width = stamps.shape[2:4]
    members = stamps.squeeze(4).unflatten(1, (-1, side**2))
    missing = members.any(dim=2, keepdim=True) & ~members
    step = torch.tensor(common_steps(layout.windows(Window(0, 0, height, width))[: layer + 2]))
    for kind in torch.cat([corners % step, missing.flatten(1)], dim=1).unique(dim=0):
        window = Window(int(kind[0]), int(kind[1]), height, width)
        sees_missing = _sight(layout, window, kind[2:].view(missing[0].shape).float(), layer)
        if sees_missing.amin(dim=1).any():
            return False
    return True


def _sight(
    layout: Layout, window: Window, pixels: Annotated[Tensor, "b members h w"], layer: int
) -> Annotated[Tensor, "b members ..."]:
    """1 at the cells after the layer that see a pixel which is 1 in the window on the image, else 0."""
    windows = layout.windows(window)
    for step, source, target in zip(layout.network.steps[: layer + 1], windows, windows[1:], strict=False):
        operation = step.operation
        if isinstance(operation, Convolution | MaxPool) and source and target:
            geometry = operation.geometry
            grown = source.local(geometry, target).pad(pixels)
            pixels = F.max_pool2d(grown, geometry.kernel, geometry.stride, 0, geometry.dilation)
        elif not isinstance(operation, ChannelScale | Monotone | Reshape):
            return pixels.amax(dim=(2, 3))
    return pixels
