"""The complete description of a training run, all frozen, and how it is read from TOML files and presets."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from torch import nn

from patchcert.data import Dataset, Split, load_dataset
from patchcert.data.folder import FOLDER, ImageShape
from patchcert.errors import DataError, RunError, SpecError, at_least
from patchcert.files import sha256
from patchcert.models import ModelSpec, copy_weights
from patchcert.threats import Patch, SparsePixels
from patchcert.train.recipe import BoundSettings
from patchcert.train.schedules import Schedule
from patchcert.train.strategies import AnyStrategy
from patchcert.train.toml import (
    Place,
    decode,
    nearest,
    parse_size,
    parse_toml,
    parse_value,
    to_table,
    to_toml,
    without_defaults,
)

TRAINING_VERSION = 1
"""To be raised whenever the same specification comes to train another network: finished runs of old code then no
longer count as done. A test holds training to its version."""

PAPER_SCHEDULE = Schedule()
PLAIN_BOUNDS = BoundSettings()


def _below_one(name: str, value: float | None) -> None:
    if not 0 <= (value or 0.0) < 1:
        raise SpecError(f"{name} is {value}; expected at least 0 and below 1")


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Which images to learn from, and how they are varied.

    `rotation` (in degrees) and `stretch` are the most by which images, each with a chance of one half, are turned and
    stretched, and `warp` (in pixels) the most by which parts of them are pulled about; `colours` is that of brightness,
    contrast and saturation. `size` is what the images of a folder are brought to, height x width; other data sets have
    a size of their own.
    """

    name: str = "mnist"
    validation: int = 0
    limit: int | None = None
    flip: bool = False
    crop_padding: int = 0
    rotation: float = 0.0
    stretch: float = 0.0
    warp: float = 0.0
    colours: float = 0.0
    size: str | None = None

    def __post_init__(self) -> None:
        at_least(0, "validation", self.validation)
        at_least(1, "limit", self.limit)
        at_least(0, "crop_padding", self.crop_padding)
        at_least(0, "rotation", self.rotation)
        _below_one("stretch", self.stretch)
        at_least(0, "warp", self.warp)
        _below_one("colours", self.colours)
        if self.size is None:
            return
        if not self.name.startswith(FOLDER):
            raise SpecError(
                f"size is {self.size!r}, but the images of {self.name} have a size of their own",
                hint='leave data.size out, or name an image folder: data.name = "folder:PATH"',
            )
        parse_size("data.size", self.size)

    @property
    def image_shape(self) -> ImageShape | None:
        """What the images of a folder are brought to where that is set: three channels of the given size."""
        if self.size is None:
            return None
        height, width = parse_size("data.size", self.size)
        return ImageShape(height=height, width=width)

    def load(self, data_dir: Path | None) -> Dataset:
        """The data set, its images in the size that is set; refused unless there is something to train on."""
        dataset = load_dataset(self.name, data_dir, self.image_shape)
        self.split(dataset)
        return dataset

    def split(self, dataset: Dataset) -> tuple[Split, Split | None]:
        """The images to train on and those held out, if any; the test set is never among them."""
        if len(dataset.train) == 0:
            raise DataError(
                f"{dataset.name} has no training images: all {len(dataset.test)} are test images",
                hint="put images to train on below train/ and others below test/ (or val/), in the same classes.",
            )
        if not self.validation:
            return dataset.train.take(self.limit or len(dataset.train)), None
        kept, held_out = dataset.split_validation(self.validation)
        return kept.take(self.limit or len(kept)), held_out


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """An architecture by name; image size, classes and, where wanted, normalisation come from the data.

    Training begins with the `weights` of a file, where one is given. Its SHA-256 decides the run, not where it lies.
    """

    name: str = "mlp"
    hidden: int | None = None
    normalise: bool = True
    filters: int | None = None
    depth: int | None = None
    receptive_field: int | None = None
    members: int | None = None
    weights: str | None = None
    weights_sha256: str | None = None

    def __post_init__(self) -> None:
        if self.weights_sha256 is not None and self.weights is None:
            raise SpecError(
                "model.weights_sha256 is set, but no file of weights", hint="set model.weights, or neither"
            )
        at_least(1, "hidden", self.hidden)
        at_least(1, "filters", self.filters)
        at_least(1, "depth", self.depth)
        at_least(1, "receptive_field", self.receptive_field)
        at_least(1, "members", self.members)

    def identified(self) -> "ModelSettings":
        """With the sum of the file of weights, where it was not given."""
        if self.weights is None or self.weights_sha256 is not None:
            return self
        if not Path(self.weights).is_file():
            raise SpecError(f"model.weights is {self.weights!r}, but there is no such file")
        return replace(self, weights_sha256=sha256(Path(self.weights)))

    def begin(self, model: nn.Module) -> None:
        """Give the model the weights that training begins with, where there are any."""
        if self.weights is None:
            return
        path = Path(self.weights)
        copy_weights(model, path)
        found = sha256(path)
        if found != self.weights_sha256:
            raise RunError(
                f"{path} has the SHA-256 {found}, but the run begins with weights of {self.weights_sha256}",
                hint="give the file that it was, or begin another run with model.weights_sha256 left out",
            )

    def for_data(self, dataset: Dataset) -> ModelSpec:
        """The architecture for the data's images and classes."""
        mean, std = dataset.normalisation() if self.normalise else ((), ())
        return replace(self.for_images(dataset.train.image_size, len(dataset.classes)), mean=mean, std=std)

    def for_images(self, size: Sequence[int], classes: int) -> ModelSpec:
        """The architecture for images of (channels, height, width), without normalisation."""
        channels, height, width = size
        return ModelSpec(
            name=self.name,
            channels=channels,
            height=height,
            width=width,
            classes=classes,
            hidden=self.hidden,
            filters=self.filters,
            depth=self.depth,
            receptive_field=self.receptive_field,
            members=self.members,
        )


@dataclass(frozen=True, slots=True)
class OptimiserSettings:
    """Adam, or gradient descent where a momentum is given, its batches, and what is added to the loss.

    Without `decay_biases` weight decay leaves biases and batch norms alone. `label_smoothing` is the share of the
    target that all classes have in common. With `average_decay` the run ends with the mean of the weights after every
    step, in which those of s steps ago count `average_decay` to the power of s.

    With `focus` q the loss of worst-case margins is (1 - p^q) / q, where p is the label's softmax: between cross
    entropy (0) and the share that is lost (1), so that images that are far from proven count less.

    For speed, `tf32` lets a GPU round the products of training steps to fewer digits, and `windows` is the precision
    on a GPU of what a patch changes in the layers of a network; certificates use neither.
    """

    batch_size: int = 256
    weight_decay: float = 0.0
    momentum: float | None = None
    clip_norm: float | None = None
    natural_weight: float = 0.0
    tf32: bool = False
    windows: Literal["bfloat16"] | None = None
    nesterov: bool = False
    decay_biases: bool = True
    label_smoothing: float = 0.0
    average_decay: float | None = None
    focus: float = 0.0

    def __post_init__(self) -> None:
        at_least(1, "batch_size", self.batch_size)
        at_least(0, "weight_decay", self.weight_decay)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise SpecError(f"clip_norm is {self.clip_norm}; expected a number above 0")
        if self.nesterov and not self.momentum:
            raise SpecError("nesterov is true, but there is no momentum", hint="set optimiser.momentum = 0.9")
        _below_one("label_smoothing", self.label_smoothing)
        _below_one("average_decay", self.average_decay)
        _below_one("momentum", self.momentum)
        if not 0 <= self.focus <= 1:
            raise SpecError(f"focus is {self.focus}; expected a number from 0 to 1")
        if self.focus and self.label_smoothing:
            raise SpecError(
                f"focus is {self.focus} and label_smoothing {self.label_smoothing}: only cross entropy is smoothed",
                hint="leave one of them out",
            )
        if not 0 <= self.natural_weight <= 1:
            raise SpecError(f"natural_weight is {self.natural_weight}; expected between 0 and 1")

    @property
    def roundings(self) -> tuple[str, ...]:
        """What training rounds to fewer digits than float32 has, in words; nothing by default."""
        return ("TF32",) * self.tf32 + ("bfloat16 windows",) * (self.windows is not None)

    def exact(self) -> "OptimiserSettings":
        """The same with steps in float32 throughout."""
        return replace(self, tf32=False, windows=None)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a run is carried out; none of it is meant to change the weights that come out."""

    cuda_graph: Literal["auto", "on", "off"] = "auto"
    checkpoint_seconds: float = 20.0
    check_every: int = 5
    check_images: int = 200

    def __post_init__(self) -> None:
        at_least(0, "checkpoint_seconds", self.checkpoint_seconds)
        at_least(0, "check_every", self.check_every)
        at_least(1, "check_images", self.check_images)


@dataclass(frozen=True, slots=True)
class Spec:
    """One training run. Two specs with the same fingerprint ask for the same weights."""

    data: DataSettings
    model: ModelSettings
    threat: Patch | SparsePixels
    strategy: AnyStrategy
    schedule: Schedule = PAPER_SCHEDULE
    optimiser: OptimiserSettings = OptimiserSettings()
    select: Literal["last", "best-validation"] = "last"
    seed: int = 2019
    run: RunSettings = RunSettings()
    bounds: BoundSettings = PLAIN_BOUNDS

    def __post_init__(self) -> None:
        strategy = self.strategy
        if self.bounds != PLAIN_BOUNDS and not (strategy.has_bounds and strategy.bounds_layers):
            raise SpecError(
                f"[bounds] is set, but the strategy {strategy.kind!r} does not train on bounds of layers",
                hint='leave [bounds] out, or set strategy.kind = "all"',
            )
        if self.model.weights is not None and self.bounds.initialisation != "default":
            raise SpecError(
                "training begins with model.weights, but bounds.initialisation draws others",
                hint="leave one of them out",
            )
        if not isinstance(self.threat, strategy.threats):
            wanted = "sparse" if SparsePixels in strategy.threats else "patch"
            raise SpecError(
                f"the strategy {strategy.kind!r} cannot train against {self.threat}",
                hint=f"give the threat kind = {wanted!r} or choose another strategy",
            )
        if self.select == "best-validation" and not self.data.validation:
            raise SpecError(
                "select is 'best-validation', but no training images are held out",
                hint="set data.validation = 5000, or select = 'last'",
            )
        if self.select == "best-validation" and not strategy.has_bounds:
            raise SpecError(
                f"select is 'best-validation', but nothing is certified while {strategy.kind!r} trains",
                hint="set select = 'last'",
            )

    def scaled(self, factor: float) -> "Spec":
        """The same run with every part of its schedule shrunk in proportion."""
        return replace(self, schedule=self.schedule.scaled(factor))

    def fingerprint(self, checksums: Mapping[str, str] | None = None) -> str:
        """16 hexadecimal digits of all that decides the weights: the settings other than `run`, the data's checksums
        where given, and the version of training from the second on."""
        asked = {key: value for key, value in without_defaults(self).items() if key != "run"}
        asked["model"].pop("weights", None)
        version = [TRAINING_VERSION] if TRAINING_VERSION > 1 else []
        text = json.dumps([asked, dict(checksums or {}), *version], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def preset_names() -> tuple[str, ...]:
    """The specifications that come with the package."""
    folder = resources.files("patchcert.train") / "presets"
    return tuple(
        sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    )


def read_spec(source: str | Path, changes: Iterable[str] = ()) -> Spec:
    """The specification in a TOML file or preset, after changes such as 'strategy.kind=random'."""
    table = _load(source)
    made = {}
    for change in changes:
        key, value = _split(change)
        made[key] = change
        _change(table, key.split("."), value, change)
    spec = decode(Spec, table, Place(str(source), changes=made))
    return replace(spec, model=spec.model.identified())


def write_spec(spec: Spec) -> str:
    """The whole specification, defaults included, as TOML text that reads back to an equal one."""
    return to_toml(to_table(spec))


def _load(source: str | Path) -> dict[str, Any]:
    path, presets = Path(source), preset_names()
    if path.is_file():
        return parse_toml(_text(path), str(path))
    if str(source) in presets:
        preset = resources.files("patchcert.train") / "presets" / f"{source}.toml"
        return parse_toml(preset.read_text(encoding="utf-8"), str(source))
    message = f"{source} is neither a file nor a preset, nor a folder with a run"
    raise SpecError(message, hint=nearest(str(source), presets, "presets are"))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path} is not a text file, so it is not a specification",
            hint="give a SPEC.toml, a preset or a run folder",
        ) from error


def _split(change: str) -> tuple[str, Any]:
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise SpecError(f"--set {change} is not of the form key=value", hint="write --set model.name=cnn2")
    return key.strip(), parse_value(text.strip())


def _change(table: dict[str, Any], path: list[str], value: Any, change: str) -> None:  # noqa: ANN401 - any TOML value
    """Set one value; a new `kind` starts its table afresh, since the other keys belonged to the old kind."""
    *parents, name = path
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise SpecError(f"--set {change}: {parent} is not a table, so it has no key {name!r}")
    if name == "kind" and table.get("kind") != value:
        table.clear()
    table[name] = deepcopy(value)
