"""Attacks made of attacks: on defended models, knowing the defense or not, and one after the other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import ClassVar, Self, final

import torch

from patchcert.attacks.base import Attack, AttackedModel, AttackJob, Findings, Rows
from patchcert.attacks.climbing import Loss
from patchcert.attacks.patch import PatchAttack
from patchcert.attacks.sparse import SparseAttack
from patchcert.defenses import Defended
from patchcert.errors import InvalidInput, whole_number
from patchcert.tensors import Images, PerImage
from patchcert.threats import Patch, Patches, SparsePixels, Threat


class WrappedAttack(Attack):
    """An attack that runs another one, its setting `attack`, in its own way."""

    attack: Attack

    @property
    def batch_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the inner attack."""
        return self.attack.batch_size

    def looks(self, job: AttackJob) -> int:
        """Those of the inner attack, as far as they are known without the target."""
        return self.attack.looks(job)

    @property
    def needs_all_images(self) -> bool:
        """As the inner attack says."""
        return self.attack.needs_all_images

    def exhaustive(self) -> Self:
        """The same attack with an inner attack that continues after a success, to the largest margin."""
        return replace(self, attack=self.attack.exhaustive())  # pyright: ignore[reportArgumentType]


@final
@dataclass(frozen=True)
class TransferAttack(WrappedAttack):
    """Optimises and selects on the undefended model, then shows the result to the defended one.

    Every image is attacked, including those that the defended model gets wrong: an attack that does not know of the
    defense may well put them right. The inner attack does not stop early, since the surest patch transfers best.
    """

    spares_wrong_images: ClassVar[bool] = False

    attack: Attack

    def propose(self, target: AttackedModel, job: AttackJob) -> Findings:
        """The surest images for the undefended model."""
        undefended = AttackedModel.of(require_defended(target).model)
        return self.attack.exhaustive().propose(undefended, job)


@final
@dataclass(frozen=True)
class AdaptiveAttack(WrappedAttack):
    """Knows the defense: tries the undefended model's patches, then the inner attack on every surrogate.

    Surrogates have the defended model's logits, so the defense is in loss, gradient and selection alike.
    """

    attack: Attack

    def propose(self, target: AttackedModel, job: AttackJob) -> Findings:
        """The strongest image for the defended model out of all attempts."""
        attempts = surrogate_attempts(self.attack, target)
        first = 1 / (len(attempts) + 1)
        transferred = TransferAttack(self.attack).propose(target, job.between(0.0, first))
        return strongest(target, attempts, job.between(first, 1.0), transferred, self.batch_size)


@final
@dataclass(frozen=True)
class AdaptiveAfterTransfer(WrappedAttack):
    """The adaptive attack from exactly the patches of `TransferAttack(first)`: none that it broke withstands this one.

    `AdaptiveAttack` draws other random patches, since it transfers only to images that the defended model gets right.
    """

    spares_wrong_images: ClassVar[bool] = False

    first: Attack
    attack: Attack

    def propose(self, target: AttackedModel, job: AttackJob) -> Findings:
        """The strongest image for the defended model; those wrong by themselves are unchanged."""
        attempts = surrogate_attempts(self.attack, target)
        first = 1 / (len(attempts) + 1)
        transferred = TransferAttack(self.first).propose(target, job.between(0.0, first))
        clean = target.evaluate(job.images, job.labels, self.batch_size).predictions
        right = (clean == job.labels).nonzero().flatten()
        rest = job.part(right).between(first, 1.0)
        found = strongest(target, attempts, rest, transferred.part(right), self.batch_size)
        return Findings.unchanged(job.images).updated(right, found)


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

    @property
    def needs_all_images(self) -> bool:
        """Whether any of the attacks does."""
        return any(attack.needs_all_images for attack in self.attacks)

    def looks(self, job: AttackJob) -> int:
        """Those of all attacks."""
        return sum(attack.looks(job) for attack in self.attacks)

    def exhaustive(self) -> Self:
        """The same attacks, each of which continues after a success, to the largest margin."""
        return replace(self, attacks=tuple(attack.exhaustive() for attack in self.attacks))

    def propose(self, target: AttackedModel, job: AttackJob) -> Findings:
        """The strongest image that any of the attacks met."""
        attempts = [Attempt(attack, target) for attack in self.attacks]
        return strongest(target, attempts, job, Findings.unchanged(job.images), self.batch_size)


@final
@dataclass(frozen=True)
class AttackWithin(WrappedAttack):
    """An attack that keeps to a threat of its own, all members of which belong to the one it is asked about.

    That they do is checked as for any attack: by the framework, on what is found.
    """

    attack: Attack
    threat: Threat

    def propose(self, target: AttackedModel, job: AttackJob) -> Findings:
        """The strongest member of its own threat; it has no placement for the one asked about."""
        found = self.attack.propose(target, replace(job, threat=self.threat))
        return replace(found, placement=torch.full_like(found.placement, -1))

    def looks(self, job: AttackJob) -> int:
        """Those of the inner attack within its own threat."""
        return self.attack.looks(replace(job, threat=self.threat))


@final
@dataclass(frozen=True)
class PatchesInTurn(WrappedAttack):
    """Several patches, one after the other: each is attacked with while the others stay as they were found.

    After all of them have had a turn, each is moved and filled anew among the others, `rounds` times in all. What was
    found first may well be undone, so the strongest of all images counts.
    """

    attack: Attack
    rounds: int = 2

    def __post_init__(self) -> None:
        whole_number(1, "rounds", self.rounds)

    def propose(self, target: AttackedModel, job: AttackJob) -> Findings:
        """The strongest image met with no more patches than the threat has; it has no one placement."""
        threat = _patches_of(job)
        shown, best = _Shown(threat.patch, job.images, threat.count), Findings.unchanged(job.images)
        margins = target.evaluate(job.images, job.labels, self.batch_size).margins
        turns = self.rounds * threat.count
        for turn in range(turns):
            left = (margins <= 0).nonzero().flatten()
            if not len(left):
                break
            others = shown.without(turn % threat.count)
            part = replace(job.part(left).in_round(turn, turns), images=others[left], threat=threat.patch)
            found = self.attack.propose(target, part)
            shown.put(turn % threat.count, left, found)
            best, margins = _kept(target, part, found, left, best, margins, self.batch_size)
        return replace(best, placement=torch.full_like(best.placement, -1))

    def looks(self, job: AttackJob) -> int:
        """Those of the inner attack in each turn of each patch."""
        threat = _patches_of(job)
        return self.rounds * threat.count * self.attack.looks(replace(job, threat=threat.patch))


def _patches_of(job: AttackJob) -> Patches:
    """The threat, which must be several patches."""
    if not isinstance(job.threat, Patches):
        raise InvalidInput(
            f"PatchesInTurn attacks with Patches, got {job.threat}",
            hint="give the attack that it turns to itself",
        )
    return job.threat


@final
class _Shown:
    """What each of several patches shows on every image, where it lies."""

    def __init__(self, patch: Patch, images: Images, count: int) -> None:
        self.patch, self.clean = patch, images
        self.values = [images.clone() for _ in range(count)]
        self.covered = [torch.zeros_like(images[:, :1], dtype=torch.bool) for _ in range(count)]

    def without(self, number: int) -> Images:
        """The images with all patches but one; where they overlap the later one is seen."""
        images = self.clean
        for other, (covered, values) in enumerate(zip(self.covered, self.values, strict=True)):
            images = torch.where(covered, values, images) if other != number else images
        return images

    def put(self, number: int, rows: PerImage, found: Findings) -> None:
        """The patch is what was found for these images; nothing where no placement was."""
        covered = self.patch.masks(found.images, found.placement.clamp(min=0))[:, None]
        self.covered[number][rows] = covered & (found.placement[:, :1, None, None] >= 0)
        self.values[number][rows] = found.images


@final
@dataclass(frozen=True)
class Attempt:
    """An attack and the target through which it looks at the model."""

    attack: Attack
    target: AttackedModel


def strongest(
    target: AttackedModel, attempts: Sequence[Attempt], job: AttackJob, start: Findings, batch_size: int
) -> Findings:
    """The best of `start` and all attempts by the margin on `target`; broken images are spared later attempts."""
    best = start
    margins = target.evaluate(start.images, job.labels, batch_size).margins
    looks = list(accumulate((attempt.attack.looks(job) for attempt in attempts), initial=0))
    for attempt, (before, after) in zip(attempts, pairwise(looks), strict=True):
        left = (margins <= 0).nonzero().flatten()
        if not len(left):
            break
        part = job.part(left).between(before / looks[-1], after / looks[-1])
        found = attempt.attack.propose(attempt.target, part)
        best, margins = _kept(target, part, found, left, best, margins, batch_size)
    return best


def _kept(
    target: AttackedModel,
    part: AttackJob,
    found: Findings,
    left: Rows,
    best: Findings,
    margins: PerImage,
    batch_size: int,
) -> tuple[Findings, PerImage]:
    """The best findings and their margins, now that something was found for the rows that are left."""
    reached = target.evaluate(found.images, part.labels, batch_size).margins
    best = best.updated(left, better(best.part(left), found, reached > margins[left]))
    return best, margins.index_copy(0, left, torch.maximum(margins[left], reached))


def better(old: Findings, new: Findings, improved: PerImage) -> Findings:
    """The new findings where they are an improvement, else the old; steps add up."""
    return Findings(
        torch.where(improved[:, None, None, None], new.images, old.images),
        torch.where(improved[:, None], new.placement, old.placement),
        old.steps + new.steps,
    )


def surrogate_attempts(attack: Attack, target: AttackedModel) -> list[Attempt]:
    """The attack on each of the surrogates of the target's defense."""
    surrogates = require_defended(target).surrogates()
    return [Attempt(attack, AttackedModel.of(surrogate)) for surrogate in surrogates]


def require_defended(target: AttackedModel) -> Defended:
    """The model, which must stand behind a defense."""
    model = target.judge
    if not isinstance(model, Defended):
        raise InvalidInput(
            f"this attack is for a defended model, got {type(model).__name__}",
            hint="wrap it as Defended(defense, model), or attack it directly",
        )
    return model


def strongest_attack(
    threat: Patch | Patches | SparsePixels,
    steps: int = 150,
    restarts: int = 20,
    batch_size: int = 1024,
    sweep_placements: int | None = None,
) -> Attack:
    """For patches, a sweep of all placements with either loss, then restarts at the weakest ones; several in turn.

    Of more than `sweep_placements` a sweep takes that many, spread evenly.

    For sparse pixels, the pixels of largest gain with either loss, then the sweeps of the largest square patch
    that has no more pixels.
    """
    losses: tuple[Loss, ...] = ("margin", "cross-entropy")
    sweeps = tuple(
        PatchAttack(
            steps,
            0.05,
            restarts,
            loss,
            "sweep",
            sweep_steps,
            sweep_placements=sweep_placements,
            batch_size=batch_size,
        )
        for loss, sweep_steps in zip(losses, (20, 5), strict=True)
    )
    if isinstance(threat, Patch):
        return AttackSeries(sweeps)
    if isinstance(threat, Patches):
        return PatchesInTurn(AttackSeries(sweeps))
    climbs = tuple(
        SparseAttack(steps, restarts=restarts, loss=loss, batch_size=batch_size) for loss in losses
    )
    if threat.unit != "pixel":
        return AttackSeries(climbs)
    square = Patch(math.isqrt(threat.pixels))
    return AttackSeries((*climbs, *(AttackWithin(sweep, square) for sweep in sweeps)))
