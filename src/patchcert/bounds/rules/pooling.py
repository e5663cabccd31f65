"""Rules of pooling layers."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.bounds.geometry import Geometry, plain_average_pool
from patchcert.bounds.lowering import Lowered, function_rule, layer_rule, pair, refuse
from patchcert.bounds.operations import AveragePool, MaxPool, Operation, Reshape


@layer_rule(nn.MaxPool2d)
def _max_pool_layer(layer: nn.MaxPool2d) -> Operation:
    return _max_pool(
        layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode, layer.return_indices
    )


@function_rule(F.max_pool2d, torch.max_pool2d)
def _max_pool(
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Operation:
    if return_indices:
        refuse("return_indices is set, bounds exist for the pooled values alone")
    kernel, (top, left) = pair(kernel_size), pair(padding)
    geometry = Geometry(kernel, pair(stride or kernel), (top, top, left, left), pair(dilation))

    def pool(value: Tensor) -> Tensor:
        return F.max_pool2d(value, kernel, geometry.stride, (top, left), geometry.dilation, ceil_mode)

    return MaxPool(pool, geometry, ceil_mode)


@layer_rule(nn.AvgPool2d)
def _average_pool_layer(layer: nn.AvgPool2d) -> Operation:
    return _average_pool(
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.ceil_mode,
        layer.count_include_pad,
        layer.divisor_override,
    )


@function_rule(F.avg_pool2d)
def _average_pool(
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Operation:
    if divisor_override is not None and divisor_override <= 0:
        refuse(f"divisor_override is {divisor_override}, bounds exist for positive divisors")
    kernel, pads = pair(kernel_size), pair(padding)
    steps = pair(stride or kernel)
    plain = (count_include_pad or pads == (0, 0)) and not ceil_mode and divisor_override is None
    geometry = plain_average_pool(kernel, steps, pads) if plain else None

    def pool(value: Tensor) -> Tensor:
        return F.avg_pool2d(value, kernel, steps, pads, ceil_mode, count_include_pad, divisor_override)

    return AveragePool(pool, lambda value: kernel[0] * kernel[1], lambda value: geometry)


@layer_rule(nn.AdaptiveAvgPool2d)
def _adaptive_average_pool_layer(layer: nn.AdaptiveAvgPool2d) -> Operation:
    return _adaptive_average_pool(layer.output_size)


@function_rule(F.adaptive_avg_pool2d)
def _adaptive_average_pool(output_size: int | tuple[int | None, int | None] | None) -> AveragePool:
    sizes = output_size if isinstance(output_size, tuple) else (output_size, output_size)

    def geometry(value: Tensor) -> Geometry | None:
        extents = value.shape[-2:]
        outputs = [extent if size is None else size for extent, size in zip(extents, sizes, strict=True)]
        if extents[0] % outputs[0] or extents[1] % outputs[1]:
            return None
        kernel = (extents[0] // outputs[0], extents[1] // outputs[1])
        return plain_average_pool(kernel, kernel, (0, 0))

    def pool(value: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(value, sizes)

    return AveragePool(pool, lambda value: value.shape[-2] * value.shape[-1], geometry)


@function_rule(torch.mean, "mean")
def _mean(dim: object = None, keepdim: bool = False) -> Lowered:
    """The mean over height and width is a pooling to one value, and is flattened unless dimensions are kept."""
    if not isinstance(dim, tuple) or frozenset(dim) not in _HEIGHT_AND_WIDTH or not isinstance(keepdim, bool):
        refuse(
            f"it is taken over dim={dim}, bounds exist for the mean over height and width, dim=(2, 3)",
            hint="use x.mean((2, 3)), or nn.AdaptiveAvgPool2d(1) and nn.Flatten()",
        )
    whole = _adaptive_average_pool(1)
    pool = replace(
        whole,
        pool=lambda value: whole.pool(_checked_maps(value)),
        window=lambda value: whole.window(_checked_maps(value)),
    )
    return pool if keepdim else (pool, Reshape(lambda value: value.flatten(1)))


_HEIGHT_AND_WIDTH = {frozenset(axes) for axes in ((2, 3), (-2, -1), (2, -1), (-2, 3))}


def _checked_maps(value: Tensor) -> Tensor:
    if value.dim() != 4:
        refuse(
            f"the mean over height and width of results of shape {tuple(value.shape)}, expected (n, channels, height, "
            "width)",
            hint="take the mean before results are flattened or reshaped",
        )
    return value
