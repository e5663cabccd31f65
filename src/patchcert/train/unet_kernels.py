"""Triton kernels for convolutions of few channels; imported only where tensors are on CUDA and Triton is installed.

`small_convolution` does what `F.conv2d` does; tests on machines with CUDA hold them equal.
Without them a guided step recorded as a CUDA graph is 39 to 43 % slower (mlp and cnn2 on MNIST, one H200).
A convolution is a product of the weights (width, entries) with what lies under the kernel (entries, places). An
entry is a channel and a tap, a place is a pixel of the output of any image: tiny maps fill whole tiles together.
With a thread for each place, all of a block's entries lie at distances from it that the compiler knows.
Their parameters are pointers and numbers of the device, which Python's types do not describe.
"""

# ruff: noqa: ANN001, ANN201, ANN202, SIM102
# pyright: reportMissingImports=false

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

_PLACES = 128
"""Of a program, a thread for each: then entries are known to the compiler, and most addresses cost nothing."""

_PROGRAMS, _MOST_PARTS = 1056, 512
"""How many programs share the places: enough to fill a large device, few enough that adding up their sums is cheap."""


@triton.jit
def _is_pixel(at, SIZE: tl.constexpr, SPREAD: tl.constexpr):
    return (at >= 0) & (at < SIZE * SPREAD) & (at % SPREAD == 0)


@triton.jit
def _is_entry(
    first, CHANNELS: tl.constexpr, AT_ONCE: tl.constexpr, TAPS: tl.constexpr, ENTRIES: tl.constexpr
):
    """Whether there is such an entry among AT_ONCE channels from `first` on."""
    channel = tl.arange(0, ENTRIES) // TAPS
    return (channel < AT_ONCE) & (first + channel < CHANNELS)


@triton.jit
def _under(
    maps,
    place,
    first,
    place_count,
    CHANNELS: tl.constexpr,
    SOURCE_ROWS: tl.constexpr,
    SOURCE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KERNEL_ROWS: tl.constexpr,
    KERNEL_COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    SPREAD: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """The values (entries, places) of maps (n, CHANNELS, SOURCE_ROWS, SOURCE_COLUMNS), 0 outside of them.

    The kernel's first tap lies at STRIDE times the place less (TOP, LEFT), on maps whose pixels stand SPREAD
    apart with zeros between them. Which taps of a place lie on pixels is worked out once for all its channels, as
    bits of one number.
    """
    TAPS: tl.constexpr = KERNEL_ROWS * KERNEL_COLUMNS
    FLAGS: tl.constexpr = tl.int64 if TAPS > 31 else tl.int32
    top = place // COLUMNS % ROWS * STRIDE - TOP
    left = place % COLUMNS * STRIDE - LEFT
    rows, columns = tl.zeros_like(place).to(FLAGS), tl.zeros_like(place).to(FLAGS)
    for tap in tl.static_range(KERNEL_ROWS):
        is_row = _is_pixel(top + tap, SOURCE_ROWS, SPREAD) & (place < place_count)
        rows += is_row.to(FLAGS) << (tap * KERNEL_COLUMNS)
    for tap in tl.static_range(KERNEL_COLUMNS):
        columns += _is_pixel(left + tap, SOURCE_COLUMNS, SPREAD).to(FLAGS) << tap
    entry = tl.arange(0, ENTRIES)
    flag = _is_entry(first, CHANNELS, AT_ONCE, TAPS, ENTRIES).to(FLAGS) << (entry % TAPS)
    is_inside = ((rows * columns)[None, :] & flag[:, None]) != 0
    plane = entry // TAPS * (SOURCE_ROWS * SOURCE_COLUMNS)
    down, right = entry % TAPS // KERNEL_COLUMNS, entry % TAPS % KERNEL_COLUMNS
    start = (place // (ROWS * COLUMNS) * CHANNELS + first) * (SOURCE_ROWS * SOURCE_COLUMNS)
    if SPREAD == 1:
        origin = (maps + (start + top * SOURCE_COLUMNS + left))[None, :]
        source = origin + (plane + down * SOURCE_COLUMNS + right)[:, None]
    else:
        row, column = top[None, :] + down[:, None], left[None, :] + right[:, None]
        source = maps + (start[None, :] + plane[:, None] + row // SPREAD * SOURCE_COLUMNS + column // SPREAD)
    return tl.load(source, mask=is_inside, other=0.0)


@triton.jit
def convolve_maps(
    maps,
    weight,
    bias,
    output,
    place_count,
    CHANNELS: tl.constexpr,
    SOURCE_ROWS: tl.constexpr,
    SOURCE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KERNEL_ROWS: tl.constexpr,
    KERNEL_COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    SPREAD: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_TURNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The output (n, WIDTH, ROWS, COLUMNS) for weights (WIDTH, CHANNELS, taps).

    Turned weights are (CHANNELS, WIDTH, taps), with the last tap first.
    """
    TAPS: tl.constexpr = KERNEL_ROWS * KERNEL_COLUMNS
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    unit = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    total = tl.zeros((BLOCK, PLACES), tl.float32)
    entry = tl.arange(0, ENTRIES)
    for first in range(0, CHANNELS, AT_ONCE):
        values = _under(
            maps, place, first, place_count, CHANNELS, SOURCE_ROWS, SOURCE_COLUMNS, ROWS, COLUMNS,
            KERNEL_ROWS, KERNEL_COLUMNS, STRIDE, SPREAD, TOP, LEFT, AT_ONCE, ENTRIES,
        )  # fmt: skip
        if IS_TURNED:
            at = unit * TAPS + ((first + entry // TAPS) * (WIDTH * TAPS) + TAPS - 1 - entry % TAPS)[None, :]
        else:
            at = unit * (CHANNELS * TAPS) + (first * TAPS + entry)[None, :]
        is_weight = (unit < WIDTH) & _is_entry(first, CHANNELS, AT_ONCE, TAPS, ENTRIES)[None, :]
        factors = tl.load(weight + at, mask=is_weight, other=0.0)
        total = tl.dot(factors, values, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + unit, mask=unit < WIDTH, other=0.0)
    target = place // (ROWS * COLUMNS) * (WIDTH * ROWS * COLUMNS) + place % (ROWS * COLUMNS)
    target = target[None, :] + unit * (ROWS * COLUMNS)
    tl.store(output + target, total, mask=(unit < WIDTH) & (place < place_count)[None, :])


@triton.jit
def correlate_maps(
    maps,
    gradient,
    parts,
    place_count,
    steps,
    CHANNELS: tl.constexpr,
    SOURCE_ROWS: tl.constexpr,
    SOURCE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KERNEL_ROWS: tl.constexpr,
    KERNEL_COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    SPREAD: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Per slice of `steps` times PLACES places, what reaches the weights (WIDTH, CHANNELS, taps), then the bias."""
    TAPS: tl.constexpr = KERNEL_ROWS * KERNEL_COLUMNS
    part = tl.program_id(0)
    first = tl.program_id(1) * AT_ONCE
    unit = (tl.program_id(2) * BLOCK + tl.arange(0, BLOCK))[:, None]
    total, slope = tl.zeros((BLOCK, ENTRIES), tl.float32), tl.zeros((BLOCK, PLACES), tl.float32)
    for step in range(steps):
        place = (part * steps + step) * PLACES + tl.arange(0, PLACES)
        values = _under(
            maps, place, first, place_count, CHANNELS, SOURCE_ROWS, SOURCE_COLUMNS, ROWS, COLUMNS,
            KERNEL_ROWS, KERNEL_COLUMNS, STRIDE, SPREAD, TOP, LEFT, AT_ONCE, ENTRIES,
        )  # fmt: skip
        source = place // (ROWS * COLUMNS) * (WIDTH * ROWS * COLUMNS) + place % (ROWS * COLUMNS)
        is_slope = (unit < WIDTH) & (place < place_count)[None, :]
        slopes = tl.load(gradient + source[None, :] + unit * (ROWS * COLUMNS), mask=is_slope, other=0.0)
        total = tl.dot(slopes, tl.trans(values), total, input_precision=PRECISION)
        if HAS_BIAS:
            slope += slopes
    parts += part.to(tl.int64) * (WIDTH * (CHANNELS * TAPS + HAS_BIAS))
    target = unit * (CHANNELS * TAPS) + (first * TAPS + tl.arange(0, ENTRIES))[None, :]
    is_weight = (unit < WIDTH) & _is_entry(first, CHANNELS, AT_ONCE, TAPS, ENTRIES)[None, :]
    tl.store(parts + target, total, mask=is_weight)
    if HAS_BIAS:
        if tl.program_id(1) == 0:
            at = parts + WIDTH * CHANNELS * TAPS + unit
            tl.store(at, tl.sum(slope, axis=1, keep_dims=True), mask=unit < WIDTH)


def small_convolution(
    images: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, precision: str = "tf32"
) -> Tensor:
    """As `F.conv2d` on float32 images, with a gradient by each of the three, for paddings of less than half the kernel.

    A kernel has 63 taps at most, each of which is a bit of a 64-bit number. The precision is that of the products:
    "tf32", or "tf32x3" which has nearly float32's. Sums are in float32 and in the same order every time.
    """
    return _SmallConvolution.apply(images, weight, bias, stride, padding, precision)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class _Reach:
    """Where the kernel lies on its source for each place of the output; in the words of the kernels."""

    CHANNELS: int
    SOURCE_ROWS: int
    SOURCE_COLUMNS: int
    ROWS: int
    COLUMNS: int
    KERNEL_ROWS: int
    KERNEL_COLUMNS: int
    STRIDE: int
    SPREAD: int
    TOP: int
    LEFT: int

    @staticmethod
    def forwards(images: Tensor, weight: Tensor, stride: int, padding: int) -> "_Reach":
        """Of the convolution itself."""
        channels, height, width = images.shape[1:]
        down, right = weight.shape[2:]
        rows, columns = (height + 2 * padding - down) // stride, (width + 2 * padding - right) // stride
        return _Reach(
            channels, height, width, rows + 1, columns + 1, down, right, stride, 1, padding, padding
        )  # fmt: skip

    def backwards(self, width: int) -> "_Reach":
        """Of the convolution that turns the output's gradient, of `width` channels, into the images' gradient."""
        return _Reach(
            width, self.ROWS, self.COLUMNS, self.SOURCE_ROWS, self.SOURCE_COLUMNS, self.KERNEL_ROWS,
            self.KERNEL_COLUMNS, 1, self.STRIDE, self.KERNEL_ROWS - 1 - self.TOP, self.KERNEL_COLUMNS - 1 - self.LEFT,
        )  # fmt: skip

    @property
    def taps(self) -> int:
        return self.KERNEL_ROWS * self.KERNEL_COLUMNS

    def blocks(self, least: int) -> dict[str, int]:
        """As many channels at once as have at most 64 entries, in equal blocks of `least` entries or more."""
        count = -(-self.CHANNELS // max(1, 64 // self.taps))
        channels = -(-self.CHANNELS // count)
        return {"AT_ONCE": channels, "ENTRIES": max(least, 1 << (channels * self.taps - 1).bit_length())}


class _SmallConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        images: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: int,
        padding: int,
        precision: str,
    ) -> Tensor:
        images, weight = images.contiguous(), weight.contiguous()
        reach = _Reach.forwards(images, weight, stride, padding)
        ctx.save_for_backward(images, weight)
        ctx.rest = (reach, bias is not None, precision)  # pyright: ignore[reportAttributeAccessIssue]
        return _convolved(images, weight, bias, reach, precision)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        reach, has_bias, precision = ctx.rest  # pyright: ignore[reportAttributeAccessIssue]
        needs = ctx.needs_input_grad  # pyright: ignore[reportAttributeAccessIssue]
        gradient = gradient.contiguous()
        to_images = to_weight = to_bias = None
        if needs[0]:
            back = reach.backwards(len(weight))
            to_images = _convolved(gradient, weight, None, back, precision, is_turned=True)
        if needs[1] or needs[2]:
            flat = _correlated(images, gradient, reach, has_bias, precision)
            to_weight = flat[: weight.numel()].view(weight.shape)
            to_bias = flat[weight.numel() :] if has_bias else None
        return to_images, to_weight, to_bias, None, None, None


def _convolved(
    maps: Tensor, weight: Tensor, bias: Tensor | None, reach: _Reach, precision: str, is_turned: bool = False
) -> Tensor:
    width = weight.shape[1] if is_turned else weight.shape[0]
    output = maps.new_empty(len(maps), width, reach.ROWS, reach.COLUMNS)
    count = output.numel() // width
    block = 32 if width > 16 and count >= 2**15 else 16
    convolve_maps[(-(-count // _PLACES), -(-width // block))](  # pyright: ignore[reportIndexIssue]
        maps,
        weight,
        weight if bias is None else bias,
        output,
        count,
        **asdict(reach),
        **reach.blocks(2 * block),
        WIDTH=width,
        IS_TURNED=is_turned,
        HAS_BIAS=bias is not None,
        PRECISION=precision,
        PLACES=_PLACES,
        BLOCK=block,
        num_warps=_PLACES // 32,
        num_stages=1,
    )
    return output


def _correlated(maps: Tensor, gradient: Tensor, reach: _Reach, has_bias: bool, precision: str) -> Tensor:
    """The gradients by weights and bias, one after the other in one row."""
    width, count = gradient.shape[1], gradient.numel() // gradient.shape[1]
    blocks = reach.blocks(32)
    others = -(-reach.CHANNELS // blocks["AT_ONCE"]), -(-width // 16)
    chunks = -(-count // _PLACES)
    steps = max(2, -(-chunks * others[0] * others[1] // _PROGRAMS), -(-chunks // _MOST_PARTS))
    slices = -(-chunks // steps)
    parts = maps.new_empty(slices, width * (reach.CHANNELS * reach.taps + has_bias))
    correlate_maps[(slices, *others)](  # pyright: ignore[reportIndexIssue]
        maps,
        gradient,
        parts,
        count,
        steps,
        **asdict(reach),
        **blocks,
        WIDTH=width,
        HAS_BIAS=has_bias,
        PRECISION=precision,
        PLACES=_PLACES,
        BLOCK=16,
        num_warps=_PLACES // 32,
        num_stages=1,
    )
    return parts.sum(dim=0)
