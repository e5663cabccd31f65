"""What all attacks share: the job, the findings, the result, and that the framework has the last word."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from patchcert.attacks.views import AttackedModel, PerImage, Predictor
from patchcert.bounds import precise_arithmetic
from patchcert.errors import PatchcertError
from patchcert.progress import Progress
from patchcert.tensors import Images, Labels
from patchcert.threats import Threat


class AttackLeftThreat(PatchcertError):
    """An attack returned an image that its threat does not allow; its successes would mean nothing."""


def seeded() -> Generator:
    """The generator of attacks that are given none."""
    return torch.Generator().manual_seed(0)


@final
@dataclass(frozen=True, eq=False)
class AttackJob:
    """The images to attack, the threat to stay within, and where the random numbers come from."""

    images: Images
    labels: Labels
    threat: Threat
    generator: Generator
    progress: Progress | None = None

    def part(self, index: Annotated[Tensor, "i"]) -> "AttackJob":
        """The same for some of the images."""
        return replace(self, images=self.images[index], labels=self.labels[index])

    def in_round(self, number: int, rounds: int) -> "AttackJob":
        """The same with its progress reported as that of one of several rounds."""
        report = self.progress
        if report is None:
            return self
        return replace(self, progress=lambda done, total: report(number * total + done, rounds * total))

    def report(self, done: int, total: int) -> None:
        """Report progress to whoever asked for it."""
        if self.progress is not None:
            self.progress(done, total)


@final
@dataclass(frozen=True, eq=False)
class Findings:
    """What a search proposes: for every image the strongest one it met, successful or not."""

    images: Images
    placement: Annotated[Tensor, "n 2"]
    """Top and left; -1 where there is no one placement."""
    steps: PerImage
    """Gradient steps spent."""

    @classmethod
    def unchanged(cls, images: Images) -> "Findings":
        """The findings of an attack that does nothing."""
        nowhere = torch.full((len(images), 2), -1, dtype=torch.long, device=images.device)
        return cls(images.clone(), nowhere, nowhere.new_zeros(len(images)))

    def part(self, index: Annotated[Tensor, "i"]) -> "Findings":
        """The findings for some of the images."""
        return Findings(self.images[index], self.placement[index], self.steps[index])

    def updated(self, index: Annotated[Tensor, "i"], part: "Findings") -> "Findings":
        """The findings with those of some images replaced."""
        return Findings(
            self.images.index_copy(0, index, part.images.detach()),
            self.placement.index_copy(0, index, part.placement),
            self.steps.index_copy(0, index, part.steps),
        )


@final
@dataclass(frozen=True, eq=False, repr=False)
class AttackResult:
    """The result of an attack, image by image, as the framework found it by asking the model itself."""

    adversarial: Images
    """The broken image where the attack succeeded, else the strongest image it met."""
    succeeded: PerImage
    """Where the prediction on `adversarial` is not the label; also images that are wrong by themselves."""
    placement: Annotated[Tensor, "n 2"]
    """Top and left of the patch; -1 where the image is unchanged or the threat has no placements."""
    predictions: Labels
    """The classes predicted for `adversarial`."""
    clean_predictions: Labels
    labels: Labels
    margins: PerImage
    """By how much the best wrong class leads the label on `adversarial`."""
    steps: PerImage
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

    def columns(self, index: PerImage) -> dict[str, NDArray[np.generic]]:
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

    A subclass keeps its settings as attributes and proposes images. The framework spares images that are wrong by
    themselves, checks that every proposal lies in the threat, and decides success by asking the model again.
    """

    batch_size: int
    spares_wrong_images: ClassVar[bool] = True
    """Whether images that are wrong by themselves are returned unchanged."""

    @final
    @precise_arithmetic()
    def run(
        self,
        model: nn.Module | Predictor,
        images: Images,
        labels: Labels,
        threat: Threat,
        generator: Generator | None = None,
        progress: Progress | None = None,
    ) -> AttackResult:
        """Attacks a module that returns logits, or any classifier with `predict`; see `AttackedModel.of`.

        Without a generator, one that starts at seed 0.
        """
        target = AttackedModel.of(model)
        target.check(images, labels)
        job = AttackJob(images, labels, threat, generator or seeded(), progress)
        clean = target.evaluate(images, labels, self.batch_size).predictions
        is_attacked = (
            clean == labels if self.spares_wrong_images else torch.ones_like(clean, dtype=torch.bool)
        )
        attacked = is_attacked.nonzero().flatten()
        found = Findings.unchanged(images)
        if len(attacked):
            found = found.updated(attacked, self.propose(target, job.part(attacked)))
        return judged(target, job, found, clean, self.batch_size)

    @abstractmethod
    def propose(self, target: AttackedModel, job: AttackJob) -> Findings:
        """The strongest member found for every image, whether or not the model gets it wrong."""

    @abstractmethod
    def exhaustive(self) -> Self:
        """The same attack without an early stop: it continues after a success, to the largest margin."""

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


def judged(
    target: AttackedModel, job: AttackJob, found: Findings, clean_predictions: Labels, batch_size: int
) -> AttackResult:
    """The result that follows from the images found, all of which must lie in the threat."""
    require_contained(job.threat, job.images, found.images)
    verdict = target.evaluate(found.images, job.labels, batch_size)
    return AttackResult(
        adversarial=found.images,
        succeeded=verdict.predictions != job.labels,
        placement=found.placement,
        predictions=verdict.predictions,
        clean_predictions=clean_predictions,
        labels=job.labels,
        margins=verdict.margins,
        steps=found.steps,
    )


def require_contained(threat: Threat, clean: Images, changed: Images) -> None:
    """Refuse images that the threat does not allow, whatever attack made them."""
    in_range = ((changed >= 0) & (changed <= 1)).flatten(1).all(dim=1)
    inside = threat.contains(clean, changed) & in_range
    if not bool(inside.all()):
        outside = (~inside).nonzero().flatten().tolist()
        raise AttackLeftThreat(
            f"the attack left its threat {threat} on {len(outside)} of {len(clean)} images, "
            f"first on image {outside[0]}",
            hint="the fault is the attack's: only the allowed pixels may change, within [0, 1]",
        )


def default_batch_size(device: torch.device, is_imagenet: bool = False) -> int:
    """Images and restarts at once: enough to keep the device busy, few enough for its memory."""
    if device.type == "cpu":
        return 16 if is_imagenet else 512
    return 256 if is_imagenet else 16384
