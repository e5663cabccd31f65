"""Attacks made of attacks: on defended models, knowing the defense or not, and one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, final

import torch
from torch import Generator, Tensor, nn

from patchcert.attacks.base import Attack, AttackJob, AttackResult, Findings, judged
from patchcert.attacks.views import PerImage, Predictor, Target
from patchcert.bounds import precise_arithmetic
from patchcert.defenses import Defended
from patchcert.errors import InvalidInput
from patchcert.progress import Progress
from patchcert.threats import Threat


@dataclass(frozen=True)
class WrappedAttack(Attack):
    """An attack that runs another one in its own way."""

    attack: Attack

    @property
    def batch_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the inner attack."""
        return self.attack.batch_size

    def exhaustive(self) -> Self:
        """The same attack with an inner attack that continues after a success, to the largest margin."""
        return replace(self, attack=self.attack.exhaustive())


@final
@dataclass(frozen=True)
class TransferAttack(WrappedAttack):
    """Optimises and selects on the undefended model, then shows the result to the defended one.

    Every image is attacked, including those that the defended model gets wrong: an attack that does not know of the
    defense may well put them right. The inner attack does not stop early, since the surest patch transfers best.
    """

    spares_wrong_images: ClassVar[bool] = False

    def propose(self, target: Target, job: AttackJob) -> Findings:
        """The surest images for the undefended model."""
        undefended = Target.of(require_defended(target.judge).model)
        return self.attack.exhaustive().propose(undefended, job)


@final
@dataclass(frozen=True)
class AdaptiveAttack(WrappedAttack):
    """Knows the defense: tries the undefended model's patches, then the inner attack on every surrogate.

    Surrogates have the defended model's logits, so the defense is in loss, gradient and selection alike.
    """

    @precise_arithmetic()
    def run_after(
        self,
        weak: AttackResult,
        model: nn.Module | Predictor,
        images: Tensor,
        labels: Tensor,
        threat: Threat,
        generator: Generator | None = None,
        progress: Progress | None = None,
    ) -> AttackResult:
        """Resumes from a `TransferAttack` on the same images: none that it broke withstands this attack."""
        target = Target.of(model)
        target.check(images, labels)
        job = AttackJob.of(images, labels, threat, generator, progress)
        right = (weak.clean_predictions == labels).nonzero().flatten()
        start = Findings(weak.adversarial, weak.placement, weak.steps).part(right)
        found = Findings.unchanged(images)
        if len(right):
            best = strongest(target, self._attempts(target), job.part(right), start, self.batch_size)
            found = found.updated(right, best)
        return judged(target, job, found, weak.clean_predictions, self.batch_size)

    def propose(self, target: Target, job: AttackJob) -> Findings:
        """The strongest image for the defended model out of all attempts."""
        attempts = self._attempts(target)
        first = job.in_round(0, len(attempts) + 1)
        transferred = TransferAttack(self.attack).propose(target, first)
        return strongest(target, attempts, job, transferred, self.batch_size)

    def _attempts(self, target: Target) -> "list[Attempt]":
        """The inner attack on each of the surrogates of the defense."""
        surrogates = require_defended(target.judge).surrogates()
        return [Attempt(self.attack, Target.of(surrogate)) for surrogate in surrogates]


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
        """The same attacks, each of which continues after a success, to the largest margin."""
        return replace(self, attacks=tuple(attack.exhaustive() for attack in self.attacks))

    def propose(self, target: Target, job: AttackJob) -> Findings:
        """The strongest image that any of the attacks met."""
        attempts = [Attempt(attack, target) for attack in self.attacks]
        return strongest(target, attempts, job, Findings.unchanged(job.images), self.batch_size)


@final
@dataclass(frozen=True)
class AttackWithin(WrappedAttack):
    """An attack that keeps to a threat of its own, all members of which belong to the one it is asked about.

    That they do is checked as for any attack: by the framework, on what is found.
    """

    threat: Threat

    def propose(self, target: Target, job: AttackJob) -> Findings:
        """The strongest member of its own threat; it has no placement for the one asked about."""
        found = self.attack.propose(target, replace(job, threat=self.threat))
        return replace(found, placement=torch.full_like(found.placement, -1))


@final
@dataclass(frozen=True)
class Attempt:
    """An attack and the target through which it looks at the model."""

    attack: Attack
    target: Target


def strongest(
    target: Target, attempts: Sequence[Attempt], job: AttackJob, start: Findings, batch_size: int
) -> Findings:
    """The best of `start` and all attempts by the margin on `target`; broken images are spared later attempts."""
    best = start
    margins = target.evaluate(start.images, job.labels, batch_size).margins
    for number, attempt in enumerate(attempts):
        left = (margins <= 0).nonzero().flatten()
        if not len(left):
            break
        part = job.part(left).in_round(number + 1, len(attempts) + 1)
        found = attempt.attack.propose(attempt.target, part)
        reached = target.evaluate(found.images, part.labels, batch_size).margins
        best = best.updated(left, better(best.part(left), found, reached > margins[left]))
        margins = margins.index_copy(0, left, torch.maximum(margins[left], reached))
    return best


def better(old: Findings, new: Findings, improved: PerImage) -> Findings:
    """The new findings where they are an improvement, else the old; steps add up."""
    return Findings(
        torch.where(improved[:, None, None, None], new.images, old.images),
        torch.where(improved[:, None], new.placement, old.placement),
        old.steps + new.steps,
    )


def require_defended(model: object) -> Defended:
    """The model, which must stand behind a defense."""
    if not isinstance(model, Defended):
        raise InvalidInput(
            f"this attack is for a defended model, got {type(model).__name__}",
            hint="wrap it as Defended(defense, model), or attack it directly",
        )
    return model
