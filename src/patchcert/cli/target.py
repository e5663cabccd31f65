"""What commands work on: the model of a run folder or of a file, and images that fit it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from patchcert.errors import DataError, InvalidInput

if TYPE_CHECKING:
    from torch import nn

    from patchcert.data import Dataset, Split
    from patchcert.experiments.runs import Run
    from patchcert.models import ModelSpec
    from patchcert.threats import Patch, SparsePixels


@dataclass(frozen=True, slots=True)
class Target:
    """A model with its file; where it comes from a run, also the data and the threat it was trained on."""

    model: "nn.Sequential"
    spec: "ModelSpec"
    weights: Path
    run: "Run | None" = None

    @property
    def threat(self) -> "Patch | SparsePixels | None":
        """What the model was trained against, as far as that is known."""
        return None if self.run is None else self.run.spec.threat

    @property
    def data(self) -> str | None:
        """The name of the data the model was trained on, as far as that is known."""
        return None if self.run is None else self.run.spec.data.name


def open_target(path: Path) -> Target:
    """The model in a run folder, or in a file that `patchcert.models.save` wrote."""
    from patchcert.models import load

    if path.is_dir():
        from patchcert.experiments.runs import Run

        run = Run.open(path)
        return Target(run.model(), run.model_spec(), run.weights, run)
    if not path.exists():
        raise InvalidInput(
            f"there is no {path}",
            hint="give a run folder of `patchcert train`, or a .safetensors model file.",
        )
    model, spec = load(path)
    return Target(model, spec, path)


def open_data(target: Target, name: str | None, data_dir: Path | None) -> "Dataset":
    """The named data set; without a name the one the run was trained on."""
    from patchcert.data import ImageShape, load_dataset

    chosen = name or target.data
    if chosen is None:
        raise DataError(
            f"{target.weights} does not say which images it is for",
            hint="name them with --data, like --data mnist; `patchcert data list` shows what there is.",
        )
    spec = target.spec
    return load_dataset(chosen, data_dir, ImageShape(spec.channels, spec.height, spec.width))


def choose_images(target: Target, dataset: "Dataset", split: str, limit: int | None) -> "Split":
    """The first images of a split, refused unless they fit the model."""
    whole = dataset.split(split)
    images = whole.take(limit or len(whole))
    if len(images) == 0:
        raise DataError(f"{dataset.name} has no {split} images", hint="choose the other split with --split.")
    spec = target.spec
    expected, actual = (spec.channels, spec.height, spec.width), tuple(images.images.shape[1:])
    if actual != expected or len(dataset.classes) > spec.classes:
        raise InvalidInput(
            f"{target.weights} is for {_size(expected)} images of {spec.classes} classes, but those of "
            f"{dataset.name} are {_size(actual)} of {len(dataset.classes)} classes",
            hint="name the data the model is for with --data.",
        )
    return images


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(str(length) for length in shape)
