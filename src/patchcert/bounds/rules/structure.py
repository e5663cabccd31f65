"""Rules of what holds a network together: sums of branches, reshapes, dropout in eval mode, the identity."""

import math
import operator
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.bounds.lowering import BATCH_SIZE, function_rule, layer_rule, refuse
from patchcert.bounds.operations import Add, Operation, Reshape
from patchcert.errors import ModelError, UnsupportedLayer


@function_rule(operator.add, operator.iadd, torch.add, "add", "add_")
def _add(*terms: object, alpha: float = 1) -> Operation:
    if terms:
        refuse(
            "it adds a constant, bounds exist for the sum of two results",
            hint="put it into a layer's bias; images are centred by patchcert.Normalize(mean, std)",
        )
    if alpha != 1:
        refuse(f"alpha is {alpha}, bounds exist for a plain sum")
    return Add()


@layer_rule(nn.Flatten)
def _flatten_layer(layer: nn.Flatten) -> Operation:
    return _flatten(layer.start_dim, layer.end_dim)


@function_rule(torch.flatten, "flatten")
def _flatten(start_dim: int = 0, end_dim: int = -1) -> Operation:
    if start_dim < 1:
        refuse(f"start_dim is {start_dim}: the batch dimension must stay", hint="flatten from dimension 1 on")
    return Reshape(lambda value: value.flatten(start_dim, end_dim))


@function_rule("view", "reshape", torch.reshape)
def _reshape(*shape: object) -> Operation:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
    batch, *others = sizes
    rest = [size for size in others if isinstance(size, int)]
    if not (batch is BATCH_SIZE or batch == -1) or rest != others:
        refuse(
            f"it reshapes to {sizes}: the first size must be the batch, the others numbers",
            hint="use nn.Flatten",
        )
    return Reshape(partial(_reshape_each, rest))


def _reshape_each(sizes: Sequence[int], value: Tensor) -> Tensor:
    """The results of each image in another shape; it must hold all of them and nothing of other images."""
    whole, part = math.prod(value.shape[1:]), math.prod(size for size in sizes if size != -1)
    if part == 0 or whole % part or (whole != part and -1 not in sizes):
        raise UnsupportedLayer(
            f"a reshape to (batch, {', '.join(map(str, sizes))}) of {tuple(value.shape[1:])} mixes images",
            hint="use nn.Flatten",
        )
    return value.reshape(value.shape[0], *sizes)


@layer_rule(nn.Dropout, nn.Dropout2d)
def _dropout_layer(layer: nn.Dropout | nn.Dropout2d) -> None:
    _dropout(layer.p, layer.training)


@function_rule(F.dropout, F.dropout2d)
def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
    if training and p > 0:
        raise ModelError("it drops values at random (training mode)", hint="call model.eval()")


@layer_rule(nn.Identity)
def _identity(layer: nn.Identity) -> None:
    return None


@function_rule("contiguous")
def _contiguous() -> None:
    return None
