"""What all attacks share: the model under attack, the job, the findings and the result, which the framework judges."""

import copy
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Protocol, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from patchcert.bounds import precise_arithmetic
from patchcert.certificates.checks import (
    check_independence,
    check_inputs,
    check_labels,
    check_logits,
    logits_as_given,
)
from patchcert.certificates.classifier import ABSTAINED, Classifier
from patchcert.errors import InvalidInput, ModelError, PatchcertError
from patchcert.progress import Progress
from patchcert.tensors import Images, Labels, Logits, PerImage
from patchcert.threats import Threat

# Sums of 10,000 terms in another order differ by about sqrt(10,000) units of rounding. No verdict rests on it: the
# model is asked again about every image that is handed out.
_ROUNDING = 100.0


Rows = Annotated[Tensor, "i"]
"""Indices of some of the images, or of some of the ascents."""


class Predictor(Protocol):
    """Anything that says a class for every image, such as a classifier with a proof."""

    def predict(self, images: Images) -> Labels: ...


@final
@dataclass(frozen=True, eq=False)
class Verdict:
    """What the judge of a target says of images."""

    predictions: Labels
    margins: PerImage
    """By how much the best wrong class leads the label."""
    sure_margins: PerImage
    """The same less what rounding may have given it, see `sure_lead`."""


@final
@dataclass(frozen=True, eq=False)
class AttackedModel:
    """A model under attack: ascents follow the logits of `surrogate`, and only the answers of `judge` count.

    A plain model is both. So is a surrogate of a defense, which has the defended model's logits and a more useful
    gradient. A classifier that only predicts is the judge of a differentiable surrogate, and a large network the
    judge of its `FastCopy`; `judged_at_once` limits how many images the judge is shown at once.
    """

    surrogate: nn.Module
    judge: nn.Module | Predictor
    judged_at_once: int | None = None

    @classmethod
    def of(cls, model: nn.Module | Predictor) -> "AttackedModel":
        """A module is judged by its logits, anything else with a `predict` method by its predictions.

        The latter gives a differentiable module as `surrogate()`, or has one as `model`.
        """
        if isinstance(model, nn.Module):
            return cls(model, model)
        if not callable(getattr(model, "predict", None)):
            raise InvalidInput(
                f"the model must be a torch.nn.Module, got {type(model).__name__}",
                hint="give a module that returns logits, or a classifier with predict(images)",
            )
        make = getattr(model, "surrogate", None)
        surrogate = make() if callable(make) else getattr(model, "model", None)
        if not isinstance(surrogate, nn.Module):
            raise InvalidInput(
                f"{type(model).__name__} has no differentiable module that an attack could follow",
                hint="give it a method surrogate() that returns a torch.nn.Module with logits",
            )
        return cls(surrogate, model)

    @property
    def is_exact(self) -> bool:
        """Whether the logits of `surrogate` are those that decide."""
        return self.judge is self.surrogate

    @torch.no_grad()
    def evaluate(self, images: Images, labels: Labels, batch_size: int | None = None) -> Verdict:
        """The judge's verdict on every image; logits that are not finite are an error.

        The margins of a judge that only predicts are those of its surrogate, made positive exactly where the
        prediction is wrong. Where it promises detection, an alert is not: a search goes on to what raises none.
        """
        at_once = batch_size or self.judged_at_once or max(len(images), 1)
        predictions = labels.new_zeros(len(images))
        margins, sure_margins = images.new_zeros(len(images)), images.new_zeros(len(images))
        finite = torch.ones((), dtype=torch.bool, device=images.device)
        for start in range(0, len(images), at_once):
            part = slice(start, start + at_once)
            logits, predictions[part] = self._answer(images[part], labels[part])
            finite &= logits.isfinite().all()
            margins[part] = wrong_lead(logits, labels[part]).to(margins.dtype)
            sure_margins[part] = sure_lead(logits, labels[part]).to(margins.dtype)
        require_finite(finite)
        if not isinstance(self.judge, nn.Module):
            wrong = (predictions != labels) & ~self._alerts(predictions)
            margins, sure_margins = _agreeing(margins, wrong), _agreeing(sure_margins, wrong)
        return Verdict(predictions, margins, sure_margins)

    def _alerts(self, predictions: Labels) -> PerImage:
        """Where an abstention is all that the judge promises."""
        is_detector = isinstance(self.judge, Classifier) and self.judge.promise == "detection"
        return (predictions == ABSTAINED) & is_detector

    def _answer(self, images: Images, labels: Labels) -> tuple[Logits, Labels]:
        """Logits, and the classes that the judge predicts."""
        if isinstance(self.judge, nn.Module):
            logits = self.judge(images)
            check_logits(logits, images)
            return logits, logits.argmax(dim=1)
        predictions, logits = self.judge.predict(images), self.surrogate(images)
        check_logits(logits, images)
        if predictions.shape != labels.shape or predictions.is_floating_point():
            raise ModelError(
                f"{type(self.judge).__name__}.predict must give one class per image ({len(labels)},), "
                f"got {predictions.dtype} {tuple(predictions.shape)}",
                hint="return a long tensor of class indices",
            )
        return logits, predictions

    def check(self, images: Images, labels: Labels) -> None:
        """Refuse images, labels and models that do not fit together, before time is spent on them."""
        check_inputs(self.surrogate, images, labels)
        check_independence(self.surrogate)
        if len(images):
            with torch.no_grad():
                logits = logits_as_given(self.surrogate, images[:1])
            check_labels(labels, logits.shape[1])


def wrong_lead(logits: Logits, labels: Labels) -> PerImage:
    """The largest logit of another class less the label's: positive exactly where the label has lost."""
    label = labels[:, None]
    others = logits.scatter(1, label, -torch.inf).amax(dim=1)
    return others - logits.gather(1, label)[:, 0]


def sure_lead(logits: Logits, labels: Labels) -> PerImage:
    """The wrong class's lead less what rounding may have given it.

    The same image in a batch of another size has slightly different logits. A success beyond that survives the
    framework's own check.
    """
    scale = 1 + logits.abs().amax(dim=1)
    return wrong_lead(logits, labels) - _ROUNDING * torch.finfo(logits.dtype).eps * scale


def _agreeing(margins: PerImage, wrong: PerImage) -> PerImage:
    """The margins, cut so that they are positive exactly where a prediction is wrong."""
    least = torch.finfo(margins.dtype).tiny
    return torch.where(wrong, margins.clamp(min=least), margins.clamp(max=0))


def require_finite(is_finite: Tensor) -> None:
    """Refuse NaN and infinite logits; this is where the device is waited for."""
    if not bool(is_finite):
        raise ModelError(
            "the model gave NaN or infinite logits, which neither break nor withstand an attack",
            hint="check the weights and the normalisation of the model",
        )


@final
class FastCopy(nn.Module):
    """Nearly the same logits sooner: batch norms folded in, channels last, on a GPU products in bfloat16.

    Takes and returns float32, and gradients pass. Its logits differ from the network's by rounding, so it serves as
    a surrogate that the network itself judges.
    """

    def __init__(self, model: nn.Module, reduced: bool | None = None) -> None:
        super().__init__()
        self.model = without_batch_norms(model).to(memory_format=torch.channels_last)  # pyright: ignore
        self.reduced = next(model.parameters()).is_cuda if reduced is None else reduced
        self.train(model.training)

    def forward(self, images: Images) -> Logits:
        """Logits in float32."""
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.reduced):
            logits = self.model(images)
        return logits.float()


class _LeafTracer(fx.Tracer):
    """Descends to the modules that contain no others."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(m.children())


def without_batch_norms(model: nn.Module) -> nn.Module:
    """A copy of a network in eval mode with each batch norm folded into the convolution before it."""
    root = copy.deepcopy(model).requires_grad_(False)
    traced = fx.GraphModule(root, _LeafTracer().trace(root))
    modules = dict(traced.named_modules())
    calls = Counter(node.target for node in traced.graph.nodes if node.op == "call_module")
    for node in list(traced.graph.nodes):
        if node.op != "call_module" or not isinstance(norm := modules[node.target], nn.BatchNorm2d):
            continue
        before = node.args[0]
        convolution = modules.get(before.target) if before.op == "call_module" else None
        if isinstance(convolution, nn.Conv2d) and calls[before.target] == 1 and len(before.users) == 1:
            traced.set_submodule(before.target, fuse_conv_bn_eval(convolution, norm))
            node.replace_all_uses_with(before)
            traced.graph.erase_node(node)
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced.requires_grad_(False)


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

    def part(self, index: Rows) -> "AttackJob":
        """The same for some of the images."""
        return replace(self, images=self.images[index], labels=self.labels[index])

    def in_round(self, number: int, rounds: int) -> "AttackJob":
        """The same with its progress reported as that of one of several rounds."""
        return self.between(number / rounds, (number + 1) / rounds)

    def between(self, start: float, stop: float) -> "AttackJob":
        """The same with its progress reported as that from one share of the work to another."""
        report = self.progress
        if report is None:
            return self

        def part(done: float, total: int) -> None:
            report(start * (total - done) + stop * done, total)

        return replace(self, progress=part)

    def report(self, done: float, total: int) -> None:
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

    def part(self, index: Rows) -> "Findings":
        """The findings for some of the images."""
        return Findings(self.images[index], self.placement[index], self.steps[index])

    def updated(self, index: Rows, part: "Findings") -> "Findings":
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
    """Where the prediction on `adversarial` is not the label: also images that are wrong by themselves, and alerts."""
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
        job.report(1, 1)
        return judged(target, job, found, clean, self.batch_size)

    @abstractmethod
    def propose(self, target: AttackedModel, job: AttackJob) -> Findings:
        """The strongest member found for every image, whether or not the model gets it wrong."""

    def looks(self, job: AttackJob) -> int:
        """How many points of each image it looks at if it breaks none: by these, stages of work are weighed.

        1 where they are not counted.
        """
        return 1

    @property
    def needs_all_images(self) -> bool:
        """Whether what is found for one image serves all, so that they cannot be attacked block by block."""
        return False

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
