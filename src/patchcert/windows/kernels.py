"""Steps on windows as single CUDA kernels, which read and write each number once; loaded where `is_fused` says so.

Each computes what a slower form computes, and tests on machines with CUDA hold the two equal. `fused_relu` and
`differentiable_relu` are `_monotone` in `rules`; `placed` is `F.pad`; `fused_rows` followed by a product is `convolve`;
`fused_head` is `fused_relu` followed by two products; `slid_relu` is a convolution of the library followed by
`fused_relu`; `window_products` is two products with gathered weights.
"""

# Triton is a language of its own; its stubs, where it is installed, do not tell all.
# pyright: reportCallIssue=false

from dataclasses import dataclass
from functools import cache
from typing import Annotated

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from patchcert.bounds.geometry import Geometry
from patchcert.bounds.operations import Convolution, is_relu
from patchcert.bounds.rounding import blocked_product
from patchcert.windows import triton_kernels
from patchcert.windows.layout import Weight
from patchcert.windows.passes import Columns, OnWindows, WindowPass, Windows
from patchcert.windows.rules import relu_terms

Size = tuple[int, int]

_State = Annotated[Tensor, "p n ..."]
"""Deviations or radii: (p, n, h, w, c) on windows, or (p, n, features)."""
_Radius = Annotated[Tensor, "_ _ ..."]
"""Radii that may be the same for all placements or images."""


def fused_relu(
    deviation: _State,
    radius: _Radius,
    clean: Annotated[Tensor, "n ..."],
    cells: Annotated[Tensor, "p ... cells"] | None,
    factor: float,
    widen: float,
    slack: tuple[Annotated[Tensor, "n"], Annotated[Tensor, "n"]] | None,
) -> tuple[_State, _State]:
    """Deviation and radius after ReLU, on windows with clean values (n, places, c), or on features with (n, features).

    The cells are those of each placement (p, cells), or of each window (p, n, cells), -1 outside. The radius is
    multiplied by `factor` and the first slack added before the function, by `widen` and the second slack after it.
    Deviation and radius may be of half precision: the sums are in float32 all the same.
    """
    deviation, radius, clean = deviation.contiguous(), radius.contiguous(), clean.contiguous()
    placements, images = deviation.shape[:2]
    new_deviation, new_radius = torch.empty_like(deviation), torch.empty_like(deviation)
    grid = _Grid.of(deviation, 256)
    triton_kernels.relu_windows[grid.programs](  # pyright: ignore[reportIndexIssue]
        deviation,
        radius,
        clean,
        clean if cells is None else cells.contiguous(),
        *(slack or (clean, clean)),
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
        INNER=grid.inner,
        HAS_PLACES=cells is not None,
        OWN_CELLS=cells is not None and cells.dim() == 3,
        HAS_SLACK=slack is not None,
        IS_HALF=deviation.dtype == torch.float16,
        ROWS=grid.rows,
        BLOCK=grid.block,
        num_warps=4,
    )
    return new_deviation, new_radius


@dataclass(frozen=True, slots=True)
class _Grid:
    """How windows are shared out among programs: each takes `block` numbers of `rows` windows."""

    inner: int
    rows: int
    block: int
    programs: tuple[int, int]

    @staticmethod
    def of(windows: _State, most: int) -> "_Grid":
        """With at most `most` numbers of one window side by side: 1024, or 1024 divided by a power of two."""
        count, inner = windows.shape[0] * windows.shape[1], windows[0, 0].numel()
        block = min(1 << (inner - 1).bit_length(), most)
        rows = max(1, 1024 // block)
        return _Grid(inner, rows, block, (-(-count // rows), -(-inner // block)))


def differentiable_relu(
    deviation: _State,
    radius: _Radius,
    clean: Annotated[Tensor, "n ..."],
    cells: Annotated[Tensor, "p n cells"] | None,
) -> tuple[_State, _State]:
    """As `fused_relu` rounded to nearest, with a gradient; the cells are each window's own."""
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
        deviation, radius, clean, *cells = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        to_deviation, to_radius = torch.empty_like(deviation), torch.empty_like(deviation)
        to_clean = torch.zeros_like(clean)
        grid = _Grid.of(deviation, 1024)
        triton_kernels.relu_windows_gradient[grid.programs](  # pyright: ignore[reportIndexIssue]
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
            INNER=grid.inner,
            HAS_PLACES=bool(cells),
            ROWS=grid.rows,
            BLOCK=grid.block,
            num_warps=8,
        )
        return to_deviation, to_radius, to_clean, None


def placed(windows: Tensor, size: Size, origin: Size, shifts: Tensor | None = None) -> Tensor:
    """Maps (..., height, width, c) of the given size, each with a window (..., h, w, c) in it and zero elsewhere.

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
    source = source.contiguous()
    height, width, channels = source.shape[-3:]
    output = source.new_empty(*source.shape[:-3], *size, channels)
    count = output.numel() // channels
    block = 1 << (channels - 1).bit_length()
    at_once = max(1, 4096 // block)
    triton_kernels.place_windows[(-(-count // at_once),)](  # pyright: ignore[reportIndexIssue]
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
    deviation: Annotated[Tensor, "p n features"],
    radius: Annotated[Tensor, "_ _ features"],
    clean: Annotated[Tensor, "n features"],
    weight: Annotated[Tensor, "k features"],
    labels: Annotated[Tensor, "n"],
    factor: float,
    widen: float,
    slack: tuple[Annotated[Tensor, "n"], Annotated[Tensor, "n"]] | None,
) -> tuple[Annotated[Tensor, "n p k"], Annotated[Tensor, "n p k"]]:
    """As `fused_relu` on features, then through the last layer merged with the specification.

    Gives the deviation times row label minus row class of the weight, and the radius times the absolute values. Every
    sum has one term per feature. Products are in TF32 where that is allowed, as in the search of training.
    """
    deviation, radius, clean, weight = (part.contiguous() for part in (deviation, radius, clean, weight))
    placements, images, features = deviation.shape
    classes = len(weight)
    shift = torch.empty(images, placements, classes, dtype=clean.dtype, device=clean.device)
    spread = torch.empty_like(shift)
    is_fast = torch.backends.cuda.matmul.fp32_precision == "tf32"
    rows, warps = (32, 2) if is_fast else (8, 4)
    triton_kernels.head_windows[(images, -(-placements // rows))](  # pyright: ignore[reportIndexIssue]
        deviation,
        radius,
        clean,
        weight,
        labels,
        *(slack or (clean, clean)),
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


def fused_rows(
    maps: Annotated[Tensor, "b _ _ c"], geometry: Geometry, height: int, width: int
) -> Annotated[Tensor, "rows terms"]:
    """The values under the kernel at each place of its output (height, width), a row for each, 0 in padding."""
    maps = maps.contiguous()
    count, rows, columns, channels = maps.shape
    taps, places = geometry.kernel[0] * geometry.kernel[1], count * height * width
    output = torch.empty(places, taps * channels, dtype=maps.dtype, device=maps.device)
    block = 1 << (geometry.kernel[1] * channels - 1).bit_length()
    at_once = max(1, 1024 // block)
    triton_kernels.window_rows[(-(-places // at_once),)](  # pyright: ignore[reportIndexIssue]
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
    """Whether channels in and out are cut into tiles without a rest, which the device has room for."""
    is_even = channels % _FEWEST_CHANNELS == 0 and outputs % _FEWEST_CHANNELS == 0
    return is_even and _shared_memory(device) >= _SHARED_MEMORY


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program can have beside its registers; on a CPU, where tests interpret kernels, enough."""
    if device.type != "cuda":
        return _SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _images(count: int) -> int:
    """How many images a program takes at once."""
    return min(128, max(16, 1 << (count - 1).bit_length()))


def _part(number: int, most: int) -> int:
    """The largest power of two that divides the number and is at most `most`, itself a power of two."""
    return min(number & -number, most)


def slid_relu(
    parts: tuple[OnWindows, OnWindows],
    weight: Annotated[Tensor, "taps c out"],
    geometry: Geometry,
    clean: Annotated[Tensor, "n places out"],
    cells: Annotated[Tensor, "p cells"],
    spans: Annotated[Tensor, "p 6"],
) -> tuple[Annotated[Tensor, "p n _ _ out"], Annotated[Tensor, "p n _ _ out"]]:
    """Deviation and radius through a convolution and a ReLU.

    The `cells` are those of the new windows, -1 outside; the `spans` are those of the old windows.
    """
    deviation, radius, clean = parts[0].contiguous(), parts[1].contiguous(), clean.contiguous()
    placements, images, rows, columns, channels = deviation.shape
    outputs, (height, width) = weight.shape[-1], geometry.output_size(rows, columns)
    # Two sums of 128 images by 128 outputs fill the registers of a core; narrower ones leave room for another.
    at_once, block = _images(images), _part(outputs, 128)
    new_deviation = deviation.new_empty(placements, images, height, width, outputs)
    new_radius = torch.empty_like(new_deviation)
    programs = -(-images // at_once) * (outputs // block)
    triton_kernels.slide_relu[(height * width, programs, placements)](  # pyright: ignore[reportIndexIssue]
        deviation,
        radius,
        weight,
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
        IMAGES=at_once,
        TERMS=_part(channels, 64),
        BLOCK=block,
        num_warps=8,
        num_stages=4 if block == 128 else 2,
    )
    return new_deviation, new_radius


def window_products(
    parts: tuple[OnWindows, OnWindows],
    weights: tuple[Annotated[Tensor, "places c out"], Annotated[Tensor, "places c out"]],
    map_columns: int,
    spans: Annotated[Tensor, "p 6"],
) -> tuple[Annotated[Tensor, "p n out"], Annotated[Tensor, "p n out"]]:
    """Deviation and radius times the weights and their absolute values, where `spans` say on a map of `map_columns`."""
    deviation, radius = parts[0].contiguous(), parts[1].contiguous()
    placements, images, rows, columns, channels = deviation.shape
    outputs = weights[0].shape[-1]
    # One sum of 128 images by 256 outputs fills the registers of a core.
    at_once, block = _images(images), _part(outputs, 256)
    new_deviation = deviation.new_empty(placements, images, outputs)
    new_radius = torch.empty_like(new_deviation)
    programs = -(-images // at_once) * (outputs // block)
    triton_kernels.window_product[(2 * programs, placements)](  # pyright: ignore[reportIndexIssue]
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
        IMAGES=at_once,
        TERMS=_part(channels, 64),
        BLOCK=block,
        num_warps=8,
        num_stages=4,
    )
    return new_deviation, new_radius


def relu(state: Windows, sweep: WindowPass, position: int) -> Windows:
    """The windows after the ReLU at this position, in one pass over the memory."""
    index = sweep.steps[position].inputs[0]
    cells = sweep.signed_cells(index)
    clean = sweep.clean.values[index].flatten(1) if cells is None else sweep.clean.places(index, sweep.layout)
    if sweep.has_gradient:
        return Windows(*differentiable_relu(state.deviation, state.radius, clean, cells))
    terms = relu_terms(state, sweep, position)
    return Windows(*fused_relu(state.deviation, state.radius, clean, cells, *terms))


def padded(maps: Annotated[Tensor, "b h w c"], geometry: Geometry) -> Annotated[Tensor, "b _ _ c"]:
    """The maps with the padding made explicit."""
    top, bottom, left, right = geometry.padding
    return placed(maps, (maps.shape[1] + top + bottom, maps.shape[2] + left + right), (top, left))


def slide_by_rows(
    maps: Annotated[Tensor, "b h w c"], taps: Weight, geometry: Geometry
) -> Annotated[Tensor, "b _ _ out"]:
    """As `convolve` by a product, with the rows under the kernel laid out by a CUDA kernel."""
    height, width = geometry.output_size(maps.shape[1], maps.shape[2])
    rows = fused_rows(maps, geometry, height, width)
    columns = taps.permute(2, 3, 1, 0).flatten(0, 2)
    return blocked_product(rows, columns).reshape(len(maps), height, width, -1)


def convolution_with_relu(state: Windows, sweep: WindowPass, position: int) -> Windows | None:
    """The windows after the convolution at this position and the ReLU that follows it, by one kernel of half precision.

    None where the kernel does not apply.
    """
    step = sweep.steps[position]
    if not isinstance(step.operation, Convolution) or not _is_half(state, sweep):
        return None
    spans, cells = sweep.spans(step.inputs[0]), sweep.signed_cells(position + 1)
    geometry, weight = step.operation.geometry, step.operation.weight()
    users = [user for user in sweep.steps if position + 1 in user.inputs]
    is_before_relu = users == [sweep.steps[position + 1]] and is_relu(users[0].operation)
    is_plain = step.operation.groups == 1 and geometry.dilation == (1, 1) and is_before_relu
    fits = is_plain and fills_cores(weight.shape[1], weight.shape[0], weight.device)
    if spans is None or cells is None or not fits:
        return None
    clean = sweep.clean.places(position + 1, sweep.layout)
    local = sweep.window(step.inputs[0]).local(geometry, sweep.window(position + 1))
    formed, _ = sweep.shared.weights(
        (position, "half"), lambda: weight.permute(2, 3, 1, 0).flatten(0, 1).half().contiguous()
    )
    return Windows(*slid_relu((state.deviation, state.radius), formed, local, clean, cells, spans))


def product_of_windows(
    state: Windows, weights: tuple[Columns, Columns], sweep: WindowPass, index: int
) -> Windows | None:
    """The windows on value `index` times the weights of the layer after it, by one kernel of half precision.

    None where the kernel does not apply.
    """
    spans, area = sweep.spans(index), sweep.layout.maps[index]
    _, channels, outputs = weights[0].shape
    fits = _is_half(state, sweep) and fills_cores(channels, outputs, weights[0].device)
    if spans is None or area is None or not fits:
        return None
    parts = (state.deviation, state.radius)
    return Windows(*window_products(parts, weights, area.width, spans))


def _is_half(state: Windows, sweep: WindowPass) -> bool:
    is_full = state.radius.shape == state.deviation.shape
    return state.deviation.dtype == torch.float16 and is_full and not sweep.has_gradient
