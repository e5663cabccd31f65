"""Bounds carried as differences from the clean pass, on the small window that a patch can reach.

Where a placement can change a value it is kept as `deviation` (centre of the interval minus the clean value) and
`radius`; everywhere else both are zero and nothing is computed. An affine layer maps them by W and |W| without its
offset, which the clean pass holds already; a monotone layer looks up the clean values on the window.

Rounding. The clean image lies in every box, so |deviation| <= radius holds at every step, and the error
gamma |W||deviation| of a product is at most gamma |W| radius: widening the radius by the
factor (1 + gamma) / (1 - gamma) pays for the products of both. At a monotone layer the sums with the clean value z cost a few units of |z| and of the radius, and the
clean value itself may be off by its slack; both are added to the radius before and after the function.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from patchcert.bounds import Rounding
from patchcert.bounds.network import Step
from patchcert.bounds.operations import (
    Add,
    AveragePool,
    ChannelScale,
    Convolution,
    Geometry,
    Linear,
    MaxPool,
    Monotone,
    Operation,
    Reshape,
    convolve,
)
from patchcert.bounds.rounding import blocked_product, summed_roundings
from patchcert.engine.clean import Clean
from patchcert.engine.geometry import Cells, Group, Layout, Window, is_global


@dataclass(frozen=True, slots=True)
class Windows:
    """Deviation and radius (p, n, c, h, w) on the window of each placement, or (p, n, features) without a window.

    The radius may have n = 1 where it is the same for all images. Cells outside the feature map hold zeros.
    """

    deviation: Tensor
    radius: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "Windows":
        """Both parts, each changed by the same function."""
        return Windows(function(self.deviation), function(self.radius))

    def inside(self, cells: Cells | None) -> "Windows":
        """With zeros in the cells outside the feature map."""
        if cells is None or cells.inside is None:
            return self
        inside = cells.inside
        return self.map(lambda part: part.where(inside, 0.0))


@dataclass(frozen=True, slots=True)
class Sweep:
    """What all rules need: the network, its clean pass, and a slice of one group of placements."""

    layout: Layout
    clean: Clean
    group: Group
    start: int
    stop: int
    rounding: Rounding
    matrices: dict[tuple, tuple[Tensor, Tensor]]

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.layout.network.steps

    def cells(self, index: int) -> Cells | None:
        """The cells of the chosen placements on value `index`."""
        cells = self.group.cells[index]
        return None if cells is None else cells.slice(self.start, self.stop)

    def clean_windows(self, index: int) -> Tensor:
        """The clean value `index` on the windows of the chosen placements; the value itself where it has no places."""
        cells, window = self.cells(index), self.group.windows[index]
        if cells is None or window is None:
            return self.clean.values[index].flatten(1)
        return self._gather(index, cells.index).unflatten(3, (window.height, window.width))

    def surroundings(self, position: int, height: int, width: int) -> Tensor:
        """The clean values that the max pooling at `position` looks at, -infinity outside the feature map."""
        index, cells = self.steps[position].inputs[0], self.group.surroundings[position]
        assert cells is not None
        chosen = cells.slice(self.start, self.stop)
        values = self._gather(index, chosen.index).unflatten(3, (height, width))
        return values if chosen.inside is None else values.where(chosen.inside, -torch.inf)

    def _gather(self, index: int, cells: Tensor) -> Tensor:
        area = self.layout.maps[index]
        assert area is not None
        value = self.clean.values[index]
        return value.reshape(-1, area.channels, area.height * area.width)[:, :, cells].permute(2, 0, 1, 3)

    def slack(self, index: int, units: int, like: Tensor) -> Tensor:
        """What the clean value `index` may be off by, with some units of rounding in sums with it; per image."""
        assert self.clean.slack is not None and self.clean.largest is not None
        slack = self.clean.slack[index] + self.clean.largest[index] * (units * self.rounding.unit)
        return (slack * (1 + 8 * self.rounding.unit)).reshape(-1, *[1] * (like.dim() - 2))

    def run(self, start: Windows) -> Windows:
        """Deviation and radius of the input of the last layer."""
        states: dict[int, Windows] = {0: start}
        last_use = {index: position for position, step in enumerate(self.steps) for index in step.inputs}
        for position, step in enumerate(self.steps[:-1]):
            inputs = [states[index] for index in step.inputs]
            state = RULES[type(step.operation)](step.operation, inputs, self, position)
            for index in set(step.inputs):
                if last_use[index] <= position:
                    del states[index]
            states[position + 1] = state
        return states[self.steps[-1].inputs[0]]


def _convolution(operation: Convolution, inputs: Sequence[Windows], sweep: Sweep, position: int) -> Windows:
    weight, groups = operation.weight(), operation.groups
    return _slide(operation.geometry, weight, groups, inputs[0], sweep, position)


def _average_pool(operation: AveragePool, inputs: Sequence[Windows], sweep: Sweep, position: int) -> Windows:
    index, (state,) = sweep.steps[position].inputs[0], inputs
    area, clean = sweep.layout.maps[index], sweep.clean.values[index]
    geometry = operation.geometry(clean)
    assert area is not None and geometry is not None
    if is_global(operation, area):
        mean = state.map(lambda part: part.sum(dim=(3, 4)) / (area.height * area.width))
        return _widen(mean, state.deviation[0, 0, 0].numel() + 1, sweep.rounding)
    weight = clean.new_full((area.channels, 1, *geometry.kernel), 1.0 / (geometry.kernel[0] * geometry.kernel[1]))
    return _slide(geometry, weight, area.channels, state, sweep, position)


def _slide(
    geometry: Geometry, weight: Tensor, groups: int, state: Windows, sweep: Sweep, position: int
) -> Windows:
    source = sweep.group.windows[sweep.steps[position].inputs[0]]
    target = sweep.group.windows[position + 1]
    assert source is not None and target is not None
    local = Geometry(geometry.kernel, geometry.stride, _turn(source.input_padding(geometry, target)), geometry.dilation)
    inputs, taps = weight.shape[1] * groups * source.height * source.width, weight[0].numel()
    if inputs <= _DENSE_INPUTS and inputs <= _DENSE_FACTOR * taps:
        moved = _slide_by_matrix(local, weight, groups, state, sweep, position)
    else:
        moved = _slide_by_convolution(local, weight, groups, state, sweep)
    return _widen(moved, summed_roundings(taps) + 2, sweep.rounding).inside(sweep.cells(position + 1))


_DENSE_INPUTS = 1024
_DENSE_FACTOR = 8
"""A convolution on a small window is written as one dense matrix when that costs at most this many times the work."""


def _turn(padding: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    left, right, top, bottom = padding
    return (top, bottom, left, right)


def _slide_by_convolution(
    geometry: Geometry, weight: Tensor, groups: int, state: Windows, sweep: Sweep
) -> Windows:
    precise = sweep.rounding.is_outward

    def slide(part: Tensor, taps: Tensor) -> Tensor:
        return convolve(part.flatten(0, 1), taps, geometry, groups, precise).unflatten(0, part.shape[:2])

    return Windows(slide(state.deviation, weight), slide(state.radius, weight.abs()))


def _slide_by_matrix(
    geometry: Geometry, weight: Tensor, groups: int, state: Windows, sweep: Sweep, position: int
) -> Windows:
    shape = state.deviation.shape[2:]
    key = (position, geometry, shape)
    if key not in sweep.matrices:
        matrix = window_matrix(geometry, weight, groups, shape)
        sweep.matrices[key] = (matrix, matrix.abs())
    matrix, absolute = sweep.matrices[key]
    size = (weight.shape[0], *geometry.output_size(shape[1], shape[2]))

    def slide(part: Tensor, factor: Tensor) -> Tensor:
        rows = product(part.flatten(2).flatten(0, 1), factor, sweep.rounding)
        return rows.reshape(*part.shape[:2], *size)

    return Windows(slide(state.deviation, matrix), slide(state.radius, absolute))


def window_matrix(geometry: Geometry, weight: Tensor, groups: int, shape: Sequence[int]) -> Tensor:
    """The convolution on a window of the given (channels, height, width) as a matrix (inputs, outputs), exactly."""
    count = shape[0] * shape[1] * shape[2]
    basis = torch.eye(count, dtype=weight.dtype, device=weight.device).reshape(count, *shape)
    return convolve(basis, weight, geometry, groups, precise=True).flatten(1)


def product(left: Tensor, right: Tensor, rounding: Rounding) -> Tensor:
    """The matrix product, in the form whose rounding is known where bounds must be sound."""
    return blocked_product(left, right) if rounding.is_outward else left @ right


def _widen(state: Windows, roundings: int, rounding: Rounding) -> Windows:
    if not rounding.is_outward:
        return state
    gamma, underflow = rounding.gamma(roundings), rounding.tiny / rounding.unit
    return Windows(state.deviation, state.radius * (1 + 2 * gamma * (1 + 2 * gamma) + 4 * rounding.unit) + underflow)


def _linear(operation: Linear, inputs: Sequence[Windows], sweep: Sweep, position: int) -> Windows:
    (state,) = inputs
    weight, cells = operation.weight(), sweep.cells(sweep.steps[position].inputs[0])
    if cells is None:
        moved, terms = _map_features(state, weight.T, sweep.rounding), weight.shape[1]
    else:
        columns = weight.unflatten(1, (state.deviation.shape[2], -1))[:, :, cells.index]  # (out, c, p, cells)
        columns, flat = columns.permute(2, 1, 3, 0).flatten(1, 2), state.map(lambda part: part.flatten(2))
        moved = Windows(
            product(flat.deviation, columns, sweep.rounding), product(flat.radius, columns.abs(), sweep.rounding)
        )
        terms = columns.shape[1]
    return _widen(moved, summed_roundings(terms) + 1, sweep.rounding)


def _map_features(state: Windows, columns: Tensor, rounding: Rounding) -> Windows:
    def rows(part: Tensor, factor: Tensor) -> Tensor:
        return product(part.flatten(0, 1), factor, rounding).unflatten(0, part.shape[:2])

    return Windows(rows(state.deviation, columns), rows(state.radius, columns.abs()))


def _channel_scale(operation: ChannelScale, inputs: Sequence[Windows], sweep: Sweep, position: int) -> Windows:
    (state,) = inputs
    scale = operation.scale().to(state.deviation.dtype).flatten()
    if state.deviation.dim() == 5:
        scale = scale[:, None, None]
    return _widen(Windows(state.deviation * scale, state.radius * scale.abs()), 8, sweep.rounding)


def _monotone(operation: Monotone, inputs: Sequence[Windows], sweep: Sweep, position: int) -> Windows:
    before = sweep.clean_windows(sweep.steps[position].inputs[0])
    after = sweep.clean_windows(position + 1) if sweep.rounding.is_outward else operation.function(before)
    return _between(operation.function, operation.units, before, after, inputs[0], sweep, position)


def _max_pool(operation: MaxPool, inputs: Sequence[Windows], sweep: Sweep, position: int) -> Windows:
    """The pooled window also sees clean values around the patch's own window."""
    geometry = operation.geometry
    source, target = sweep.group.windows[sweep.steps[position].inputs[0]], sweep.group.windows[position + 1]
    assert source is not None and target is not None
    padding = source.input_padding(geometry, target)
    grown = inputs[0].map(lambda part: F.pad(part, padding))
    before = sweep.surroundings(position, grown.deviation.shape[3], grown.deviation.shape[4])

    def pool(values: Tensor) -> Tensor:
        pooled = F.max_pool2d(values.flatten(0, 1), geometry.kernel, geometry.stride, 0, geometry.dilation)
        return pooled.unflatten(0, values.shape[:2])

    return _between(pool, 0, before, sweep.clean_windows(position + 1), grown, sweep, position)


def _between(
    function: Callable[[Tensor], Tensor],
    units: int,
    before: Tensor,
    after: Tensor,
    state: Windows,
    sweep: Sweep,
    position: int,
) -> Windows:
    """The interval around the clean values pushed through a non-decreasing function, as a difference again."""
    centre, radius, rounding = before + state.deviation, state.radius, sweep.rounding
    if rounding.is_outward:
        slack = sweep.slack(sweep.steps[position].inputs[0], 3, state.deviation)
        radius = radius * (1 + 6 * rounding.unit) + slack
    lower, upper = function(centre - radius), function(centre + radius)
    deviation, spread = (lower + upper) * 0.5 - after, (upper - lower) * 0.5
    if rounding.is_outward:
        slack = sweep.slack(position + 1, 4 + units, state.deviation)
        spread = spread * (1 + (8 + 2 * units) * rounding.unit) + (slack + rounding.tiny)
    return Windows(deviation, spread).inside(sweep.cells(position + 1))


def _add(operation: Add, inputs: Sequence[Windows], sweep: Sweep, position: int) -> Windows:
    step, target = sweep.steps[position], sweep.group.windows[position + 1]
    first, second = (
        _extend(state, sweep.group.windows[index], target) for state, index in zip(inputs, step.inputs, strict=True)
    )
    total = Windows(first.deviation + second.deviation, first.radius + second.radius)
    return _widen(total, 2, sweep.rounding)


def _extend(state: Windows, source: Window | None, target: Window | None) -> Windows:
    if source is None or target is None or source == target:
        return state
    top, left = source.top - target.top, source.left - target.left
    bottom = target.height - source.height - top
    right = target.width - source.width - left
    return state.map(lambda part: F.pad(part, (left, right, top, bottom)))


def _reshape(operation: Reshape, inputs: Sequence[Windows], sweep: Sweep, position: int) -> Windows:
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
