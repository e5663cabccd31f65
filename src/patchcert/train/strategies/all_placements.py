"""Every placement of the patch in every step, at the memory of a handful."""

from collections.abc import Callable
from typing import final

import torch
from torch import Generator, Tensor

from patchcert.bounds import Network
from patchcert.threats import Patch
from patchcert.train.strategies.placed import PlacedPatch
from patchcert.train.strategy import Batch, WorstCase
from patchcert.windows import WeakestPlacements


@final
class AllPlacements:
    """Bounds all placements of every image, as all-patch training demands.

    The gradient of a minimum flows only through the placements that attain it, at most one for each class. So
    all placements are swept without a gradient, and only the weakest ones of each class are passed with one.
    """

    helper = None
    is_capturable = True

    def __init__(self, threat: Patch, windows: torch.dtype | None = None) -> None:
        self.patch = PlacedPatch(threat, windows)
        self.search = WeakestPlacements(threat)

    def worst_case(
        self, network: Network, batch: Batch, epsilon: float | Tensor, generator: Generator
    ) -> WorstCase:
        """The least margin per class over all placements."""
        images, labels = batch.own_images, batch.own_labels
        clean = self.patch.clean(network, images, labels)
        worst = self.search.find(network, images, labels, epsilon, clean)
        return worst_of_classes(
            labels,
            worst,
            lambda chosen, classes: self.patch.margins_against(
                network, images, labels, chosen, classes, epsilon, clean
            ),
        )


def worst_of_classes(
    labels: Tensor, worst: Tensor, margins_against: Callable[[Tensor, Tensor], Tensor]
) -> WorstCase:
    """Margins at each class's own weakest placement (n, classes); they are asked for by placement and class."""
    classes = other_classes(labels, worst.shape[1])
    margins = margins_against(worst.gather(1, classes), classes)
    own = torch.zeros_like(margins[:, :1])
    return WorstCase(torch.cat([margins, own], dim=1).gather(1, class_order(labels, worst.shape[1])))


def other_classes(labels: Tensor, classes: int) -> Tensor:
    """The classes (n, classes - 1) that are not the image's label."""
    steps = torch.arange(1, classes, device=labels.device)
    return (labels.unsqueeze(1) + steps) % classes


def class_order(labels: Tensor, classes: int) -> Tensor:
    """Where each class (n, classes) stands when `other_classes` come first and the label last."""
    numbers = torch.arange(classes, device=labels.device)
    return (numbers - labels.unsqueeze(1) - 1) % classes
