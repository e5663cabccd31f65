"""Verdicts without margins: an image is dropped as soon as it is decided, so that fewer placements are bounded.

An image is refuted for good by one placement that is not proven. One larger patch that covers a block of
placements proves all of them at once; where it does not, the placements are bounded one by one. Both only
save work: an image is proven here if every one of its placements is bounded by itself or by a block, with all
margins positive.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds import Rounding
from patchcert.tensors import Images, Labels
from patchcert.threats import Patch
from patchcert.windows.layout import covered_pixels
from patchcert.windows.passes import Clean, Group
from patchcert.windows.sweep import PlacementSweep, covering_sweep

_BLOCK = 2
"""Placements are merged in squares of this side."""


@dataclass(frozen=True, slots=True)
class VerdictSweep:
    """The placements one by one and, where all that fit are allowed, in blocks."""

    single: PlacementSweep
    blocks: PlacementSweep | None

    @staticmethod
    def of(single: PlacementSweep, images: Images) -> "VerdictSweep":
        """With blocks where they save work."""
        merged, network = block_patch(single.threat, *images.shape[-2:]), single.layout.network
        if merged is None:
            return VerdictSweep(single, None)
        return VerdictSweep(single, covering_sweep(network, images, merged, single.memory_budget))

    def proven(self, clean: Clean, labels: Labels, rounding: Rounding) -> Annotated[Tensor, "n"]:
        """True where every placement is proven."""
        first, *rest = self.single.groups
        undecided = _Undecided(clean, labels, torch.arange(len(labels), device=labels.device), rounding)
        undecided = undecided.kept(undecided.proven(self.single, first))
        proven = torch.zeros_like(labels, dtype=torch.bool)
        if self.blocks is not None and len(undecided.images):
            by_blocks = torch.ones_like(undecided.labels, dtype=torch.bool)
            for group in self.blocks.groups:
                by_blocks &= undecided.proven(self.blocks, group)
            proven[undecided.images[by_blocks]] = True
            undecided = undecided.kept(~by_blocks)
        for group in rest:
            if len(undecided.images) == 0:
                break
            undecided = undecided.kept(undecided.proven(self.single, group))
        proven[undecided.images] = True
        return proven


@dataclass(frozen=True, slots=True)
class _Undecided:
    """The images that are not decided yet, by their numbers."""

    clean: Clean
    labels: Labels
    images: Annotated[Tensor, "n"]
    rounding: Rounding

    def proven(self, sweep: PlacementSweep, group: Group) -> Annotated[Tensor, "n"]:
        """True where all margins at the group's placements are positive numbers, neither NaN nor infinite."""
        margins = sweep.group_margins(group, self.clean, self.labels, self.rounding)
        return ((margins > 0) & margins.isfinite()).all(dim=1)

    def kept(self, is_kept: Annotated[Tensor, "n"]) -> "_Undecided":
        if bool(is_kept.all()):
            return self
        index = is_kept.nonzero().flatten()
        return _Undecided(self.clean.select(index), self.labels[index], self.images[index], self.rounding)


def block_patch(threat: Patch, height: int, width: int) -> Patch | None:
    """A larger patch whose placements, on a grid, cover the threat's in blocks; None where that saves nothing."""
    placements = threat.placements(height, width)
    if not placements.complete or min(placements.rows, placements.columns) < 2 * _BLOCK:
        return None
    merged = covered_pixels(threat, _BLOCK, _BLOCK).any(dim=0).squeeze(2)
    tops, lefts = _starts(placements.rows), _starts(placements.columns)
    return Patch(merged, placements=[(top, left) for top in tops for left in lefts])


def _starts(count: int) -> list[int]:
    """The first placement of each block; the last block reaches back so that it does not stick out."""
    return sorted({min(start, count - _BLOCK) for start in range(0, count, _BLOCK)})
