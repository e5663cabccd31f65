"""What each operation does to windows: one short rule per operation, one table."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from patchcert.bounds.operations import (
    Add,
    AveragePool,
    ChannelScale,
    Convolution,
    Linear,
    MaxPool,
    Monotone,
    Operation,
    Reshape,
)
from patchcert.bounds.rounding import lifted, summed_roundings
from patchcert.windows.affine import convolution_with_relu, moved_channels, only, product_of_windows, slide
from patchcert.windows.geometry import FeatureMap, Window, is_global
from patchcert.windows.kernels import differentiable_relu, fused_relu
from patchcert.windows.passes import WindowPass, Windows
from patchcert.windows.products import product


def propagate(sweep: WindowPass, start: Windows, last: int, first: int = 0) -> Windows:
    """Deviation and radius of value `last`, from those of value `first`, which all between must come from."""
    states: dict[int, Windows] = {first: start}
    last_use = {index: position for position, step in enumerate(sweep.steps) for index in step.inputs}
    for position, step in enumerate(sweep.steps[first:last], first):
        if position + 1 in states:
            continue
        inputs = [states[index] for index in step.inputs]
        if not isinstance(step.operation, Monotone | Reshape):
            inputs = [
                state.settled(sweep.outside(index)) for state, index in zip(inputs, step.inputs, strict=True)
            ]
        joint = None if position + 2 > last else convolution_with_relu(inputs[0], sweep, position)
        if joint is None:
            states[position + 1] = RULES[type(step.operation)](step.operation, inputs, sweep, position)
        else:
            states[position + 2] = joint
        for index in set(step.inputs):
            if last_use[index] <= position:
                del states[index]
    return states[last]


def before_head(sweep: WindowPass, start: Windows, first: int = 0) -> Windows:
    """Deviation and radius of the input of the last layer, from those of value `first`."""
    last = sweep.steps[-1].inputs[0]
    return propagate(sweep, start, last, first).settled(sweep.outside(last))


def _convolution(
    operation: Convolution, inputs: Sequence[Windows], sweep: WindowPass, position: int
) -> Windows:
    return slide(operation.geometry, operation.weight(), operation.groups, inputs[0], sweep, position)


def _average_pool(
    operation: AveragePool, inputs: Sequence[Windows], sweep: WindowPass, position: int
) -> Windows:
    index, (state,) = sweep.steps[position].inputs[0], inputs
    area, clean = sweep.layout.maps[index], sweep.clean.values[index]
    geometry = operation.geometry(clean)
    assert area is not None
    assert geometry is not None
    if is_global(operation, area):
        return _global_mean(state, area, sweep)
    weight = clean.new_full(
        (area.channels, 1, *geometry.kernel), 1.0 / (geometry.kernel[0] * geometry.kernel[1])
    )
    return slide(geometry, weight, area.channels, state, sweep, position)


def _global_mean(state: Windows, area: FeatureMap, sweep: WindowPass) -> Windows:
    cells = state.deviation.shape[2] * state.deviation.shape[3]
    ones = state.deviation.new_ones(cells, 1)

    def mean(part: Tensor) -> Tensor:
        total = product(part.flatten(2, 3).transpose(2, 3), ones, sweep.rounding).squeeze(3)
        return total / (area.height * area.width)

    return state.map(mean).widened(summed_roundings(cells) + 1, sweep.rounding)


def _linear(operation: Linear, inputs: Sequence[Windows], sweep: WindowPass, position: int) -> Windows:
    (state,), index = inputs, sweep.steps[position].inputs[0]
    columns, absolute = _columns(operation, state.deviation.dtype, sweep, position)
    if sweep.windows[index] is None:
        moved = Windows(
            _feature_product(state.deviation, columns, sweep), _feature_product(state.radius, absolute, sweep)
        )
        return moved.widened(summed_roundings(columns.shape[0]) + 1, sweep.rounding)
    joint = product_of_windows(state, columns, absolute, sweep, index)
    if joint is not None:
        return joint
    height, width, channels = state.deviation.shape[2:]
    moved_ones = moved_channels(state) if sweep.rounding.is_outward else None
    if moved_ones is not None:
        state = only(moved_ones, state)
        columns, absolute = (part.index_select(1, moved_ones) for part in (columns, absolute))
    moved = Windows(
        sweep.flat_product(state.deviation, columns, index), sweep.flat_product(state.radius, absolute, index)
    )
    by_rows = summed_roundings(width * channels) + height
    roundings = max(summed_roundings(height * width * channels), by_rows)
    return moved.widened(roundings + 1, sweep.rounding)


def _feature_product(part: Tensor, columns: Tensor, sweep: WindowPass) -> Tensor:
    return product(part.flatten(0, 1), columns, sweep.rounding).unflatten(0, part.shape[:2])


def _columns(
    operation: Linear, dtype: torch.dtype, sweep: WindowPass, position: int
) -> tuple[Tensor, Tensor]:
    """Transposed weights and their absolute values; (places, channels, out) where the input still has places.

    Where there is a gradient they lie in memory row by row, like the weights, and so does their gradient: to turn
    either would cost more than products of turned matrices do. Elsewhere the weights of a place lie together.
    """
    key = (position,)
    if key not in sweep.shared.weights:
        area, rows = sweep.layout.maps[sweep.steps[position].inputs[0]], operation.weight()
        if area is not None:
            rows = rows.unflatten(1, (area.channels, -1)).transpose(1, 2)
        columns = (
            _packed(rows, dtype).movedim(0, -1) if sweep.has_gradient else _packed(rows.movedim(0, -1), dtype)
        )
        sweep.shared.weights[key] = (columns, columns.abs())
    return sweep.shared.weights[key]


def _packed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights in order of their dimensions and of the given type, at one copy where there are both to change."""
    return weight.to(dtype, memory_format=torch.contiguous_format).contiguous()


def _channel_scale(
    operation: ChannelScale, inputs: Sequence[Windows], sweep: WindowPass, position: int
) -> Windows:
    (state,), key = inputs, (position,)
    if key not in sweep.shared.weights:
        scale = operation.scale().to(state.deviation.dtype).flatten()
        absolute = lifted(scale.abs()) if sweep.rounding.is_outward else scale.abs()
        sweep.shared.weights[key] = (scale, absolute)
    scale, absolute = sweep.shared.weights[key]
    return Windows(state.deviation * scale, state.radius * absolute).widened(8, sweep.rounding)


def _monotone(operation: Monotone, inputs: Sequence[Windows], sweep: WindowPass, position: int) -> Windows:
    index, (state,) = sweep.steps[position].inputs[0], inputs
    if operation.is_relu and sweep.is_fused:
        return _fused_relu(state, sweep, position)
    before = sweep.clean_windows(index)
    if not sweep.rounding.is_outward:
        after = operation.function(before)
        return _between(operation.function, operation.units, before, after, state, sweep, position)
    after = sweep.clean_windows(position + 1)
    function = operation.precisely if operation.units else operation.function
    return _between(function, operation.units, before, after, state, sweep, position, operation.is_relu)


def _max_pool(operation: MaxPool, inputs: Sequence[Windows], sweep: WindowPass, position: int) -> Windows:
    """The pooled window also sees clean values around the patch's own window."""
    geometry = operation.geometry
    source, target = sweep.window(sweep.steps[position].inputs[0]), sweep.window(position + 1)
    left, right, top, bottom = source.input_padding(geometry, target)
    grown = inputs[0].map(lambda part: F.pad(part, (0, 0, left, right, top, bottom)))
    before = sweep.surroundings(position, grown.deviation.shape[2], grown.deviation.shape[3])

    def pool(values: Tensor) -> Tensor:
        maps = values.flatten(0, 1).permute(0, 3, 1, 2)
        pooled = F.max_pool2d(maps, geometry.kernel, geometry.stride, 0, geometry.dilation)
        return pooled.permute(0, 2, 3, 1).unflatten(0, values.shape[:2])

    return _between(pool, 0, before, sweep.clean_windows(position + 1), grown, sweep, position)


def _between(
    function: Callable[[Tensor], Tensor],
    units: int,
    before: Tensor,
    after: Tensor,
    state: Windows,
    sweep: WindowPass,
    position: int,
    shuts: bool = False,
) -> Windows:
    """The interval around the clean values pushed through a non-decreasing function, as a difference again.

    A function that `shuts` is exactly 0 up to 0: where that is all there is, the difference is 0 without any slack.
    """
    centre, radius, rounding = before + state.deviation, state.radius, sweep.rounding
    shape = (-1, *[1] * (state.deviation.dim() - 2))
    if rounding.is_outward:
        slack = sweep.shared.slack(sweep.steps[position].inputs[0], 3, state.extra).reshape(shape)
        radius = radius * (state.factor * (1 + 8 * rounding.unit)) + slack
    upper, lower = function(centre + radius), function(centre - radius)
    is_open = (upper != 0) | (after != 0) if shuts else None
    if torch.is_grad_enabled():
        spread = (upper - lower) * 0.5
        deviation = lower + spread - after
    else:
        spread = upper.sub_(lower).mul_(0.5)
        deviation = lower.add_(spread).sub_(after)
    if rounding.is_outward:
        slack = sweep.shared.slack(position + 1, 4 + units, 0.0).reshape(shape)
        slack = slack if is_open is None else slack * is_open
        spread = spread * (1 + (8 + 2 * units) * rounding.unit) + slack
    return Windows(deviation, spread, is_ragged=True).settled(sweep.outside(position + 1))


def _fused_relu(state: Windows, sweep: WindowPass, position: int) -> Windows:
    """As `_between` for ReLU, in one pass over the memory."""
    index = sweep.steps[position].inputs[0]
    cells = sweep.signed_cells(index)
    clean = sweep.clean.values[index].flatten(1) if cells is None else sweep.clean.places(index, sweep.layout)
    if sweep.has_gradient:
        return Windows(*differentiable_relu(state.deviation, state.radius, clean, cells))
    terms = relu_terms(state, sweep, position)
    return Windows(*fused_relu(state.deviation, state.radius, clean, cells, *terms))


def relu_terms(
    state: Windows, sweep: WindowPass, position: int
) -> tuple[float, float, tuple[Tensor, Tensor] | None]:
    """What pays for the rounding of a fused ReLU: factors of the radius before and after, and slacks likewise."""
    rounding, slack = sweep.rounding, None
    if rounding.is_outward:
        index = sweep.steps[position].inputs[0]
        slack = (sweep.shared.slack(index, 3, state.extra), sweep.shared.slack(position + 1, 4, 0.0))
    return state.factor * (1 + 8 * rounding.unit), 1 + 8 * rounding.unit, slack


def _add(operation: Add, inputs: Sequence[Windows], sweep: WindowPass, position: int) -> Windows:
    step, target = sweep.steps[position], sweep.windows[position + 1]
    first, second = (
        _extend(state, sweep.windows[index], target) for state, index in zip(inputs, step.inputs, strict=True)
    )
    total = Windows(first.deviation + second.deviation, first.radius + second.radius)
    return replace(total.widened(2, sweep.rounding), is_ragged=True)


def _extend(state: Windows, source: Window | None, target: Window | None) -> Windows:
    if source is None or target is None or source == target:
        return state
    top, left = source.top - target.top, source.left - target.left
    bottom = target.height - source.height - top
    right = target.width - source.width - left
    return state.map(lambda part: F.pad(part, (0, 0, left, right, top, bottom)))


def _reshape(operation: Reshape, inputs: Sequence[Windows], sweep: WindowPass, position: int) -> Windows:
    return inputs[0]


RULES: dict[type[Operation], Callable[..., Windows]] = {
    Convolution: _convolution,
    AveragePool: _average_pool,
    Linear: _linear,
    ChannelScale: _channel_scale,
    Monotone: _monotone,
    MaxPool: _max_pool,
    Add: _add,
    Reshape: _reshape,
}
