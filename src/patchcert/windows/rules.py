"""What operations do to windows: a short rule for each that has products or kernels of its own, one for all others.

Convolutions and linear layers take the form that is fastest for their size and arithmetic. Rules pay for rounding as
derived in `passes`. Below, u is the unit of rounding, D and R are deviation and radius of a window, z is the clean
value, and L the largest absolute clean value of the image.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from patchcert.bounds.geometry import FeatureMap, Geometry, Window, convolve
from patchcert.bounds.operations import (
    RESCALE_ROUNDINGS,
    SCALE_ROUNDINGS,
    Add,
    AveragePool,
    ChannelScale,
    Concatenate,
    Convolution,
    Interval,
    Linear,
    Monotone,
    Operation,
    Rescale,
    Reshape,
    equal_weights,
    precisely,
)
from patchcert.bounds.rounding import lifted, summed_roundings
from patchcert.windows.layout import Weight, is_worth_a_matrix
from patchcert.windows.passes import Columns, Weights, WindowPass, Windows

Inputs = Sequence[Windows]


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
        both = None
        if sweep.is_fused and position + 2 <= last:
            from patchcert.windows.kernels import convolution_with_relu

            both = convolution_with_relu(inputs[0], sweep, position)
        if both is None:
            rule = RULES.get(type(step.operation), _by_interval)
            states[position + 1] = rule(step.operation, inputs, sweep, position)
        else:
            states[position + 2] = both
        for index in set(step.inputs):
            if last_use[index] <= position:
                del states[index]
    return states[last]


def before_head(sweep: WindowPass, start: Windows, first: int = 0) -> Windows:
    """Deviation and radius of the input of the last layer, from those of value `first`."""
    last = sweep.steps[-1].inputs[0]
    return propagate(sweep, start, last, first).settled(sweep.outside(last))


def _average_pool(operation: AveragePool, inputs: Inputs, sweep: WindowPass, position: int) -> Windows:
    index, (state,) = sweep.steps[position].inputs[0], inputs
    area, clean = sweep.layout.area(index), sweep.clean.values[index]
    geometry = operation.places(area)
    if not isinstance(geometry, Geometry):
        return _global_mean(state, area, sweep)
    return _slide(geometry, equal_weights(geometry, clean), area.channels, state, sweep, position)


def _global_mean(state: Windows, area: FeatureMap, sweep: WindowPass) -> Windows:
    cells = state.deviation.shape[2] * state.deviation.shape[3]
    ones = state.deviation.new_ones(cells, 1)

    def mean(part: Annotated[Tensor, "p n h w c"]) -> Annotated[Tensor, "p n c"]:
        total = sweep.rounding.product(part.flatten(2, 3).transpose(2, 3), ones).squeeze(3)
        return total / (area.height * area.width)

    # The division rounds once more than the sum.
    return state.map(mean).widened(summed_roundings(cells) + 1, sweep.rounding)


def _channel_scale(operation: ChannelScale, inputs: Inputs, sweep: WindowPass, position: int) -> Windows:
    return _scaled(inputs[0], operation.scale, SCALE_ROUNDINGS, sweep, position)


def _rescale(operation: Rescale, inputs: Inputs, sweep: WindowPass, position: int) -> Windows:
    """A shift moves the clean value as much as any other; where there are no windows, features are no channels."""
    if operation.factor is None:
        return inputs[0]
    if sweep.windows[position + 1] is None:
        return _by_interval(operation, inputs, sweep, position)
    return _scaled(inputs[0], operation.factor, RESCALE_ROUNDINGS, sweep, position)


def _scaled(
    state: Windows, scale: Callable[[], Tensor], roundings: int, sweep: WindowPass, position: int
) -> Windows:
    """The windows times a number for each channel, or one for all."""
    is_outward = sweep.rounding.is_outward
    weights = sweep.shared.weights(
        (position,),
        lambda: scale().to(state.deviation).flatten(),
        lambda formed: lifted(formed.abs()) if is_outward else formed.abs(),
    )
    return state.times(weights, torch.mul).widened(roundings, sweep.rounding)


def _monotone(operation: Monotone, inputs: Inputs, sweep: WindowPass, position: int) -> Windows:
    index, (state,) = sweep.steps[position].inputs[0], inputs
    if operation.is_relu and sweep.is_fused:
        from patchcert.windows.kernels import relu

        return relu(state, sweep, position)
    before, is_outward = sweep.clean_windows(index), sweep.rounding.is_outward
    after = sweep.clean_windows(position + 1) if is_outward else operation.function(before)
    is_rounded = is_outward and operation.units
    function = partial(precisely, operation.function) if is_rounded else operation.function
    bounds = _box(before, state, sweep, index).map(function)
    return _difference(bounds, after, sweep, position, operation.units, operation.is_relu and is_outward)


def _by_interval(operation: Operation, inputs: Inputs, sweep: WindowPass, position: int) -> Windows:
    """Any other operation: its own interval bound on what the output window sees, clean values around it included."""
    indices, target = sweep.steps[position].inputs, sweep.windows[position + 1]
    if target is None:
        boxes = [
            _box(sweep.clean_windows(index), state, sweep, index).map(
                lambda part, index=index: part.reshape(-1, *sweep.clean.values[index].shape[1:])
            )
            for state, index in zip(inputs, indices, strict=True)
        ]
        bounds = operation.interval(*boxes, rounding=sweep.rounding).map(lambda part: part.flatten(1))
    else:
        box = _seen_box(inputs[0], sweep, position).map(lambda part: part.flatten(0, 1).permute(0, 3, 1, 2))
        bounds = operation.unpadded().interval(box, rounding=sweep.rounding)
        assert bounds.shape[2:] == (target.height, target.width), f"{operation} does not have its geometry"
        bounds = bounds.map(lambda part: part.permute(0, 2, 3, 1))
    # The copies are changed in place; the operation may keep what it has given.
    bounds = bounds.map(lambda part: part.clone().unflatten(0, inputs[0].deviation.shape[:2]))
    return _difference(bounds, sweep.clean_windows(position + 1), sweep, position)


def _seen_box(state: Windows, sweep: WindowPass, position: int) -> Interval:
    """All values (p, n, h, w, c) that the windows allow where the step looks at them."""
    index = sweep.steps[position].inputs[0]
    source, seen = sweep.window(index), sweep.layout.seen(position, sweep.windows)
    grown = _extend(state, source, seen)
    return _box(sweep.surroundings(position), grown, sweep, index)


def _box(before: Tensor, state: Windows, sweep: WindowPass, index: int) -> Interval:
    """All values that the windows on value `index` allow, whose clean values are `before`."""
    centre, radius, rounding = before + state.deviation, state.radius, sweep.rounding
    if rounding.is_outward:
        # z is off by its slack. z + D is off by u (L + R), as |D| <= R, and each end by u (L + 2R): 2 of the 3 units of
        # L, and 3 of the 8 units of R; the radius itself is rounded three times, and (1 + 8u)(1 - 3u) > 1 + 3u.
        slack = _per_image(sweep.shared.slack(index, 3, state.extra), state)
        radius = radius * (state.factor * (1 + 8 * rounding.unit)) + slack
    return Interval.around(centre, radius)


def _difference(
    bounds: Interval, after: Tensor, sweep: WindowPass, position: int, units: int = 0, shuts: bool = False
) -> Windows:
    """The bounds after a step as a difference from the clean values there; the bounds are used up.

    They were computed to within `units`. A function that `shuts` is exactly 0 up to 0: where that is all there is, the
    difference is 0 without any slack.
    """
    lower, upper, rounding = bounds.lower, bounds.upper, sweep.rounding
    is_open = (upper != 0) | (after != 0) if shuts else None
    if torch.is_grad_enabled():
        spread = (upper - lower) * 0.5
        deviation = lower + spread - after
    else:
        spread = upper.sub_(lower).mul_(0.5)
        deviation = lower.add_(spread).sub_(after)
    state = Windows(deviation, spread, is_ragged=True)
    if rounding.is_outward:
        # The clean value lies between the bounds, so that they are at most L + 2R: each is off by `units` of that. The
        # difference costs u R, the middle u (L + R), its deviation u R: 1 of the 4 units of L, 3 of the 8 units of R,
        # and the radius itself is rounded three times. The clean value is off by its slack.
        slack = _per_image(sweep.shared.slack(position + 1, 4 + units, 0.0), state)
        slack = slack if is_open is None else slack * is_open
        state = replace(state, radius=spread * (1 + (8 + 2 * units) * rounding.unit) + slack)
    return state.settled(sweep.outside(position + 1))


def _per_image(slack: Annotated[Tensor, "n"], state: Windows) -> Tensor:
    return slack.reshape(-1, *[1] * (state.deviation.dim() - 2))


def relu_terms(
    state: Windows, sweep: WindowPass, position: int
) -> tuple[float, float, tuple[Tensor, Tensor] | None]:
    """What pays for the rounding of a fused ReLU: factors of the radius before and after, and slacks likewise."""
    rounding, slack = sweep.rounding, None
    # The constants are those of `_box` and of `_difference` with no units, as ReLU is exact.
    if rounding.is_outward:
        index = sweep.steps[position].inputs[0]
        slack = (sweep.shared.slack(index, 3, state.extra), sweep.shared.slack(position + 1, 4, 0.0))
    return state.factor * (1 + 8 * rounding.unit), 1 + 8 * rounding.unit, slack


def _add(operation: Add, inputs: Inputs, sweep: WindowPass, position: int) -> Windows:
    first, second = _alike(inputs, sweep, position)
    total = Windows(first.deviation + second.deviation, first.radius + second.radius)
    # One rounding of each sum, and one to spare.
    return replace(total.widened(2, sweep.rounding), is_ragged=True)


def _concatenate(operation: Concatenate, inputs: Inputs, sweep: WindowPass, position: int) -> Windows:
    """Channels, or features, stand last in windows; nothing is rounded."""
    parts = _alike(inputs, sweep, position)
    radius = torch.cat([part.radius.expand_as(part.deviation) for part in parts], dim=-1)
    return Windows(torch.cat([part.deviation for part in parts], dim=-1), radius, is_ragged=True)


def _alike(inputs: Inputs, sweep: WindowPass, position: int) -> Inputs:
    """All inputs on the window after the step."""
    sources = [sweep.windows[index] for index in sweep.steps[position].inputs]
    target = sweep.windows[position + 1]
    return [_extend(state, source, target) for state, source in zip(inputs, sources, strict=True)]


def _extend(state: Windows, source: Window | None, target: Window | None) -> Windows:
    """The windows with zeros around them, as far as the target reaches."""
    if source is None or target is None or source == target:
        return state
    top, left = source.top - target.top, source.left - target.left
    bottom = target.height - source.height - top
    right = target.width - source.width - left
    return state.map(lambda part: F.pad(part, (0, 0, left, right, top, bottom)))


def _convolution(operation: Convolution, inputs: Inputs, sweep: WindowPass, position: int) -> Windows:
    return _slide(operation.geometry, operation.weight(), operation.groups, inputs[0], sweep, position)


def _slide(
    geometry: Geometry, weight: Weight, groups: int, state: Windows, sweep: WindowPass, position: int
) -> Windows:
    """The windows after a kernel with these weights has slid over them, in the step at this position."""
    source, target = sweep.window(sweep.steps[position].inputs[0]), sweep.window(position + 1)
    local = source.local(geometry, target)
    inputs, taps = weight.shape[1] * groups * source.height * source.width, weight[0].numel()
    if is_worth_a_matrix(inputs, taps):
        moved = _slide_by_matrix(local, weight, groups, state, sweep, position)
        roundings = summed_roundings(taps, inputs)
    else:
        moved = _slide_by_convolution(local, weight, groups, state, sweep, position)
        roundings = summed_roundings(taps)
    # The weights of a mean are rounded once before the products are; one rounding more is to spare.
    return replace(moved.widened(roundings + 2, sweep.rounding), is_ragged=True)


def _slide_by_convolution(
    geometry: Geometry, weight: Weight, groups: int, state: Windows, sweep: WindowPass, position: int
) -> Windows:
    precise = sweep.rounding.is_outward
    # Laid out for the library as windows are.
    layout = torch.channels_last if sweep.is_fused and not precise else torch.preserve_format
    weights = sweep.shared.weights(
        (position,), lambda: weight.to(state.deviation.dtype, memory_format=layout)
    )
    if precise and groups == 1:
        state, weights = moved_alone(state, weights)

    def moved(part: Tensor, taps: Tensor) -> Tensor:
        maps, local = part.flatten(0, 1), geometry
        if sweep.is_fused and precise and groups == 1:
            from patchcert.windows.kernels import slide_by_rows

            return slide_by_rows(maps, taps, geometry).unflatten(0, part.shape[:2])
        if sweep.is_fused and not precise and geometry.symmetric_padding is None:
            from patchcert.windows.kernels import padded

            maps, local = padded(maps, geometry), geometry.unpadded
        slid = convolve(maps.permute(0, 3, 1, 2), taps, local, groups, precise)
        return slid.permute(0, 2, 3, 1).contiguous().unflatten(0, part.shape[:2])

    return state.times(weights, moved)


def _slide_by_matrix(
    geometry: Geometry, weight: Weight, groups: int, state: Windows, sweep: WindowPass, position: int
) -> Windows:
    shape, dtype = tuple(state.deviation.shape[2:]), state.deviation.dtype

    def matrix() -> Tensor:
        return sweep.layout.convolution_matrix(geometry, weight, groups, shape).matrix(weight).to(dtype)

    height, width = geometry.output_size(shape[0], shape[1])
    terms = weight[0].numel()

    def moved(part: Tensor, factor: Tensor) -> Tensor:
        rows = sweep.rounding.product(part.flatten(2).flatten(0, 1), factor, terms)
        return rows.reshape(*part.shape[:2], height, width, -1)

    return state.times(sweep.shared.weights((position, geometry, shape), matrix), moved)


def _linear(operation: Linear, inputs: Inputs, sweep: WindowPass, position: int) -> Windows:
    """On windows, or on features without windows."""
    (state,), weight, index = inputs, operation.weight(), sweep.steps[position].inputs[0]
    dtype, rounding = state.deviation.dtype, sweep.rounding
    weights = sweep.shared.weights((position,), lambda: _columns(weight, dtype, sweep, index))
    if sweep.windows[index] is None:

        def moved(part: Tensor, columns: Tensor) -> Tensor:
            return rounding.product(part.flatten(0, 1), columns).unflatten(0, part.shape[:2])

        # A product's roundings, and one to spare.
        return state.times(weights, moved).widened(summed_roundings(weight.shape[1]) + 1, rounding)
    if sweep.is_fused:
        from patchcert.windows.kernels import product_of_windows

        by_kernel = product_of_windows(state, weights, sweep, index)
        if by_kernel is not None:
            return by_kernel
    height, width, channels = state.deviation.shape[2:]
    if rounding.is_outward:
        state, weights = moved_alone(state, weights)
    # A window is multiplied as a whole, or row by row with a sum for each row; one rounding is to spare. Channels that
    # were left out only make sums shorter.
    by_rows = summed_roundings(width * channels) + height
    roundings = max(summed_roundings(height * width * channels), by_rows)
    products = state.times(weights, lambda part, columns: sweep.flat_product(part, columns, index))
    return products.widened(roundings + 1, rounding)


def _columns(
    weight: Annotated[Tensor, "out features"], dtype: torch.dtype, sweep: WindowPass, index: int
) -> Columns | Annotated[Tensor, "features out"]:
    """The transposed weights of the layer after value `index`, by places where the value has them.

    Where there is a gradient they lie in memory row by row, like the weights, and so does their gradient: to transpose
    either would cost more than products of transposed matrices do. Elsewhere the weights of a place lie together.
    """
    area = sweep.layout.maps[index]
    rows = weight if area is None else weight.unflatten(1, (area.channels, -1)).transpose(1, 2)
    if sweep.has_gradient:
        return _packed(rows, dtype).movedim(0, -1)
    return _packed(rows.movedim(0, -1), dtype)


def _packed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights in order of their dimensions and of the given type, at one copy where there are both to change."""
    return weight.to(dtype, memory_format=torch.contiguous_format).contiguous()


_FEWEST_CHANNELS = 16


def moved_channels(state: Windows) -> Annotated[Tensor, "moved"] | None:
    """The channels in which some window differs from the clean image; None where nearly all do, and on a CPU.

    Training on bounds shuts many units of a wide network for good: whatever the patch, they are 0, as they are on the
    clean image. Differences are then exactly 0 in the whole channel, and the layer after it need not look at it. On a
    CPU sums keep all their terms, so that the bounds of an image do not depend on the others computed with it.
    """
    if not _may_pay(state) or _are_nearly_all(_is_moved(state.map(lambda part: part[:1, :1]))):
        return None
    is_moved = _is_moved(state)
    if _are_nearly_all(is_moved):
        return None
    moved = is_moved.nonzero().flatten()
    return moved if len(moved) else moved.new_zeros(1)


def _may_pay(state: Windows) -> bool:
    return state.deviation.is_cuda and state.deviation.shape[-1] >= _FEWEST_CHANNELS


def _is_moved(state: Windows) -> Annotated[Tensor, "c"]:
    """Which channels some window moves or widens."""
    first, second = ((part != 0).flatten(0, -2).any(dim=0) for part in (state.deviation, state.radius))
    return first | second


def _are_nearly_all(is_moved: Annotated[Tensor, "c"]) -> bool:
    return 4 * int(is_moved.sum()) > 3 * len(is_moved)


def moved_alone(state: Windows, weights: Weights) -> tuple[Windows, Weights]:
    """The windows and the weights (outputs or places, channels, ...) without the channels that nothing moves."""
    moved = moved_channels(state)
    if moved is None:
        return state, weights
    first, second = (part.index_select(1, moved) for part in weights)
    return state.map(lambda part: part.index_select(-1, moved)), (first, second)


RULES: dict[type[Operation], Callable[..., Windows]] = {
    Convolution: _convolution,
    AveragePool: _average_pool,
    Linear: _linear,
    ChannelScale: _channel_scale,
    Monotone: _monotone,
    Add: _add,
    Concatenate: _concatenate,
    Rescale: _rescale,
    Reshape: lambda operation, inputs, sweep, position: inputs[0],
}
