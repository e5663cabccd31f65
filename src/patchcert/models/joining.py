"""Puts trained networks of one architecture side by side in one whose logits are the mean of theirs.

Networks that learned from other seeds err on other images, and a patch that moves one of them moves the others less:
their mean can be proven for more images than each. It is a network of its own, certified as such; what was proven of
its members says nothing about it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from patchcert.errors import ModelError
from patchcert.models.chains import Affine, is_chain, rebuild
from patchcert.models.layers import Mean
from patchcert.models.registry import ModelSpec, build
from patchcert.models.storage import find_misfits


def join(models: Sequence[nn.Module], specs: Sequence[ModelSpec]) -> tuple[nn.Sequential, ModelSpec]:
    """The network of all models, and its description; `specs` are those of the models.

    Chains of convolutions, linear layers and ReLUs, which may differ in their widths, become a wider network of the
    same architecture. Others, which must be alike, become its `members`.
    """
    if len(specs) < 2:
        raise ModelError(f"expected two networks at least to join, got {len(specs)}")
    if all(is_chain(model) for model in models):
        _check_alike([_without_widths(spec) for spec in specs], " in more than their widths")
        return _widened(models, specs[0])
    plain = [spec if spec.normalises else replace(spec, mean=(), std=()) for spec in specs]
    _check_alike(plain)
    if specs[0].members is not None:
        raise ModelError("networks that have members are joined already", hint="join all members at once")
    return _side_by_side(models, replace(plain[0], members=len(models)))


def _side_by_side(models: Sequence[nn.Module], spec: ModelSpec) -> tuple[nn.Sequential, ModelSpec]:
    joined = build(spec, torch.Generator())
    mean = joined.get_submodule("network")
    assert isinstance(mean, Mean)
    for member, model in zip(mean.networks, models, strict=True):
        own = dict(model.named_children())
        if spec.normalises:
            own.pop("normalize", None)
        given = (
            nn.Sequential(OrderedDict(own))
            if isinstance(member, nn.Sequential)
            else own.get("network", model)
        )
        misfits = find_misfits(given.state_dict(), member.state_dict())
        if misfits:
            raise ModelError(
                f"{type(model).__name__} is not as the architecture {spec.name!r} is built: {misfits}",
                hint="give each model with its own description, as patchcert.models.load returns them",
            )
        copies = {name: value.detach().clone() for name, value in given.state_dict().items()}
        member.load_state_dict(copies, assign=True)
    return joined.eval(), spec


def _widened(models: Sequence[nn.Module], spec: ModelSpec) -> tuple[nn.Sequential, ModelSpec]:
    members = [_affine_layers(model) for model in models]
    names = list(members[0])
    widths = tuple(sum(len(member[name].weight) for member in members) for name in names[:-1])
    wide = replace(spec, hidden=None, widths=widths)
    weights = dict(models[0].state_dict())
    for place, name in enumerate(names):
        layers = [member[name] for member in members]
        is_first, is_last = place == 0, place == len(names) - 1
        weights[f"{name}.weight"] = _joined([layer.weight.detach() for layer in layers], is_first, is_last)
        if layers[0].bias is not None:
            biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
            weights[f"{name}.bias"] = torch.stack(biases).mean(0) if is_last else torch.cat(biases)
    return rebuild(wide, weights), wide


def _joined(weights: Sequence[Tensor], is_first: bool, is_last: bool) -> Tensor:
    """The weights of a layer of all members: the first layer sees the same image, the last sums up in the same logits,
    and between them no member sees another."""
    if is_first and is_last:
        return torch.stack(list(weights)).mean(0)
    if is_first:
        return torch.cat(list(weights))
    if is_last:
        return torch.cat(list(weights), dim=1) / len(weights)
    rows, columns = (sum(weight.shape[axis] for weight in weights) for axis in (0, 1))
    blocks = weights[0].new_zeros(rows, columns, *weights[0].shape[2:])
    row = column = 0
    for weight in weights:
        blocks[row : row + weight.shape[0], column : column + weight.shape[1]] = weight
        row, column = row + weight.shape[0], column + weight.shape[1]
    return blocks


def _affine_layers(model: nn.Module) -> dict[str, nn.Conv2d | nn.Linear]:
    return {name: layer for name, layer in model.named_children() if isinstance(layer, Affine)}


def _check_alike(specs: Sequence[ModelSpec], how: str = "") -> None:
    for one, other in pairwise(specs):
        if one != other:
            raise ModelError(
                f"networks that differ{how} cannot be joined: {one} and {other}",
                hint="join networks of one architecture, for the same images and classes",
            )


def _without_widths(spec: ModelSpec) -> ModelSpec:
    """What all members have in common; a mean of 0 and a deviation of 1 are no normalisation."""
    plain = replace(spec, hidden=None, widths=(), filters=None)
    return plain if spec.normalises else replace(plain, mean=(), std=())
