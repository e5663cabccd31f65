"""Removes from a trained network the channels and units that are zero on every training image.

Training against patches shuts most channels of a wide network for good. Without them it is a network of its
own: on the images shown it computes the same, and its bounds are no wider; on others a channel that is gone might
have opened. What was proven of the whole network there says nothing about the trimmed one, which has to be
certified again.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from patchcert.errors import ModelError
from patchcert.models.chains import Affine, check_chain, rebuild
from patchcert.models.registry import ModelSpec
from patchcert.progress import Progress
from patchcert.tensors import Images


def trim(
    model: nn.Sequential, spec: ModelSpec, images: Images, progress: Progress | None = None, batch: int = 500
) -> tuple[nn.Sequential, ModelSpec]:
    """The model less what is zero on all images, which are those it was trained on, and its description.

    A layer of which nothing is left is refused, and so are models that are not a chain of convolutions, linear
    layers and ReLUs.
    """
    check_chain(model, "trimmed")
    opened = find_open(model, images, progress, batch)
    widths = tuple(int(channels.sum()) for channels in opened.values())
    narrow = replace(spec, hidden=None, widths=widths)
    weights = {**model.state_dict(), **dict(_parts(model, opened))}
    return rebuild(narrow, weights).to(images.device), narrow


@torch.no_grad()
def find_open(
    model: nn.Sequential, images: Images, progress: Progress | None = None, batch: int = 500
) -> dict[str, Tensor]:
    """By the name of each layer before a ReLU: which of its channels or units any image opens, NaN among them."""
    if len(images) == 0:
        raise ModelError("a model cannot be trimmed without images", hint="give those it was trained on")
    largest: dict[str, Tensor] = {}
    for start in range(0, len(images), batch):
        values, last = images[start : start + batch], ""
        for name, layer in model.named_children():
            values = layer(values)
            if isinstance(layer, nn.ReLU):
                found = values.transpose(0, 1).flatten(1).amax(1)
                largest[last] = torch.maximum(largest[last], found) if last in largest else found
            last = name
        if progress is not None:
            progress(min(start + batch, len(images)), len(images))
    opened = {name: ~(values <= 0) for name, values in largest.items()}
    shut = [name for name, channels in opened.items() if not channels.any()]
    if shut:
        raise ModelError(
            f"nothing of {shut[0]} opens on any of {len(images):,} images: nothing would be left"
        )
    return opened


def round_to_half(model: nn.Sequential) -> nn.Sequential:
    """A copy whose parameters are the nearest numbers of half precision, still of the type they had."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            parameter.copy_(parameter.half())
            if not parameter.isfinite().all():
                raise ModelError(f"{name} holds numbers that are too large for half precision")
    return rounded


def _parts(model: nn.Sequential, opened: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What is kept of the weights: rows of open channels, and of those the columns of open channels before."""
    before: Tensor | None = None
    for name, layer in model.named_children():
        if not isinstance(layer, Affine):
            continue
        weight, bias, after = layer.weight.detach(), layer.bias, opened.get(name)
        if before is not None:
            weight = weight[:, before.repeat_interleave(weight.shape[1] // len(before))]
        yield f"{name}.weight", (weight if after is None else weight[after]).clone()
        if bias is not None:
            yield f"{name}.bias", (bias if after is None else bias[after]).detach().clone()
        before = after
