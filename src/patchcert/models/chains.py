"""Networks that are chains of affine layers and ReLUs, whose channels and units can be taken out or put together."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from patchcert.errors import ModelError
from patchcert.models.layers import Normalize
from patchcert.models.registry import ModelSpec, build
from patchcert.models.storage import find_misfits

Affine = nn.Conv2d | nn.Linear

_KNOWN = (Normalize, nn.Conv2d, nn.Linear, nn.ReLU, nn.Flatten)


def check_chain(model: nn.Module, done: str) -> None:
    """Every layer is known, and a ReLU follows every convolution and linear layer but the last; `done` says what
    cannot be done to others, like "trimmed"."""
    if not isinstance(model, nn.Sequential):
        raise ModelError(f"{type(model).__name__} cannot be {done}: it is no nn.Sequential of its layers")
    layers = list(model.named_children())
    for name, layer in layers:
        if not isinstance(layer, _KNOWN) or getattr(layer, "groups", 1) != 1:
            raise ModelError(f"the layer {name} ({type(layer).__name__}) cannot be {done}")
    for (name, layer), (_, following) in pairwise(layers):
        if isinstance(layer, Affine) != isinstance(following, nn.ReLU):
            raise ModelError(f"the layer {name} ({type(layer).__name__}) is followed by {following}")


def is_chain(model: nn.Module) -> bool:
    """Whether `check_chain` has nothing against it."""
    try:
        check_chain(model, "joined")
    except ModelError:
        return False
    return True


def rebuild(spec: ModelSpec, weights: dict[str, Tensor]) -> nn.Sequential:
    """The model of a description with these weights, whose widths are those of `spec.widths`, in eval mode."""
    model = build(spec, torch.Generator())
    misfits = find_misfits(weights, model.state_dict())
    if misfits:
        raise ModelError(
            f"the architecture {spec.name!r} cannot be built with the widths {spec.widths}: {misfits}",
            hint="give the description of this very model, whose builder must read spec.widths",
        )
    model.load_state_dict(weights, assign=True)
    return model.eval()
