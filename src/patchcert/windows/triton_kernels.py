"""Triton kernels for windows; imported only where tensors are on CUDA and Triton is installed.

Their parameters are pointers and numbers of the device, which Python's types do not describe. The last two kernels are
for windows of half precision whose channels fill tensor cores. They sum in float32, and a program takes the same cell
of the windows of many images, which all lie alike: what falls on padding, outside the window or outside the map is the
same for all of them, and is not computed.
"""

# Triton is a language of its own; its stubs, where it is installed, do not tell all.
# pyright: reportGeneralTypeIssues=false

# ruff: noqa: ANN001, ANN201, ANN202, D103
# pyright: reportMissingImports=false

import triton
import triton.language as tl


@triton.jit
def _relu(value):
    return tl.where(value < 0, 0.0, value)  # NaN is not below 0, so it stays


@triton.jit
def _finite(value, IS_HALF: tl.constexpr):
    """In float32; of half precision, whose products may overflow, within its range."""
    value = value.to(tl.float32)
    if IS_HALF:
        value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
    return value


@triton.jit
def _place(
    cells,
    cell_row,
    image,
    inner,
    is_here,
    clean_image_stride,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
    HAS_PLACES: tl.constexpr,
):
    """Where the clean value of each number of a window lies, and whether there is one."""
    place, is_inside = inner, is_here
    if HAS_PLACES:
        cell = tl.load(cells + cell_row * (INNER // CHANNELS) + inner // CHANNELS, mask=is_here, other=-1)
        place, is_inside = cell * CHANNELS + inner % CHANNELS, is_here & (cell >= 0)
    return image.to(tl.int64) * clean_image_stride + place, is_inside


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
    OWN_CELLS: tl.constexpr,
    HAS_SLACK: tl.constexpr,
    IS_HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inner = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_row, image, placement = row < row_count, row % images, row // images
    is_here = is_row & (inner < INNER)
    offset = row.to(tl.int64) * INNER + inner
    place, is_inside = _place(
        cells,
        row if OWN_CELLS else placement,
        image,
        inner,
        is_here,
        clean_image_stride,
        CHANNELS,
        INNER,
        HAS_PLACES,
    )
    value = tl.load(clean + place, mask=is_inside, other=0.0)
    shift = _finite(tl.load(deviation + offset, mask=is_inside, other=0.0), IS_HALF)
    at = placement.to(tl.int64) * radius_placement_stride + image.to(tl.int64) * radius_image_stride + inner
    spread = _finite(tl.load(radius + at, mask=is_inside, other=0.0), IS_HALF) * factor
    if HAS_SLACK:
        spread += tl.load(slack_before + image, mask=is_row, other=0.0)
    lower, upper = _relu(value + shift - spread), _relu(value + shift + spread)
    shift = (lower + upper) * 0.5 - _relu(value)
    spread = (upper - lower) * 0.5 * widen
    if HAS_SLACK:
        is_shut = (upper <= 0) & (value <= 0)
        spread += tl.where(is_shut, 0.0, tl.load(slack_after + image, mask=is_row, other=0.0))
    shift, spread = (
        _finite(tl.where(is_inside, shift, 0.0), IS_HALF),
        _finite(tl.where(is_inside, spread, 0.0), IS_HALF),
    )
    tl.store(new_deviation + offset, shift, mask=is_here)
    tl.store(new_radius + offset, spread, mask=is_here)


@triton.jit
def relu_windows_gradient(
    deviation,
    radius,
    clean,
    cells,
    by_deviation,
    by_radius,
    to_deviation,
    to_radius,
    to_clean,
    row_count,
    images,
    clean_image_stride,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of `relu_windows` with cells of each window's own; what reaches the clean values is added up there.

    Of the placements of an image only the weakest have a gradient: a block of zeros is passed on unread.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inner = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    image, is_here = row % images, (row < row_count) & (inner < INNER)
    offset = row.to(tl.int64) * INNER + inner
    place, is_inside = _place(
        cells, row, image, inner, is_here, clean_image_stride, CHANNELS, INNER, HAS_PLACES
    )
    shifted = tl.load(by_deviation + offset, mask=is_inside, other=0.0).to(tl.float32)
    spreaded = tl.load(by_radius + offset, mask=is_inside, other=0.0).to(tl.float32)
    lower, upper = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    if tl.max(((shifted != 0) | (spreaded != 0)).to(tl.int32)) > 0:
        value = tl.load(clean + place, mask=is_inside, other=0.0)
        shift = tl.load(deviation + offset, mask=is_inside, other=0.0).to(tl.float32)
        spread = tl.load(radius + offset, mask=is_inside, other=0.0).to(tl.float32)
        lower = tl.where(value + shift - spread <= 0, 0.0, (shifted - spreaded) * 0.5)
        upper = tl.where(value + shift + spread <= 0, 0.0, (shifted + spreaded) * 0.5)
        own = tl.where(value <= 0, 0.0, shifted)
        tl.atomic_add(to_clean + place, upper + lower - own, mask=is_inside, sem="relaxed")
    tl.store(to_deviation + offset, upper + lower, mask=is_here)
    tl.store(to_radius + offset, upper - lower, mask=is_here)


@triton.jit
def place_windows(
    source,
    shifts,
    output,
    cell_count,
    top,
    left,
    SIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOURCE_ROWS: tl.constexpr,
    SOURCE_COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_SHIFTS: tl.constexpr,
    CELLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every cell of the output (b, ROWS, COLUMNS, CHANNELS) reads the cell of its source that lies there, or 0."""
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    is_here = (cell < cell_count) & (channel < CHANNELS)
    one = cell // (ROWS * COLUMNS)
    row = cell // COLUMNS % ROWS - SIGN * top
    column = cell % COLUMNS - SIGN * left
    if HAS_SHIFTS:
        row -= SIGN * tl.load(shifts + 2 * one, mask=cell < cell_count, other=0)
        column -= SIGN * tl.load(shifts + 2 * one + 1, mask=cell < cell_count, other=0)
    is_inside = (row >= 0) & (row < SOURCE_ROWS) & (column >= 0) & (column < SOURCE_COLUMNS)
    at = ((one.to(tl.int64) * SOURCE_ROWS + row) * SOURCE_COLUMNS + column) * CHANNELS + channel
    values = tl.load(source + at, mask=is_here & is_inside, other=0.0)
    tl.store(output + cell.to(tl.int64) * CHANNELS + channel, values, mask=is_here)


@triton.jit
def window_rows(
    maps,
    output,
    place_count,
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
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)[:, None]
    inner = tl.arange(0, BLOCK)[None, :]
    is_tap = (place < place_count) & (inner < KERNEL_COLUMNS * CHANNELS)
    one = (place // (height * width)).to(tl.int64)
    column = place % width * COLUMN_STRIDE - left_padding + inner // CHANNELS * COLUMN_DILATION
    is_column = is_tap & (column >= 0) & (column < columns)
    target = place.to(tl.int64) * (KERNEL_ROWS * KERNEL_COLUMNS * CHANNELS) + inner
    for tap in tl.static_range(KERNEL_ROWS):
        row = (place // width) % height * ROW_STRIDE - top_padding + tap * ROW_DILATION
        is_inside = is_column & (row >= 0) & (row < rows)
        source = ((one * rows + row) * columns + column) * CHANNELS + inner % CHANNELS
        values = tl.load(maps + source, mask=is_inside, other=0.0)
        tl.store(output + target + tap * (KERNEL_COLUMNS * CHANNELS), values, mask=is_tap)


@triton.jit
def head_windows(
    deviation,
    radius,
    clean,
    weight,
    labels,
    slack_before,
    slack_after,
    shift,
    spread,
    placements,
    images,
    radius_placement_stride,
    radius_image_stride,
    factor,
    widen,
    FEATURES: tl.constexpr,
    CLASSES: tl.constexpr,
    HAS_SLACK: tl.constexpr,
    IS_FAST: tl.constexpr,
    IS_HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    placement = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row, column = placement[:, None].to(tl.int64), tl.arange(0, COLUMNS)
    label = tl.load(labels + image)
    before, after = 0.0, 0.0
    if HAS_SLACK:
        before, after = tl.load(slack_before + image), tl.load(slack_after + image)
    if IS_FAST:
        total_shift = tl.zeros((ROWS, COLUMNS), tl.float32)
        total_spread = tl.zeros((ROWS, COLUMNS), tl.float32)
    else:
        total_shift = tl.zeros((COLUMNS, ROWS, BLOCK), tl.float32)
        total_spread = tl.zeros((COLUMNS, ROWS, BLOCK), tl.float32)
    for start in range(0, FEATURES, BLOCK):
        feature = start + tl.arange(0, BLOCK)
        is_feature = feature < FEATURES
        is_here = (row < placements) & is_feature[None, :]
        value = tl.load(clean + image * FEATURES + feature, mask=is_feature, other=0.0)[None, :]
        moved = tl.load(
            deviation + (row * images + image) * FEATURES + feature[None, :], mask=is_here, other=0.0
        )
        at = row * radius_placement_stride + image * radius_image_stride + feature[None, :]
        wide = tl.load(radius + at, mask=is_here, other=0.0) * factor + before
        lower, upper = _relu(value + moved - wide), _relu(value + moved + wide)
        moved = (lower + upper) * 0.5 - _relu(value)
        is_shut = (upper <= 0) & (value <= 0)
        wide = (upper - lower) * 0.5 * widen + tl.where(is_shut, 0.0, after)
        own = tl.load(weight + label * FEATURES + feature, mask=is_feature, other=0.0)[None, :]
        is_weight = (column < CLASSES)[:, None] & is_feature[None, :]
        other = tl.load(weight + column[:, None] * FEATURES + feature[None, :], mask=is_weight, other=0.0)
        difference = own - other
        if IS_FAST:
            turned = tl.trans(difference)
            total_shift += tl.dot(moved, turned, input_precision="tf32")
            total_spread += tl.dot(wide, tl.abs(turned), input_precision="tf32")
        else:
            total_shift += moved[None, :, :] * difference[:, None, :]
            total_spread += wide[None, :, :] * tl.abs(difference)[:, None, :]
    if IS_FAST:
        target = (image * placements + row) * CLASSES + column[None, :]
        is_target = (row < placements) & (column < CLASSES)[None, :]
        tl.store(shift + target, total_shift, mask=is_target)
        tl.store(spread + target, total_spread, mask=is_target)
    else:
        target = (image * placements + placement[None, :].to(tl.int64)) * CLASSES + column[:, None]
        is_target = (placement < placements)[None, :] & (column < CLASSES)[:, None]
        tl.store(shift + target, tl.sum(total_shift, axis=2), mask=is_target)
        tl.store(spread + target, tl.sum(total_spread, axis=2), mask=is_target)


@triton.jit(do_not_specialize=["top_padding", "left_padding"])
def slide_relu(
    deviation,
    radius,
    weight,
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
):
    """A convolution of both parts, then ReLU around the clean values, at one cell of the new windows.

    The weights are (taps, channels, outputs). `spans` (placements, 6) say which rows and columns of the
    windows lie in the map: from, to, from, to. A program sums up BLOCK outputs, TERMS terms at a time. It reads the
    weights once for both sums, and has their absolute values made in registers.
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
    shift = tl.zeros((BLOCK, IMAGES), tl.float32)
    spread = tl.zeros((BLOCK, IMAGES), tl.float32)
    for step in range(taps * (CHANNELS // TERMS)):
        tap, start = step // (CHANNELS // TERMS), step % (CHANNELS // TERMS) * TERMS
        row, column = first_row + tap // width, first_column + tap % width
        source = at + (((top + row) * COLUMNS + left + column) * CHANNELS + start)
        taken = below + ((row * KERNEL_COLUMNS + column) * CHANNELS + start) * OUTPUTS
        factor = tl.trans(tl.load(weight + taken))
        shift = tl.dot(factor, tl.trans(tl.load(deviation + source)), shift)
        spread = tl.dot(tl.abs(factor), tl.trans(tl.load(radius + source)), spread)
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
