"""Products of windows with the weights of a layer, in the forms that suit the window and the machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from patchcert.bounds import Rounding
from patchcert.bounds.geometry import Geometry, convolve
from patchcert.bounds.rounding import blocked_product

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Weight = Annotated[Tensor, "out _ _ _"]
"""The weights of a convolution: outputs, channels of a group, height and width of the kernel."""


def product(
    left: Annotated[Tensor, "... rows inner"],
    right: Annotated[Tensor, "... inner columns"],
    rounding: Rounding,
    terms: int | None = None,
) -> Annotated[Tensor, "... rows columns"]:
    """The matrix product, in the form whose rounding is known where bounds must be sound.

    `terms` is how many products of a sum can differ from zero, where that is fewer than all.
    """
    return blocked_product(left, right, terms) if rounding.is_outward else left @ right


_MOST_INPUTS, _MOST_WORK = 1024, 8


def is_worth_a_matrix(inputs: int, taps: int) -> bool:
    """Whether the window is small, and its matrix costs at most `_MOST_WORK` times a convolution of `taps` a place."""
    return inputs <= min(_MOST_INPUTS, _MOST_WORK * taps)


@dataclass(frozen=True, slots=True)
class ConvolutionMatrix:
    """Which weight of a convolution stands where in its matrix (inputs, outputs) on a window, if any does.

    Where none does, `index` names weights in turn: adding up a gradient of zeros there then has no bottleneck.
    """

    index: Annotated[Tensor, "entries"]
    is_empty: Annotated[Tensor, "inputs outputs"]

    @staticmethod
    def of(geometry: Geometry, weight: Weight, groups: int, shape: Sequence[int]) -> "ConvolutionMatrix":
        """For weights of this shape, on windows of the given (height, width, channels)."""
        with torch.no_grad():
            numbers = torch.arange(1.0, weight.numel() + 1, dtype=torch.float64, device=weight.device)
            numbers = window_matrix(geometry, numbers.view(weight.shape), groups, shape).long()
        in_turn = torch.arange(numbers.numel(), device=weight.device) % weight.numel()
        index = (numbers - 1).flatten().where(numbers.flatten() > 0, in_turn)
        return ConvolutionMatrix(index, numbers == 0)

    def matrix(self, weight: Weight) -> Annotated[Tensor, "inputs outputs"]:
        """The convolution with these weights, exactly, and differentiable in them."""
        chosen = weight.flatten().index_select(0, self.index).view(self.is_empty.shape)
        return chosen.masked_fill(self.is_empty, 0.0)


def window_matrix(
    geometry: Geometry, weight: Weight, groups: int, shape: Sequence[int]
) -> Annotated[Tensor, "inputs outputs"]:
    """The convolution on a window of the given (height, width, channels) as a matrix, exactly."""
    count = shape[0] * shape[1] * shape[2]
    basis = (
        torch.eye(count, dtype=weight.dtype, device=weight.device).reshape(count, *shape).permute(0, 3, 1, 2)
    )
    return convolve(basis, weight, geometry, groups, precise=True).permute(0, 2, 3, 1).flatten(1)


_SPARSE = 10
"""Rows are multiplied as sparse ones where at most one entry in this many is not zero."""


def is_sparse(part: Annotated[Tensor, "_ _ h w c"], columns: Annotated[Tensor, "places c out"]) -> bool:
    """Whether windows, which must be without a gradient, cover so few places that a CPU gains by skipping zeros."""
    entries = part.shape[2] * part.shape[3]
    return not part.requires_grad and part.device.type == "cpu" and entries * _SPARSE <= len(columns)


def sparse_product(
    part: Annotated[Tensor, "p n h w c"],
    columns: Annotated[Tensor, "places c out"],
    cells: Annotated[Tensor, "p n cells"],
) -> Annotated[Tensor, "p n out"]:
    """Windows at these cells of their maps times the weights; a cell that is named twice counts twice.

    The gradient is that of the weights.
    """
    from scipy.sparse import csr_array

    channels, width = part.shape[-1], part[0, 0].numel()
    entries = (cells.unsqueeze(-1) * channels + torch.arange(channels)).flatten().int()
    ends = torch.arange(0, entries.numel() + 1, width, dtype=torch.int32)
    shape = (len(ends) - 1, columns.shape[0] * channels)
    rows = csr_array((part.reshape(-1).numpy(), entries.numpy(), ends.numpy()), shape=shape)
    moved: Tensor = _SparseProduct.apply(rows, columns.flatten(0, 1))  # pyright: ignore[reportAssignmentType]
    return moved.unflatten(0, part.shape[:2])


class _SparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: "csr_array", matrix: Tensor) -> Tensor:
        ctx.rows = rows  # pyright: ignore[reportAttributeAccessIssue]
        return torch.from_numpy(rows @ matrix.numpy())

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, torch.from_numpy(ctx.rows.T @ gradient.numpy())  # pyright: ignore[reportAttributeAccessIssue]
