"""Activations: functions of each value by itself that never fall."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.bounds.geometry import FeatureMap, Places
from patchcert.bounds.lowering import function_rule, layer_rule, refuse
from patchcert.bounds.operations.base import Interval, Operation
from patchcert.bounds.rounding import Rounding


@dataclass(frozen=True, slots=True)
class Monotone(Operation):
    """A non-decreasing function of each element; `units` unit roundoffs pay for computing it and moving its bounds."""

    function: Callable[[Tensor], Tensor]
    units: int
    is_relu: bool = False

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(inputs[0])

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        (box,) = inputs
        slack = self.units * rounding.unit
        if not slack:
            return box.map(self.function)
        lower, upper = self.precisely(box.lower), self.precisely(box.upper)
        # `units` are those of the function and two more: u |f| for the sum here, u |f| for all that is quadratic in u.
        # Results that underflow are off by less than tiny.
        lower = lower - (lower.abs() * slack + rounding.tiny)
        return Interval(lower, upper + (upper.abs() * slack + rounding.tiny))

    def precisely(self, value: Tensor) -> Tensor:
        """The function rounded from float64: a float32 may not hold its constants, such as a tiny slope, and libraries
        compute it differently in the last bits for other sizes."""
        return self.function(value.double()).to(value.dtype)

    def places(self, area: FeatureMap) -> Places:
        return Places.KEPT


def is_relu(operation: Operation) -> bool:
    """Whether the operation is max(x, 0), for which there are kernels."""
    return isinstance(operation, Monotone) and operation.is_relu


# max(x, 0) and limits that are numbers of every type are exact.
_EXACT = 0
# A limit is rounded to the type, by at most half the distance to the next number; 2u |f| is at least that whole
# distance, so that the bound moves to the next number or further, whatever the sum is rounded to.
_ROUNDED_LIMIT = 2
# The product with the slope and its rounding to the type are 2 units; two more as in `Monotone.interval`.
_ROUNDED_PRODUCT = 4
# Assumed of the elementary functions of the platform, and measured by tests: an error of at most 7 units in the last
# place, which are 14 unit roundoffs; two more as in `Monotone.interval`.
_ELEMENTARY = 16


def _always(
    function: Callable[[Tensor], Tensor], units: int, layer: type[nn.Module], *functions: Callable | str
) -> None:
    """Registers an activation without settings, as a layer and as functions or methods."""
    operation = Monotone(function, units, is_relu=function is torch.relu)

    def of_layer(layer: nn.Module) -> Operation:
        return operation

    def of_function(inplace: bool = False) -> Operation:
        return operation

    layer_rule(layer)(of_layer)
    function_rule(*functions)(of_function)


_always(torch.relu, _EXACT, nn.ReLU, F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
_always(F.relu6, _EXACT, nn.ReLU6, F.relu6)
_always(F.selu, _ELEMENTARY, nn.SELU, F.selu)
_always(torch.sigmoid, _ELEMENTARY, nn.Sigmoid, torch.sigmoid, F.sigmoid, "sigmoid")
_always(torch.tanh, _ELEMENTARY, nn.Tanh, torch.tanh, F.tanh, "tanh")
_always(F.hardsigmoid, _ELEMENTARY, nn.Hardsigmoid)
_always(F.logsigmoid, _ELEMENTARY, nn.LogSigmoid)
_always(F.softsign, _ELEMENTARY, nn.Softsign)


@function_rule(F.hardtanh, layers=(nn.Hardtanh,))
def _hardtanh(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Operation:
    return Monotone(lambda value: F.hardtanh(value, min_val, max_val), _ROUNDED_LIMIT)


@function_rule(F.leaky_relu, layers=(nn.LeakyReLU,))
def _leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> Operation:
    if negative_slope < 0:
        refuse(f"negative_slope is {negative_slope}, bounds exist for slopes of at least 0")
    return Monotone(lambda value: F.leaky_relu(value, negative_slope), _ROUNDED_PRODUCT)


@function_rule(F.elu, layers=(nn.ELU,))
def _elu(alpha: float = 1.0, inplace: bool = False) -> Operation:
    if alpha < 0:
        refuse(f"alpha is {alpha}, bounds exist for alpha of at least 0")
    return Monotone(lambda value: F.elu(value, alpha), _ELEMENTARY)
