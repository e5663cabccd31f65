"""The training loop: one short function for every strategy."""

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Generator, Tensor

from patchcert.data import Split
from patchcert.errors import InvalidInput, RunError
from patchcert.train.capture import CapturedStep
from patchcert.train.distributed import ALONE, World
from patchcert.train.schedules import Phase, Schedule
from patchcert.train.step import StepSettings, Trainee, TrainingStep
from patchcert.train.strategies.natural import Natural
from patchcert.train.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Position:
    """The epoch and the batch in it that come next, and the seconds already spent in that epoch."""

    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EpochSummary:
    """What an epoch did: epsilon at its end, mean loss, and the share of images robust by its bounds."""

    epoch: int
    epsilon: float
    learning_rate: float
    loss: float
    robust_accuracy: float
    seconds: float


class Observer(Protocol):
    """Is told of every batch and epoch; may save the state, and may end the training by raising."""

    def after_batch(self, position: Position) -> None:
        """Called between two batches, when the state is whole; `position` is what comes next."""
        ...

    def after_epoch(self, summary: EpochSummary) -> None:
        """Called once at the end of every epoch, before `after_batch` with the start of the next."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a training that does not change while it runs."""

    strategy: Strategy
    data: Split
    schedule: Schedule
    settings: StepSettings
    seed: int
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    world: World = ALONE

    @property
    def batches(self) -> int:
        """Batches in an epoch; the last may be shorter."""
        return math.ceil(len(self.data) / self.settings.batch_size)

    def order(self, epoch: int) -> Tensor:
        """The rows of the data in the order of the epoch, which depends on seed and epoch alone."""
        generator = Generator().manual_seed(derived_seed(self.seed, "order", epoch))
        return torch.randperm(len(self.data), generator=generator)


def train(trainee: Trainee, plan: Plan, observer: Observer, start: Position | None = None) -> None:
    """Carry out the plan from a position on; the trainee must be as it was at that position."""
    position = start or Position()
    step, phase = None, None
    for epoch in range(position.epoch, plan.schedule.epochs):
        if epoch > position.epoch:
            position = Position(epoch)
        if step is None or phase != plan.schedule.epsilon.phase(epoch):
            phase = plan.schedule.epsilon.phase(epoch)
            step = _make_step(trainee, plan, phase)
        summary = _train_epoch(trainee, plan, step, observer, position)
        observer.after_epoch(summary)
        observer.after_batch(Position(epoch + 1))


def _train_epoch(
    trainee: Trainee, plan: Plan, step: Callable[[Tensor], None], observer: Observer, start: Position
) -> EpochSummary:
    """The rest of an epoch. Where it begins at the first batch, its random draws do too."""
    epoch, schedule, began = start.epoch, plan.schedule, time.perf_counter() - start.seconds
    if start.batch == 0:
        trainee.generator.manual_seed(derived_seed(plan.seed, "draws", epoch))
        trainee.sums.zero_()
    trainee.learning_rate.fill_(schedule.rate(epoch))
    parts = plan.order(epoch).to(trainee.device).split(plan.settings.batch_size)
    for batch in range(start.batch, plan.batches):
        trainee.epsilon.fill_(schedule.epsilon.for_batch(epoch, batch, plan.batches))
        step(parts[batch])
        if batch + 1 < plan.batches:
            observer.after_batch(Position(epoch, batch + 1, time.perf_counter() - began))
    loss, robust, images = trainee.sums.tolist()
    _check_finite(loss, epoch)
    rate, epsilon = schedule.rate(epoch), schedule.epsilon.end(epoch)
    return EpochSummary(epoch, epsilon, rate, loss / images, robust / images, time.perf_counter() - began)


def _make_step(trainee: Trainee, plan: Plan, phase: Phase) -> Callable[[Tensor], None]:
    strategy = Natural() if phase == "natural" else plan.strategy
    step = TrainingStep(trainee, strategy, plan.data, plan.settings, plan.world, phase == "full")
    obstacle = _obstacle_to_capture(trainee, strategy, plan.world)
    if plan.cuda_graph == "on" and obstacle:
        raise InvalidInput(f"cuda_graph is 'on', but {obstacle}", hint="set run.cuda_graph = 'auto'")
    if plan.cuda_graph == "off" or obstacle:
        return step
    return CapturedStep(step, plan.settings.batch_size, trainee.generator, plan.cuda_graph == "auto")


def _obstacle_to_capture(trainee: Trainee, strategy: Strategy, world: World) -> str:
    if trainee.device.type != "cuda":
        return f"the training runs on {trainee.device}"
    if not strategy.is_capturable:
        return f"{type(strategy).__name__} cannot be recorded"
    return "several processes share the training" if world.size > 1 else ""


def _check_finite(loss: float, epoch: int) -> None:
    if not math.isfinite(loss):
        raise RunError(
            f"the loss became {loss} in epoch {epoch}, so the weights are lost",
            hint="lower schedule.learning_rate.initial, or set optimiser.clip_norm",
        )


def derived_seed(seed: int, purpose: str, number: int = 0) -> int:
    """A seed of its own for each purpose and number, so that no two kinds of draws share a stream."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
