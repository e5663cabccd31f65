"""The ImageNet experiment of Chiang et al. (2020): two defenses against patches in the corners."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, final

from torch import Generator, Tensor, nn

from patchcert.attacks import AttackedModel, AttackJob, AttackResult, FastCopy, Findings, PatchAttack
from patchcert.attacks.base import judged, seeded
from patchcert.attacks.composite import Attempt, strongest
from patchcert.bounds import precise_arithmetic
from patchcert.defenses import Defended, Defense, DigitalWatermarking, LocalGradientSmoothing
from patchcert.threats import Patch

DefenseName = Literal["lgs", "dw"]
Tell = Callable[[str], None]

DEFENSES: tuple[DefenseName, ...] = ("lgs", "dw")
CORNER_ATTACK = PatchAttack(restarts=4, batch_size=64, check_every=10)


@final
@dataclass(frozen=True, eq=False)
class CornerRow:
    """One cell of the table: a defense, a patch and a kind of attack, with the outcome image by image."""

    defense: DefenseName
    patch: int
    adaptive: bool
    result: AttackResult
    undefended: Tensor
    """The undefended model's predictions on the clean images."""
    undefended_after: Tensor
    """The undefended model's predictions on the attacked images."""


@final
@dataclass(frozen=True)
class CornerExperiment:
    """Weak and adaptive attacks with patches in the four corners.

    The weak attack does not know of the defense: it runs to its end on the undefended model, and its surest
    patch is shown to each defense. The adaptive one starts from these patches and climbs on every surrogate of
    the defense, last on the first of them once more by the margin; an image is spared once it is broken.

    Ascents follow a fast copy of the network, in bfloat16 on a GPU. Whatever counts is said by the network itself in
    float32, `judged_at_once` images at a time: clean predictions, successes before an image is given up, and
    the results. The default attack visits every corner once in each of its stages, with 150 steps of 0.05.
    """

    attack: PatchAttack = CORNER_ATTACK
    judged_at_once: int = 64
    reduced: bool | None = None
    """Whether the fast copy computes in bfloat16; None for a GPU only."""

    def run(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        patch: int,
        defenses: tuple[DefenseName, ...] = DEFENSES,
        generator: Generator | None = None,
        tell: Tell | None = None,
    ) -> tuple[CornerRow, ...]:
        """All cells of one patch size."""
        job = AttackJob(images, labels, Patch(patch, placements="corners"), generator or seeded())
        transferred = self.transferred(model, job, tell)
        return tuple(row for name in defenses for row in self.rows(name, model, job, transferred, tell))

    @precise_arithmetic()
    def transferred(self, model: nn.Module, job: AttackJob, tell: Tell | None = None) -> Findings:
        """The surest patch for the undefended model, in one of the corners.

        `tell` hears before every pass of the fast copy what it is for, and may raise to end the attack.
        """
        AttackedModel.of(model).check(job.images, job.labels)
        copy = self._copy(model, "weak attack", tell)
        attack = replace(self.attack.exhaustive(), check_every=max(self.attack.steps, 1))
        return attack.propose(AttackedModel(copy, model, self.judged_at_once), job)

    @precise_arithmetic()
    def rows(
        self,
        name: DefenseName,
        model: nn.Module,
        job: AttackJob,
        transferred: Findings,
        tell: Tell | None = None,
    ) -> tuple[CornerRow, CornerRow]:
        """The weak and the adaptive attack on one defense, from what was found on the undefended model."""
        patch, at_once = _side(job), self.judged_at_once
        defended = Defended(imagenet_defense(name, model, patch), model)
        target = AttackedModel(defended, defended, at_once)
        clean = target.evaluate(job.images, job.labels, at_once).predictions
        weak = judged(target, job, transferred, clean, at_once)
        copy = self._copy(model, f"adaptive attack on {name}", tell)
        imitated = Defended(imagenet_defense(name, copy, patch), copy)
        found = self._adapted(target, imitated, job, transferred, clean)
        adaptive = judged(target, job, found, clean, at_once)
        return self._row(name, model, job, weak, False), self._row(name, model, job, adaptive, True)

    def attacks(self, defended: Defended) -> list[tuple[PatchAttack, nn.Module]]:
        """What the adaptive attack tries, and on which surrogate: the most passable one first, and last again."""
        first, *rest = reversed(defended.surrogates())
        by_margin = replace(self.attack, loss="margin")
        return [*((self.attack, each) for each in (first, *rest)), (by_margin, first)]

    def _copy(self, model: nn.Module, purpose: str, tell: Tell | None) -> FastCopy:
        """A fast copy of the network that announces the purpose of each of its passes."""
        copy = FastCopy(model, self.reduced)
        if tell is not None:
            copy.register_forward_pre_hook(lambda module, inputs: tell(purpose))
        return copy

    def _adapted(
        self, target: AttackedModel, imitated: Defended, job: AttackJob, transferred: Findings, clean: Tensor
    ) -> Findings:
        """The strongest images for the defended model; those wrong by themselves stay unchanged."""
        right = (clean == job.labels).nonzero().flatten()
        attempts = [
            Attempt(attack, replace(target, surrogate=surrogate))
            for attack, surrogate in self.attacks(imitated)
        ]
        found = strongest(target, attempts, job.part(right), transferred.part(right), self.judged_at_once)
        return Findings.unchanged(job.images).updated(right, found)

    def _row(
        self, name: DefenseName, model: nn.Module, job: AttackJob, result: AttackResult, adaptive: bool
    ) -> CornerRow:
        before, after = (
            AttackedModel.of(model).evaluate(images, job.labels, self.judged_at_once).predictions
            for images in (job.images, result.adversarial)
        )
        return CornerRow(name, _side(job), adaptive, result, before, after)


def imagenet_defense(name: DefenseName, model: nn.Module, patch: int) -> Defense:
    """The defense with its settings for ImageNet; watermarking is given the size of the patch."""
    if name == "lgs":
        return LocalGradientSmoothing.imagenet()
    return DigitalWatermarking.imagenet(model, patch).to(next(model.parameters()).device)


def _side(job: AttackJob) -> int:
    assert isinstance(job.threat, Patch)
    return job.threat.height
