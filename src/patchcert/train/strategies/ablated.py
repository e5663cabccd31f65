"""Ordinary training on ablated images, for the vote of Random Ablation."""

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Generator, Tensor, nn

from patchcert.bounds import Network
from patchcert.certificates.ablation import draw_retained, encode_ablated
from patchcert.train.strategy import Batch, WorstCase

Masks = Literal["image", "batch"]


@final
@dataclass(frozen=True, slots=True)
class WholeModel(Network):
    """A model carried out as it is instead of traced, so that batch norms can follow their batches.

    For strategies that ask for no bounds; it has values, but no intervals.
    """

    model: nn.Module

    @staticmethod
    def in_training(model: nn.Module) -> "WholeModel":
        """The model, from now on in training mode."""
        return WholeModel((), model.train())

    def values(self, images: Tensor) -> list[Tensor]:
        """The images and their logits."""
        return [images, self.model(images)]


@final
@dataclass(frozen=True, slots=True)
class Ablated:
    """The margins of images of which all but a few random pixels are ablated, whatever epsilon is.

    Masks are drawn for each image, or one for the whole batch. With `bfloat16` the products of the network are
    rounded to it, those of the loss are not.
    """

    retained: int
    masks: Masks = "image"
    bfloat16: bool = False
    helper: nn.Module | None = None
    is_capturable: bool = True

    def worst_case(
        self, network: Network, batch: Batch, epsilon: float | Tensor, generator: Generator
    ) -> WorstCase:
        """Logit of the label minus every logit, on one ablated copy of each image."""
        count = len(batch) if self.masks == "image" else 1
        height, width = batch.images.shape[2:]
        masks = draw_retained(count, height, width, self.retained, generator)
        rows = batch.rows if self.masks == "image" else slice(None)
        encoded = encode_ablated(batch.own_images, masks[rows])
        device = batch.images.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.bfloat16, cache_enabled=False):
            logits = network.values(encoded)[-1]
        logits = logits.float()
        return WorstCase(logits.gather(1, batch.own_labels.unsqueeze(1)) - logits)
