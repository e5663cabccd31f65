"""One training step: gather a batch, vary it, bound it, follow the gradient. Nothing waits for the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from patchcert.bounds import Network, trace
from patchcert.bounds.rounding import fast_arithmetic, precise_arithmetic
from patchcert.data import Split
from patchcert.data.split import random_crop, random_flip
from patchcert.train.distributed import World
from patchcert.train.strategy import Batch, Strategy, WorstCase, is_robust, margin_loss


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What every step does alike, whatever the strategy."""

    batch_size: int = 256
    weight_decay: float = 0.0
    momentum: float | None = None
    clip_norm: float | None = None
    natural_weight: float = 0.0
    tf32: bool = False
    flip: bool = False
    crop_padding: int = 0


class Trainee:
    """A model in training with all that changes from step to step, on one device.

    Epsilon, the learning rate and the running sums are tensors on the device, so that a recorded step reads
    their present values and nothing is read back before an epoch ends. The model is traced for its bounds
    unless it comes with a network.
    """

    def __init__(
        self,
        model: nn.Module,
        helper: nn.Module | None,
        settings: StepSettings,
        network: Network | None = None,
    ) -> None:
        self.model = model
        self.network: Network = trace(model) if network is None else network
        self.helper = helper
        self.device = next(model.parameters()).device
        self.generator = Generator(self.device)
        self.epsilon = torch.zeros((), device=self.device)
        self.learning_rate = torch.zeros((), device=self.device)
        self.sums = torch.zeros(3, device=self.device, dtype=torch.float64)
        self.optimiser = self._optimiser(settings)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All weights that learn, the classifier's first."""
        return [each for group in self.optimiser.param_groups for each in group["params"]]

    def _optimiser(self, settings: StepSettings) -> torch.optim.Optimizer:
        """Gradient descent where there is a momentum, else Adam; both can be recorded with their step."""
        groups: list[dict[str, Any]] = [{"params": list(self.model.parameters())}]
        if self.helper is not None:
            groups.append({"params": list(self.helper.parameters()), "weight_decay": 0.0})
        on_cuda = self.device.type == "cuda"
        rate, decay = self.learning_rate, settings.weight_decay
        if settings.momentum is not None:
            return torch.optim.SGD(groups, rate, settings.momentum, weight_decay=decay, fused=True)
        return torch.optim.Adam(groups, lr=rate, weight_decay=decay, fused=True, capturable=on_cuda)


class TrainingStep:
    """Trains on the images at the given rows of the data, which lie on the trainee's device as bytes.

    Epsilon is the trainee's, or 1 for good where `is_full`: bounds are cheaper when it is known to be 1.
    """

    def __init__(
        self,
        trainee: Trainee,
        strategy: Strategy,
        data: Split,
        settings: StepSettings,
        world: World,
        is_full: bool = False,
    ) -> None:
        self.trainee = trainee
        self.strategy = strategy
        self.data = data
        self.settings = settings
        self.world = world
        self.epsilon = 1.0 if is_full else trainee.epsilon
        helper = strategy.helper
        self.learning = [*trainee.model.parameters(), *(helper.parameters() if helper is not None else ())]
        self.full_scale = torch.full((), 255.0, device=trainee.device)

    def __call__(self, index: Tensor) -> None:
        """One step of the optimiser, and its loss and robust images added to the running sums."""
        batch = self._gather(index)
        if len(batch.own_labels):
            with fast_arithmetic() if self.settings.tf32 else precise_arithmetic():
                loss, counts = self._loss(batch)
                gradients = torch.autograd.grad(loss, self.learning, materialize_grads=True)
        else:
            counts = torch.zeros_like(self.trainee.sums)
            gradients = [torch.zeros_like(parameter) for parameter in self.learning]
        self.world.sum_in_place([counts, *gradients])
        self.trainee.sums += counts
        self._descend(gradients)

    def _gather(self, index: Tensor) -> Batch:
        labels = self.data.labels.index_select(0, index)
        images = self.data.images.index_select(0, index).to(torch.float32) / self.full_scale
        if self.settings.flip:
            images = random_flip(images, self.trainee.generator)
        if self.settings.crop_padding:
            images = random_crop(images, self.settings.crop_padding, self.trainee.generator)
        return Batch(images, labels, self.world.rows(len(index)))

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """This process's part of the batch's mean loss, and its sums of loss, robust images and images."""
        trainee, labels = self.trainee, batch.own_labels
        worst = self.strategy.worst_case(trainee.network, batch, self.epsilon, trainee.generator)
        loss = self._with_natural_part(margin_loss(worst.margins, labels, len(batch)), batch)
        robust = is_robust(worst.margins.detach(), labels).sum()
        images = torch.full_like(robust, len(labels))
        counts = torch.stack([loss.detach().double() * len(batch), robust.double(), images.double()])
        return _with_helper(loss, worst), counts

    def _with_natural_part(self, loss: Tensor, batch: Batch) -> Tensor:
        weight = self.settings.natural_weight
        if not weight:
            return loss
        logits = self.trainee.network.values(batch.own_images)[-1]
        natural = F.cross_entropy(logits, batch.own_labels, reduction="sum") / len(batch)
        return torch.lerp(loss, natural, weight)

    def _descend(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.learning, gradients, strict=True):
            parameter.grad = gradient.contiguous()
        if self.settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.trainee.model.parameters(), self.settings.clip_norm)
        self.trainee.optimiser.step()
        self.trainee.optimiser.zero_grad(set_to_none=True)


def _with_helper(loss: Tensor, worst: WorstCase) -> Tensor:
    """The helper learns from its own loss alone: the classifier's loss does not reach it, nor the reverse."""
    return loss if worst.helper_loss is None else loss + worst.helper_loss
