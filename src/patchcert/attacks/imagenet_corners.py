"""The ImageNet experiment of Chiang et al. (2020): two defenses against patches in the corners."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, final

from torch import Generator, Tensor, nn

from patchcert.attacks.base import AttackResult, Findings, Task, judge
from patchcert.attacks.composite import Stage, strongest
from patchcert.attacks.judging import check_batch, evaluate
from patchcert.attacks.patch import PatchAttack
from patchcert.attacks.twin import InParts, Twin, TwinAttack
from patchcert.bounds import precise_arithmetic
from patchcert.data.files import data_folders
from patchcert.defenses import Defended, Defense, DigitalWatermarking, LocalGradientSmoothing
from patchcert.errors import DataError
from patchcert.threats import Patch

DefenseName = Literal["lgs", "dw"]
Tell = Callable[[str], None]

PATCHES = (42, 52, 60)
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

    def summary(self) -> dict[str, str | int | float | bool]:
        """Accuracies over all images and over those that the undefended model gets right."""
        right = self.undefended == self.result.labels
        withstood = ~self.result.succeeded
        return {
            "defense": self.defense,
            "patch": self.patch,
            "adaptive": self.adaptive,
            "images": len(right),
            "undefended_accuracy": _share(right),
            "undefended_accuracy_after": _share(self.undefended_after == self.result.labels),
            "clean_accuracy": self.result.clean_accuracy,
            "accuracy": self.result.accuracy,
            "accuracy_of_initially_correct": _share(withstood[right]),
        }


@final
@dataclass(frozen=True)
class CornerExperiment:
    """Weak and adaptive attacks with patches in the four corners.

    The weak attack does not know of the defense: it runs to its end on the undefended model, and its surest
    patch is shown to each defense. The adaptive one starts from these patches and climbs on every surrogate of
    the defense, last on the first of them once more by the margin; an image is spared once it is broken.

    Ascents go by a twin of the network, in bfloat16 on a GPU. Whatever counts is said by the network itself in
    float32, `judged_at_once` images at a time: clean predictions, successes before an image is given up, and
    the results. The default attack visits every corner once in each of its stages, with 150 steps of 0.05.
    """

    attack: PatchAttack = CORNER_ATTACK
    judged_at_once: int = 64
    reduced: bool | None = None
    """Whether the twin computes in bfloat16; None for a GPU only."""

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
        threat = Patch(patch, placements="corners")
        task = Task(images, labels, threat, generator or Generator().manual_seed(0))
        transferred = self.transferred(model, task, tell)
        return tuple(row for name in defenses for row in self.rows(name, model, task, transferred, tell))

    @precise_arithmetic()
    def transferred(self, model: nn.Module, task: Task, tell: Tell | None = None) -> Findings:
        """The surest patch for the undefended model, in one corner or other.

        `tell` hears before every pass of the twin what it is for, and may raise to end the attack.
        """
        check_batch(model, task.images, task.labels)
        twin = Observed(Twin(model, self.reduced), "weak attack", tell or _silence)
        attack = replace(self.attack.exhaustive(), check_every=max(self.attack.steps, 1))
        return TwinAttack(attack, twin).propose(InParts(model, self.judged_at_once), task)

    @precise_arithmetic()
    def rows(
        self,
        name: DefenseName,
        model: nn.Module,
        task: Task,
        transferred: Findings,
        tell: Tell | None = None,
    ) -> tuple[CornerRow, CornerRow]:
        """The weak and the adaptive attack on one defense, from what was found on the undefended model."""
        patch = _side(task)
        defended = Defended(imagenet_defense(name, model, patch), model)
        clean = evaluate(defended, task.images, task.labels, self.judged_at_once).predictions
        weak = judge(defended, task, transferred, clean, self.judged_at_once)
        twin = Observed(Twin(model, self.reduced), f"adaptive attack on {name}", tell or _silence)
        rehearsed = Defended(imagenet_defense(name, twin, patch), twin)
        found = self._adapted(defended, rehearsed, task, transferred, clean)
        adaptive = judge(defended, task, found, clean, self.judged_at_once)
        return self._row(name, model, task, weak, False), self._row(name, model, task, adaptive, True)

    def attacks(self, rehearsed: Defended) -> list[TwinAttack]:
        """The adaptive attack's stages: the most passable surrogate first, which breaks most, and last again."""
        first, *rest = reversed(rehearsed.surrogates())
        by_margin = replace(self.attack, loss="margin")
        return [TwinAttack(self.attack, each) for each in (first, *rest)] + [TwinAttack(by_margin, first)]

    def _adapted(
        self, defended: Defended, rehearsed: Defended, task: Task, transferred: Findings, clean: Tensor
    ) -> Findings:
        """The strongest images for the defended model; those wrong by themselves stay unchanged."""
        right = (clean == task.labels).nonzero().flatten()
        judged = InParts(defended, self.judged_at_once)
        stages = [Stage(judged, attack) for attack in self.attacks(rehearsed)]
        found = strongest(judged, stages, task.part(right), transferred.part(right), self.judged_at_once)
        return Findings.unchanged(task.images).updated(right, found)

    def _row(
        self, name: DefenseName, model: nn.Module, task: Task, result: AttackResult, adaptive: bool
    ) -> CornerRow:
        before, after = (
            evaluate(model, images, task.labels, self.judged_at_once).predictions
            for images in (task.images, result.adversarial)
        )
        return CornerRow(name, _side(task), adaptive, result, before, after)


@final
class Observed(nn.Module):
    """The same model, of each of whose passes somebody is told."""

    def __init__(self, model: nn.Module, words: str, tell: Tell) -> None:
        super().__init__()
        self.model, self.words, self.tell = model, words, tell
        self.train(model.training)

    def forward(self, images: Tensor) -> Tensor:
        """The logits of the model."""
        self.tell(self.words)
        return self.model(images)


def imagenet_defense(name: DefenseName, model: nn.Module, patch: int) -> Defense:
    """The defense with its settings for ImageNet; watermarking is told the size of the patch."""
    if name == "lgs":
        return LocalGradientSmoothing.imagenet()
    return DigitalWatermarking.imagenet(model, patch).to(next(model.parameters()).device)


def find_imagenet(data_dir: Path | None = None) -> Path:
    """The first folder with ImageNet's labels.csv, among those where data are looked for."""
    folders = [root / inner for root in data_folders(data_dir) for inner in ("imagenet", ".")]
    for folder in folders:
        if (folder / "labels.csv").is_file():
            return folder.resolve()
    looked = ", ".join(str(root) for root in data_folders(data_dir))
    raise DataError(
        f"no ImageNet folder with labels.csv found; looked in {looked}",
        hint="put images/, labels.csv and the networks' .safetensors files into DIR/imagenet "
        "and pass --data-dir DIR or set PATCHCERT_DATA=DIR",
    )


def _side(task: Task) -> int:
    assert isinstance(task.threat, Patch)
    return task.threat.height


def _silence(words: str) -> None:
    """For nobody who wants to hear."""


def _share(flags: Tensor) -> float:
    return float(flags.double().mean()) if len(flags) else 0.0
