"""What commands work on: the model of a run folder, of a file or of the zoo, and images that fit it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from patchcert.cli.output import say
from patchcert.errors import DataError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from patchcert.data import Dataset, Split
    from patchcert.models import ModelSpec
    from patchcert.threats import Patch, SparsePixels
    from patchcert.train.run_folder import Run
    from patchcert.zoo import Card

ZOO = "zoo:"


@dataclass(frozen=True, slots=True)
class Target:
    """A model with its file; that of a run or of the zoo knows the data and the threat it was trained on."""

    model: "nn.Sequential"
    spec: "ModelSpec"
    weights: Path
    run: "Run | None" = None
    card: "Card | None" = None

    @property
    def threat(self) -> "Patch | SparsePixels | None":
        """What the model was trained against, as far as that is known."""
        if self.card is not None:
            return self.card.threat
        return None if self.run is None else self.run.spec.threat

    @property
    def data(self) -> str | None:
        """The name of the data the model was trained on, as far as that is known."""
        if self.card is not None:
            return self.card.data
        return None if self.run is None else self.run.spec.data.name


def open_target(target: str) -> Target:
    """The model in a run folder, in a file that `patchcert.models.save` wrote, or of `zoo:NAME`, `zoo:FOLDER/NAME`."""
    from patchcert.models import load

    if target.startswith(ZOO):
        return _open_zoo(target.removeprefix(ZOO))
    path = Path(target)
    if path.is_dir():
        from patchcert.train.run_folder import Run

        run = Run.open(path)
        return Target(run.model(), run.model_spec(), run.weights, run)
    if not path.exists():
        raise InvalidInput(f"there is no {path}", hint=_instead_of(target))
    model, spec = load(path)
    return Target(model, spec, path)


def open_run(folder: Path) -> "Run":
    """The run in a folder, for commands that need more than a model."""
    from patchcert.train.run_folder import Run

    if str(folder).startswith(ZOO):
        name = str(folder).removeprefix(ZOO)
        raise InvalidInput(
            f"{folder} is a model, no run folder with evidence of its own",
            hint=f"patchcert zoo copy {name} --out runs/{name} makes one; then certify runs/{name}.",
        )
    return Run.open(folder)


def _instead_of(target: str) -> str:
    from patchcert.zoo import shipped

    if target in shipped().names():
        return f"the model of the zoo is zoo:{target}."
    return "give a run folder of `patchcert train`, a .safetensors model file, or zoo:NAME."


def _open_zoo(name: str) -> Target:
    """Of the package's models, or with a path before the name of those in a folder of one's own."""
    from patchcert.zoo import Zoo, shipped

    folder, slash, name = name.rpartition("/")
    zoo = Zoo(Path(folder or slash).expanduser()) if slash else shipped()
    card = zoo.card(name)
    return Target(zoo.load(name), card.model, zoo.weights(name), card=card)


def open_data(target: Target, name: str | None, data_dir: Path | None) -> "Dataset":
    """The named data set; without a name the one the model was trained on."""
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
    _warn_of_classes(target, dataset)
    return images


def _warn_of_classes(target: Target, dataset: "Dataset") -> None:
    """Say where the labels of the data seem to mean other classes than the model's, and go on."""
    from patchcert.data import class_names, shown_classes

    count = target.spec.classes
    learned = class_names(target.data) if target.data else None
    if learned is not None and len(learned) != count:
        learned = None
    if len(dataset.classes) == count and (learned is None or _agree(learned, dataset)):
        return
    own = f"{count} classes" if learned is None else shown_classes(learned)
    say(
        f"warning: {target.weights} is a model for {own}; {dataset.name} has {shown_classes(dataset.classes)}. "
        "A label is taken for the model's class of the same number, whatever their names."
    )


def _agree(learned: "Sequence[str]", dataset: "Dataset") -> bool:
    """Whether classes have the same names; numbers in a folder are no names, but positions."""
    from patchcert.data.folder import FOLDER

    numbers = tuple(map(str, range(len(learned))))
    is_numbered = dataset.name.startswith(FOLDER) and dataset.classes == numbers
    return is_numbered or [name.lower() for name in learned] == [name.lower() for name in dataset.classes]


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(str(length) for length in shape)
