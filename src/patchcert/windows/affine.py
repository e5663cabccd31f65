"""Convolutions and linear layers on windows: each in the form that is fastest for its size and its arithmetic."""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds.geometry import FeatureMap, Geometry, convolve
from patchcert.bounds.operations import Convolution, is_relu
from patchcert.bounds.rounding import blocked_product, summed_roundings
from patchcert.windows.kernels import fills_cores, fused_rows, placed, slid_relu, window_products
from patchcert.windows.passes import Columns, Weights, WindowPass, Windows
from patchcert.windows.products import Weight, is_worth_a_matrix, product

Maps = Annotated[Tensor, "b h w c"]
"""Windows of all placements and images, one after the other."""


def slide(
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
        if precise and sweep.is_fused and groups == 1:
            return _slide_by_rows(part.flatten(0, 1), taps, geometry).unflatten(0, part.shape[:2])
        maps, local = part.flatten(0, 1), geometry
        if sweep.is_fused and not precise and geometry.symmetric_padding is None:
            maps, local = _padded(maps, geometry)
        slid = convolve(maps.permute(0, 3, 1, 2), taps, local, groups, precise)
        return slid.permute(0, 2, 3, 1).contiguous().unflatten(0, part.shape[:2])

    return state.times(weights, moved)


def _padded(maps: Maps, geometry: Geometry) -> tuple[Annotated[Tensor, "b _ _ c"], Geometry]:
    """The maps with the padding made explicit, and the geometry that is left."""
    top, bottom, left, right = geometry.padding
    size = (maps.shape[1] + top + bottom, maps.shape[2] + left + right)
    return placed(maps, size, (top, left)), replace(geometry, padding=(0, 0, 0, 0))


def _slide_by_rows(maps: Maps, taps: Weight, geometry: Geometry) -> Annotated[Tensor, "b _ _ out"]:
    """As `convolve` by a product, with the rows under the kernel laid out by a CUDA kernel."""
    height, width = geometry.output_size(maps.shape[1], maps.shape[2])
    rows = fused_rows(maps, geometry, height, width)
    columns = taps.permute(2, 3, 1, 0).flatten(0, 2)
    return blocked_product(rows, columns).reshape(len(maps), height, width, -1)


def _slide_by_matrix(
    geometry: Geometry, weight: Weight, groups: int, state: Windows, sweep: WindowPass, position: int
) -> Windows:
    shape, dtype = tuple(state.deviation.shape[2:]), state.deviation.dtype

    def matrix() -> Tensor:
        return sweep.layout.convolution_matrix(geometry, weight, groups, shape).matrix(weight).to(dtype)

    height, width = geometry.output_size(shape[0], shape[1])
    terms = weight[0].numel()

    def moved(part: Tensor, factor: Tensor) -> Tensor:
        rows = product(part.flatten(2).flatten(0, 1), factor, sweep.rounding, terms)
        return rows.reshape(*part.shape[:2], height, width, -1)

    return state.times(sweep.shared.weights((position, geometry, shape), matrix), moved)


def multiply(
    weight: Annotated[Tensor, "out features"], state: Windows, sweep: WindowPass, position: int
) -> Windows:
    """The windows, or features without windows, after a linear layer with these weights, the step at this position."""
    index, dtype = sweep.steps[position].inputs[0], state.deviation.dtype
    weights = sweep.shared.weights((position,), lambda: _columns(weight, dtype, sweep, index))
    if sweep.windows[index] is None:
        moved = state.times(weights, lambda part, columns: _feature_product(part, columns, sweep))
        # A product's roundings, and one to spare.
        return moved.widened(summed_roundings(weight.shape[1]) + 1, sweep.rounding)
    by_kernel = product_of_windows(state, weights, sweep, index)
    if by_kernel is not None:
        return by_kernel
    height, width, channels = state.deviation.shape[2:]
    if sweep.rounding.is_outward:
        state, weights = moved_alone(state, weights)
    moved = state.times(weights, lambda part, columns: sweep.flat_product(part, columns, index))
    # A window is multiplied as a whole, or row by row with a sum for each row; one rounding is to spare. Channels that
    # were left out only make sums shorter.
    by_rows = summed_roundings(width * channels) + height
    roundings = max(summed_roundings(height * width * channels), by_rows)
    return moved.widened(roundings + 1, sweep.rounding)


def _feature_product(
    part: Annotated[Tensor, "p n features"], columns: Annotated[Tensor, "features out"], sweep: WindowPass
) -> Annotated[Tensor, "p n out"]:
    return product(part.flatten(0, 1), columns, sweep.rounding).unflatten(0, part.shape[:2])


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


def convolution_with_relu(state: Windows, sweep: WindowPass, position: int) -> Windows | None:
    """The windows after the convolution at this position and the ReLU that follows it, by one kernel of half precision.

    None where the kernel does not apply.
    """
    operation = sweep.steps[position].operation
    if not isinstance(operation, Convolution) or not _is_half(state, sweep):
        return None
    source, target = sweep.window(sweep.steps[position].inputs[0]), sweep.window(position + 1)
    spans, cells = sweep.spans(sweep.steps[position].inputs[0]), sweep.signed_cells(position + 1)
    geometry, weight = operation.geometry, operation.weight()
    is_plain = operation.groups == 1 and geometry.dilation == (1, 1) and _is_before_relu(sweep, position)
    fits = is_plain and fills_cores(weight.shape[1], weight.shape[0], weight.device)
    if spans is None or cells is None or not fits:
        return None
    clean, local = sweep.clean.places(position + 1, sweep.layout), source.local(geometry, target)
    weights = sweep.shared.weights(
        (position, "half"), lambda: weight.permute(2, 3, 1, 0).flatten(0, 1).half().contiguous()
    )
    return Windows(*slid_relu((state.deviation, state.radius), weights, local, clean, cells, spans))


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


def is_read_in_place(
    weight: Annotated[Tensor, "out features"], area: FeatureMap | None, dtype: torch.dtype | None
) -> bool:
    """Whether windows of this type on the map take the weights under them without a copy."""
    is_half = dtype == torch.float16 and weight.is_cuda
    return is_half and area is not None and fills_cores(area.channels, len(weight), weight.device)


def _is_half(state: Windows, sweep: WindowPass) -> bool:
    is_full = state.radius.shape == state.deviation.shape
    return sweep.is_fused and state.deviation.dtype == torch.float16 and is_full and not sweep.has_gradient


def _is_before_relu(sweep: WindowPass, position: int) -> bool:
    users = [step for step in sweep.steps if position + 1 in step.inputs]
    return users == [sweep.steps[position + 1]] and is_relu(users[0].operation)


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
