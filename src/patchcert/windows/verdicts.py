"""Verdicts without margins: images are let go as soon as they are decided, so that fewer placements are
bounded.

An image is refuted for good by one placement that is not proven. One larger patch that covers a block of
placements proves all of them at once; where it does not, the placements are bounded one by one. Both only
save work: an image is proven here if every one of its placements is bounded by itself or by a block, with all
margins positive.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from patchcert.bounds import Network, Rounding
from patchcert.threats import Patch
from patchcert.windows.clean import Clean
from patchcert.windows.sweep import PlacementSweep, covering_sweep

_BLOCK = 2
"""Placements are merged in squares of this side."""


@dataclass(frozen=True, slots=True)
class VerdictSweep:
    """The placements one by one and, where all that fit are allowed, in blocks."""

    single: PlacementSweep
    blocks: PlacementSweep | None

    @staticmethod
    def of(network: Network, images: Tensor, threat: Patch, memory_budget: int) -> "VerdictSweep | None":
        """None where windows do not cover the network."""
        single = covering_sweep(network, images, threat, memory_budget)
        if single is None:
            return None
        merged = block_patch(threat, images.shape[-2], images.shape[-1])
        blocks = None if merged is None else covering_sweep(network, images, merged, memory_budget)
        return VerdictSweep(single, blocks)

    def proven(self, clean: Clean, labels: Tensor, rounding: Rounding) -> Tensor:
        """True (n,) where every placement is proven."""
        open_ = _Open(clean, labels, torch.arange(len(labels), device=labels.device), rounding)
        first, *rest = self.single.groups
        open_ = open_.after(self.single.group_margins(first, open_.clean, open_.labels, rounding))
        proven = torch.zeros_like(labels, dtype=torch.bool)
        if self.blocks is not None and len(open_.images):
            by_blocks = open_.proven_by(self.blocks)
            proven[open_.images[by_blocks]] = True
            open_ = open_.keeping(~by_blocks)
        for group in rest:
            if len(open_.images) == 0:
                break
            open_ = open_.after(self.single.group_margins(group, open_.clean, open_.labels, rounding))
        proven[open_.images] = True
        return proven


@dataclass(frozen=True, slots=True)
class _Open:
    """The images that are not decided yet, by their numbers."""

    clean: Clean
    labels: Tensor
    images: Tensor
    rounding: Rounding

    def after(self, margins: Tensor) -> "_Open":
        """Without the images that these margins leave unproven, NaN included."""
        return self.keeping(_are_proven(margins))

    def keeping(self, kept: Tensor) -> "_Open":
        if bool(kept.all()):
            return self
        index = kept.nonzero().flatten()
        return _Open(self.clean.select(index), self.labels[index], self.images[index], self.rounding)

    def proven_by(self, blocks: PlacementSweep) -> Tensor:
        proven = torch.ones_like(self.labels, dtype=torch.bool)
        for group in blocks.groups:
            proven &= _are_proven(blocks.group_margins(group, self.clean, self.labels, self.rounding))
        return proven


def _are_proven(margins: Tensor) -> Tensor:
    """True (n,) where all margins are positive numbers, neither NaN nor infinite."""
    return ((margins > 0) & margins.isfinite()).all(dim=1)


def block_patch(threat: Patch, height: int, width: int) -> Patch | None:
    """A larger patch whose placements, on a grid, cover the threat's in blocks; None where that saves nothing."""
    placements = threat.placements(height, width)
    if not placements.complete or min(placements.rows, placements.columns) < 2 * _BLOCK:
        return None
    merged = torch.zeros(threat.height + _BLOCK - 1, threat.width + _BLOCK - 1, dtype=torch.bool)
    for top in range(_BLOCK):
        for left in range(_BLOCK):
            merged[top : top + threat.height, left : left + threat.width] |= threat.stamp.cpu()
    tops, lefts = _starts(placements.rows), _starts(placements.columns)
    return Patch(merged, placements=[(top, left) for top in tops for left in lefts])


def _starts(count: int) -> list[int]:
    """The first placement of each block; the last block reaches back so that it does not stick out."""
    return sorted({min(start, count - _BLOCK) for start in range(0, count, _BLOCK)})
