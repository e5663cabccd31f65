"""Ordinary training."""

from dataclasses import dataclass
from typing import final

from torch import Generator, Tensor, nn

from patchcert.bounds import Network
from patchcert.train.strategy import Batch, WorstCase


@final
@dataclass(frozen=True, slots=True)
class Natural:
    """The margins of the clean images: their loss is plain cross entropy, whatever epsilon is."""

    helper: nn.Module | None = None
    is_capturable: bool = True

    def worst_case(
        self, network: Network, batch: Batch, epsilon: float | Tensor, generator: Generator
    ) -> WorstCase:
        """Logit of the label minus every logit."""
        logits = network.values(batch.own_images)[-1]
        return WorstCase(logits.gather(1, batch.own_labels.unsqueeze(1)) - logits)
