"""Steps on windows as single CUDA kernels, which read and write each number once.

Each computes what a slower form computes, and tests on machines with CUDA hold the two equal. `fused_relu` and
`differentiable_relu` are `_between` in `rules`; `placed` is `F.pad`; `fused_rows` followed by a product is `convolve`;
`fused_head` is `fused_relu` followed by two products; `slid_relu` is a convolution of the library followed by
`fused_relu`; `window_products` is two products with gathered weights.
"""

# Triton is a language of its own; its stubs, where it is installed, do not tell all.
# pyright: reportCallIssue=false

import importlib.util
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from patchcert.bounds.geometry import Geometry

Size = tuple[int, int]


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_fused(value: Tensor) -> bool:
    """Whether the kernel takes this tensor: float32 on CUDA, with Triton there to compile it."""
    return value.is_cuda and value.dtype == torch.float32 and _has_triton()


def fused_relu(
    deviation: Tensor,
    radius: Tensor,
    clean: Tensor,
    cells: Tensor | None,
    factor: float,
    widen: float,
    slack: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Deviation and radius after ReLU, for (p, n, h, w, c) with clean places (n, places, c), or (p, n,
    features).

    The cells are those of each placement (p, cells), or of each window (p, n, cells), -1 outside. The radius
    is first taken times `factor` plus the first slack (n,), the result's times `widen` plus the second.
    Deviation and radius may be of half precision: the sums are in float32 all the same.
    """
    from patchcert.windows.triton_kernels import relu_windows

    deviation, radius, clean = deviation.contiguous(), radius.contiguous(), clean.contiguous()
    placements, images = deviation.shape[:2]
    new_deviation, new_radius = torch.empty_like(deviation), torch.empty_like(deviation)
    tiles = _Tiles.of(deviation, 256)
    relu_windows[tiles.grid](  # pyright: ignore[reportIndexIssue]
        deviation,
        radius,
        clean,
        clean if cells is None else cells.contiguous(),
        slack[0] if slack is not None else clean,
        slack[1] if slack is not None else clean,
        new_deviation,
        new_radius,
        placements * images,
        images,
        radius.stride(0) if radius.shape[0] > 1 else 0,
        radius.stride(1) if radius.shape[1] > 1 else 0,
        clean.stride(0),
        factor,
        widen,
        CHANNELS=deviation.shape[-1],
        INNER=tiles.inner,
        HAS_PLACES=cells is not None,
        OWN_CELLS=cells is not None and cells.dim() == 3,
        HAS_SLACK=slack is not None,
        IS_HALF=deviation.dtype == torch.float16,
        ROWS=tiles.rows,
        BLOCK=tiles.block,
        num_warps=4,
    )
    return new_deviation, new_radius


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How windows (p, n, ...) are shared out: so many numbers of so many windows to each program."""

    inner: int
    rows: int
    block: int
    grid: tuple[int, int]

    @staticmethod
    def of(windows: Tensor, most: int) -> "_Tiles":
        """With at most so many numbers of one window side by side, 1024 or a part of it by a power of two."""
        count, inner = windows.shape[0] * windows.shape[1], windows[0, 0].numel()
        block = min(1 << (inner - 1).bit_length(), most)
        rows = max(1, 1024 // block)
        return _Tiles(inner, rows, block, (-(-count // rows), -(-inner // block)))


def differentiable_relu(
    deviation: Tensor, radius: Tensor, clean: Tensor, cells: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `fused_relu` rounded to nearest, with a gradient; the cells (p, n, cells) are each window's own."""
    return _FusedRelu.apply(deviation, radius.expand_as(deviation), clean, cells)  # pyright: ignore[reportReturnType]


class _FusedRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, deviation: Tensor, radius: Tensor, clean: Tensor, cells: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        deviation, radius, clean = deviation.contiguous(), radius.contiguous(), clean.contiguous()
        cells = None if cells is None else cells.contiguous()
        ctx.save_for_backward(deviation, radius, clean, *([] if cells is None else [cells]))
        return fused_relu(deviation, radius, clean, cells, 1.0, 1.0, None)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, by_deviation: Tensor, by_radius: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        from patchcert.windows.triton_kernels import relu_windows_gradient

        deviation, radius, clean, *cells = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        to_deviation, to_radius = torch.empty_like(deviation), torch.empty_like(deviation)
        to_clean = torch.zeros_like(clean)
        tiles = _Tiles.of(deviation, 1024)
        relu_windows_gradient[tiles.grid](  # pyright: ignore[reportIndexIssue]
            deviation,
            radius,
            clean,
            cells[0] if cells else clean,
            by_deviation.contiguous(),
            by_radius.contiguous(),
            to_deviation,
            to_radius,
            to_clean,
            deviation.shape[0] * deviation.shape[1],
            deviation.shape[1],
            clean.stride(0),
            CHANNELS=deviation.shape[-1],
            INNER=tiles.inner,
            HAS_PLACES=bool(cells),
            ROWS=tiles.rows,
            BLOCK=tiles.block,
            num_warps=8,
        )
        return to_deviation, to_radius, to_clean, None


def placed(windows: Tensor, size: Size, origin: Size, shifts: Tensor | None = None) -> Tensor:
    """Maps (..., height, width, c) of the given size, zero but for the window (..., h, w, c) that each has in it.

    The window's first cell lies at the origin (row, column), moved by its own shift (..., 2) where there are
    shifts. What sticks out over the map is left out, and gets no gradient.
    """
    return _Placed.apply(windows, size, origin, shifts)  # pyright: ignore[reportReturnType]


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, windows: Tensor, size: Size, origin: Size, shifts: Tensor | None) -> Tensor:
        ctx.back = (tuple(windows.shape[-3:-1]), origin, shifts, -1)  # pyright: ignore[reportAttributeAccessIssue]
        return _moved(windows, size, origin, shifts, 1)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor, None, None, None]:
        return _moved(gradient, *ctx.back), None, None, None  # pyright: ignore[reportAttributeAccessIssue]


def _moved(source: Tensor, size: Size, origin: Size, shifts: Tensor | None, sign: int) -> Tensor:
    """The source (..., h, w, c) put into maps of the given size; with sign -1 what lies there is taken out again."""
    from patchcert.windows.triton_kernels import place_windows

    source = source.contiguous()
    height, width, channels = source.shape[-3:]
    output = source.new_empty(*source.shape[:-3], *size, channels)
    count = output.numel() // channels
    block = 1 << (channels - 1).bit_length()
    at_once = max(1, 4096 // block)
    place_windows[(-(-count // at_once),)](  # pyright: ignore[reportIndexIssue]
        source,
        source if shifts is None else shifts.contiguous(),
        output,
        count,
        *origin,
        SIGN=sign,
        ROWS=size[0],
        COLUMNS=size[1],
        SOURCE_ROWS=height,
        SOURCE_COLUMNS=width,
        CHANNELS=channels,
        HAS_SHIFTS=shifts is not None,
        CELLS=at_once,
        BLOCK=block,
        num_warps=4,
    )
    return output


def fused_head(
    deviation: Tensor,
    radius: Tensor,
    clean: Tensor,
    weight: Tensor,
    labels: Tensor,
    factor: float,
    widen: float,
    slack: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """As `fused_relu` on (p, n, features), then through the last layer merged with the specification.

    Gives (n, p, classes): the deviation times row label minus row class of the weight (classes, features), and
    the radius times the absolute values. No number is summed over more than once per feature. In TF32 where
    products may be, as in the search of training.
    """
    from patchcert.windows.triton_kernels import head_windows

    deviation, radius, clean, weight = (part.contiguous() for part in (deviation, radius, clean, weight))
    placements, images, features = deviation.shape
    classes = len(weight)
    shift = torch.empty(images, placements, classes, dtype=clean.dtype, device=clean.device)
    spread = torch.empty_like(shift)
    is_fast = torch.backends.cuda.matmul.fp32_precision == "tf32"
    rows, warps = (32, 2) if is_fast else (8, 4)
    head_windows[(images, -(-placements // rows))](  # pyright: ignore[reportIndexIssue]
        deviation,
        radius,
        clean,
        weight,
        labels,
        slack[0] if slack is not None else clean,
        slack[1] if slack is not None else clean,
        shift,
        spread,
        placements,
        images,
        radius.stride(0) if radius.shape[0] > 1 else 0,
        radius.stride(1) if radius.shape[1] > 1 else 0,
        factor,
        widen,
        FEATURES=features,
        CLASSES=classes,
        HAS_SLACK=slack is not None,
        IS_FAST=is_fast,
        IS_HALF=deviation.dtype == torch.float16,
        ROWS=rows,
        BLOCK=32,
        COLUMNS=max(16, 1 << (classes - 1).bit_length()),
        num_warps=warps,
    )
    return shift, spread


def fused_rows(maps: Tensor, geometry: Geometry, height: int, width: int) -> Tensor:
    """The values under the kernel at each place on maps (b, h, w, c): rows (b * places, taps * c), 0 in padding."""
    from patchcert.windows.triton_kernels import window_rows

    maps = maps.contiguous()
    count, rows, columns, channels = maps.shape
    taps, places = geometry.kernel[0] * geometry.kernel[1], count * height * width
    output = torch.empty(places, taps * channels, dtype=maps.dtype, device=maps.device)
    block = 1 << (geometry.kernel[1] * channels - 1).bit_length()
    at_once = max(1, 1024 // block)
    window_rows[(-(-places // at_once),)](  # pyright: ignore[reportIndexIssue]
        maps,
        output,
        places,
        height,
        width,
        rows,
        columns,
        geometry.padding[0],
        geometry.padding[2],
        CHANNELS=channels,
        KERNEL_ROWS=geometry.kernel[0],
        KERNEL_COLUMNS=geometry.kernel[1],
        ROW_STRIDE=geometry.stride[0],
        COLUMN_STRIDE=geometry.stride[1],
        ROW_DILATION=geometry.dilation[0],
        COLUMN_DILATION=geometry.dilation[1],
        PLACES=at_once,
        BLOCK=block,
        num_warps=4,
    )
    return output


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
    from patchcert.windows.triton_kernels import slide_relu

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
    from patchcert.windows.triton_kernels import window_product

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
