"""One training step: gather a batch, vary it, bound it, follow the gradient. Nothing waits for the device.

On a GPU the step is recorded once as a CUDA graph and replayed, so that small networks do not wait for launches.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Generator, Tensor, nn

from patchcert.bounds.rounding import fast_arithmetic, precise_arithmetic
from patchcert.data import Split
from patchcert.data.augmentation import random_colours, random_crop, random_flip, random_turns, random_warps
from patchcert.train.batch_norms import batch_norms
from patchcert.train.distributed import ALONE, World
from patchcert.train.recipe import Observation
from patchcert.train.schedules import Phase
from patchcert.train.spec import OptimiserSettings, Spec
from patchcert.train.strategy import Batch, Objective, Scalar, derived_seed, is_robust, margin_loss

WARM_UP_STEPS = 3
Rows = Annotated[Tensor, "b"]
"""The rows of the data that a batch is made of."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a training that does not change while it runs; the data lie on the device as bytes."""

    spec: Spec
    data: Split
    world: World = ALONE

    @property
    def batches(self) -> int:
        """Batches in an epoch; the last may be shorter."""
        return math.ceil(len(self.data) / self.spec.optimiser.batch_size)

    def average_share(self, epoch: int, batch: int) -> float:
        """What the weights after this batch count in the mean of all so far: 1 / (1 + d + d^2 + ...), d the decay."""
        decay = self.spec.optimiser.average_decay or 0.0
        return (1 - decay) / (1 - decay ** (epoch * self.batches + batch + 1))

    def order(self, epoch: int) -> Rows:
        """The rows of the data in the order of the epoch, which depends on seed and epoch alone."""
        generator = Generator().manual_seed(derived_seed(self.spec.seed, "order", epoch))
        return torch.randperm(len(self.data), generator=generator)


class Trainee:
    """A model in training with all that changes from step to step, on one device.

    Epsilon, the learning rate, the share of the present weights in their average and the running sums are tensors on
    the device, so that a recorded step reads their present values and nothing is read back before an epoch ends.
    `average` has the averaged weights and statistics, where they are asked for.
    """

    def __init__(self, model: nn.Module, objective: Objective, settings: OptimiserSettings) -> None:
        self.model = model
        self.objective = objective
        self.device = next(model.parameters()).device
        self.generator = Generator(self.device)
        self.epsilon = torch.zeros((), device=self.device)
        self.learning_rate = torch.zeros((), device=self.device)
        self.sums = torch.zeros(3, device=self.device, dtype=torch.float64)
        is_averaged = settings.average_decay is not None
        self.average = copy.deepcopy(model).eval().requires_grad_(False) if is_averaged else None
        self.average_share = torch.ones((), device=self.device)
        self.statistics = [each for layer in batch_norms(model).values() for each in layer.buffers()]
        self.optimiser = self._optimiser(settings)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All weights that learn, the classifier's first."""
        return [each for group in self.optimiser.param_groups for each in group["params"]]

    @contextmanager
    def deployed(self) -> Iterator[nn.Module]:
        """The model that the training would end with now, in eval mode; what is trained is as before afterwards."""
        model, was_training = self.model if self.average is None else self.average, self.model.training
        try:
            yield model.eval()
        finally:
            self.model.train(was_training)

    def follow(self) -> None:
        """Move the average by its share towards the present weights and statistics."""
        if self.average is None:
            return
        present, kept = self.model.state_dict(), self.average.state_dict()
        with torch.no_grad():
            for name, value in present.items():
                if value.is_floating_point():
                    kept[name].lerp_(value, self.average_share)
                else:
                    kept[name].copy_(value)

    def _optimiser(self, settings: OptimiserSettings) -> torch.optim.Optimizer:
        """Gradient descent where there is a momentum, else Adam; both can be recorded with their step."""
        groups: list[dict[str, Any]] = [{"params": list(self.model.parameters())}]
        if not settings.decay_biases:
            tensors = groups[0]["params"]
            groups = [
                {"params": [each for each in tensors if each.dim() > 1]},
                {"params": [each for each in tensors if each.dim() <= 1], "weight_decay": 0.0},
            ]
        if self.objective.helper is not None:
            groups.append({"params": list(self.objective.helper.parameters()), "weight_decay": 0.0})
        on_cuda = self.device.type == "cuda"
        rate, decay = self.learning_rate, settings.weight_decay
        if settings.momentum is not None:
            return torch.optim.SGD(
                groups, rate, settings.momentum, weight_decay=decay, nesterov=settings.nesterov, fused=True
            )
        return torch.optim.Adam(groups, lr=rate, weight_decay=decay, fused=True, capturable=on_cuda)


class TrainingStep:
    """Trains on the images at the given rows of the plan's data.

    Epsilon is the trainee's, or 1 for good in the phase "full": bounds are cheaper when it is known to be 1. The
    objective is the trainee's own, or another on the same network for epochs without a threat. Bounds are regularised
    while epsilon grows.
    """

    def __init__(
        self, trainee: Trainee, plan: Plan, objective: Objective | None = None, phase: Phase = "growing"
    ) -> None:
        self.trainee = trainee
        self.plan = plan
        self.objective = objective or trainee.objective
        self.epsilon = 1.0 if phase == "full" else trainee.epsilon
        spec, network = plan.spec, self.objective.network
        self.observation = Observation.of(network, spec.threat, spec.bounds, phase == "growing")
        helper = self.objective.helper
        self.learning = [*trainee.model.parameters(), *(helper.parameters() if helper is not None else ())]
        self.full_scale = torch.full((), 255.0, device=trainee.device)

    def __call__(self, index: Rows) -> None:
        """One step of the optimiser, and its loss and robust images added to the running sums."""
        batch = self._gather(index)
        if len(batch.own_labels):
            with fast_arithmetic() if self.plan.spec.optimiser.tf32 else precise_arithmetic():
                loss, counts = self._loss(batch)
                gradients = torch.autograd.grad(loss, self.learning, materialize_grads=True)
        else:
            counts = torch.zeros_like(self.trainee.sums)
            gradients = [torch.zeros_like(parameter) for parameter in self.learning]
        statistics = self._own_statistics(batch)
        self.plan.world.sum_in_place([counts, *statistics, *gradients])
        self._agree_on(statistics)
        self.trainee.sums += counts
        self._descend(gradients)
        self.trainee.follow()

    def _own_statistics(self, batch: Batch) -> list[Tensor]:
        """This process's part of the mean statistics of batch norms over all processes; of one alone there is none.

        Statistics move in proportion to what a batch has, so their mean is that of the batches, by numbers of images.
        """
        if self.plan.world.size == 1:
            return []
        share = len(batch.own_labels) / len(batch)
        return [each.double() * share for each in self.trainee.statistics]

    def _agree_on(self, statistics: Sequence[Tensor]) -> None:
        for own, mean in zip(self.trainee.statistics, statistics, strict=False):
            own.copy_(mean if own.is_floating_point() else mean.round())

    def _gather(self, index: Rows) -> Batch:
        data, settings = self.plan.data, self.plan.spec.data
        labels = data.labels.index_select(0, index)
        images = data.images.index_select(0, index).to(torch.float32) / self.full_scale
        if settings.flip:
            images = random_flip(images, self.trainee.generator)
        if settings.crop_padding:
            images = random_crop(images, settings.crop_padding, self.trainee.generator)
        if settings.rotation or settings.stretch:
            images = random_turns(images, settings.rotation, settings.stretch, self.trainee.generator)
        if settings.warp:
            images = random_warps(images, settings.warp, self.trainee.generator)
        if settings.colours:
            images = random_colours(images, settings.colours, self.trainee.generator)
        return Batch(images, labels, self.plan.world.rows(len(index)))

    def _loss(self, batch: Batch) -> tuple[Scalar, Annotated[Tensor, "3"]]:
        """This process's part of the batch's mean loss, and its sums of loss, robust images and images.

        A helper learns from its own loss alone: the classifier's loss does not reach it, nor the reverse. A further
        loss is learned from, and not summed.
        """
        labels = batch.own_labels
        added = self._observe(batch)
        worst = self.objective.worst_case(batch, self.epsilon, self.trainee.generator)
        settings = self.plan.spec.optimiser
        loss = margin_loss(worst.margins, labels, len(batch), settings.label_smoothing, settings.focus)
        loss = self._with_natural_part(loss, batch)
        proven = worst.margins if worst.bounded is None else worst.bounded
        robust = is_robust(proven.detach(), labels).sum()
        images = torch.full_like(robust, len(labels))
        counts = torch.stack([loss.detach().double() * len(batch), robust.double(), images.double()])
        for more in (added, worst.further_loss):
            loss = loss if more is None else loss + more
        return loss, counts

    def _observe(self, batch: Batch) -> Scalar | None:
        """Show the batch to batch norms; this process's part of what regularisers add to its mean loss."""
        if self.observation is None:
            return None
        added = self.observation(batch, self.epsilon, self.trainee.generator)
        return None if added is None else added * (len(batch.own_labels) / len(batch))

    def _with_natural_part(self, loss: Tensor, batch: Batch) -> Tensor:
        weight = self.plan.spec.optimiser.natural_weight
        if not weight:
            return loss
        logits = self.objective.network.values(batch.own_images)[-1]
        smoothing = self.plan.spec.optimiser.label_smoothing
        natural = margin_loss(-logits, batch.own_labels, len(batch), smoothing)
        return torch.lerp(loss, natural, weight)

    def _descend(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.learning, gradients, strict=True):
            parameter.grad = laid_out_like(parameter, gradient)
        clip_norm = self.plan.spec.optimiser.clip_norm
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(self.trainee.model.parameters(), clip_norm)
        self.trainee.optimiser.step()
        self.trainee.optimiser.zero_grad(set_to_none=True)


def laid_out_like(parameter: Tensor, values: Tensor) -> Tensor:
    """The values on the parameter's device and in the order of its numbers, as fused optimisers demand."""
    if values.device == parameter.device and values.stride() == parameter.stride():
        return values
    return torch.empty_like(parameter).copy_(values)


class CapturedStep:
    """Replays a step for every full batch; the first few and shorter batches are carried out as usual.

    The steps that warm up the device are real steps, and recording does not carry anything out, so that a run
    with a graph does exactly the steps of a run without. All random draws must come from the registered
    generator. If recording fails and `may_fall_back`, training continues without a graph.
    """

    def __init__(
        self, step: Callable[[Tensor], None], batch_size: int, generator: Generator, may_fall_back: bool
    ) -> None:
        self.step = step
        self.generator = generator
        self.may_fall_back = may_fall_back
        self.index = torch.zeros(batch_size, dtype=torch.int64, device=generator.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm_up_steps = WARM_UP_STEPS
        self.gave_up = False

    def __call__(self, index: Rows) -> None:
        """One step on the images at these rows."""
        if self.gave_up or len(index) != len(self.index):
            self.step(index)
            return
        self.index.copy_(index)
        with torch.cuda.device(self.index.device):
            if self.warm_up_steps:
                self._warm_up()
                return
            if self.graph is None:
                self._record()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.step(index)

    def _warm_up(self) -> None:
        """A step on another stream, as recording demands, so that libraries set themselves up before it."""
        self.warm_up_steps -= 1
        present = torch.cuda.current_stream(self.index.device)
        aside = torch.cuda.Stream(self.index.device)
        aside.wait_stream(present)
        with torch.cuda.stream(aside):
            self.step(self.index)
        present.wait_stream(aside)

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        try:
            with torch.cuda.graph(graph):
                self.step(self.index)
        except RuntimeError as error:
            if not self.may_fall_back:
                raise
            self.gave_up = True
            logger.warning(
                "the training step could not be recorded as a CUDA graph, so it runs without: %s", error
            )
            return
        self.graph = graph
