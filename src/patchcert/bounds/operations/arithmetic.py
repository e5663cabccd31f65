"""Sums and products of two results, and of a result and a constant."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Annotated, ClassVar, cast

import torch
from torch import Size, Tensor

from patchcert.bounds.forms import Forms, Pulled, Slopes
from patchcert.bounds.geometry import FeatureMap, NotCovered, Places
from patchcert.bounds.lowering import function_rule, instead_of, refuse
from patchcert.bounds.operations.affine import Affine
from patchcert.bounds.operations.base import Elementwise, Interval, Operation, Source, check_terms
from patchcert.bounds.rounding import Rounding, lifted
from patchcert.errors import UnsupportedLayer


@dataclass(frozen=True, slots=True)
class Add(Elementwise):
    """The sum of two branches, as at the end of a skip connection."""

    arity: ClassVar[int] = 2

    def forward(self, *inputs: Tensor) -> Tensor:
        check_terms(inputs[0], inputs[1])
        return inputs[0] + inputs[1]

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        first, second = inputs
        total = Interval(self.forward(first.lower, second.lower), self.forward(first.upper, second.upper))
        # A sum is off by u of itself, and so is the new end; sums so small that 4u of them underflow are exact.
        return total.widened(4 * rounding.unit) if rounding.is_outward else total

    def backward(self, forms: Forms, *inputs: Interval, slope: Slopes, rounding: Rounding) -> Pulled | None:
        is_plain = inputs[0].shape == inputs[1].shape
        return Pulled.exactly(forms, forms, forms) if is_plain else None


@function_rule(operator.add, operator.iadd, torch.add, "add", "add_")
def _add(other: object = None, *, alpha: float = 1) -> Operation:
    if alpha != 1:
        refuse(f"alpha is {alpha}, bounds exist for a plain sum")
    return Add() if other is None else Rescale(shift=_constant(other))


@dataclass(frozen=True, slots=True)
class Multiply(Elementwise):
    """The product of two branches, as where a squeezed map scales the channels of another."""

    arity: ClassVar[int] = 2

    def forward(self, *inputs: Tensor) -> Tensor:
        check_terms(inputs[0], inputs[1], "product")
        return inputs[0] * inputs[1]

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        """A product is linear in either factor, so that its extremes lie at corners of the two intervals."""
        first, second = inputs
        ends = [(box.lower, box.upper) for box in (first, second)]
        corners = [self.forward(left, right) for left, right in product(*ends)]
        bounds = Interval(reduce(torch.minimum, corners), reduce(torch.maximum, corners))
        # A product is off by u of itself, and so is the new end; products that underflow are off by less than tiny.
        return bounds.widened(4 * rounding.unit, rounding.tiny) if rounding.is_outward else bounds


@function_rule(operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply")
def _multiply(other: object = None) -> Operation:
    return Multiply() if other is None else Rescale(factor=_constant(other))


@dataclass(frozen=True, slots=True)
class Rescale(Affine):
    """y = factor x + shift by constants, in float64, that are the same for all images; None for 1 and for 0."""

    factor: Source | None = None
    shift: Source | None = None

    def map(self, value: Annotated[Tensor, "n ..."], precise: bool) -> Annotated[Tensor, "n ..."]:
        return value if self.factor is None else value * _for_each_image(self.factor(), value)

    def absolute_map(self, value: Annotated[Tensor, "n ..."], precise: bool) -> Annotated[Tensor, "n ..."]:
        if self.factor is None:
            return value
        factor = _for_each_image(self.factor().abs(), value)
        return value * (lifted(factor) if precise else factor)

    def offset(self, like: Tensor) -> Tensor | None:
        return None if self.shift is None else _for_each_image(self.shift(), like)

    def roundings(self, value: Tensor) -> int:
        return RESCALE_ROUNDINGS

    def transposed(
        self, value: Annotated[Tensor, "n ..."], inputs: Size, precise: bool
    ) -> tuple[Annotated[Tensor, "n ..."], int] | None:
        return self.map(value, precise), RESCALE_ROUNDINGS

    def places(self, area: FeatureMap) -> Places:
        for constant in (self.factor, self.shift):
            shape = () if constant is None else constant().shape
            is_by_channel = len(shape) > 2 and math.prod(shape[-2:]) == 1 and not area.is_flat
            if math.prod(shape) > 1 and not is_by_channel:
                raise NotCovered("a constant differs from place to place")
        return Places.KEPT


# The factor is rounded where it is a quotient, and to the type; its product with x is rounded once. One is to spare.
# The shift is rounded to the type.
RESCALE_ROUNDINGS = 4


def _for_each_image(constant: Tensor, like: Annotated[Tensor, "n ..."]) -> Tensor:
    """The constant in the type of the values; one that would make more of them, or tell images apart, is refused."""
    pairs = zip(reversed(constant.shape), reversed((1, *like.shape[1:])), strict=False)
    if constant.dim() > like.dim() or any(size not in (1, whole) for size, whole in pairs):
        raise UnsupportedLayer(
            f"a constant of shape {tuple(constant.shape)} does not fit results of shape {tuple(like.shape)}, image by "
            "image",
            hint="give it the shape of a result, with 1 or nothing for the batch, or the size 1",
        )
    return constant.to(like)


def _constant(value: object, make: Callable[[Tensor], Tensor] = lambda value: value) -> Source:
    """What `make` gives for a number, or for a weight whenever it is read; both in float64."""
    if callable(value):
        source = cast("Source", value)
        return lambda: make(source().double())
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse(f"its constant is {value!r}, bounds exist for numbers, parameters and buffers")
    number = make(torch.tensor(value, dtype=torch.float64))
    if not number.isfinite():
        refuse(f"its constant {value!r} gives no finite factor")
    return lambda: number


@function_rule(operator.sub, operator.isub, torch.sub, torch.subtract, "sub", "sub_")
def _subtract(other: object = None, *, alpha: float = 1) -> Operation:
    if other is None or alpha != 1:
        refuse("bounds exist for the difference of a result and a constant", instead_of(torch.sub))
    return Rescale(shift=_constant(other, torch.neg))


@function_rule(torch.rsub)
def _subtract_from(other: object, *, alpha: float = 1) -> Operation:
    if alpha != 1:
        refuse(f"alpha is {alpha}, bounds exist for a plain difference")
    return Rescale(_constant(-1), _constant(other))


@function_rule(operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide, "div", "div_")
def _divide(other: object = None) -> Operation:
    if other is None:
        refuse("bounds exist for the quotient of a result and a constant", instead_of(torch.div))
    return Rescale(factor=_constant(other, torch.reciprocal))


@function_rule(operator.neg, torch.neg, torch.negative, "neg")
def _negate() -> Operation:
    return Rescale(factor=_constant(-1))
