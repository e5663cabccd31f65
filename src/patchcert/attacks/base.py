"""What all attacks share: who is attacked, what comes back, and that the framework has the last word."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from patchcert.attacks.judging import check_batch, evaluate, require_contained
from patchcert.bounds import precise_arithmetic
from patchcert.progress import Progress
from patchcert.threats import Threat


@final
@dataclass(frozen=True, eq=False)
class Task:
    """What is to be attacked, with what, and where the random numbers come from."""

    images: Tensor
    labels: Tensor
    threat: Threat
    generator: Generator
    progress: Progress | None = None

    def part(self, index: Tensor) -> "Task":
        """The same for some of the images."""
        return replace(self, images=self.images[index], labels=self.labels[index])

    def stage(self, number: int, stages: int) -> "Task":
        """The same with its progress told as that of one stage of several."""
        tell = self.progress
        if tell is None:
            return self
        return replace(self, progress=lambda done, total: tell(number * total + done, stages * total))

    def tell(self, done: int, total: int) -> None:
        """Report progress to whoever wants it."""
        if self.progress is not None:
            self.progress(done, total)


@final
@dataclass(frozen=True, eq=False)
class Findings:
    """What a search proposes: for every image the strongest one it met, be it good enough or not."""

    images: Tensor
    placement: Tensor
    """Top and left (n, 2); -1 where there is no one placement."""
    steps: Tensor
    """Gradient steps spent (n,)."""

    @classmethod
    def unchanged(cls, images: Tensor) -> "Findings":
        """The findings of an attack that does nothing."""
        nowhere = torch.full((len(images), 2), -1, dtype=torch.long, device=images.device)
        return cls(images.clone(), nowhere, nowhere.new_zeros(len(images)))

    def part(self, index: Tensor) -> "Findings":
        """The findings for some of the images."""
        return Findings(self.images[index], self.placement[index], self.steps[index])

    def updated(self, index: Tensor, part: "Findings") -> "Findings":
        """The findings with those of some images replaced."""
        return Findings(
            self.images.index_copy(0, index, part.images.detach()),
            self.placement.index_copy(0, index, part.placement),
            self.steps.index_copy(0, index, part.steps),
        )


@final
@dataclass(frozen=True, eq=False, repr=False)
class AttackResult:
    """The outcome of an attack, image by image, as the framework found it by asking the model itself."""

    adversarial: Tensor
    """The broken image where the attack succeeded, else the strongest image it met."""
    succeeded: Tensor
    """Where the prediction on `adversarial` is not the label; also images that are wrong by themselves."""
    placement: Tensor
    """Top and left of the patch (n, 2); -1 where the image is unchanged or the threat has no placements."""
    predictions: Tensor
    """The classes predicted for `adversarial`."""
    clean_predictions: Tensor
    labels: Tensor
    margins: Tensor
    """By how much the best wrong class leads the label on `adversarial`."""
    steps: Tensor
    """Gradient steps spent on the image, over all restarts."""

    def __repr__(self) -> str:
        right = int((self.clean_predictions == self.labels).sum())
        return f"AttackResult({len(self.labels)} images, {right} right, {int((~self.succeeded).sum())} withstood)"

    @property
    def accuracy(self) -> float:
        """The share of images that withstood the attack: an upper bound of the true robust accuracy."""
        return float((~self.succeeded).double().mean())

    @property
    def clean_accuracy(self) -> float:
        """The share of images that are right without any attack."""
        return float((self.clean_predictions == self.labels).double().mean())


    def columns(self, index: Tensor) -> dict[str, NDArray[np.generic]]:
        """One row per image as in evidence files; `index` gives the images' positions in their data set."""
        columns = {
            "index": index,
            "label": self.labels,
            "prediction": self.clean_predictions,
            "prediction_after": self.predictions,
            "succeeded": self.succeeded,
            "top": self.placement[:, 0],
            "left": self.placement[:, 1],
            "margin": self.margins,
            "steps": self.steps,
        }
        return {name: column.cpu().numpy() for name, column in columns.items()}


class Attack(ABC):
    """Looks for members of a threat that a model gets wrong.

    A subclass proposes images; the framework spares those that are wrong by themselves, checks that every
    proposal lies in the threat, and decides success by asking the model again.
    """

    batch_size: int

    @final
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
        """Attacks every image that is classified rightly. Without a generator, one that starts at seed 0."""
        check_batch(model, images, labels)
        task = Task(images, labels, threat, generator or torch.Generator().manual_seed(0), progress)
        clean = evaluate(model, images, labels, self.batch_size).predictions
        right = (clean == labels).nonzero().flatten()
        found = Findings.unchanged(images)
        if len(right):
            found = found.updated(right, self.propose(model, task.part(right)))
        return judge(model, task, found, clean, self.batch_size)

    @abstractmethod
    def propose(self, model: nn.Module, task: Task) -> Findings:
        """The strongest member found for every image, be the model right about it or wrong."""

    @abstractmethod
    def exhaustive(self) -> Self:
        """The same attack, which does not stop at the first success but goes on to the largest margin."""


    def describe(self) -> dict[str, Any]:
        """The kind of attack and its settings in types that JSON has, as they stand in evidence."""
        settings = {name: _described(value) for name, value in vars(self).items() if value is not None}
        return {"kind": type(self).__name__, **settings}


def _described(value: object) -> object:
    """A setting in types that JSON has: functions by their name, other objects as they print."""
    if isinstance(value, Attack):
        return value.describe()
    if isinstance(value, tuple | list):
        return [_described(each) for each in value]
    if isinstance(value, str | int | float):
        return value
    return getattr(value, "__name__", str(value))


def judge(
    model: nn.Module, task: Task, found: Findings, clean_predictions: Tensor, batch_size: int
) -> AttackResult:
    """The result that follows from the images found, all of which must lie in the threat."""
    require_contained(task.threat, task.images, found.images)
    verdict = evaluate(model, found.images, task.labels, batch_size)
    return AttackResult(
        adversarial=found.images,
        succeeded=verdict.predictions != task.labels,
        placement=found.placement,
        predictions=verdict.predictions,
        clean_predictions=clean_predictions,
        labels=task.labels,
        margins=verdict.margins,
        steps=found.steps,
    )
