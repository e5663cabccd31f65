"""Triton kernels of training; imported only where tensors are on CUDA and Triton is installed.

A convolution is a product of the weights (width, entries) with what lies under the kernel (entries, places). An
entry is a channel and a tap, a place is a pixel of the output of any image: tiny maps fill whole tiles together.
With a thread for each place, all of a block's entries lie at distances from it that the compiler knows.
Their parameters are pointers and numbers of the device, which Python's types do not describe.
"""

# ruff: noqa: ANN001, ANN201, ANN202, SIM102
# pyright: reportMissingImports=false

import triton
import triton.language as tl


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
