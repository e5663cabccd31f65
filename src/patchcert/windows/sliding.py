"""Convolutions of windows: as a small matrix, by a library, or row by row where the rounding must be known."""

from dataclasses import replace

import torch
from torch import Tensor

from patchcert.bounds.geometry import Geometry, convolve
from patchcert.bounds.rounding import blocked_product, summed_roundings
from patchcert.windows.fused import fused_rows, placed
from patchcert.windows.taps import is_worth_a_matrix
from patchcert.windows.unmoved import moved_channels, only
from patchcert.windows.windows import WindowPass, Windows, product


def slide(
    geometry: Geometry, weight: Tensor, groups: int, state: Windows, sweep: WindowPass, position: int
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
    return replace(moved.widened(roundings + 2, sweep.rounding), is_ragged=True)


def _slide_by_convolution(
    geometry: Geometry, weight: Tensor, groups: int, state: Windows, sweep: WindowPass, position: int
) -> Windows:
    precise = sweep.rounding.is_outward
    weight, absolute = _shared_weights(weight, state.deviation.dtype, sweep, position)
    moved_ones = moved_channels(state) if precise and groups == 1 else None
    if moved_ones is not None:
        state = only(moved_ones, state)
        weight, absolute = (taps.index_select(1, moved_ones) for taps in (weight, absolute))

    def moved(part: Tensor, taps: Tensor) -> Tensor:
        if precise and sweep.is_fused and groups == 1:
            return _slide_by_rows(part.flatten(0, 1), taps, geometry).unflatten(0, part.shape[:2])
        maps, local = part.flatten(0, 1), geometry
        if sweep.is_fused and not precise and geometry.symmetric_padding is None:
            maps, local = _padded(maps, geometry)
        slid = convolve(maps.permute(0, 3, 1, 2), taps, local, groups, precise)
        return slid.permute(0, 2, 3, 1).contiguous().unflatten(0, part.shape[:2])

    return Windows(moved(state.deviation, weight), moved(state.radius, absolute))


def _shared_weights(
    weight: Tensor, dtype: torch.dtype, sweep: WindowPass, position: int
) -> tuple[Tensor, Tensor]:
    """The weights and their absolute values, made once for all groups; laid out as windows are for the library."""
    key = (position,)
    if key not in sweep.shared.weights:
        is_for_library = sweep.is_fused and not sweep.rounding.is_outward
        layout = torch.channels_last if is_for_library else torch.preserve_format
        weight = weight.to(dtype, memory_format=layout)
        sweep.shared.weights[key] = (weight, weight.abs())
    return sweep.shared.weights[key]


def _padded(maps: Tensor, geometry: Geometry) -> tuple[Tensor, Geometry]:
    """The maps (b, h, w, c) with the padding made explicit, and the geometry that is left."""
    top, bottom, left, right = geometry.padding
    size = (maps.shape[1] + top + bottom, maps.shape[2] + left + right)
    return placed(maps, size, (top, left)), replace(geometry, padding=(0, 0, 0, 0))


def _slide_by_rows(maps: Tensor, taps: Tensor, geometry: Geometry) -> Tensor:
    """As `convolve` by a product, on maps (b, h, w, c), with the rows under the kernel laid out by a kernel of ours."""
    height, width = geometry.output_size(maps.shape[1], maps.shape[2])
    rows = fused_rows(maps, geometry, height, width)
    columns = taps.permute(2, 3, 1, 0).flatten(0, 2)
    return blocked_product(rows, columns).reshape(len(maps), height, width, -1)


def _slide_by_matrix(
    geometry: Geometry, weight: Tensor, groups: int, state: Windows, sweep: WindowPass, position: int
) -> Windows:
    shape = tuple(state.deviation.shape[2:])
    key = (position, geometry, shape)
    if key not in sweep.shared.weights:
        taps = sweep.layout.taps(geometry, weight, groups, shape)
        matrix = taps.matrix(weight).to(state.deviation.dtype)
        sweep.shared.weights[key] = (matrix, matrix.abs())
    matrix, absolute = sweep.shared.weights[key]
    height, width = geometry.output_size(shape[0], shape[1])
    terms = weight[0].numel()

    def moved(part: Tensor, factor: Tensor) -> Tensor:
        rows = product(part.flatten(2).flatten(0, 1), factor, sweep.rounding, terms)
        return rows.reshape(*part.shape[:2], height, width, -1)

    return Windows(moved(state.deviation, matrix), moved(state.radius, absolute))
