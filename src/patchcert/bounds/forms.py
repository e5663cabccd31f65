"""Linear forms of a layer's output, and what is left of them when they are written by the layer's input.

A form is a row of coefficients A: it stands for the sum of A times the values of some result of the network. Where a
layer y = f(x) is passed backwards, A y is replaced by something that is never above it and is linear in x. What holds,
exactly, with all coefficients as they are stored:

    A y >= A' x + constant - 2 error      for every x in the interval of the layer's input.

The coefficients A' are whatever numbers came out; how far they are from those that were meant, times the largest
absolute value of x, is part of the error. An error is a sum of numbers that are not negative, each rounded a few times
and all of them added in some order; that makes it too small by a factor of 1/2 at the very most, for which the 2 pays.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds.rounding import Rounding

Forms = Annotated[Tensor, "n m ..."]
"""The coefficients of m forms for each of n boxes."""
PerForm = Annotated[Tensor, "n m"]
Slopes = Tensor | None
"""In [0, 1], of the lower line of each element where an activation bends, which may be any; None for those that
enclose least."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """Forms of an output, written by the inputs: coefficients for each of them, and what does not depend on them."""

    coefficients: tuple[Forms, ...]
    constant: PerForm
    error: PerForm

    @staticmethod
    def exactly(forms: Forms, *coefficients: Forms) -> "Pulled":
        """Coefficients that need no constant and were not rounded."""
        nothing = forms.new_zeros(forms.shape[:2])
        return Pulled(coefficients, nothing, nothing)


def summed(terms: Forms, roundings: int, rounding: Rounding) -> tuple[PerForm, PerForm]:
    """The sum of the terms of each form, and its error; each term was itself rounded `roundings` times."""
    rows = terms.flatten(2)
    total = rows.sum(dim=2)
    if not rounding.is_outward:
        return total, torch.zeros_like(total)
    # A sum in any order rounds each of n terms less than n times. A term that underflows is off by less than tiny, and
    # there are fewer than 1/u of them.
    gamma = rounding.gamma(rows.shape[2] + roundings)
    return total, rows.abs().sum(dim=2) * gamma + rounding.tiny / rounding.unit


def shifted(
    forms: Forms, magnitude: Annotated[Tensor, "n ..."], roundings: int, rounding: Rounding
) -> PerForm:
    """The error of coefficients of which each was rounded `roundings` times.

    `magnitude` bounds, for each output, the sum of |weight| |input| behind it: what a form of outputs loses is at most
    gamma |A| (|W| |x|), whichever coefficients of inputs it was lost in.
    """
    if not rounding.is_outward:
        return forms.new_zeros(forms.shape[:2])
    # Where the sum behind the magnitude underflows, it is short of less than tiny.
    rows = (forms.abs() * (magnitude + rounding.tiny).unsqueeze(1)).flatten(2)
    rounding.gamma(rows.shape[2])  # refuses sums too long for the error to be within a factor of 2
    return rows.sum(dim=2) * rounding.gamma(roundings)


def underflow(inputs: Annotated[Tensor, "n ..."], rounding: Rounding) -> Annotated[Tensor, "n 1"]:
    """What coefficients can lose where their products underflow: less than tiny each, times the input."""
    return inputs.flatten(1).sum(dim=1, keepdim=True) * rounding.tiny + rounding.tiny / rounding.unit
