"""A convolution on a window as one matrix, made of its weights anew in every step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from patchcert.bounds.geometry import Geometry, convolve

_MOST_INPUTS = 1024
_MOST_WORK = 8


def is_worth_a_matrix(inputs: int, taps: int) -> bool:
    """Whether the window is small, and the matrix costs at most so many times the work of so many taps a place."""
    return inputs <= min(_MOST_INPUTS, _MOST_WORK * taps)


@dataclass(frozen=True, slots=True)
class Taps:
    """Which weight of a convolution stands where in its matrix (inputs, outputs) on a window, if any does.

    Where none does, `index` names weights in turn: adding up a gradient of zeros there then has no bottleneck.
    """

    index: Tensor
    is_empty: Tensor

    @staticmethod
    def of(geometry: Geometry, weight: Tensor, groups: int, shape: Sequence[int]) -> "Taps":
        """For weights of this shape, on windows of the given (height, width, channels)."""
        with torch.no_grad():
            numbers = torch.arange(1.0, weight.numel() + 1, dtype=torch.float64, device=weight.device)
            numbers = window_matrix(geometry, numbers.view(weight.shape), groups, shape).long()
        in_turn = torch.arange(numbers.numel(), device=weight.device) % weight.numel()
        index = (numbers - 1).flatten().where(numbers.flatten() > 0, in_turn)
        return Taps(index, numbers == 0)

    def matrix(self, weight: Tensor) -> Tensor:
        """The convolution with these weights, exactly, and differentiable in them."""
        chosen = weight.flatten().index_select(0, self.index).view(self.is_empty.shape)
        return chosen.masked_fill(self.is_empty, 0.0)


def window_matrix(geometry: Geometry, weight: Tensor, groups: int, shape: Sequence[int]) -> Tensor:
    """The convolution on a window of the given (height, width, channels) as a matrix (inputs, outputs), exactly."""
    count = shape[0] * shape[1] * shape[2]
    basis = (
        torch.eye(count, dtype=weight.dtype, device=weight.device).reshape(count, *shape).permute(0, 3, 1, 2)
    )
    return convolve(basis, weight, geometry, groups, precise=True).permute(0, 2, 3, 1).flatten(1)
