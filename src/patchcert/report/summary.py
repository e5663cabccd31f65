"""What a page needs to know of one run, as plain values: nothing here knows how runs are stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from patchcert.errors import InvalidInput
from patchcert.report.statistics import WRONG_CERTIFIED, Bracket, Proportion, Violation, bracket
from patchcert.threats import Patch, SparsePixels

Booleans = NDArray[np.bool_]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Pixels = NDArray[np.uint8]
AnyThreat = Patch | SparsePixels


@dataclass(frozen=True, eq=False)
class CertificateRows:
    """One row per certified test image: what was predicted, whether it is proven, and how narrowly."""

    threat: AnyThreat
    index: Integers
    label: Integers
    prediction: Integers
    certified: Booleans
    margin: Floats
    top: Integers
    left: Integers
    meta: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Columns are equally long and every image appears once."""
        columns = (self.label, self.prediction, self.certified, self.margin, self.top, self.left)
        _check_rows("certificates", self.index, columns)

    @property
    def correct(self) -> Booleans:
        """True where the clean prediction is the label."""
        return self.prediction == self.label

    @property
    def certified_accuracy(self) -> Proportion:
        """The share of images proven."""
        return Proportion.of(self.certified)

    @property
    def clean_accuracy(self) -> Proportion:
        """The share of images predicted rightly when nobody interferes."""
        return Proportion.of(self.correct)


@dataclass(frozen=True, eq=False)
class AttackRows:
    """One row per attacked test image: what the model says of the attacked image and where the patch lies.

    `images` holds attacked images (c, h, w) in [0, 1] by index, for as many as were kept. Rows of certified
    images only can refute certificates, but no accuracy may be counted on images chosen like that.
    """

    threat: AnyThreat
    index: Integers
    label: Integers
    prediction_after: Integers
    succeeded: Booleans
    top: Integers
    left: Integers
    meta: Mapping[str, object] = field(default_factory=dict)
    images: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    certified_only: bool = False

    def __post_init__(self) -> None:
        """Columns are equally long and every image appears once."""
        columns = (self.label, self.prediction_after, self.succeeded, self.top, self.left)
        _check_rows("attacks", self.index, columns)


@dataclass(frozen=True, eq=False)
class CertificateMap:
    """The least margin at every placement of one image; NaN where no placement is allowed."""

    index: int
    image: Pixels
    label: int
    prediction: int
    certified: bool
    height: int
    width: int
    margins: Floats

    @property
    def weakest(self) -> tuple[int, int]:
        """Top and left of the placement with the least margin."""
        top, left = np.unravel_index(int(np.nanargmin(self.margins)), self.margins.shape)
        return int(top), int(left)

    @property
    def least(self) -> float:
        """The margin at the weakest placement."""
        return float(np.nanmin(self.margins))


@dataclass(frozen=True)
class Box:
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True, eq=False)
class AttackedImage:
    """An image that an attack broke, before and after, and the boxes that hold everything it changed."""

    index: int
    clean: Pixels
    attacked: Pixels
    label: int
    before: int
    after: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True, eq=False)
class RunSummary:
    """One run: how it was trained, what was proven and attacked, and what is needed to check it again.

    Thumbnails, where given, are one image (c, h, w) per row of the headline's certificates.
    """

    name: str
    dataset: str = ""
    model: str = ""
    threat: AnyThreat | None = None
    spec_text: str = ""
    metrics: Sequence[Mapping[str, object]] = ()
    certificates: Sequence[CertificateRows] = ()
    attacks: Sequence[AttackRows] = ()
    maps: Sequence[CertificateMap] = ()
    attacked: Sequence[AttackedImage] = ()
    thumbnails: Pixels | None = None
    classes: Sequence[str] = ()
    environment: Mapping[str, object] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def headline(self) -> CertificateRows | None:
        """The certificates that lead the page: for the threat trained against, else the first measured."""
        matching = [rows for rows in self.certificates if rows.threat == self.threat]
        return next(iter([*matching, *self.certificates]), None)

    @cached_property
    def withstood(self) -> dict[int, bool]:
        """By image: whether every attack in the headline's threat failed; images not attacked are absent."""
        outcomes: dict[int, bool] = {}
        for rows in self.headline_attacks:
            for index, succeeded in zip(rows.index.tolist(), rows.succeeded.tolist(), strict=True):
                outcomes[index] = outcomes.get(index, True) and not succeeded
        return outcomes

    @cached_property
    def sample(self) -> Integers:
        """The images attacked whatever the certificate says of them, on which an accuracy may be counted."""
        fair = [rows.index for rows in self.headline_attacks if not rows.certified_only]
        return np.unique(np.concatenate(fair)) if fair else np.array([], dtype=np.int64)

    @cached_property
    def headline_attacks(self) -> tuple[AttackRows, ...]:
        """The attacks within the threat that the headline is about."""
        threat = self.headline.threat if self.headline else self.threat
        return tuple(rows for rows in self.attacks if threat is None or rows.threat == threat)

    @property
    def clean(self) -> Proportion | None:
        """Clean accuracy on the images of the headline."""
        return self.headline.clean_accuracy if self.headline else None

    @property
    def certified(self) -> Proportion | None:
        """Certified accuracy on the images of the headline."""
        return self.headline.certified_accuracy if self.headline else None

    @property
    def empirical(self) -> Proportion | None:
        """Accuracy under all attacks with the headline's threat, on the sample attacked."""
        outcomes = [self.withstood[index] for index in self.sample.tolist()]
        return Proportion.of(np.array(outcomes)) if outcomes else None

    @cached_property
    def bracket(self) -> Bracket | None:
        """Clean, empirical and certified on the images of the sample that were certified too, if any."""
        return self._bracket_on(self.sample)

    @cached_property
    def violations(self) -> tuple[Violation, ...]:
        """Every image on which certificate, attack and clean prediction contradict each other."""
        rows = self.headline
        if rows is None:
            return ()
        attacked = np.fromiter(self.withstood, dtype=np.int64)
        found = self._bracket_on(attacked)
        wrong = rows.certified & ~rows.correct & ~np.isin(rows.index, attacked)
        others = tuple(Violation(int(index), WRONG_CERTIFIED) for index in rows.index[wrong])
        return (found.violations if found else ()) + others

    def _bracket_on(self, images: Integers) -> Bracket | None:
        rows = self.headline
        common = np.isin(rows.index, images) if rows else np.array([], dtype=bool)
        if rows is None or not common.any():
            return None
        self._check_labels(rows)
        index = rows.index[common]
        withstood = np.array([self.withstood[image] for image in index.tolist()])
        return bracket(index, rows.correct[common], withstood, rows.certified[common])

    def _check_labels(self, rows: CertificateRows) -> None:
        labels = dict(zip(rows.index.tolist(), rows.label.tolist(), strict=True))
        for attack in self.headline_attacks:
            for index, label in zip(attack.index.tolist(), attack.label.tolist(), strict=True):
                if labels.get(index, label) != label:
                    raise InvalidInput(
                        f"run {self.name!r}: image {index} has label {labels[index]} in the certificates "
                        f"but {label} in the attack",
                        hint="both must come from the same data set; certify or attack the run again",
                    )


def _check_rows(what: str, index: Integers, columns: Sequence[NDArray[np.generic]]) -> None:
    if any(column.shape != index.shape for column in columns) or index.ndim != 1:
        shapes = [column.shape for column in (index, *columns)]
        raise InvalidInput(f"the columns of {what} must be equally long, got shapes {shapes}")
    if (index < 0).any():
        raise InvalidInput(f"the rows of {what} name image {index.min()}", hint="count images from 0")
    if len(np.unique(index)) != len(index):
        raise InvalidInput(f"the rows of {what} name an image twice", hint="write one row per image")
    if not len(index):
        raise InvalidInput(f"the rows of {what} are empty", hint="certify or attack at least one image")
