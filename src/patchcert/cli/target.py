"""What commands work on: the model of a run folder, of a file or of the zoo, and images that fit it."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import patchcert as pc
from patchcert.cli.factory import make_model, names_a_factory
from patchcert.cli.options import (
    check_choice,
    parse_camera,
    parse_image_size,
    parse_normalisation,
    parse_settings,
)
from patchcert.cli.output import say
from patchcert.errors import DataError, InvalidInput, InvalidThreat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from patchcert.certificates import AnyThreat
    from patchcert.data import Dataset, Split
    from patchcert.evidence import Selection
    from patchcert.models import ModelSpec, OnnxNetwork
    from patchcert.threats.resizing import Mode
    from patchcert.train.run_folder import Run

ZOO, IMAGENET, ONNX = "zoo:", "imagenet:", ".onnx"


@dataclass(frozen=True, slots=True)
class Target:
    """A model with its file; that of a run or of the zoo knows the data and the threat it was trained on.

    A network for ImageNet, one that a factory makes and one of an ONNX file, which were not trained here, have no spec;
    the factory's weights are named by the target, not by a file. `onnx` is the network of such a file, which may be
    normalised in the model.
    """

    model: "nn.Module"
    spec: "ModelSpec | None"
    weights: Path | str
    run: "Run | None" = None
    card: "pc.zoo.Card | None" = None
    threat: "pc.Patch | pc.SparsePixels | None" = None
    data: str | None = None
    onnx: "OnnxNetwork | None" = None
    image_size: tuple[int, int, int] | None = None

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width of the images it is for, where it says so or `image_size` was given for it."""
        known = self.spec or self.onnx
        return self.image_size if known is None else known.image_shape

    @property
    def weights_sha256(self) -> str:
        """Of the file; where a factory makes the model, of its weights as they are, normalisation included.

        Of an ONNX file that is normalised here, of both.
        """
        from patchcert.files import sha256
        from patchcert.models import state_sha256

        if self.onnx is not None and self.model is not self.onnx and isinstance(self.weights, Path):
            both = f"{sha256(self.weights)} {state_sha256(self.model)}"
            return hashlib.sha256(both.encode()).hexdigest()
        return sha256(self.weights) if isinstance(self.weights, Path) else state_sha256(self.model)


def open_target(
    target: str,
    data_dir: Path | None = None,
    weights: Path | None = None,
    normalise: str | None = None,
    image_size: str | None = None,
) -> Target:
    """The model in a run folder, in a file that `patchcert.models.save` wrote or in an ONNX file, of `zoo:NAME` or
    `zoo:FOLDER/NAME`, or the one that `MODULE:FACTORY` makes, with weights and normalisation of its own.

    `imagenet:NAME` is a network beside ImageNet's images in the folder of the data.
    """
    from patchcert.certificates.checks import check_weights

    opened = _open(target, data_dir, weights, normalise)
    check_weights(opened.model, str(opened.weights))
    if image_size is None:
        return opened
    if opened.image_shape is not None:
        raise InvalidInput(
            f"--image-size is for a model of your own, but {target} says what images it is for",
            hint="leave it out.",
        )
    return replace(opened, image_size=parse_image_size(image_size))


def _open(target: str, data_dir: Path | None, weights: Path | None, normalise: str | None) -> Target:
    from patchcert.models import load

    if not target.startswith((ZOO, IMAGENET)) and names_a_factory(target):
        return _open_own(target, weights, normalise)
    if target.endswith(ONNX) and weights is None:
        return _open_onnx(Path(target), normalise)
    if weights is not None or normalise is not None:
        option = "--weights" if weights is not None else "--normalise"
        raise InvalidInput(
            f"{option} is for a model of your own, but {target} comes with its own",
            hint="leave it out, or name the function that makes the model, like my_models:resnet.",
        )
    if target.startswith(ZOO):
        return _open_zoo(target.removeprefix(ZOO))
    if target.startswith(IMAGENET):
        return _open_imagenet(target.removeprefix(IMAGENET), data_dir)
    path = Path(target)
    if path.is_dir():
        run = open_run(path)
        known = run.spec.threat, run.spec.data.name
        return Target(run.model(), run.model_spec(), run.weights, run, None, *known)
    if not path.exists():
        raise InvalidInput(f"there is no {path}", hint=_instead_of(target))
    if path.suffix in (".pt", ".pth"):
        raise InvalidInput(
            f"{path} holds weights, and does not say of which model",
            hint=f"name the function that makes it: my_models:resnet --weights {path}.",
        )
    model, spec = load(path)
    return Target(model, spec, path)


def _open_own(target: str, weights: Path | None, normalise: str | None) -> Target:
    from patchcert.models import load_weights

    model = make_model(target)
    if weights is None:
        say(f"no --weights are given: {target} is taken as it is made")
    else:
        load_weights(model, weights)
    model = _normalised(model, normalise)
    return Target(model, None, target if weights is None else f"{target} with {weights}")


def _open_onnx(path: Path, normalise: str | None) -> Target:
    from patchcert.models import load_onnx

    network = load_onnx(path)
    if network.left_out:
        say(
            f"the {network.left_out} at the end of {path} is left out: it does not change the order of classes"
        )
    return Target(_normalised(network, normalise), None, path, onnx=network)


def _normalised(model: "nn.Module", normalise: str | None) -> "nn.Module":
    from torch import nn

    if normalise is None:
        return model
    layer = pc.Normalize(*parse_normalisation(normalise))
    kept = next((value.dtype for value in model.parameters()), None)
    return nn.Sequential(layer if kept is None else layer.to(kept), model).eval()


def open_run(folder: Path) -> "Run":
    """The run in a folder, for commands that need more than a model."""
    from patchcert.train.run_folder import Run

    if str(folder).startswith(ZOO):
        name = str(folder).removeprefix(ZOO)
        raise InvalidInput(
            f"{folder} is a model, not a run folder with evidence of its own",
            hint=f"patchcert zoo copy {name} --out runs/{name} makes one; then certify runs/{name}.",
        )
    return Run.open(folder)


def _instead_of(target: str) -> str:
    if target in pc.zoo.shipped().names():
        return f"the model of the zoo is zoo:{target}."
    return (
        "give a run folder of `patchcert train`, a .safetensors or .onnx model file, zoo:NAME, or the function that "
        "makes your model, like my_models:resnet."
    )


def _open_zoo(name: str) -> Target:
    """Of the package's models, or with a path before the name of those in a folder of one's own."""
    folder, slash, name = name.rpartition("/")
    zoo = pc.zoo.Zoo(Path(folder or slash).expanduser()) if slash else pc.zoo.shipped()
    card = zoo.card(name)
    known = card.threat, card.data
    return Target(zoo.load(name), card.model, zoo.weights(name), None, card, *known)


def _open_imagenet(name: str, data_dir: Path | None) -> Target:
    from patchcert.data.files import find_imagenet
    from patchcert.models.imagenet import load_imagenet

    folder = find_imagenet(data_dir)
    return Target(load_imagenet(name, folder), None, folder / f"{name}.safetensors", data="imagenet")


def open_data(target: Target, name: str | None, data_dir: Path | None) -> "Dataset":
    """The named data set; without a name the one the model was trained on."""
    from patchcert.data import ImageShape
    from patchcert.data.folder import FOLDER

    chosen = name or target.data
    if chosen is None:
        raise DataError(
            f"{target.weights} does not say which images it is for",
            hint="name them with --data, like --data mnist; `patchcert data list` shows what there is.",
        )
    shape = target.image_shape
    if shape is None and chosen.startswith(FOLDER):
        say(
            "images are brought to 3x224x224; --image-size 1x28x28, as an example, says which size the model takes"
        )
    return pc.load_dataset(chosen, data_dir, None if shape is None else ImageShape(*shape))


def through_camera(
    target: Target, camera: str | None, data: str | None, data_dir: Path | None
) -> "Callable[[pc.Patch], pc.Patch] | None":
    """What makes of a patch in the camera's pixels the one that covers it in the images of the model or the data."""
    if camera is None:
        return None
    before, mode, antialias = parse_camera(camera)
    _, height, width = target.image_shape or open_data(target, data, data_dir).test.image_size

    def resized(patch: "pc.Patch") -> "pc.Patch":
        found = pc.resized_patch(patch, before, (height, width), cast("Mode", mode), antialias)
        say(f"{patch} of {_size(before)} pixels is covered by {found} of {height}x{width}")
        return found

    return resized


def select_images(
    target: Target, dataset: "Dataset", split: str, limit: int | None, drawn: int | None = None, seed: int = 0
) -> "Selection":
    """Images of a split, refused unless there are any and they fit the model."""
    from patchcert.evidence import Selection

    split = _held_out(target) if split == "validation" else split
    whole = dataset.split(split)
    if len(whole) == 0:
        raise DataError(f"{dataset.name} has no {split} images", hint="choose the other split with --split.")
    _check_fit(target, dataset, whole)
    count = _classes(target, whole)
    if count is not None:
        _warn_of_classes(target, count, dataset)
    if target.onnx is not None:
        _compare_onnx(target, target.onnx, whole)
    return Selection(dataset.name, split, limit, drawn, seed)


def _compare_onnx(target: Target, network: "OnnxNetwork", images: "Split") -> None:
    """The network of an ONNX file says of some images what ONNX Runtime says of them."""
    from patchcert.models.onnx.runtime import COMPARED, compare_with_runtime, has_runtime

    assert isinstance(target.weights, Path)
    if not has_runtime():
        say(f"ONNX Runtime is not installed: {target.weights} is not compared with it")
        return
    few = images.take(COMPARED).floats()
    if target.model is not network:
        few = cast("Callable", target.model.get_submodule("0"))(few)
    compare_with_runtime(network, target.weights, few, network.left_out)


def _held_out(target: Target) -> str:
    """The split that a run has held out of its training."""
    count = 0 if target.run is None else target.run.spec.data.validation
    if not count:
        raise DataError(
            f"{target.weights} is not of a run that held out training images",
            hint="train with --set data.validation=5000, or choose --split test.",
        )
    return f"validation:{count}"


def _check_fit(target: Target, dataset: "Dataset", images: "Split") -> None:
    """Refuse images of another size than the model's, and of more classes than it has, as far as it says so."""
    shape, own, theirs = target.image_shape, "", ""
    if target.spec is not None:
        own, theirs = f" of {target.spec.classes} classes", f" of {len(dataset.classes)} classes"
    has_too_many = target.spec is not None and len(dataset.classes) > target.spec.classes
    if shape is not None and (images.image_size != shape or has_too_many):
        raise InvalidInput(
            f"{target.weights} is for {_size(shape)} images{own}, but those of {dataset.name} are "
            f"{_size(images.image_size)}{theirs}",
            hint="name the data the model is for with --data.",
        )


METHODS = {
    "interval": "IntervalBounds",
    "masking": "DoubleMasking",
    "detection": "MaskedDetection",
    "ablation": "RandomAblation",
    "bands": "BandVotes",
    "blocks": "BlockVotes",
    "local-votes": "LocalVotes",
}
_OTHERWISE_GIVEN = ("model", "threat", "with_map")


def choose_classifier(
    target: Target,
    threat: "AnyThreat | None",
    method: str | None = None,
    settings: "Sequence[str]" = (),
    of_intervals: "Mapping[str, Any] | None" = None,
) -> "pc.Classifier":
    """The target's model with the kind of proof asked for; by default the kind that it was trained for.

    Masks are made for the threat, which no other kind of proof needs before it certifies.
    """
    from patchcert.certificates import method_named

    learned, learned_settings = learned_method(target)
    chosen = method or learned
    check_choice("--method", chosen, METHODS)
    kind = method_named(METHODS[chosen])
    assert kind is not None
    of_intervals = of_intervals or {}
    given = {name: value for name, value in of_intervals.items() if value is not None}
    if kind is not pc.IntervalBounds and given:
        option = next(iter(given)).replace("_", "-")
        raise InvalidInput(
            f"--{option} is a setting of interval bounds, not of {chosen}", hint="leave it out."
        )
    has_masks = chosen in ("masking", "detection")
    if not has_masks and any(setting.startswith("masks=") for setting in settings):
        raise InvalidInput(
            f"masks are a setting of masking and detection, not of {chosen}",
            hint="give --method masking or --method detection, or leave them out.",
        )
    words = parse_settings(chosen, kind, settings, without=(*_OTHERWISE_GIVEN, *of_intervals))
    made = cast("Callable[..., pc.Classifier]", kind)
    if has_masks and threat is None:
        raise InvalidThreat(
            "no threat is given, and masks are made for one",
            hint="give --patch 5x5 or --shape diamond:25, for example.",
        )
    masked = {"threat": threat} if has_masks else {}
    trained = learned_settings if chosen == learned else {}
    return made(target.model, **masked, **{**trained, **given, **words})


def learned_method(target: Target) -> "tuple[str, Mapping[str, Any]]":
    """The kind of proof that a run was trained for, or that a card is about, with its settings; interval bounds where
    there is none."""
    if target.card is not None:
        return _method_of_card(target.card, target.model)
    strategy = None if target.run is None else target.run.spec.strategy
    learned = None if strategy is None or target.threat is None else strategy.learned_method(target.threat)
    return learned or ("interval", {})


def _method_of_card(card: "pc.zoo.Card", model: "nn.Module") -> "tuple[str, Mapping[str, Any]]":
    """The kind of proof that is counted in a card, and its settings; masks are made for the threat asked for."""
    from patchcert.certificates import method_named

    description = card.proof.classifier
    kind = method_named(description["name"])
    if kind is None or kind is pc.IntervalBounds:
        return "interval", {}
    proof = kind.described(model, description)
    names = [each.name for each in fields(proof) if each.name not in ("model", "threat")]  # pyright: ignore[reportArgumentType]
    method = next(name for name, of in METHODS.items() if of == description["name"])
    return method, {name: getattr(proof, name) for name in names}


def _classes(target: Target, images: "Split") -> int | None:
    """How many classes the model tells apart; None where it does not take such images as they are."""
    import torch

    if target.spec is not None:
        return target.spec.classes
    with suppress(Exception), torch.no_grad():  # what is wrong with a model is said when it is used
        logits = target.model(images.take(1).floats())
        return logits.shape[1] if logits.dim() == 2 else None
    return None


def _warn_of_classes(target: Target, count: int, dataset: "Dataset") -> None:
    """Say where the labels of the data seem to mean other classes than the model's."""
    from patchcert.data import class_names, shown_classes

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
    """Whether classes have the same names; numbers in a folder are positions, not names."""
    from patchcert.data.folder import FOLDER

    numbers = tuple(map(str, range(len(learned))))
    is_numbered = dataset.name.startswith(FOLDER) and dataset.classes == numbers
    return is_numbered or [name.lower() for name in learned] == [name.lower() for name in dataset.classes]


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(str(length) for length in shape)
