"""What every kind of proof has in common: a classifier that predicts and certifies, and what certificates hold."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from patchcert.bounds.network import least_over_others
from patchcert.errors import InvalidInput
from patchcert.progress import Progress
from patchcert.tensors import Images, Labels
from patchcert.threats import AnyThreat

Promise = Literal["recovery", "detection"]
Columns = Mapping[str, NDArray[Any]]
ABSTAINED = -1
"""The prediction of a classifier that abstains."""


@final
@dataclass(frozen=True, slots=True)
class Guarantee:
    """What "certified" promises of an image.

    `recovery`: the prediction stays the label. `detection`: it stays the label, or an alert is raised. The
    promise is deterministic where `confidence` is 1; else it is false with a probability of at most
    1 - `confidence` for each image.
    """

    promise: Promise = "recovery"
    confidence: float = 1.0

    @property
    def is_deterministic(self) -> bool:
        """Whether nothing is left to chance."""
        return self.confidence == 1.0

    def __str__(self) -> str:
        return (
            f"{self.promise}, deterministic"
            if self.is_deterministic
            else f"{self.promise}, with {self.confidence:.4g} confidence for each image"
        )


@final
@dataclass(frozen=True, slots=True)
class Ballots:
    """How often each class was voted for: once to select a class, and in a fresh count.

    Votes that leave nothing to chance are counted once, and stand in both places.
    """

    selection: Annotated[Tensor, "n k"]
    estimation: Annotated[Tensor, "n k"]

    @property
    def selected(self) -> Labels:
        """The class that leads the first count; a certificate is about this one."""
        return self.selection.argmax(dim=1)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Certificates:
    """One row per image. Certified means proven: no member of the threat changes the prediction from the label.

    `predictions` are those of the deployed classifier on the clean images; -1 where it abstains. What a method does
    not have is None: `placements` is the certificate map, whether the image is proven with the patch at each
    placement; `margins` are proven lower bounds of logit[label] - logit[class] over the threat, 0 at the label, and
    `worst_placement` is the (top, left) where the least of them lies, (-1, -1) for threats without placements;
    `radius` is how many pixels may change, -1 where nothing is proven, and `ballots` are the votes behind it.
    With masks, `lead` is the share by which the label leads on every copy that the proof needs (at most, where it
    fails), and `weakest_masks` are the numbers of the two masks of the copy with the least lead that was looked at.
    `broken` says where a member of the threat was found that the classifier gets wrong, and `counterexamples` are these
    members, elsewhere the clean images; what is predicted rightly and neither certified nor broken is open.
    """

    certified: Annotated[Tensor, "n"]
    predictions: Labels
    labels: Labels
    guarantee: Guarantee = field(default_factory=Guarantee)
    placements: Annotated[Tensor, "n p"] | None = None
    margins: Annotated[Tensor, "n k"] | None = None
    worst_placement: Annotated[Tensor, "n 2"] | None = None
    radius: Annotated[Tensor, "n"] | None = None
    ballots: Ballots | None = None
    lead: Annotated[Tensor, "n"] | None = None
    weakest_masks: Annotated[Tensor, "n 2"] | None = None
    broken: Annotated[Tensor, "n"] | None = None
    counterexamples: Annotated[Tensor, "n c h w"] | None = None

    def __repr__(self) -> str:
        right = int((self.predictions == self.labels).sum())
        counts = f"{right} right, {int(self.certified.sum())} certified"
        if self.broken is not None and self.open is not None:
            counts += f", {int(self.broken.sum())} broken, {int(self.open.sum())} open"
        return f"Certificates({len(self)} images, {counts}: {self.guarantee})"

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def clean_accuracy(self) -> float:
        """The share of images that are predicted rightly without a patch; NaN without images."""
        return _share(self.predictions == self.labels)

    @property
    def certified_accuracy(self) -> float:
        """The share of images that are certified; NaN without images."""
        return _share(self.certified)

    @property
    def open(self) -> Annotated[Tensor, "n"] | None:
        """Predicted rightly, but neither certified nor broken; None where nothing was tried to break."""
        if self.broken is None:
            return None
        return (self.predictions == self.labels) & ~self.certified & ~self.broken

    @property
    def least_margin(self) -> Annotated[Tensor, "n"] | None:
        """The least margin over the classes other than the label, where there are margins."""
        if self.margins is None:
            return None
        return least_over_others(self.margins, self.labels)

    @staticmethod
    def concatenated(parts: "Sequence[Certificates]") -> "Certificates":
        """The certificates of the images of all parts, in their order; a part that lacks something lacks it for all."""
        tensors = [part.to_tensors() for part in parts]
        shared = set.intersection(*(set(each) for each in tensors))
        joined = {name: torch.cat([each[name] for each in tensors]) for name in shared}
        return Certificates.from_tensors(joined, parts[0].guarantee)

    def to_tensors(self) -> dict[str, Tensor]:
        """All columns that there are, by name."""
        columns = {name: getattr(self, name) for name in _TENSORS}
        if self.ballots is not None:
            columns |= {"selection": self.ballots.selection, "estimation": self.ballots.estimation}
        return {name: column for name, column in columns.items() if column is not None}

    @staticmethod
    def from_tensors(columns: Mapping[str, Tensor], guarantee: Guarantee) -> "Certificates":
        """The certificates that `to_tensors` took apart."""
        ballots = Ballots(columns["selection"], columns["estimation"]) if "selection" in columns else None
        own = {name: columns[name] for name in _TENSORS if name in columns}
        return Certificates(**own, guarantee=guarantee, ballots=ballots)


_TENSORS = tuple(each.name for each in fields(Certificates) if each.name not in ("guarantee", "ballots"))


def _share(flags: Tensor) -> float:
    return float(flags.double().mean()) if len(flags) else float("nan")


class Classifier(ABC):
    """A deployed classifier and the kind of proof it admits; settings in its constructor, data in the calls."""

    model: nn.Module
    promise: ClassVar[Promise] = "recovery"
    """What its certificates promise; where it is detection, an abstention is an alert, and breaks nothing."""
    predicts_as_its_model: ClassVar[bool] = False
    """Whether `predict` is the class of the model's largest logit, so that attacks on the model are attacks on it."""

    of_proofs_alone: ClassVar[tuple[str, ...]] = ()
    """What in `describe` decides verdicts, but no prediction."""
    undescribed: ClassVar[tuple[str, ...]] = ("model", "batch_size")
    """Fields that are no settings, or decide neither."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Settings that `describe` leaves out where they have their default: older evidence does not know them."""

    def __post_init__(self) -> None:
        """Refuses what is neither on nor off where the default of a field is."""
        switches = [each for each in fields(self) if type(each.default) is bool]  # pyright: ignore[reportArgumentType]
        for name in (each.name for each in switches):
            if type(getattr(self, name)) is not bool:
                raise InvalidInput(f"{name} is {getattr(self, name)!r}; expected True or False")

    @abstractmethod
    def predict(self, images: Images, progress: Progress | None = None) -> Labels:
        """What the deployed classifier says of each image; -1 where it abstains."""

    @abstractmethod
    def certify(
        self, images: Images, labels: Labels, threat: AnyThreat, progress: Progress | None = None
    ) -> Certificates:
        """For each image whether it is proven that no member of the threat changes the prediction from the label.

        Only images whose prediction is the label can be certified; ties, NaN and infinities never are. `progress` is
        called with the number of images done and the number of all images.
        """

    def describe(self) -> dict[str, Any]:
        """The method's name and every setting that decides a verdict, as plain JSON; evidence is named by it.

        Unless a method says otherwise, these are all fields but the `undescribed` ones, and `optional` ones at their
        default.
        """
        each_field = fields(self)  # pyright: ignore[reportArgumentType]
        defaults = {each.name for each in each_field if getattr(self, each.name) == each.default}
        left_out = {*self.undescribed, *defaults.intersection(self.optional)}
        names = [each.name for each in each_field if each.name not in left_out]
        settings = {name: getattr(self, name) for name in names}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
        return {"name": type(self).__name__, **plain}

    @classmethod
    def described(cls, model: nn.Module, description: Mapping[str, Any]) -> Self:
        """The classifier of a model of which `describe` says this."""
        names = {each.name for each in fields(cls)} - {"model"}  # pyright: ignore[reportArgumentType]
        given = {name: value for name, value in description.items() if name in names}
        settings = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        return cls(model, **settings)  # pyright: ignore[reportCallIssue]

    def images_per_block(self, device: torch.device) -> int | None:
        """How many images an interruptible proof certifies at a time; None where verdicts do not depend on it."""
        return 256

    def images_at_once(self) -> int:
        """How many images a prediction looks at, whether they are asked for or blank."""
        return 1

    def passes(self, height: int, width: int) -> int | None:
        """How many forward passes of the model a prediction of one image takes at least; None where it is not known."""
        return None

    def surrogate(self) -> nn.Module:
        """A module whose logits an attack may differentiate in search of images that `predict` gets wrong."""
        return self.model

    @classmethod
    def contradiction(cls, columns: Columns, meta: Mapping[str, Any]) -> str:
        """What in stored rows contradicts the method's own rules, such as a verdict that no vote supports; else ""."""
        return ""


def first_row(flags: NDArray[np.bool_]) -> int | None:
    """The first row where the flag is set."""
    found = np.flatnonzero(flags)
    return int(found[0]) if found.size else None
