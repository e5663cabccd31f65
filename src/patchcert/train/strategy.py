"""What a training strategy is: it turns a batch and an epsilon into worst-case margins with a gradient."""

from dataclasses import dataclass, field
from typing import Protocol

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from patchcert.bounds import Network


@dataclass(frozen=True, slots=True)
class Batch:
    """Images (n, c, h, w) in [0, 1] with labels (n,), and the rows of them that this process answers for.

    Random draws are made for the whole batch, so that they do not depend on how many processes share it.
    """

    images: Tensor
    labels: Tensor
    rows: slice = field(default_factory=lambda: slice(None))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def own_images(self) -> Tensor:
        """The images of this process."""
        return self.images[self.rows]

    @property
    def own_labels(self) -> Tensor:
        """The labels of this process."""
        return self.labels[self.rows]


@dataclass(frozen=True, slots=True)
class WorstCase:
    """Margins (own rows, classes), 0 at the label, and the loss of a helper network where there is one.

    A helper's loss is this process's part of the mean over the whole batch, so that parts add up.
    """

    margins: Tensor
    helper_loss: Tensor | None = None


class Strategy(Protocol):
    """One way to train against a threat. Settings are fixed when it is made; the data come with the call."""

    @property
    def helper(self) -> nn.Module | None:
        """A network trained beside the classifier, with the same optimiser and learning rate."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether shapes never depend on data and nothing waits for the device, as a CUDA graph demands."""
        ...

    def worst_case(
        self, network: Network, batch: Batch, epsilon: float | Tensor, generator: Generator
    ) -> WorstCase:
        """The margins that are left when pixels may move by epsilon, a number or a tensor holding one."""
        ...


def margin_loss(margins: Tensor, labels: Tensor, count: int) -> Tensor:
    """Cross entropy of the negated margins, summed over these images and divided by the whole batch's count.

    With margins of a single image this is the ordinary cross entropy of its logits, since they differ by a
    constant.
    """
    return F.cross_entropy(-margins, labels, reduction="sum") / count


def is_robust(margins: Tensor, labels: Tensor) -> Tensor:
    """True (n,) where the margin against every other class is above 0; NaN is not."""
    others = margins.scatter(1, labels.unsqueeze(1), float("inf"))
    return others.amin(dim=1) > 0
