"""Sums of products with several inputs and an offset, of which each box may have its own: what is left of affine layers
where most of their inputs are known."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds.forms import Forms, PerForm, Pulled, Slopes, underflow
from patchcert.bounds.operations import Interval, Operation
from patchcert.bounds.rounding import Rounding

Weights = Annotated[Tensor, "_ u v"]
"""Those of each box, or of a single one, which are then the same for all."""


@dataclass(frozen=True, slots=True)
class Mixture(Operation):
    """y = sum of W x over several inputs + offset, give or take `error`; the weights may have been rounded before."""

    weights: tuple[Annotated[Tensor, "_ u _"], ...]
    offset: Annotated[Tensor, "n u"]
    error: Annotated[Tensor, "n u"]
    roundings: int = 0

    def select(self, boxes: Annotated[Tensor, "chosen"]) -> "Mixture":
        """The same for some of the boxes, by their numbers."""
        offset, error = self.offset.index_select(0, boxes), self.error.index_select(0, boxes)
        return replace(
            self, weights=tuple(_chosen(weight, boxes) for weight in self.weights), offset=offset, error=error
        )

    def forward(self, *inputs: Tensor) -> Annotated[Tensor, "n u"]:
        products = [_applied(weight, value) for weight, value in zip(self.weights, inputs, strict=True)]
        return torch.stack([self.offset, *products]).sum(dim=0)

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        pairs = list(zip(self.weights, inputs, strict=True))
        lower, upper = self.offset, self.offset
        for weight, box in pairs:
            rising, falling = weight.clamp(min=0), weight.clamp(max=0)
            lower = lower + (_applied(rising, box.lower) + _applied(falling, box.upper))
            upper = upper + (_applied(rising, box.upper) + _applied(falling, box.lower))
        error = self.error
        if rounding.is_outward:
            # The weight's own, a product, a sum for each term, and two sums for each input; the sizes themselves are
            # short by a factor of 1 - gamma > 7/8, and twice the error pays for that and for the last sums.
            terms = sum(weight.shape[2] + 2 for weight in self.weights)
            gamma = rounding.gamma(self.roundings + terms + 4)
            error = error + gamma * (self.reached(inputs) + self.offset.abs()) + rounding.tiny / rounding.unit
        return Interval(lower - 2 * error, upper + 2 * error)

    def backward(self, forms: Forms, *inputs: Interval, slope: Slopes, rounding: Rounding) -> Pulled | None:
        moved = tuple(forms @ (weight[0] if len(weight) == 1 else weight) for weight in self.weights)
        constant, sizes = _applied_forms(forms, self.offset), forms.abs()
        lost = self.error
        if rounding.is_outward:
            # The offset's product and sums; the weights' own, the coefficients' product and sums.
            units = self.offset.shape[1]
            lost = lost + rounding.gamma(units + 1) * self.offset.abs()
            lost = lost + rounding.gamma(self.roundings + units + 1) * (self.reached(inputs) + rounding.tiny)
        error = _applied_forms(sizes, lost)
        if rounding.is_outward:
            error = error + rounding.tiny / rounding.unit  # products with the offset that underflow
            for box in inputs:
                error = error + underflow(box.magnitude, rounding)
        return Pulled(moved, constant, error)

    def reached(self, inputs: Sequence[Interval]) -> Annotated[Tensor, "n u"]:
        """The sum of |W| |x| over all inputs."""
        pairs = zip(self.weights, inputs, strict=True)
        return torch.stack([_applied(weight.abs(), box.magnitude) for weight, box in pairs]).sum(dim=0)


def _applied(weight: Weights, value: Annotated[Tensor, "n v"]) -> Annotated[Tensor, "n u"]:
    return value @ weight[0].T if len(weight) == 1 else (weight @ value.unsqueeze(2)).squeeze(2)


def _applied_forms(forms: Forms, values: Annotated[Tensor, "n u"]) -> PerForm:
    return (forms @ values.unsqueeze(2)).squeeze(2)


def _chosen(weight: Weights, boxes: Annotated[Tensor, "chosen"]) -> Weights:
    return weight if len(weight) == 1 else weight.index_select(0, boxes)
