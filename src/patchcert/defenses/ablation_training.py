"""Training of the base network of Random Ablation: ordinary training on ablated images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from patchcert.defenses.ablation import draw_retained, encode_ablated
from patchcert.errors import InvalidInput

Augment = Callable[[Tensor, Generator], Tensor]
Progress = Callable[[int, int], None]
Masks = Literal["image", "batch"]


@final
@dataclass(frozen=True)
class AblationTraining:
    """Stochastic gradient descent on one ablated copy per image; the rate falls to a tenth half way.

    `masks` says whether every image has its own mask or a mini-batch shares one, as in the original code. The
    original decays weights by 5e-4 on CIFAR-10 and not on MNIST.
    """

    retained: int
    epochs: int = 400
    batch_size: int = 128
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    masks: Masks = "image"
    augment: Augment | None = None

    def __post_init__(self) -> None:
        if min(self.retained, self.epochs, self.batch_size) < 1 or self.masks not in get_args(Masks):
            raise InvalidInput(
                "ablation training needs retained, epochs and batch_size of at least 1 and masks 'image' or "
                f"'batch', got {self.retained}, {self.epochs}, {self.batch_size} and {self.masks!r}",
                hint="MNIST uses retained=45, CIFAR-10 retained=75",
            )

    def run(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        generator: Generator,
        progress: Progress | None = None,
    ) -> list[float]:
        """Trains the model in place, leaves it in eval mode, and returns the mean loss of every epoch."""
        optimiser = torch.optim.SGD(
            model.parameters(), self.learning_rate, self.momentum, weight_decay=self.weight_decay
        )
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, [max(self.epochs // 2, 1)], 0.1)
        losses = []
        model.train()
        for epoch in range(self.epochs):
            losses.append(self._epoch(model, images, labels, optimiser, generator))
            schedule.step()
            if progress is not None:
                progress(epoch + 1, self.epochs)
        model.eval()
        return losses

    def _epoch(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        optimiser: torch.optim.Optimizer,
        generator: Generator,
    ) -> float:
        order = torch.randperm(len(images), generator=generator, device=generator.device).to(images.device)
        total = torch.zeros((), device=images.device)
        for chosen in order.split(self.batch_size):
            batch = self._ablated(images[chosen], generator)
            loss = F.cross_entropy(model(batch), labels[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.detach() * len(chosen)
        return float(total) / len(images)

    def _ablated(self, images: Tensor, generator: Generator) -> Tensor:
        if self.augment is not None:
            images = self.augment(images, generator)
        count = len(images) if self.masks == "image" else 1
        masks = draw_retained(count, images.shape[2], images.shape[3], self.retained, generator)
        return encode_ablated(images, masks.to(images))
