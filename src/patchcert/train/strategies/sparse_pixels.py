"""Any few pixels at once: one box per image."""

from typing import final

from torch import Generator, Tensor

from patchcert.bounds import Network
from patchcert.threats import SparsePixels
from patchcert.threats.sparse import SparseBound
from patchcert.train.strategy import Batch, WorstCase


@final
class SparseChanges:
    """Bounds all choices of a few pixels in the first layer, by the threat's own bound or by another."""

    helper = None
    is_capturable = True

    def __init__(self, threat: SparsePixels, bound: SparseBound | None = None) -> None:
        self.threat = threat
        self.bound = bound or threat.bound

    def worst_case(
        self, network: Network, batch: Batch, epsilon: float | Tensor, generator: Generator
    ) -> WorstCase:
        """The margins that are left whichever pixels change."""
        images, labels = batch.own_images, batch.own_labels
        return WorstCase(network.sparse_margins(images, labels, self.threat.pixels, self.bound, epsilon))
