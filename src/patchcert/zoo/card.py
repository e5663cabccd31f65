"""The card of a model: counts from evidence, image by image, and all that is needed to repeat them."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from patchcert.errors import ModelError
from patchcert.models import ModelSpec
from patchcert.threats import Patch, SparsePixels, threat_from_dict


@final
@dataclass(frozen=True, slots=True)
class ProofCount:
    """What is proven on the first `images` test images of the deployed classifier that `classifier` describes.

    `right_images` and `certified_images` say it of each: one bit per image in the order of the test set, the
    first image in the highest bit of the first byte, in base 64. `evidence` is the sum of the file of rows.
    """

    images: int
    right: int
    certified: int
    classifier: Mapping[str, Any]
    device: str
    evidence: str
    right_images: str
    certified_images: str
    seconds: float | None = None

    def __post_init__(self) -> None:
        for count, marks in ((self.right, self.right_marks), (self.certified, self.certified_marks)):
            if count != np.count_nonzero(marks):
                raise ModelError(f"the card counts {count} images, but marks {np.count_nonzero(marks)}")
        if (self.certified_marks & ~self.right_marks).any():
            raise ModelError("the card marks images as certified that it does not mark as right")

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "ProofCount":
        """The inverse of `asdict`. Cards name a dtype instead of a classifier where they are of interval bounds."""
        if "dtype" in plain and "classifier" not in plain:
            given = {key: value for key, value in plain.items() if key != "dtype"}
            plain = {**given, "classifier": {"name": "IntervalBounds", "dtype": plain["dtype"]}}
        return cls(**_exactly(cls, "proof", plain))

    @property
    def right_marks(self) -> NDArray[np.bool_]:
        """True for every image whose clean prediction is the label."""
        return unpack_marks(self.right_images, self.images)

    @property
    def certified_marks(self) -> NDArray[np.bool_]:
        """True for every image that is proven."""
        return unpack_marks(self.certified_images, self.images)


@final
@dataclass(frozen=True, slots=True)
class AttackCount:
    """How many of the attacked images the model still got right, and how many are certified; `command` repeats it.
    `evidence` is the sum of the file of rows.

    The share of certified images among few that were drawn can be above or below that of all. Where only certified
    images were attacked, none may have been broken, and the count is not an accuracy.
    """

    images: int
    withstood: int
    certified: int
    certified_only: bool
    command: str
    settings: Mapping[str, Any]
    device: str
    evidence: str = ""
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.images < 1 or not {self.withstood, self.certified} <= {*range(self.images + 1)}:
            raise ModelError(
                f"the card counts {self.withstood} and {self.certified} of {self.images} attacked images"
            )


@final
@dataclass(frozen=True, slots=True)
class Training:
    """How the weights came about. `run` is the fingerprint of specification and data, which names evidence."""

    run: str
    command: str
    weights_of: str
    seconds: float
    device: str
    runs_at_once: int
    versions: Mapping[str, str]
    commit: str
    spec: str


@final
@dataclass(frozen=True, slots=True)
class Card:
    """One model of a zoo. Every number is counted from evidence gathered with these very weights."""

    name: str
    data: str
    data_sha256: Mapping[str, str]
    threat: Patch | SparsePixels
    model: ModelSpec
    parameters: int
    weights_sha256: str
    proof: ProofCount
    attacks: tuple[AttackCount, ...]
    training: Training
    note: str

    @property
    def command(self) -> str:
        """What computes the proof again and compares it with the card."""
        return f"patchcert certify zoo:{self.name}"

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        return {**asdict(self), "threat": self.threat.to_dict(), "model": self.model.to_dict()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Card":
        """The inverse of `to_dict`; unknown and missing keys are refused by name."""
        given = _exactly(cls, "card", plain)
        return cls(
            **given
            | {
                "threat": threat_from_dict(given["threat"]),
                "model": ModelSpec.from_dict(given["model"]),
                "proof": ProofCount.from_dict(given["proof"]),
                "attacks": tuple(
                    AttackCount(**_exactly(AttackCount, "attack", each)) for each in given["attacks"]
                ),
                "training": Training(**_exactly(Training, "training", given["training"])),
            }
        )


def pack_marks(marks: NDArray[np.bool_]) -> str:
    """One bit per image, as text."""
    return base64.b64encode(np.packbits(marks).tobytes()).decode()


def unpack_marks(text: str, images: int) -> NDArray[np.bool_]:
    """The marks of `images` images that `pack_marks` wrote."""
    try:
        packed = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    except binascii.Error as error:
        raise ModelError(f"the card's marks of images cannot be read: {error}") from error
    if len(packed) != -(-images // 8):
        raise ModelError(f"the card has marks of {8 * len(packed)} images at most, but counts {images}")
    return np.unpackbits(packed, count=images).astype(bool)


def _exactly(kind: type, what: str, plain: Mapping[str, Any]) -> dict[str, Any]:
    """The table itself, refused unless it has exactly the fields of the kind; those with defaults may be absent."""
    known = {field.name for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    unknown, missing = sorted(set(plain) - known), sorted(needed - set(plain))
    if unknown or missing:
        raise ModelError(f"the {what} of a card has unknown keys {unknown} and lacks {missing}")
    return dict(plain)
