"""Triton kernels; imported only where tensors are on CUDA and Triton is installed.

Their parameters are pointers and numbers of the device, which Python's types do not describe.
"""

# ruff: noqa: ANN001, ANN201, ANN202, D103
# pyright: reportMissingImports=false

import triton
import triton.language as tl


@triton.jit
def _relu(value):
    return tl.where(value < 0, 0.0, value)  # NaN is not below 0, so it stays


@triton.jit
def relu_windows(
    deviation,
    radius,
    clean,
    cells,
    slack_before,
    slack_after,
    new_deviation,
    new_radius,
    row_count,
    images,
    radius_placement_stride,
    radius_image_stride,
    clean_image_stride,
    factor,
    widen,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    HAS_SLACK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inner = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_row, image, placement = row < row_count, row % images, row // images
    is_here = is_row & (inner < INNER)
    offset = row.to(tl.int64) * INNER + inner
    if HAS_PLACES:
        cell = tl.load(cells + placement * (INNER // CHANNELS) + inner // CHANNELS, mask=is_here, other=-1)
        is_inside = is_here & (cell >= 0)
        place = image.to(tl.int64) * clean_image_stride + cell * CHANNELS + inner % CHANNELS
    else:
        is_inside = is_here
        place = image.to(tl.int64) * clean_image_stride + inner
    value = tl.load(clean + place, mask=is_inside, other=0.0)
    shift = tl.load(deviation + offset, mask=is_inside, other=0.0)
    at = placement.to(tl.int64) * radius_placement_stride + image.to(tl.int64) * radius_image_stride + inner
    spread = tl.load(radius + at, mask=is_inside, other=0.0) * factor
    if HAS_SLACK:
        spread += tl.load(slack_before + image, mask=is_row, other=0.0)
    lower, upper = _relu(value + shift - spread), _relu(value + shift + spread)
    shift = (lower + upper) * 0.5 - _relu(value)
    spread = (upper - lower) * 0.5 * widen
    if HAS_SLACK:
        spread += tl.load(slack_after + image, mask=is_row, other=0.0)
    tl.store(new_deviation + offset, tl.where(is_inside, shift, 0.0), mask=is_here)
    tl.store(new_radius + offset, tl.where(is_inside, spread, 0.0), mask=is_here)


@triton.jit
def window_rows(
    maps,
    output,
    height,
    width,
    rows,
    columns,
    top_padding,
    left_padding,
    CHANNELS: tl.constexpr,
    KERNEL_ROWS: tl.constexpr,
    KERNEL_COLUMNS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    ROW_DILATION: tl.constexpr,
    COLUMN_DILATION: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0)
    tap = tl.arange(0, TAPS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    one = place // (height * width)
    row = (place // width) % height * ROW_STRIDE - top_padding + tap // KERNEL_COLUMNS * ROW_DILATION
    column = place % width * COLUMN_STRIDE - left_padding + tap % KERNEL_COLUMNS * COLUMN_DILATION
    is_tap = (tap < KERNEL_ROWS * KERNEL_COLUMNS) & (channel < CHANNELS)
    is_inside = is_tap & (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    source = ((one.to(tl.int64) * rows + row) * columns + column) * CHANNELS + channel
    values = tl.load(maps + source, mask=is_inside, other=0.0)
    target = place.to(tl.int64) * (KERNEL_ROWS * KERNEL_COLUMNS * CHANNELS) + tap * CHANNELS + channel
    tl.store(output + target, values, mask=is_tap)
