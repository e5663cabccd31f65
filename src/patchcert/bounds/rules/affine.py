"""Rules of layers that multiply and add: fully connected, convolutions, batch norm."""

import torch
import torch.nn.functional as F
from torch import nn

from patchcert.bounds.geometry import Geometry
from patchcert.bounds.lowering import attribute, function_rule, layer_rule, pair, refuse
from patchcert.bounds.operations import ChannelScale, Convolution, Linear, Operation, Source
from patchcert.errors import ModelError


@layer_rule(nn.Linear)
def _linear_layer(layer: nn.Linear) -> Operation:
    return Linear(lambda: layer.weight, attribute(layer, "bias"))


@function_rule(F.linear)
def _linear(weight: Source, bias: Source | None = None) -> Operation:
    return Linear(weight, bias)


@layer_rule(nn.Conv2d)
def _convolution_layer(layer: nn.Conv2d) -> Operation:
    if layer.padding_mode != "zeros":
        refuse(f"padding_mode is {layer.padding_mode!r}, bounds exist for 'zeros'")
    bias = attribute(layer, "bias")
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
    kernel, spacing = (weight().shape[2], weight().shape[3]), pair(dilation)
    geometry = Geometry(kernel, pair(stride), _explicit_padding(padding, kernel, spacing), spacing)
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
    vertical, horizontal = pair(padding)
    return (vertical, vertical, horizontal, horizontal)


@layer_rule(nn.BatchNorm1d, nn.BatchNorm2d)
def _batch_norm_layer(layer: nn.BatchNorm1d | nn.BatchNorm2d) -> Operation:
    if layer.training or not layer.track_running_stats:
        raise ModelError(
            "it normalises by the statistics of the batch (training mode): no function of the image alone",
            hint="call model.eval() and keep track_running_stats=True",
        )
    mean, variance = attribute(layer, "running_mean"), attribute(layer, "running_var")
    assert mean is not None
    assert variance is not None
    return _batch_norm(
        mean,
        variance,
        attribute(layer, "weight"),
        attribute(layer, "bias"),
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
