"""Layers on windows of half precision as single kernels, where channels fill tensor cores.

Neither what falls on padding is computed, nor what lies outside the map. The plain twin of `slid_relu` is a convolution
of the library followed by `fused_relu`, that of `window_products` are gathered weights and two products; they are held
equal by tests on machines with CUDA.
"""

# Triton is a language of its own; its stubs, where it is installed, do not tell all.
# pyright: reportCallIssue=false

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from patchcert.bounds.geometry import Geometry

_FEWEST_CHANNELS = 32
_SHARED_MEMORY = 200 * 2**10


def fills_cores(channels: int, outputs: int, device: torch.device) -> bool:
    """Whether so many channels in and out are cut into blocks without a rest, which the device has room for."""
    is_even = channels % _FEWEST_CHANNELS == 0 and outputs % _FEWEST_CHANNELS == 0
    return is_even and _shared_memory(device) >= _SHARED_MEMORY


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program can have beside its registers; on a CPU, as interpreted in tests, as many as it likes."""
    if device.type != "cuda":
        return _SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a program takes at once: so many images and outputs, so many terms of their sums; and how it is run."""

    images: int
    outputs: int
    terms: int
    warps: int
    stages: int
    is_turned: bool = False


def slide_blocks(images: int, channels: int, outputs: int) -> Blocks:
    """Two sums of 128 images by 128 outputs fill the registers of a core; narrower ones leave room for another."""
    width = _part(outputs, 128)
    return Blocks(_images(images), width, _part(channels, 64), 8, 4 if width == 128 else 2, is_turned=True)


def product_blocks(images: int, channels: int, outputs: int) -> Blocks:
    """One sum of 128 images by 256 outputs likewise."""
    return Blocks(_images(images), _part(outputs, 256), _part(channels, 64), 8, 4)


def _images(count: int) -> int:
    return min(128, max(16, 1 << (count - 1).bit_length()))


def _part(number: int, most: int) -> int:
    """The largest power of two that divides the number, up to the most, which is one itself."""
    return min(number & -number, most)


def slid_relu(
    parts: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    geometry: Geometry,
    clean: Tensor,
    cells: Tensor,
    spans: Tensor,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor]:
    """Deviation and radius (p, n, h, w, c) through a convolution and a ReLU.

    The weights, and their absolute values, are (taps, c, outputs); the clean values (n, places, outputs), of which the
    new windows have the `cells` (p, new cells), -1 outside. The `spans` (p, 6) are those of the old windows.
    """
    from patchcert.windows.half_kernels import slide_relu

    deviation, radius, clean = parts[0].contiguous(), parts[1].contiguous(), clean.contiguous()
    placements, images, rows, columns, channels = deviation.shape
    outputs, (height, width) = weights[0].shape[-1], geometry.output_size(rows, columns)
    blocks = blocks or slide_blocks(images, channels, outputs)
    new_deviation = deviation.new_empty(placements, images, height, width, outputs)
    new_radius = torch.empty_like(new_deviation)
    tiles = -(-images // blocks.images) * (outputs // blocks.outputs)
    slide_relu[(height * width, tiles, placements)](  # pyright: ignore[reportIndexIssue]
        deviation,
        radius,
        *weights,
        clean,
        cells.contiguous(),
        spans.contiguous(),
        new_deviation,
        new_radius,
        images,
        clean.stride(0),
        geometry.padding[0],
        geometry.padding[2],
        CHANNELS=channels,
        OUTPUTS=outputs,
        ROWS=rows,
        COLUMNS=columns,
        NEW_ROWS=height,
        NEW_COLUMNS=width,
        KERNEL_ROWS=geometry.kernel[0],
        KERNEL_COLUMNS=geometry.kernel[1],
        ROW_STRIDE=geometry.stride[0],
        COLUMN_STRIDE=geometry.stride[1],
        IMAGES=blocks.images,
        TERMS=blocks.terms,
        BLOCK=blocks.outputs,
        IS_TURNED=blocks.is_turned,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return new_deviation, new_radius


def window_products(
    parts: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    map_columns: int,
    spans: Tensor,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor]:
    """Deviation and radius (p, n, h, w, c) times the weights (places, c, outputs) and their absolute values.

    The windows lie on a map of so many columns, as their `spans` (p, 6) say.
    """
    from patchcert.windows.half_kernels import window_product

    deviation, radius = parts[0].contiguous(), parts[1].contiguous()
    placements, images, rows, columns, channels = deviation.shape
    outputs = weights[0].shape[-1]
    blocks = blocks or product_blocks(images, channels, outputs)
    new_deviation = deviation.new_empty(placements, images, outputs)
    new_radius = torch.empty_like(new_deviation)
    tiles = -(-images // blocks.images) * (outputs // blocks.outputs)
    window_product[(2 * tiles, placements)](  # pyright: ignore[reportIndexIssue]
        deviation,
        radius,
        *weights,
        spans.contiguous(),
        new_deviation,
        new_radius,
        images,
        CHANNELS=channels,
        OUTPUTS=outputs,
        ROWS=rows,
        COLUMNS=columns,
        MAP_COLUMNS=map_columns,
        IMAGES=blocks.images,
        TERMS=blocks.terms,
        BLOCK=blocks.outputs,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return new_deviation, new_radius
