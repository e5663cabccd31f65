"""Steps that kernels of half precision take in one go, as in the search of training; None where they do not."""

import torch
from torch import Tensor

from patchcert.bounds.geometry import FeatureMap
from patchcert.bounds.operations import Convolution, is_relu
from patchcert.windows.half import fills_cores, slid_relu, window_products
from patchcert.windows.windows import WindowPass, Windows


def convolution_with_relu(state: Windows, sweep: WindowPass, position: int) -> Windows | None:
    """The windows after the convolution at this position and the ReLU that alone takes its result."""
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
    parts = (state.deviation, state.radius)
    return Windows(*slid_relu(parts, _taps(weight, sweep, position), local, clean, cells, spans))


def product_of_windows(
    state: Windows, columns: Tensor, absolute: Tensor, sweep: WindowPass, index: int
) -> Windows | None:
    """The windows on value `index` times the weights (places, channels, outputs) of the layer after it."""
    spans, area = sweep.spans(index), sweep.layout.maps[index]
    fits = _is_half(state, sweep) and fills_cores(columns.shape[1], columns.shape[2], columns.device)
    if spans is None or area is None or not fits:
        return None
    parts = (state.deviation, state.radius)
    return Windows(*window_products(parts, (columns, absolute), area.width, spans))


def is_read_in_place(weight: Tensor, area: FeatureMap | None, dtype: torch.dtype | None) -> bool:
    """Whether windows of this type on the map take the weights (outputs, inputs) under them without a copy."""
    is_half = dtype == torch.float16 and weight.is_cuda
    return is_half and area is not None and fills_cores(area.channels, len(weight), weight.device)


def _is_half(state: Windows, sweep: WindowPass) -> bool:
    is_full = state.radius.shape == state.deviation.shape
    return sweep.is_fused and state.deviation.dtype == torch.float16 and is_full and not sweep.has_gradient


def _is_before_relu(sweep: WindowPass, position: int) -> bool:
    users = [step for step in sweep.steps if position + 1 in step.inputs]
    return users == [sweep.steps[position + 1]] and is_relu(users[0].operation)


def _taps(weight: Tensor, sweep: WindowPass, position: int) -> tuple[Tensor, Tensor]:
    """The weights (taps, channels, outputs) and their absolute values, made once for all groups."""
    key = (position, "taps")
    if key not in sweep.shared.weights:
        taps = weight.permute(2, 3, 1, 0).flatten(0, 1).half().contiguous()
        sweep.shared.weights[key] = (taps, taps.abs())
    return sweep.shared.weights[key]
