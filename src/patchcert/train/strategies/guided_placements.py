"""Placements drawn where a U-net expects the classifier to be weakest."""

from typing import final

import torch
from torch import Generator, Tensor, nn

from patchcert.bounds import Network
from patchcert.threats import Patch
from patchcert.train.strategies.placed import PlacedPatch
from patchcert.train.strategy import Batch, WorstCase


@final
class GuidedPlacements:
    """For each class draws distinct placements from softmax(-inverse_temperature * guessed margin).

    The helper maps images to a guess (n, classes, H, W) whose entry [j, top, left] is the margin of class j
    with the patch's top-left corner there. It sees no label, and learns from the margins at the placements it
    drew.
    """

    is_capturable = True

    def __init__(
        self,
        threat: Patch,
        helper: nn.Module,
        per_class: int = 1,
        inverse_temperature: float = 1.0,
        windows: torch.dtype | None = None,
    ) -> None:
        self.patch = PlacedPatch(threat, windows)
        self.helper = helper
        self.per_class = per_class
        self.inverse_temperature = inverse_temperature

    def worst_case(
        self, network: Network, batch: Batch, epsilon: float | Tensor, generator: Generator
    ) -> WorstCase:
        """The least margin per class over the placements drawn, and the squared error of guesses there."""
        corners = self.patch.corners(batch.images)
        places = corners[:, 0] * batch.images.shape[3] + corners[:, 1]
        guesses = self.helper(batch.images).flatten(2).index_select(2, places)
        chosen = self.draw(guesses.detach(), generator)[batch.rows]
        margins = self.patch.margins(network, batch.own_images, batch.own_labels, chosen, epsilon)
        guessed = guesses[batch.rows].gather(2, chosen.unsqueeze(1).expand(-1, guesses.shape[1], -1))
        errors = (guessed.transpose(1, 2) - margins.detach()).square()
        return WorstCase(margins.amin(dim=1), errors.mean(dim=(1, 2)).sum() / len(batch))

    def draw(self, guesses: Tensor, generator: Generator) -> Tensor:
        """Placements (n, classes * per_class) for guesses (n, classes, p), distinct within each class.

        The largest entries of log-probability plus Gumbel noise are a draw without replacement.
        """
        noise = torch.empty(guesses.shape, dtype=guesses.dtype, device=generator.device)
        gumbel = -noise.exponential_(generator=generator).clamp(min=torch.finfo(noise.dtype).tiny).log()
        count = min(self.per_class, guesses.shape[2])
        scores = gumbel - self.inverse_temperature * guesses
        return (scores.argmax(dim=2) if count == 1 else scores.topk(count, dim=2).indices).flatten(1)
