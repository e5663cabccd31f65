"""Attacks made of attacks: on defended models, knowing the defense or not, and one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, final

import torch
from torch import Generator, Tensor, nn

from patchcert.attacks.base import Attack, AttackResult, Findings, Task, judge
from patchcert.attacks.judging import check_batch, evaluate
from patchcert.bounds import precise_arithmetic
from patchcert.defenses import Defended
from patchcert.errors import InvalidInput
from patchcert.progress import Progress
from patchcert.threats import Threat


@final
@dataclass(frozen=True)
class TransferAttack:
    """Optimises and selects on the undefended model, then shows the result to the defended one.

    Every image is attacked, those that the defended model gets wrong too: an attack that does not know of the
    defense may well put them right. The inner attack runs to its end, since the surest patch transfers best.
    """

    attack: Attack

    def describe(self) -> dict[str, object]:
        """The kind of attack and its settings in types that JSON has, as they stand in evidence."""
        return {"kind": type(self).__name__, "attack": self.attack.describe()}

    @precise_arithmetic()
    def run(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        threat: Threat,
        generator: Generator | None = None,
        progress: Progress | None = None,
    ) -> AttackResult:
        """The defended model's answers to patches made for the undefended one."""
        defended = require_defended(model)
        check_batch(defended, images, labels)
        task = Task(images, labels, threat, generator or torch.Generator().manual_seed(0), progress)
        clean = evaluate(defended, images, labels, self.attack.batch_size).predictions
        found = self.attack.exhaustive().propose(defended.model, task)
        return judge(defended, task, found, clean, self.attack.batch_size)


@final
@dataclass(frozen=True)
class AdaptiveAttack(Attack):
    """Knows the defense: tries the undefended model's patches, then the inner attack on every surrogate.

    Surrogates have the defended model's logits, so the defense is in loss, gradient and selection alike.
    """

    attack: Attack

    @property
    def batch_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the inner attack."""
        return self.attack.batch_size

    def exhaustive(self) -> Self:
        """The same attack with an inner attack that goes on to the largest margin."""
        return type(self)(self.attack.exhaustive())

    @precise_arithmetic()
    def run_after(
        self,
        weak: AttackResult,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        threat: Threat,
        generator: Generator | None = None,
        progress: Progress | None = None,
    ) -> AttackResult:
        """Goes on from a `TransferAttack` on the same images: none that it broke withstands this attack."""
        defended = require_defended(model)
        check_batch(defended, images, labels)
        task = Task(images, labels, threat, generator or torch.Generator().manual_seed(0), progress)
        right = (weak.clean_predictions == labels).nonzero().flatten()
        stages = surrogate_stages(defended, self.attack)
        start = Findings(weak.adversarial, weak.placement, weak.steps).part(right)
        found = Findings.unchanged(images)
        if len(right):
            best = strongest(defended, stages, task.part(right), start, self.batch_size)
            found = found.updated(right, best)
        return judge(defended, task, found, weak.clean_predictions, self.batch_size)

    def propose(self, model: nn.Module, task: Task) -> Findings:
        """The strongest image for the defended model out of all stages."""
        defended = require_defended(model)
        stages = surrogate_stages(defended, self.attack)
        transferred = self.attack.exhaustive().propose(defended.model, task.stage(0, len(stages) + 1))
        return strongest(defended, stages, task, transferred, self.batch_size)


@final
@dataclass(frozen=True)
class AttackSeries(Attack):
    """Several attacks, each on the images that those before it did not break."""

    attacks: tuple[Attack, ...]

    def __post_init__(self) -> None:
        if not self.attacks:
            raise InvalidInput("a series of attacks needs at least one", hint="give a tuple of attacks")

    @property
    def batch_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The smallest of the attacks', which fits into memory with each of them."""
        return min(attack.batch_size for attack in self.attacks)

    def exhaustive(self) -> Self:
        """The same attacks, each of which goes on to the largest margin."""
        return type(self)(tuple(attack.exhaustive() for attack in self.attacks))

    def propose(self, model: nn.Module, task: Task) -> Findings:
        """The strongest image that any of the attacks met."""
        stages = [Stage(model, attack) for attack in self.attacks]
        return strongest(model, stages, task, Findings.unchanged(task.images), self.batch_size)


@final
@dataclass(frozen=True)
class AttackWithin(Attack):
    """An attack that keeps to a threat of its own, all members of which belong to the one it is asked about.

    That they do is checked as for any attack: by the framework, on what is found.
    """

    attack: Attack
    threat: Threat

    @property
    def batch_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the inner attack."""
        return self.attack.batch_size

    def exhaustive(self) -> Self:
        """The same attack with an inner attack that goes on to the largest margin."""
        return type(self)(self.attack.exhaustive(), self.threat)

    def propose(self, model: nn.Module, task: Task) -> Findings:
        """The strongest member of its own threat; it has no placement for the one asked about."""
        found = self.attack.propose(model, replace(task, threat=self.threat))
        return replace(found, placement=torch.full_like(found.placement, -1))


@final
@dataclass(frozen=True)
class Stage:
    """An attack and the model whose gradients it follows."""

    target: nn.Module
    attack: Attack


def surrogate_stages(defended: Defended, attack: Attack) -> list[Stage]:
    """The attack on each of the surrogates of a defense."""
    return [Stage(surrogate, attack) for surrogate in defended.surrogates()]


def strongest(
    model: nn.Module, stages: Sequence[Stage], task: Task, start: Findings, batch_size: int
) -> Findings:
    """The best of `start` and all stages by the margin on `model`; broken images are spared later stages."""
    best = start
    margins = evaluate(model, start.images, task.labels, batch_size).margins
    for number, stage in enumerate(stages):
        left = (margins <= 0).nonzero().flatten()
        if not len(left):
            break
        part = task.part(left).stage(number + 1, len(stages) + 1)
        found = stage.attack.propose(stage.target, part)
        reached = evaluate(model, found.images, part.labels, batch_size).margins
        best = best.updated(left, better(best.part(left), found, reached > margins[left]))
        margins = margins.index_copy(0, left, torch.maximum(margins[left], reached))
    return best


def better(old: Findings, new: Findings, improved: Tensor) -> Findings:
    """The new findings where they are an improvement, else the old; steps add up."""
    return Findings(
        torch.where(improved[:, None, None, None], new.images, old.images),
        torch.where(improved[:, None], new.placement, old.placement),
        old.steps + new.steps,
    )


def require_defended(model: nn.Module) -> Defended:
    """The model, which must stand behind a defense."""
    if not isinstance(model, Defended):
        raise InvalidInput(
            f"this attack is for a defended model, got {type(model).__name__}",
            hint="wrap it as Defended(defense, model), or attack it directly",
        )
    return model
