"""What a training strategy is: it turns a batch and an epsilon into worst-case margins with a gradient."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from patchcert.bounds import Network, trace
from patchcert.bounds.network import least_over_others
from patchcert.errors import InvalidThreat, ModelError, PatchcertError, SpecError
from patchcert.models import ModelSpec
from patchcert.tensors import Images, Labels, Margins
from patchcert.threats import Patch, SparsePixels
from patchcert.train.batch_norms import batch_norms

TrainedThreat = Patch | SparsePixels
Scalar = Annotated[Tensor, ""]


@dataclass(frozen=True, slots=True)
class Batch:
    """Images in [0, 1] with their labels, and the rows of them that this process answers for.

    Random draws are made for the whole batch, so that they do not depend on how many processes share it.
    """

    images: Images
    labels: Labels
    rows: slice = field(default_factory=lambda: slice(None))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def own_images(self) -> Images:
        """The images of this process."""
        return self.images[self.rows]

    @property
    def own_labels(self) -> Labels:
        """The labels of this process."""
        return self.labels[self.rows]


@dataclass(frozen=True, slots=True)
class WorstCase:
    """Margins of this process's rows, 0 at the label, and a further loss where there is one: that of a helper network,
    or what else the model is to learn. It is added to the loss of margins, and not to what is reported of it.

    A further loss is this process's part of the mean over the whole batch, so that parts add up. `bounded` are the
    margins that are proven, where those to learn from are other ones.
    """

    margins: Margins
    further_loss: Scalar | None = None
    bounded: Margins | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """The model to train, what it was built from, and the threat to train it against.

    Strategies with a helper network draw its weights from `seed`. `windows` is the precision of what a patch
    changes in the layers of the network, by default that of the images.
    """

    model: nn.Module
    model_spec: ModelSpec
    threat: TrainedThreat
    seed: int = 0
    windows: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        """The device of the model's weights."""
        return next(self.model.parameters()).device

    @property
    def patch(self) -> Patch:
        """The threat, which must be a patch."""
        if not isinstance(self.threat, Patch):
            raise InvalidThreat(f"placements of a patch are trained against, but the threat is {self.threat}")
        return self.threat


@dataclass(frozen=True, slots=True)
class Objective:
    """A strategy bound to a network: the margins that are left when pixels may move by epsilon.

    `worst_case` takes a batch, epsilon as a number or as a tensor holding one, and the generator of all random draws.
    It can be recorded as a CUDA graph: shapes never depend on data, and nothing waits for the device. `helper` is a
    network trained beside the classifier, with the same optimiser and learning rate. `later` takes its place once the
    share `later_from` of all epochs is done.
    """

    network: Network
    worst_case: Callable[[Batch, float | Tensor, Generator], WorstCase]
    helper: nn.Module | None = None
    later: "Objective | None" = None
    later_from: float = 1.0

    def at(self, done: float) -> "Objective":
        """The objective of an epoch before which this share of all epochs is done."""
        return self.later if self.later is not None and done >= self.later_from else self


class Strategy(ABC):
    """One way to train against a threat: a frozen dataclass whose fields are the keys of `[strategy]`."""

    __slots__ = ()
    threats: ClassVar[tuple[type, ...]] = (Patch,)
    """The kinds of threat it can train against."""
    has_bounds: ClassVar[bool] = True
    """Whether interval bounds of the model mean anything, so that certified accuracy is measured during training."""
    bounds_layers: ClassVar[bool] = True
    """Whether what it trains on are bounds of one layer after the other, which the settings of `[bounds]` are about."""
    has_epsilon: ClassVar[bool] = True
    """Whether epsilon means anything, so that a schedule may have natural epochs and a ramp."""

    @abstractmethod
    def bind(self, subject: Subject) -> Objective:
        """The strategy at work on a model and a threat, with all that it keeps between steps."""

    def learned_method(self, threat: TrainedThreat) -> tuple[str, dict[str, Any]] | None:
        """The kind of proof it trains a model for, as `--method` names it, and its settings; None for bounds."""
        return None


@final
@dataclass(frozen=True, slots=True)
class Natural(Strategy):
    """Plain cross entropy on clean images, whatever epsilon is: no threat is trained against.

    Batch norms, where there are any, follow their batches.
    """

    threats: ClassVar = (Patch, SparsePixels)
    bounds_layers: ClassVar = False
    kind: Literal["natural"] = "natural"

    def bind(self, subject: Subject) -> Objective:
        """The margins of the clean images."""
        model = subject.model
        return natural_objective(
            whole_model(model) if batch_norms(model) else trace(model, subject.model_spec.image_shape)
        )


@final
@dataclass(frozen=True, slots=True)
class WholeModel(Network):
    """A model carried out as it is instead of traced, so that batch norms can follow their batches.

    For strategies that ask for no bounds: it has values, but no intervals.
    """

    model: nn.Module

    def values(self, images: Images) -> list[Tensor]:
        """The images and their logits."""
        return [images, self.model(images)]


def whole_model(model: nn.Module) -> WholeModel:
    """The model in training mode; refused if it would draw random numbers that no run could draw again."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise ModelError(
                f"layer '{name}' is a {type(layer).__name__}, whose draws a resumed training would not repeat",
                hint="leave dropout out of the architecture",
            )
    return WholeModel((), model.train())


@final
@dataclass(frozen=True, slots=True)
class Forward:
    """How a strategy without bounds carries its model out: on a GPU with channels last and, where that is asked for, as
    torch.compile fuses its layers; with products rounded to bfloat16, where that is."""

    network: WholeModel
    run: Callable[[Images], Tensor]
    layout: torch.memory_format
    bfloat16: bool

    @staticmethod
    def of(subject: Subject, bfloat16: bool, compiled: bool) -> "Forward":
        """The model in training mode, its weights laid out so from now on."""
        on_gpu = subject.device.type == "cuda"
        layout = torch.channels_last if on_gpu else torch.contiguous_format
        subject.model.to(memory_format=layout)  # pyright: ignore[reportCallIssue]
        network = whole_model(subject.model)
        run = torch.compile(network.model, dynamic=False) if compiled and on_gpu else network.model
        return Forward(network, run, layout, bfloat16)

    def logits(self, images: Images) -> Tensor:
        """What the model gives, in float32 whatever its products are rounded to."""
        laid_out = images.contiguous(memory_format=self.layout)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bfloat16, cache_enabled=False):
            return self.run(laid_out).float()


def check_takes(subject: Subject, channels: int, what: str, hint: str) -> None:
    """Refuse a model that does not take images as they are encoded in this many channels; it is left in eval mode."""
    spec = subject.model_spec
    try:
        with torch.no_grad():
            subject.model.eval()(torch.zeros(1, channels, spec.height, spec.width, device=subject.device))
    except (RuntimeError, PatchcertError) as error:
        message = f"the model {spec.name!r} does not take {what}, encoded in {channels} channels"
        raise SpecError(message, hint) from error


def natural_objective(network: Network) -> Objective:
    """The margins of clean images by a model that has been traced."""

    def clean_margins(batch: Batch, epsilon: float | Tensor, generator: Generator) -> WorstCase:
        return WorstCase(logit_margins(network.values(batch.own_images)[-1], batch.own_labels))

    return Objective(network, clean_margins)


def logit_margins(logits: Annotated[Tensor, "n k"], labels: Labels) -> Margins:
    """The logit of the label minus every logit."""
    return logits.gather(1, labels.unsqueeze(1)) - logits


def margin_loss(
    margins: Margins, labels: Labels, count: int, smoothing: float = 0.0, focus: float = 0.0
) -> Scalar:
    """Cross entropy of the negated margins, summed over these images and divided by the whole batch's count.

    Margins of a clean image give the ordinary cross entropy of its logits, from which they differ by a constant. With
    a focus q it is generalised (Zhang and Sabuncu 2018): (1 - p^q) / q of the label's softmax p, whose limit is -log p.
    """
    if focus:
        own = F.log_softmax(-margins, dim=1).gather(1, labels[:, None])
        return -torch.expm1(focus * own).sum() / (focus * count)
    return F.cross_entropy(-margins, labels, reduction="sum", label_smoothing=smoothing) / count


def is_robust(margins: Margins, labels: Labels) -> Annotated[Tensor, "n"]:
    """True where the margin against every other class is above 0; NaN is not."""
    return least_over_others(margins, labels) > 0


def derived_seed(seed: int, purpose: str, number: int = 0) -> int:
    """A separate seed for each purpose and number, so that no two kinds of draws share a stream."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
