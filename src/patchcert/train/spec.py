"""The complete description of a training run: data, model, threat, strategy, schedule; all frozen."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from patchcert.data.folder import FOLDER, ImageShape
from patchcert.errors import SpecError
from patchcert.threats import Patch, SparsePixels
from patchcert.threats.sparse import SparseBound
from patchcert.train.plain import decisive
from patchcert.train.schedules import Schedule

CudaGraph = Literal["auto", "on", "off"]
TRAINING_VERSION = 1
"""To be raised whenever the same choices come to train another network: finished runs of old code then no longer count
as done. A test holds training to its version."""

PAPER_SCHEDULE = Schedule()


def _at_least(least: int, name: str, value: int | None) -> None:
    if value is not None and value < least:
        raise SpecError(f"{name} is {value}; expected at least {least}")


@dataclass(frozen=True, slots=True)
class DataChoice:
    """Which images to learn from, and how they are varied.

    `size` is what the images of a folder are brought to, height x width; other data sets have a size of their own.
    """

    name: str = "mnist"
    validation: int = 0
    limit: int | None = None
    flip: bool = False
    crop_padding: int = 0
    size: str | None = None

    def __post_init__(self) -> None:
        _at_least(0, "validation", self.validation)
        _at_least(1, "limit", self.limit)
        _at_least(0, "crop_padding", self.crop_padding)
        if self.size is None:
            return
        if not self.name.startswith(FOLDER):
            raise SpecError(
                f"size is {self.size!r}, but the images of {self.name} have a size of their own",
                hint='leave data.size out, or name an image folder: data.name = "folder:PATH"',
            )
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", self.size):
            raise SpecError(
                f"size is {self.size!r}; expected height x width", hint='write data.size = "32x32"'
            )

    @property
    def image_shape(self) -> ImageShape | None:
        """What the images of a folder are brought to where that is chosen: three channels of the given size."""
        if self.size is None:
            return None
        height, width = map(int, self.size.split("x"))
        return ImageShape(height=height, width=width)


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """An architecture by name; image size, classes and, where wanted, normalisation come from the data."""

    name: str = "mlp"
    hidden: int | None = None
    normalise: bool = True

    def __post_init__(self) -> None:
        _at_least(1, "hidden", self.hidden)


@dataclass(frozen=True, slots=True)
class NaturalTraining:
    """Plain cross entropy: no threat is trained against."""

    kind: Literal["natural"] = "natural"


@dataclass(frozen=True, slots=True)
class AllTraining:
    """Every placement of the patch, for every image, in every step."""

    kind: Literal["all"] = "all"


@dataclass(frozen=True, slots=True)
class RandomTraining:
    """A few random placements per image and step."""

    kind: Literal["random"] = "random"
    placements: int = 10

    def __post_init__(self) -> None:
        _at_least(1, "placements", self.placements)


@dataclass(frozen=True, slots=True)
class GuidedTraining:
    """Placements drawn where a U-net expects small margins: so many for each class.

    The width of the U-net is 6 for grey images and 10 for others unless it is given.
    """

    kind: Literal["guided"] = "guided"
    per_class: int = 1
    width: int | None = None
    inverse_temperature: float = 1.0

    def __post_init__(self) -> None:
        _at_least(1, "per_class", self.per_class)
        _at_least(1, "width", self.width)


@dataclass(frozen=True, slots=True)
class PooledTraining:
    """All placements, merged into square blocks of adjacent ones after each of the first layers."""

    kind: Literal["pooled"] = "pooled"
    blocks: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        if not self.blocks or min(self.blocks) < 1:
            raise SpecError(f"blocks are {list(self.blocks)}; expected at least one, each 1 or more")


@dataclass(frozen=True, slots=True)
class SparseTraining:
    """All choices of a few pixels at once, bounded in the first layer; `bound` overrides the threat's own."""

    kind: Literal["sparse"] = "sparse"
    bound: SparseBound | None = None


@dataclass(frozen=True, slots=True)
class AblatedTraining:
    """Plain cross entropy on images of which all but so many random pixels are ablated, for their vote.

    Every image has a mask of its own, or a batch shares one. With `bfloat16` the products of the network are
    rounded to it.
    """

    kind: Literal["ablated"] = "ablated"
    retained: int = 45
    masks: Literal["image", "batch"] = "image"
    bfloat16: bool = False

    def __post_init__(self) -> None:
        _at_least(1, "retained", self.retained)


Training = (
    NaturalTraining
    | AllTraining
    | RandomTraining
    | GuidedTraining
    | PooledTraining
    | SparseTraining
    | AblatedTraining
)


@dataclass(frozen=True, slots=True)
class OptimiserChoice:
    """Adam, or gradient descent where a momentum is given, its batches, and what is added to the loss.

    `tf32` lets a GPU round the products of training steps to fewer digits for speed, and `windows` keeps in so
    few digits what a patch can change in the layers of a network; certificates do neither.
    """

    batch_size: int = 256
    weight_decay: float = 0.0
    momentum: float | None = None
    clip_norm: float | None = None
    natural_weight: float = 0.0
    tf32: bool = False
    windows: Literal["bfloat16"] | None = None

    def __post_init__(self) -> None:
        _at_least(1, "batch_size", self.batch_size)
        if not 0 <= (self.momentum or 0.0) < 1:
            raise SpecError(f"momentum is {self.momentum}; expected at least 0 and below 1")
        if not 0 <= self.natural_weight <= 1:
            raise SpecError(f"natural_weight is {self.natural_weight}; expected between 0 and 1")

    @property
    def roundings(self) -> tuple[str, ...]:
        """What training rounds to fewer digits than float32 has, in words; none by default."""
        return ("TF32",) * self.tf32 + ("bfloat16 windows",) * (self.windows is not None)

    def exact(self) -> "OptimiserChoice":
        """The same with steps in float32 throughout."""
        return replace(self, tf32=False, windows=None)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a run is carried out; none of it is meant to change the weights that come out."""

    cuda_graph: CudaGraph = "auto"
    checkpoint_seconds: float = 20.0
    check_every: int = 5
    check_images: int = 200

    def __post_init__(self) -> None:
        _at_least(0, "check_every", self.check_every)
        _at_least(1, "check_images", self.check_images)


@dataclass(frozen=True, slots=True)
class Spec:
    """One training run. Two specs with the same fingerprint ask for the same weights."""

    data: DataChoice
    model: ModelChoice
    threat: Patch | SparsePixels
    strategy: Training
    schedule: Schedule = PAPER_SCHEDULE
    optimiser: OptimiserChoice = OptimiserChoice()
    select: Literal["last", "best-validation"] = "last"
    seed: int = 2019
    run: RunSettings = RunSettings()

    def __post_init__(self) -> None:
        sparse = isinstance(self.threat, SparsePixels)
        kind = self.strategy.kind
        counts_pixels = kind in ("sparse", "ablated")
        if kind != "natural" and sparse != counts_pixels:
            wanted = "kind = 'sparse'" if counts_pixels else "kind = 'patch'"
            raise SpecError(
                f"the strategy {kind!r} cannot train against {self.threat}",
                hint=f"give the threat {wanted} or choose another strategy",
            )
        if self.select == "best-validation" and not self.data.validation:
            raise SpecError(
                "select is 'best-validation', but no training images are held out",
                hint="set data.validation = 5000, or select = 'last'",
            )
        if self.select == "best-validation" and kind == "ablated":
            raise SpecError(
                "select is 'best-validation', but votes are not counted during training",
                hint="set select = 'last'",
            )

    def scaled(self, factor: float) -> "Spec":
        """The same run with every part of its schedule shrunk in proportion."""
        return replace(self, schedule=self.schedule.scaled(factor))

    def fingerprint(self, checksums: Mapping[str, str] | None = None) -> str:
        """16 hexadecimal digits of all that decides the weights: the choices, the data's checksums where given, and the
        version of training, which is silent where it is the first."""
        asked = {key: value for key, value in decisive(self).items() if key != "run"}
        version = [TRAINING_VERSION] if TRAINING_VERSION > 1 else []
        text = json.dumps([asked, dict(checksums or {}), *version], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
