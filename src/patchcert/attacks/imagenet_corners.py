"""The ImageNet experiment of Chiang et al. (2020): two defenses against patches in the corners."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import torch
from torch import Generator, Tensor, nn

from patchcert.attacks.base import AttackResult, Findings, Progress, Task, judge
from patchcert.attacks.composite import strongest, surrogate_stages
from patchcert.attacks.judging import check_batch, evaluate
from patchcert.attacks.patch import PatchAttack
from patchcert.data.files import data_folders
from patchcert.defenses import Defended, Defense, DigitalWatermarking, LocalGradientSmoothing
from patchcert.errors import DataError
from patchcert.threats import Patch

DefenseName = Literal["lgs", "dw"]

PATCHES = (42, 52, 60)
DEFENSES: tuple[DefenseName, ...] = ("lgs", "dw")


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
            "clean_accuracy": self.result.clean_accuracy,
            "accuracy": self.result.accuracy,
            "accuracy_of_initially_correct": _share(withstood[right]),
        }


def corner_experiment(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    attack: PatchAttack | None = None,
    patches: Sequence[int] = PATCHES,
    defenses: Sequence[DefenseName] = DEFENSES,
    generator: Generator | None = None,
    progress: Progress | None = None,
) -> Iterator[CornerRow]:
    """Weak and adaptive attacks in the four corners, cell by cell as they are done.

    The default attack visits every corner once with 150 steps of 0.05. The weak attack does not depend on the
    defense, so its patches are made once per size; the adaptive one starts from them.
    """
    check_batch(model, images, labels)
    attack = attack or PatchAttack(restarts=4, batch_size=64)
    generator = generator or torch.Generator().manual_seed(0)
    undefended = evaluate(model, images, labels, attack.batch_size).predictions
    for patch in patches:
        task = Task(images, labels, Patch(patch, placements="corners"), generator, progress)
        transferred = attack.exhaustive().propose(model, task)
        for name in defenses:
            defended = Defended(imagenet_defense(name, model, patch), model)
            clean = evaluate(defended, images, labels, attack.batch_size).predictions
            weak = judge(defended, task, transferred, clean, attack.batch_size)
            yield CornerRow(name, patch, False, weak, undefended)
            found = _adapted(attack, defended, task, transferred, clean)
            result = judge(defended, task, found, clean, attack.batch_size)
            yield CornerRow(name, patch, True, result, undefended)


def _adapted(
    attack: PatchAttack, defended: Defended, task: Task, transferred: Findings, clean: Tensor
) -> Findings:
    """The strongest images for the defended model; those wrong by themselves stay unchanged."""
    right = (clean == task.labels).nonzero().flatten()
    stages = surrogate_stages(defended, attack)
    found = strongest(defended, stages, task.part(right), transferred.part(right), attack.batch_size)
    return Findings.unchanged(task.images).updated(right, found)


def imagenet_defense(name: DefenseName, model: nn.Module, patch: int) -> Defense:
    """The defense with its settings for ImageNet; watermarking is told the size of the patch."""
    if name == "lgs":
        return LocalGradientSmoothing.imagenet()
    return DigitalWatermarking.imagenet(model, patch).to(next(model.parameters()).device)


def find_imagenet(data_dir: Path | None = None) -> Path:
    """The first folder with ImageNet's labels.csv: in `data_dir`, $PATCHCERT_DATA or the user's cache."""
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


def _share(flags: Tensor) -> float:
    return float(flags.double().mean()) if len(flags) else 0.0
