"""A few random placements per image and step."""

from typing import final

import torch
from torch import Generator, Tensor

from patchcert.bounds import Network
from patchcert.threats import Patch
from patchcert.train.strategies.placed import PlacedPatch
from patchcert.train.strategy import Batch, WorstCase


@final
class RandomPlacements:
    """Bounds a few uniform placements, drawn with replacement, instead of all (Chiang et al. 2020)."""

    helper = None
    is_capturable = True

    def __init__(self, threat: Patch, placements: int = 10, windows: torch.dtype | None = None) -> None:
        self.patch = PlacedPatch(threat, windows)
        self.placements = placements

    def worst_case(
        self, network: Network, batch: Batch, epsilon: float | Tensor, generator: Generator
    ) -> WorstCase:
        """The least margin per class over the placements drawn for each image."""
        allowed = len(self.patch.corners(batch.images))
        shape = (len(batch), self.placements)
        drawn = torch.randint(allowed, shape, generator=generator, device=generator.device)
        margins = self.patch.margins(network, batch.own_images, batch.own_labels, drawn[batch.rows], epsilon)
        return WorstCase(margins.amin(dim=1))
