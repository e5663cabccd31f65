"""Architectures by name, and the one way to build them."""

import difflib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Generator, nn

from patchcert.errors import ModelError
from patchcert.models.layers import Normalize
from patchcert.models.spec import ModelSpec

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
        module = builder(spec)
    else:
        with _draws_from(generator):
            module = builder(spec)
    return _normalised(module, spec).eval()


def _find(name: str) -> Builder:
    if name in _builders:
        return _builders[name]
    nearest = difflib.get_close_matches(name, names(), n=1, cutoff=0.5)
    advice = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise ModelError(
        f"there is no architecture named {name!r}; known: {', '.join(names())}",
        hint=f"{advice}Your own are registered with @patchcert.models.architecture(name); "
        "on the command line in a module that --import names.",
    )


@contextmanager
def _draws_from(generator: Generator) -> Iterator[None]:
    """Layers initialise from the global CPU state: seed it from the generator, and put it back afterwards."""
    seed = torch.randint(2**62, (), generator=generator, device=generator.device).item()
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(int(seed))
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def _normalised(module: nn.Module, spec: ModelSpec) -> nn.Sequential:
    layers = OrderedDict[str, nn.Module]()
    if spec.normalises:
        layers["normalize"] = Normalize(spec.mean, spec.std)
    if isinstance(module, nn.Sequential):
        layers.update(module.named_children())
    else:
        layers["network"] = module
    return nn.Sequential(layers)
