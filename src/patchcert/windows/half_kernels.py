"""Triton kernels for windows of half precision, whose channels fill tensor cores; sums are in float32.

A program takes the same cell of the windows of many images, which all lie alike: what falls on padding, outside the
window or outside the map is the same for all of them, and is not computed.
"""

# Triton is a language of its own; its stubs, where it is installed, do not tell all.
# pyright: reportGeneralTypeIssues=false

# ruff: noqa: ANN001, ANN201
# pyright: reportMissingImports=false

import triton
import triton.language as tl

from patchcert.windows.kernels import _finite, _relu


@triton.jit(do_not_specialize=["top_padding", "left_padding"])
def slide_relu(
    deviation,
    radius,
    weight,
    absolute,
    clean,
    cells,
    spans,
    new_deviation,
    new_radius,
    images,
    clean_image_stride,
    top_padding,
    left_padding,
    CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NEW_ROWS: tl.constexpr,
    NEW_COLUMNS: tl.constexpr,
    KERNEL_ROWS: tl.constexpr,
    KERNEL_COLUMNS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    IMAGES: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    """A convolution of both parts, then ReLU around the clean values, at one cell of the new windows.

    The weights are (taps, channels, outputs), in both forms. `spans` (placements, 6) say which rows and columns of the
    windows lie in the map: from, to, from, to. A program sums up BLOCK outputs, TERMS terms at a time;
    turned, it reads the weights once for both sums, and has their absolute values made in registers.
    """
    cell, placement = tl.program_id(0), tl.program_id(2)
    image = tl.program_id(1) // (OUTPUTS // BLOCK) * IMAGES + tl.arange(0, IMAGES)
    output = tl.program_id(1) % (OUTPUTS // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(cells + placement * (NEW_ROWS * NEW_COLUMNS) + cell)
    top = cell // NEW_COLUMNS * ROW_STRIDE - top_padding
    left = cell % NEW_COLUMNS * COLUMN_STRIDE - left_padding
    spans += 6 * placement
    first_row = tl.maximum(tl.load(spans) - top, 0)
    last_row = tl.minimum(tl.load(spans + 1) - top, KERNEL_ROWS)
    first_column = tl.maximum(tl.load(spans + 2) - left, 0)
    last_column = tl.minimum(tl.load(spans + 3) - left, KERNEL_COLUMNS)
    width = tl.maximum(last_column - first_column, 0)
    taps = tl.where(place < 0, 0, tl.maximum(last_row - first_row, 0) * width)

    window = placement.to(tl.int64) * images + tl.minimum(image, images - 1)
    term = tl.arange(0, TERMS)
    at = (window * (ROWS * COLUMNS * CHANNELS))[:, None] + term[None, :]
    below = term[:, None] * OUTPUTS + output[None, :]
    height: tl.constexpr = BLOCK if IS_TURNED else IMAGES
    shift = tl.zeros((height, IMAGES * BLOCK // height), tl.float32)
    spread = tl.zeros((height, IMAGES * BLOCK // height), tl.float32)
    for step in range(taps * (CHANNELS // TERMS)):
        tap, start = step // (CHANNELS // TERMS), step % (CHANNELS // TERMS) * TERMS
        row, column = first_row + tap // width, first_column + tap % width
        source = at + (((top + row) * COLUMNS + left + column) * CHANNELS + start)
        taken = below + ((row * KERNEL_COLUMNS + column) * CHANNELS + start) * OUTPUTS
        if IS_TURNED:
            factor = tl.trans(tl.load(weight + taken))
            shift = tl.dot(factor, tl.trans(tl.load(deviation + source)), shift)
            spread = tl.dot(tl.abs(factor), tl.trans(tl.load(radius + source)), spread)
        else:
            shift = tl.dot(tl.load(deviation + source), tl.load(weight + taken), shift)
            spread = tl.dot(tl.load(radius + source), tl.load(absolute + taken), spread)
    if IS_TURNED:
        shift, spread = tl.trans(shift), tl.trans(spread)

    is_here = (image < images)[:, None] & (output < OUTPUTS)[None, :]
    found = (
        image.to(tl.int64)[:, None] * clean_image_stride + (tl.maximum(place, 0) * OUTPUTS + output)[None, :]
    )
    value = tl.load(clean + found, mask=is_here, other=0.0)
    lower, upper = _relu(value + shift - spread), _relu(value + shift + spread)
    target = ((window * (NEW_ROWS * NEW_COLUMNS) + cell) * OUTPUTS)[:, None] + output[None, :]
    moved = _finite((lower + upper) * 0.5 - _relu(value), True)
    tl.store(new_deviation + target, moved.to(tl.float16), mask=is_here)
    tl.store(new_radius + target, _finite((upper - lower) * 0.5, True).to(tl.float16), mask=is_here)


@triton.jit
def window_product(
    deviation,
    radius,
    weight,
    absolute,
    spans,
    new_deviation,
    new_radius,
    images,
    CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAP_COLUMNS: tl.constexpr,
    IMAGES: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Windows times the weights (places, channels, outputs) under them, of which those in the map are read in place.

    One program in two takes the radius. The last two of the `spans` are where on the map a window begins.
    """
    placement, part = tl.program_id(1), tl.program_id(0)
    if part % 2 == 1:
        deviation, weight, new_deviation = radius, absolute, new_radius
    part = part // 2
    image = part // (OUTPUTS // BLOCK) * IMAGES + tl.arange(0, IMAGES)
    output = part % (OUTPUTS // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    spans += 6 * placement
    first_row, last_row = tl.load(spans), tl.load(spans + 1)
    first_column, last_column = tl.load(spans + 2), tl.load(spans + 3)
    terms = (last_column - first_column) * (CHANNELS // TERMS)
    origin = (tl.load(spans + 4) + first_row) * MAP_COLUMNS + tl.load(spans + 5) + first_column

    window = placement.to(tl.int64) * images + tl.minimum(image, images - 1)
    term = tl.arange(0, TERMS)
    first = (first_row * COLUMNS + first_column) * CHANNELS
    at = (window * (ROWS * COLUMNS * CHANNELS) + first)[:, None] + term[None, :]
    below = origin * (CHANNELS * OUTPUTS) + term[:, None] * OUTPUTS + output[None, :]
    total = tl.zeros((IMAGES, BLOCK), tl.float32)
    for step in range((last_row - first_row) * terms):
        row, start = step // terms, step % terms * TERMS
        left = tl.load(deviation + at + (row * (COLUMNS * CHANNELS) + start))
        right = tl.load(weight + below + (row * (MAP_COLUMNS * CHANNELS) + start) * OUTPUTS)
        total = tl.dot(left, right, total)
    target = (window * OUTPUTS)[:, None] + output[None, :]
    is_here = (image < images)[:, None] & (output < OUTPUTS)[None, :]
    tl.store(new_deviation + target, _finite(total, True).to(tl.float16), mask=is_here)
