"""Rules of monotone activations."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.bounds.lowering import function_rule, layer_rule, refuse
from patchcert.bounds.operations import Monotone, Operation


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
