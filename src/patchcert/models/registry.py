"""What a model is made from, architectures by name, and the one way to build them."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Generator, nn

from patchcert.errors import ModelError, did_you_mean
from patchcert.models.layers import Mean, Normalize


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """An architecture by name, and the images and classes it is for.

    `hidden` replaces the width of the fully connected layers. `widths` replaces the channels or units of every
    layer but the last, in their order; trimmed models have them. `filters` are the channels of a residual network's
    first stage, and `depth` is how many layers it has. `receptive_field` is how many pixels in a row a local score
    sees. Of several `members`, each such a network, the logits are the mean. `mean` and `std` hold one value per
    channel, in pixel units of [0, 1]; empty, they mean no normalisation.
    """

    name: str
    channels: int
    height: int
    width: int
    classes: int = 10
    hidden: int | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    widths: tuple[int, ...] = ()
    filters: int | None = None
    depth: int | None = None
    receptive_field: int | None = None
    members: int | None = None

    def __post_init__(self) -> None:
        for field in ("channels", "height", "width", "classes"):
            _check_count(field, getattr(self, field), optional=False)
        for field in ("hidden", "filters", "depth", "receptive_field", "members"):
            _check_count(field, getattr(self, field), optional=True)
        object.__setattr__(self, "widths", tuple(self.widths))
        _check_widths(self.widths, self.hidden)
        object.__setattr__(self, "mean", tuple(float(value) for value in self.mean))
        object.__setattr__(self, "std", tuple(float(value) for value in self.std))
        _check_normalisation(self.mean, self.std, self.channels)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images it is for."""
        return self.channels, self.height, self.width

    @property
    def normalises(self) -> bool:
        """Whether the model starts with a `Normalize` layer; a mean of 0 and a deviation of 1 need none."""
        return any(value != 0 for value in self.mean) or any(value != 1 for value in self.std)

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, for TOML and JSON; what is not set is left out."""
        plain = {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()
        }
        return {key: value for key, value in plain.items() if value is not None and value != []}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelSpec":
        """The inverse of `to_dict`; unknown and missing keys are refused by name."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        missing = sorted({"name", "channels", "height", "width"} - set(values))
        if unknown or missing:
            raise ModelError(
                f"a model description has unknown keys {unknown} and lacks {missing}; "
                f"its keys are: {', '.join(field.name for field in fields(cls))}"
            )
        return cls(**values)


Builder = Callable[[ModelSpec], nn.Module]

_builders: dict[str, Builder] = {}


def architecture(name: str) -> Callable[[Builder], Builder]:
    """Registers a function from a `ModelSpec` to a module on images that are already normalised.

    A builder that returns `nn.Sequential` names the layers itself; `build` puts `Normalize` in front.
    """

    def register(builder: Builder) -> Builder:
        if name in _builders:
            raise ModelError(
                f"an architecture named {name!r} is already registered",
                hint=f"choose another name; taken: {', '.join(names())}",
            )
        _builders[name] = builder
        return builder

    return register


def names() -> tuple[str, ...]:
    """Every registered architecture, sorted."""
    return tuple(sorted(_builders))


def build(spec: ModelSpec, generator: Generator | None = None) -> nn.Sequential:
    """The model of a description, in eval mode, its weights drawn by PyTorch's default initialisation.

    With a generator the same state gives the same weights and the global random state is left as it was;
    without one the weights come from the global random state.
    """
    builder = _find(spec.name)
    if generator is None:
        module = _members(builder, spec)
    else:
        seed = torch.randint(2**62, (), generator=generator, device=generator.device)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(seed))  # layers initialise from the global CPU state
            module = _members(builder, spec)
    return _normalised(module, spec).eval()


def _find(name: str) -> Builder:
    if name in _builders:
        return _builders[name]
    raise ModelError(
        f"there is no architecture named {name!r}; known: {', '.join(names())}",
        hint=(
            f"{did_you_mean(name, names())} Your own are registered with @patchcert.models.architecture(name); "
            "on the command line in a module that --import names."
        ).strip(),
    )


def _members(builder: Builder, spec: ModelSpec) -> nn.Module:
    """What the builder makes, or the mean of several."""
    if spec.members is None:
        return builder(spec)
    alone = replace(spec, members=None)
    return Mean(builder(alone) for _ in range(spec.members))


def _normalised(module: nn.Module, spec: ModelSpec) -> nn.Sequential:
    layers = OrderedDict[str, nn.Module]()
    if spec.normalises:
        layers["normalize"] = Normalize(spec.mean, spec.std)
    if isinstance(module, nn.Sequential):
        layers.update(module.named_children())
    else:
        layers["network"] = module
    return nn.Sequential(layers)


def _check_count(field: str, value: object, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"ModelSpec.{field} must be a whole number of at least 1, got {value!r}")


def _check_widths(widths: tuple[int, ...], hidden: int | None) -> None:
    for width in widths:
        _check_count("widths", width, optional=False)
    if widths and hidden is not None:
        raise ModelError(
            f"ModelSpec.hidden={hidden} and widths={widths} both say how wide fully connected layers are",
            hint="give only one of them",
        )


def _check_normalisation(mean: tuple[float, ...], std: tuple[float, ...], channels: int) -> None:
    if len(mean) != len(std) or len(mean) not in (0, channels):
        raise ModelError(
            f"ModelSpec.mean and std must both be empty or hold one value for each of {channels} channels, "
            f"got {len(mean)} and {len(std)}"
        )
    if not all(math.isfinite(value) for value in mean + std) or not all(value > 0 for value in std):
        raise ModelError(f"ModelSpec.mean must be finite and std positive, got mean={mean}, std={std}")
