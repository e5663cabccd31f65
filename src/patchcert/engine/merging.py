"""Blocks of adjacent placements whose bounds are merged after some of the first layers, on windows.

One window covers all members of a block. Each member passes the layer by itself there; where it changes nothing
its deviation and radius are zero, so the merged bounds are the least and the largest over the members, and the
clean value, which all share, need not be looked at.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from patchcert.engine.geometry import NotCovered
from patchcert.engine.rules import propagate
from patchcert.engine.windows import WindowPass, Windows
from patchcert.threats import Patch, Placements


@dataclass(frozen=True, slots=True)
class Merging:
    """Merges blocks[0] x blocks[0] placements after the layer at layers[0], blocks[1] x blocks[1] of these blocks
    after layers[1], and so on.

    `corners` (b, 2) are those of the whole blocks; `rows` and `columns` (image rows or columns, members of an
    axis) say, for a block with its corner there, how far down or right of it each member lies. A block at the
    border has fewer members; the last stands in for those that are missing.
    """

    blocks: tuple[int, ...]
    layers: tuple[int, ...]
    corners: Tensor
    rows: Tensor
    columns: Tensor

    @staticmethod
    def of(
        placements: Placements, blocks: Sequence[int], layers: Sequence[int], device: torch.device
    ) -> "Merging":
        """For all placements that fit; raises NotCovered where a block has more than there are."""
        if min(placements.rows, placements.columns) < math.prod(blocks):
            raise NotCovered("a block of placements is larger than the image allows")
        tops, rows = _axis(placements.rows, blocks, placements.image_height)
        lefts, columns = _axis(placements.columns, blocks, placements.image_width)
        corners = torch.cartesian_prod(tops, lefts).to(device)
        return Merging(tuple(blocks), tuple(layers), corners, rows.to(device), columns.to(device))

    @property
    def reach(self) -> int:
        """How many members a block has along an axis."""
        return math.prod(self.blocks)

    @property
    def first(self) -> int:
        """The value that the merged bounds are of."""
        return self.layers[-1] + 1

    def whole(self, threat: Patch) -> Patch:
        """A patch over whole blocks, at their corners."""
        height, width = threat.height + self.reach - 1, threat.width + self.reach - 1
        return Patch((height, width), [(int(top), int(left)) for top, left in self.corners.tolist()])

    def merged(self, sweep: WindowPass, member: Callable[[int, int], Windows]) -> Windows:
        """The bounds of value `first`, from those of the members in the image, given by row and column."""
        return self._merged(sweep, member, len(self.blocks), 0, 0)

    def _merged(
        self, sweep: WindowPass, member: Callable[[int, int], Windows], level: int, row: int, column: int
    ) -> Windows:
        block, size = self.blocks[level - 1], math.prod(self.blocks[: level - 1])
        first, last = self.layers[level - 2] + 1 if level > 1 else 0, self.layers[level - 1] + 1
        lower, upper = [], []
        for down, right in itertools.product(range(block), repeat=2):
            place = (row + down * size, column + right * size)
            state = member(*place) if level == 1 else self._merged(sweep, member, level - 1, *place)
            state = propagate(sweep, state, last, first).settled(sweep.outside(last))
            lower.append(state.deviation - state.radius)
            upper.append(state.deviation + state.radius)
        least, largest = torch.stack(lower).amin(dim=0), torch.stack(upper).amax(dim=0)
        return Windows((largest + least) * 0.5, (largest - least) * 0.5)


def _axis(count: int, blocks: Sequence[int], size: int) -> tuple[Tensor, Tensor]:
    """The corners of the blocks along an axis of so many placements, and the members by corner (size, reach)."""
    counts = [count]
    for block in blocks:
        counts.append(-(-counts[-1] // block))
    reach = math.prod(blocks)
    corners = (torch.arange(counts[-1]) * reach).clamp(max=count - reach)
    members = torch.arange(counts[-1]).unsqueeze(1)
    for block, below in zip(reversed(blocks), reversed(counts[:-1]), strict=True):
        members = (members.unsqueeze(2) * block + torch.arange(block)).clamp(max=below - 1).flatten(1)
    table = torch.zeros(size, reach, dtype=torch.long)
    table[corners] = members - corners.unsqueeze(1)
    return corners, table


def covered_pixels(threat: Patch, rows: int, columns: int) -> Tensor:
    """True (offsets, h, w, 1) where the stamp covers a window when it lies so many rows and columns inside it.

    Offsets are counted in rows; the window is just large enough for all of them.
    """
    height, width = threat.height + rows - 1, threat.width + columns - 1
    masks = torch.zeros(rows, columns, height, width, 1, dtype=torch.bool)
    for top, left in itertools.product(range(rows), range(columns)):
        masks[top, left, top : top + threat.height, left : left + threat.width, 0] = threat.stamp
    return masks.flatten(0, 1)
