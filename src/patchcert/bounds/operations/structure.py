"""What holds a network together: sums of branches, reshapes, dropout in eval mode, the identity."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.bounds.geometry import FeatureMap, Places
from patchcert.bounds.lowering import BATCH_SIZE, function_rule, refuse
from patchcert.bounds.operations.base import Interval, Operation
from patchcert.bounds.rounding import Rounding
from patchcert.errors import ModelError, UnsupportedLayer


@dataclass(frozen=True, slots=True)
class Add(Operation):
    """The sum of two branches, as at the end of a skip connection."""

    arity: ClassVar[int] = 2

    def forward(self, *inputs: Tensor) -> Tensor:
        _check_terms(*inputs)
        return inputs[0] + inputs[1]

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        first, second = inputs
        _check_terms(first.lower, second.lower)
        lower, upper = first.lower + second.lower, first.upper + second.upper
        if rounding.is_outward:
            # A sum is off by u of itself, and so is the new end; sums so small that 4u of them underflow are exact.
            lower = lower - lower.abs() * (4 * rounding.unit)
            upper = upper + upper.abs() * (4 * rounding.unit)
        return Interval(lower, upper)

    def places(self, area: FeatureMap) -> Places:
        return Places.KEPT


def _check_terms(first: Tensor, second: Tensor) -> None:
    if first.dim() != second.dim():
        raise UnsupportedLayer(
            f"a sum of results of shapes {tuple(first.shape)} and {tuple(second.shape)} would mix images",
            hint="give both terms the same dimensions",
        )


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


@dataclass(frozen=True, slots=True)
class Reshape(Operation):
    """The same values in another shape; the first dimension, the batch, stays."""

    reshape: Callable[[Tensor], Tensor]
    may_share_memory: ClassVar[bool] = True

    def forward(self, *inputs: Tensor) -> Annotated[Tensor, "n ..."]:
        return self.reshape(inputs[0])

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        return inputs[0].map(self.reshape)

    def places(self, area: FeatureMap) -> Places:
        return Places.KEPT


@function_rule(torch.flatten, "flatten", layers=(nn.Flatten,))
def _flatten(start_dim: int = 0, end_dim: int = -1) -> Operation:
    if start_dim < 1:
        refuse(
            f"start_dim is {start_dim}: the batch dimension must stay", hint="start flattening at dimension 1"
        )
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


def _reshape_each(sizes: Sequence[int], value: Annotated[Tensor, "n ..."]) -> Annotated[Tensor, "n ..."]:
    """The results of each image in another shape; it must hold all of them and nothing of other images."""
    whole, part = math.prod(value.shape[1:]), math.prod(size for size in sizes if size != -1)
    if part == 0 or whole % part or (whole != part and -1 not in sizes):
        raise UnsupportedLayer(
            f"a reshape to (batch, {', '.join(map(str, sizes))}) of {tuple(value.shape[1:])} mixes images",
            hint="use nn.Flatten",
        )
    return value.reshape(value.shape[0], *sizes)


@function_rule(F.dropout, F.dropout2d, layers=(nn.Dropout, nn.Dropout2d))
def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
    if training and p > 0:
        raise ModelError("it drops values at random (training mode)", hint="call model.eval()")


@function_rule("contiguous", layers=(nn.Identity,))
def _identity() -> None:
    return None
