"""Rows that are zero but in a window, times the weights of a linear layer: a CPU need not multiply the zeros."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_SPARSE = 10  # a row is worth it with at most one entry in so many


def is_sparse(part: Tensor, columns: Tensor) -> bool:
    """Whether windows (k, n, h, w, c), which must be without a gradient, cover little enough of the places."""
    entries = part.shape[2] * part.shape[3]
    return not part.requires_grad and part.device.type == "cpu" and entries * _SPARSE <= len(columns)


def sparse_product(part: Tensor, columns: Tensor, cells: Tensor) -> Tensor:
    """Windows (k, n, h, w, c) at the cells (k, n, h * w) of their maps, times the weights (places, c, out).

    Twice in a row, cells add up. The gradient is that of the weights.
    """
    from scipy.sparse import csr_array

    channels, width = part.shape[-1], part[0, 0].numel()
    entries = (cells.unsqueeze(-1) * channels + torch.arange(channels)).flatten().int()
    ends = torch.arange(0, entries.numel() + 1, width, dtype=torch.int32)
    shape = (len(ends) - 1, columns.shape[0] * channels)
    rows = csr_array((part.reshape(-1).numpy(), entries.numpy(), ends.numpy()), shape=shape)
    moved: Tensor = _Product.apply(rows, columns.flatten(0, 1))  # pyright: ignore[reportAssignmentType]
    return moved.unflatten(0, part.shape[:2])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: "csr_array", matrix: Tensor) -> Tensor:
        ctx.rows = rows  # pyright: ignore[reportAttributeAccessIssue]
        return torch.from_numpy(rows @ matrix.numpy())

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, torch.from_numpy(ctx.rows.T @ gradient.numpy())  # pyright: ignore[reportAttributeAccessIssue]
