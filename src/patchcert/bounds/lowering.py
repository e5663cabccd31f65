"""From the layers and functions of PyTorch to the operations that have bounds.

One table maps layer types and functions to rules. A rule takes the layer (or the arguments of the function
after its input) and returns the operation, or raises `UnsupportedLayer` where the settings have no sound
bound.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    Source,
    plain_average_pool,
)
from patchcert.errors import ModelError, UnsupportedLayer

LAYER_RULES: dict[type[nn.Module], Callable[[Any], Operation | None]] = {}
FUNCTION_RULES: dict[Callable | str, Callable[..., Operation | None]] = {}
"""A rule that returns None stands for the identity."""


def layer_rule(*types: type[nn.Module]) -> Callable:
    """Registers how a layer is lowered; a second rule for the same type is an error."""
    return partial(_register, LAYER_RULES, types)


def function_rule(*functions: Callable | str) -> Callable:
    """Registers how a function, or a tensor method given by name, is lowered."""
    return partial(_register, FUNCTION_RULES, functions)


def _register(table: dict, keys: tuple, rule: Callable) -> Callable:
    for key in dict.fromkeys(keys):
        if key in table:
            raise ValueError(f"a rule for {key} is registered already")
        table[key] = rule
    return rule


def refuse(reason: str, hint: str = "") -> NoReturn:
    """Refuses a layer for its settings; the place is added by `trace`."""
    raise UnsupportedLayer(reason, hint)


def _attribute(layer: nn.Module, name: str) -> Source | None:
    return None if getattr(layer, name) is None else lambda: getattr(layer, name)


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    if isinstance(value, int):
        return (value, value)
    values = tuple(value)
    return (values[0], values[0]) if len(values) == 1 else (values[0], values[1])


@layer_rule(nn.Linear)
def _linear_layer(layer: nn.Linear) -> Operation:
    return Linear(lambda: layer.weight, _attribute(layer, "bias"))


@function_rule(F.linear)
def _linear(weight: Source, bias: Source | None = None) -> Operation:
    return Linear(weight, bias)


@layer_rule(nn.Conv2d)
def _convolution_layer(layer: nn.Conv2d) -> Operation:
    if layer.padding_mode != "zeros":
        refuse(f"padding_mode is {layer.padding_mode!r}, bounds exist for 'zeros'")
    bias = _attribute(layer, "bias")
    return _convolution(lambda: layer.weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)


@function_rule(F.conv2d, torch.conv2d)
def _convolution(
    weight: Source,
    bias: Source | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Operation:
    kernel, spacing = (weight().shape[2], weight().shape[3]), _pair(dilation)
    geometry = Geometry(kernel, _pair(stride), _explicit_padding(padding, kernel, spacing), spacing)
    return Convolution(weight, bias, geometry, groups)


def _explicit_padding(
    padding: int | str | tuple[int, ...], kernel: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int, int, int]:
    if padding == "valid":
        return (0, 0, 0, 0)
    if padding == "same":
        total = [spacing * (size - 1) for size, spacing in zip(kernel, dilation, strict=True)]
        return (total[0] // 2, total[0] - total[0] // 2, total[1] // 2, total[1] - total[1] // 2)
    if isinstance(padding, str):
        refuse(f"padding is {padding!r}, expected numbers, 'same' or 'valid'")
    vertical, horizontal = _pair(padding)
    return (vertical, vertical, horizontal, horizontal)


def _monotone(units: int, function: Callable[..., Tensor], *settings: float) -> Operation:
    return Monotone(lambda value: function(value, *settings), units)


@layer_rule(nn.ReLU)
def _relu_layer(layer: nn.ReLU) -> Operation:
    return Monotone(torch.relu, units=0, is_relu=True)


@function_rule(F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
def _relu(inplace: bool = False) -> Operation:
    return Monotone(torch.relu, units=0, is_relu=True)


@layer_rule(nn.ReLU6)
def _relu6_layer(layer: nn.ReLU6) -> Operation:
    return _monotone(0, F.relu6)


@function_rule(F.relu6)
def _relu6(inplace: bool = False) -> Operation:
    return _monotone(0, F.relu6)


@layer_rule(nn.Hardtanh)
def _hardtanh_layer(layer: nn.Hardtanh) -> Operation:
    return _hardtanh(layer.min_val, layer.max_val)


@function_rule(F.hardtanh)
def _hardtanh(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Operation:
    return _monotone(
        2, F.hardtanh, min_val, max_val
    )  # the limits themselves are rounded to the type of the bounds


@layer_rule(nn.LeakyReLU)
def _leaky_relu_layer(layer: nn.LeakyReLU) -> Operation:
    return _leaky_relu(layer.negative_slope)


@function_rule(F.leaky_relu)
def _leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> Operation:
    if negative_slope < 0:
        refuse(f"negative_slope is {negative_slope}, bounds exist for slopes of at least 0")
    return _monotone(4, F.leaky_relu, negative_slope)


_SMOOTH_UNITS = 16
"""Assumed of the elementary functions of the platform: an error of at most 7 units in the last place, 14 unit
roundoffs; two more pay for the subtraction and addition of the error."""


@layer_rule(nn.ELU)
def _elu_layer(layer: nn.ELU) -> Operation:
    return _elu(layer.alpha)


@function_rule(F.elu)
def _elu(alpha: float = 1.0, inplace: bool = False) -> Operation:
    if alpha < 0:
        refuse(f"alpha is {alpha}, bounds exist for alpha of at least 0")
    return _monotone(_SMOOTH_UNITS, F.elu, alpha)


@layer_rule(nn.SELU)
def _selu_layer(layer: nn.SELU) -> Operation:
    return _monotone(_SMOOTH_UNITS, F.selu)


@function_rule(F.selu)
def _selu(inplace: bool = False) -> Operation:
    return _monotone(_SMOOTH_UNITS, F.selu)


@layer_rule(nn.Sigmoid, nn.Tanh, nn.Hardsigmoid, nn.LogSigmoid, nn.Softsign)
def _smooth_layer(layer: nn.Module) -> Operation:
    return _monotone(_SMOOTH_UNITS, _SMOOTH_FUNCTIONS[type(layer)])


_SMOOTH_FUNCTIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.Sigmoid: torch.sigmoid,
    nn.Tanh: torch.tanh,
    nn.Hardsigmoid: F.hardsigmoid,
    nn.LogSigmoid: F.logsigmoid,
    nn.Softsign: F.softsign,
}


@function_rule(torch.sigmoid, F.sigmoid, "sigmoid")
def _sigmoid() -> Operation:
    return _monotone(_SMOOTH_UNITS, torch.sigmoid)


@function_rule(torch.tanh, F.tanh, "tanh")
def _tanh() -> Operation:
    return _monotone(_SMOOTH_UNITS, torch.tanh)


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
    kernel, (top, left) = _pair(kernel_size), _pair(padding)
    geometry = Geometry(kernel, _pair(stride or kernel), (top, top, left, left), _pair(dilation))

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
    kernel, pads = _pair(kernel_size), _pair(padding)
    steps = _pair(stride or kernel)
    plain = (count_include_pad or pads == (0, 0)) and not ceil_mode and divisor_override is None
    geometry = plain_average_pool(kernel, steps, pads) if plain else None

    def pool(value: Tensor) -> Tensor:
        return F.avg_pool2d(value, kernel, steps, pads, ceil_mode, count_include_pad, divisor_override)

    return AveragePool(pool, lambda value: kernel[0] * kernel[1], lambda value: geometry)


@layer_rule(nn.AdaptiveAvgPool2d)
def _adaptive_average_pool_layer(layer: nn.AdaptiveAvgPool2d) -> Operation:
    return _adaptive_average_pool(layer.output_size)


@function_rule(F.adaptive_avg_pool2d)
def _adaptive_average_pool(output_size: int | tuple[int | None, int | None] | None) -> Operation:
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


@layer_rule(nn.BatchNorm1d, nn.BatchNorm2d)
def _batch_norm_layer(layer: nn.BatchNorm1d | nn.BatchNorm2d) -> Operation:
    if layer.training or not layer.track_running_stats:
        raise ModelError(
            "it normalises by the statistics of the batch (training mode): no function of the image alone",
            hint="call model.eval() and keep track_running_stats=True",
        )
    mean, variance = _attribute(layer, "running_mean"), _attribute(layer, "running_var")
    assert mean is not None
    assert variance is not None
    return _batch_norm(
        mean,
        variance,
        _attribute(layer, "weight"),
        _attribute(layer, "bias"),
        eps=layer.eps,
    )


@function_rule(F.batch_norm)
def _batch_norm(
    running_mean: Source,
    running_var: Source,
    weight: Source | None = None,
    bias: Source | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Operation:
    if training:
        raise ModelError(
            "it normalises by the statistics of the batch (training=True)", hint="call model.eval()"
        )
    return ChannelScale(running_mean, lambda: (running_var().double() + eps).sqrt(), weight, bias)


@layer_rule(nn.Dropout, nn.Dropout2d)
def _dropout_layer(layer: nn.Dropout | nn.Dropout2d) -> None:
    _dropout(layer.p, layer.training)


@function_rule(F.dropout, F.dropout2d)
def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
    if training and p > 0:
        raise ModelError("it drops values at random (training mode)", hint="call model.eval()")


@layer_rule(nn.Identity)
def _identity(layer: nn.Identity) -> None:
    return None


@function_rule("contiguous")
def _contiguous() -> None:
    return None


@function_rule(operator.add, operator.iadd, torch.add, "add", "add_")
def _add(*terms: object, alpha: float = 1) -> Operation:
    if terms:
        refuse(
            "it adds a constant, bounds exist for the sum of two results", hint="put it into a layer's bias"
        )
    if alpha != 1:
        refuse(f"alpha is {alpha}, bounds exist for a plain sum")
    return Add()


@layer_rule(nn.Flatten)
def _flatten_layer(layer: nn.Flatten) -> Operation:
    return _flatten(layer.start_dim, layer.end_dim)


@function_rule(torch.flatten, "flatten")
def _flatten(start_dim: int = 0, end_dim: int = -1) -> Operation:
    if start_dim < 1:
        refuse(f"start_dim is {start_dim}: the batch dimension must stay", hint="flatten from dimension 1 on")
    return Reshape(lambda value: value.flatten(start_dim, end_dim))


@function_rule("view", "reshape", torch.reshape)
def _reshape(*shape: object) -> Operation:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
    batch, *others = sizes
    rest = [size for size in others if isinstance(size, int)]
    if not (batch is BATCH_SIZE or batch == -1) or rest != others:
        refuse(
            f"it reshapes to {sizes}: the first size must be the batch, the others numbers",
            hint="use nn.Flatten",
        )
    return Reshape(partial(_reshape_each, rest))


def _reshape_each(sizes: Sequence[int], value: Tensor) -> Tensor:
    """The results of each image in another shape; it must hold all of them and nothing of other images."""
    whole, part = math.prod(value.shape[1:]), math.prod(size for size in sizes if size != -1)
    if part == 0 or whole % part or (whole != part and -1 not in sizes):
        raise UnsupportedLayer(
            f"a reshape to (batch, {', '.join(map(str, sizes))}) of {tuple(value.shape[1:])} mixes images",
            hint="use nn.Flatten",
        )
    return value.reshape(value.shape[0], *sizes)


class _BatchSize:
    """Stands for the number of images in a traced `x.size(0)` or `x.shape[0]`."""

    def __repr__(self) -> str:
        return "batch"


BATCH_SIZE = _BatchSize()
