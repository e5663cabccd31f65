"""The training loop: one short function for every strategy."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from patchcert.errors import InvalidInput, RunError
from patchcert.train.schedules import Phase
from patchcert.train.step import CapturedStep, Plan, Rows, Trainee, TrainingStep
from patchcert.train.strategy import Objective, derived_seed, natural_objective


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
    """Hears of every batch and epoch; may save the state, and may end the training by raising."""

    def after_batch(self, position: Position) -> None:
        """Called between two batches, when the state is whole; `position` is what comes next."""
        ...

    def after_epoch(self, summary: EpochSummary) -> None:
        """Called once at the end of every epoch, before `after_batch` with the start of the next."""
        ...


def train(trainee: Trainee, plan: Plan, observer: Observer, start: Position | None = None) -> None:
    """Carry out the plan from a position on; the trainee must be as it was at that position."""
    position, epsilon = start or Position(), plan.spec.schedule.epsilon
    step, stage = None, None
    for epoch in range(position.epoch, plan.spec.schedule.epochs):
        if epoch > position.epoch:
            position = Position(epoch)
        phase, objective = epsilon.phase(epoch), trainee.objective.at(epoch / plan.spec.schedule.epochs)
        if step is None or stage != (phase, id(objective)):
            stage = (phase, id(objective))
            step = _make_step(trainee, plan, objective, phase)
        summary = _train_epoch(trainee, plan, step, observer, position)
        observer.after_epoch(summary)
        observer.after_batch(Position(epoch + 1))


def _train_epoch(
    trainee: Trainee, plan: Plan, step: Callable[[Rows], None], observer: Observer, start: Position
) -> EpochSummary:
    """The rest of an epoch. Where it begins at the first batch, its random draws do too."""
    epoch, schedule, began = start.epoch, plan.spec.schedule, time.perf_counter() - start.seconds
    if start.batch == 0:
        trainee.generator.manual_seed(derived_seed(plan.spec.seed, "draws", epoch))
        trainee.sums.zero_()
    parts = plan.order(epoch).to(trainee.device).split(plan.spec.optimiser.batch_size)
    for batch in range(start.batch, plan.batches):
        trainee.epsilon.fill_(schedule.epsilon.for_batch(epoch, batch, plan.batches))
        trainee.learning_rate.fill_(schedule.rate(epoch, batch, plan.batches))
        trainee.average_share.fill_(plan.average_share(epoch, batch))
        step(parts[batch])
        if batch + 1 < plan.batches:
            observer.after_batch(Position(epoch, batch + 1, time.perf_counter() - began))
    loss, robust, images = trainee.sums.tolist()
    _check_finite(loss, epoch)
    rate, epsilon = schedule.rate(epoch, plan.batches - 1, plan.batches), schedule.epsilon.end(epoch)
    return EpochSummary(epoch, epsilon, rate, loss / images, robust / images, time.perf_counter() - began)


def _make_step(trainee: Trainee, plan: Plan, objective: Objective, phase: Phase) -> Callable[[Rows], None]:
    if phase == "natural":
        objective = natural_objective(objective.network)
    step = TrainingStep(trainee, plan, objective, phase)
    wanted, obstacle = plan.spec.run.cuda_graph, _obstacle_to_capture(trainee, plan)
    if wanted == "on" and obstacle:
        raise InvalidInput(f"cuda_graph is 'on', but {obstacle}", hint="set run.cuda_graph = 'auto'")
    if wanted == "off" or obstacle:
        return step
    return CapturedStep(step, plan.spec.optimiser.batch_size, trainee.generator, wanted == "auto")


def _obstacle_to_capture(trainee: Trainee, plan: Plan) -> str:
    if trainee.device.type != "cuda":
        return f"the training runs on {trainee.device}"
    return "several processes share the training" if plan.world.size > 1 else ""


def _check_finite(loss: float, epoch: int) -> None:
    if not math.isfinite(loss):
        raise RunError(
            f"the loss became {loss} in epoch {epoch}, so the weights are lost",
            hint="lower schedule.learning_rate.initial, or set optimiser.clip_norm",
        )
