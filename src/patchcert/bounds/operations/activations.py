"""Functions of each element: those that never fall, and those that fall before they rise."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.bounds.forms import Forms, Pulled, Slopes, shifted, summed, underflow
from patchcert.bounds.lowering import function_rule, layer_rule, refuse
from patchcert.bounds.operations.base import Elementwise, Interval, Operation
from patchcert.bounds.rounding import Rounding


@dataclass(frozen=True, slots=True)
class Monotone(Elementwise):
    """A non-decreasing function of each element; `units` unit roundoffs pay for computing it and moving its bounds.

    `kinks` are where a function bends that is linear between them, and before and behind; None if it is not.
    """

    function: Callable[[Tensor], Tensor]
    units: int
    is_relu: bool = False
    kinks: tuple[float, ...] | None = None

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(inputs[0])

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        (box,) = inputs
        slack = self.units * rounding.unit
        if not slack:
            return box.map(self.function)
        # `units` are those of the function and two more: u |f| for the sum here, u |f| for all that is quadratic in u.
        # Results that underflow are off by less than tiny.
        return box.map(partial(precisely, self.function)).widened(slack, rounding.tiny)

    def backward(self, forms: Forms, *inputs: Interval, slope: Slopes, rounding: Rounding) -> Pulled | None:
        if self.is_relu:
            return _relu_backward(forms, inputs[0], slope, rounding)
        return _backward_between_lines(self, forms, inputs[0], rounding)


def precisely(function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """The function rounded from float64: a float32 may not hold its constants, such as a tiny slope, and libraries
    compute it differently in the last bits for other sizes."""
    return function(value.double()).to(value.dtype)


def is_relu(operation: Operation) -> bool:
    """Whether the operation is max(x, 0), for which there are kernels."""
    return isinstance(operation, Monotone) and operation.is_relu


def _relu_backward(forms: Forms, box: Interval, slope: Slopes, rounding: Rounding) -> Pulled:
    """Where a form counts an output positively, the output is at least slope * z; negatively, at most the chord."""
    lower, upper = box.lower.unsqueeze(1), box.upper.unsqueeze(1)
    if slope is None:
        slope = (upper > -lower).to(forms.dtype)
    # Lines of single units are not worth picking out where many bend; and training never waits for their number.
    if rounding.is_outward and not torch.is_grad_enabled():
        is_on, is_off = (lower >= 0) & (upper >= lower), (upper <= 0) & (lower <= upper)
        boxes, units = (~(is_on | is_off)).flatten(1).nonzero(as_tuple=True)  # NaN is among them
        if _FEW_BENT * len(boxes) < box.lower.numel():
            return _relu_backward_where_bent(forms, box, slope, (boxes, units), rounding)
    moved, intercept = _lines(forms, lower, upper, slope)
    # A difference and a product.
    constant, error = summed(intercept, 2, rounding)
    return Pulled((moved,), constant, error)


_FEW_BENT = 4
"""Lines are drawn for bent units alone if fewer than one unit in this many bends."""


def _relu_backward_where_bent(
    forms: Forms, box: Interval, slope: Tensor, bent: tuple[Tensor, Tensor], rounding: Rounding
) -> Pulled:
    """The same, with lines drawn for the `bent` units alone, by their boxes and numbers; all others are on or off."""
    boxes, units = bent
    lower, upper = (part.flatten(1)[bent].unsqueeze(1) for part in (box.lower, box.upper))
    slope = slope.expand(len(forms), *slope.shape[1:]).flatten(2)[boxes, :, units]
    coefficients, intercepts = _lines(forms.flatten(2)[boxes, :, units], lower, upper, slope)
    moved = forms.flatten(2) * (box.lower.flatten(1) >= 0).unsqueeze(1)
    moved[boxes, :, units] = coefficients
    nothing = forms.new_zeros(forms.shape[:2])
    constant, size = (nothing.index_add(0, boxes, terms) for terms in (intercepts, intercepts.abs()))
    # As in `summed`: a difference and a product, and sums of no more terms than there are units.
    gamma = rounding.gamma(moved.shape[2] + 2)
    error = size * gamma + rounding.tiny / rounding.unit
    return Pulled((moved.reshape(forms.shape),), constant, error)


def _lines(forms: Tensor, lower: Tensor, upper: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients of the input instead of the output, and their intercepts.

    Products of a coefficient with a number in [0, 1] lie, rounded, between 0 and the coefficient: so the new one is the
    old one times some slope in [0, 1] exactly, and no line has to be rounded. The intercept is that of this very slope:
    |A| max(z, 0) <= |A'| z + t at both ends of l <= z <= u, and so between them, if t is |A'| (-l) at least, and
    (|A| - |A'|) u at least.
    """
    is_bent = (lower < 0) & (upper > 0)
    straight = (lower >= 0).to(forms.dtype)
    slope = torch.where(is_bent, slope.clamp(0, 1), straight)
    chord = torch.where(is_bent, upper / (upper - lower).where(is_bent, 1), straight)
    negative = forms.clamp(max=0)
    rising, falling = forms.clamp(min=0) * slope, negative * chord.clamp(0, 1)
    intercept = torch.minimum(falling * (-lower).clamp(min=0), (negative - falling) * upper.clamp(min=0))
    return rising + falling, intercept


def _backward_between_lines(operation: Monotone, forms: Forms, box: Interval, rounding: Rounding) -> Pulled:
    """Two lines of the slope k of the chord enclose the function: k z + low <= f(z) <= k z + high.

    From a to b, f(a) - k b <= f(z) - k z <= f(b) - k a. A function that is linear between its kinks, less k z, has its
    extremes at them or at the ends of the interval: there a = b.
    """
    is_wide = box.upper > box.lower
    rise = (operation.function(box.upper) - operation.function(box.lower)).clamp(min=0)
    chord = torch.where(is_wide, rise / (box.upper - box.lower).where(is_wide, 1), 0.0)
    low, high = torch.full_like(chord, torch.inf), torch.full_like(chord, -torch.inf)
    size = chord * box.magnitude
    for start, end in _stretches(operation.kinks, box):
        least, most = (operation.interval(Interval.point(point), rounding=rounding) for point in (start, end))
        low = torch.minimum(low, least.lower - chord * end)
        high = torch.maximum(high, most.upper - chord * start)
    if rounding.is_outward:
        # The product is off by u |k z|, the difference by u of itself, and so are the sums here: 4u of each are enough.
        low = low - (4 * rounding.unit * (low.abs() + size) + rounding.tiny)
        high = high + (4 * rounding.unit * (high.abs() + size) + rounding.tiny)
    terms = forms.clamp(min=0) * low.unsqueeze(1) + forms.clamp(max=0) * high.unsqueeze(1)
    constant, error = summed(terms, 1, rounding)
    if rounding.is_outward:
        error = error + shifted(forms, size, 1, rounding) + underflow(box.magnitude, rounding)
    return Pulled((forms * chord.unsqueeze(1),), constant, error)


STRETCHES = 64
"""Of an interval on which a function is curved: lines are further apart than they must be by k (u - l) / 64 at most."""


def _stretches(kinks: tuple[float, ...] | None, box: Interval) -> Iterator[tuple[Tensor, Tensor]]:
    """Kinks and ends, each from itself to itself; or stretches of the interval from one end to the other."""
    dtype = box.lower.dtype
    if kinks is not None and all(float(torch.tensor(kink, dtype=dtype)) == kink for kink in kinks):
        inner = [box.clamped(torch.full_like(box.lower, kink)) for kink in kinks]
        yield from ((point, point) for point in (box.lower, *inner, box.upper))
        return
    start = box.lower
    for number in range(1, STRETCHES + 1):
        end = torch.lerp(box.lower, box.upper, number / STRETCHES) if number < STRETCHES else box.upper
        end = torch.maximum(start, box.clamped(end))
        yield start, end
        start = end


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
    function: Callable[[Tensor], Tensor],
    units: int,
    layer: type[nn.Module],
    *functions: Callable | str,
    kinks: tuple[float, ...] | None = None,
) -> None:
    """Registers an activation without settings, as a layer and as functions or methods."""
    operation = Monotone(function, units, is_relu=function is torch.relu, kinks=kinks)
    layer_rule(layer)(lambda layer: operation)
    function_rule(*functions)(lambda inplace=False: operation)


_always(torch.relu, _EXACT, nn.ReLU, F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
_always(F.relu6, _EXACT, nn.ReLU6, F.relu6, kinks=(0.0, 6.0))
_always(F.selu, _ELEMENTARY, nn.SELU, F.selu)
_always(torch.sigmoid, _ELEMENTARY, nn.Sigmoid, torch.sigmoid, F.sigmoid, "sigmoid")
_always(torch.tanh, _ELEMENTARY, nn.Tanh, torch.tanh, F.tanh, "tanh")
_always(F.hardsigmoid, _ELEMENTARY, nn.Hardsigmoid, kinks=(-3.0, 3.0))
_always(F.logsigmoid, _ELEMENTARY, nn.LogSigmoid)
_always(F.softsign, _ELEMENTARY, nn.Softsign)


@function_rule(F.hardtanh, layers=(nn.Hardtanh,))
def _hardtanh(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Operation:
    if not isinstance(min_val, int | float) or not isinstance(max_val, int | float):
        refuse("its limits are tensors, bounds exist for limits that are plain numbers")
    limits = (float(min_val), float(max_val))
    return Monotone(partial(F.hardtanh, min_val=min_val, max_val=max_val), _ROUNDED_LIMIT, kinks=limits)


@function_rule(F.leaky_relu, layers=(nn.LeakyReLU,))
def _leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> Operation:
    if negative_slope < 0:
        refuse(f"negative_slope is {negative_slope}, bounds exist for slopes of at least 0")
    function = partial(F.leaky_relu, negative_slope=negative_slope)
    return Monotone(function, _ROUNDED_PRODUCT, kinks=(0.0,))


@function_rule(F.elu, layers=(nn.ELU,))
def _elu(alpha: float = 1.0, inplace: bool = False) -> Operation:
    if alpha < 0:
        refuse(f"alpha is {alpha}, bounds exist for alpha of at least 0")
    return Monotone(partial(F.elu, alpha=alpha), _ELEMENTARY)


@function_rule(F.celu, torch.celu, layers=(nn.CELU,))
def _celu(alpha: float = 1.0, inplace: bool = False) -> Operation:
    if alpha <= 0:
        refuse(f"alpha is {alpha}, bounds exist for positive alpha")
    return Monotone(partial(F.celu, alpha=alpha), _ELEMENTARY)


@dataclass(frozen=True, slots=True)
class Softplus(Elementwise):
    """log(1 + exp(beta x)) / beta, which PyTorch replaces by x, falling a little, where beta x is above a threshold."""

    beta: float
    threshold: float

    def forward(self, *inputs: Tensor) -> Tensor:
        return F.softplus(inputs[0], self.beta, self.threshold)

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        (box,) = inputs
        bounds = Monotone(self.forward, _ELEMENTARY).interval(box, rounding=rounding)
        # The smooth function s never falls; before the threshold f = s, beyond it s - fall <= f <= s: so f lies between
        # f(lower) - fall and f(upper) + fall, and on either side of the threshold f never falls. A box that stays aside
        # of it by 1e-5 of it does so however it and the box's ends are rounded, in float32 by less than 2e-7 of it.
        # Twice the fall pays for rounding it, and 2u of the bound for rounding the sum. The argument of exp is rounded
        # too, in float64 by 2^-53 of at most 746, below which exp is 0: that moves f by less than 2^-43 of itself.
        # Where exp underflows, f is off by less than tiny / beta.
        fall = 2 * math.log1p(math.exp(-self.threshold)) / self.beta
        edge = self.threshold / self.beta
        crosses = (box.lower < edge * (1 + 1e-5)) & (box.upper > edge * (1 - 1e-5))
        extra = torch.where(crosses, fall, 0.0).to(box.upper.dtype) + rounding.tiny / self.beta
        return bounds.widened(2 * rounding.unit + (2.0**-43 if rounding.is_outward else 0.0), extra)


@function_rule(F.softplus, layers=(nn.Softplus,))
def _softplus(beta: float = 1.0, threshold: float = 20.0) -> Operation:
    if beta <= 0 or threshold <= 0:
        refuse(f"beta is {beta} and threshold {threshold}, bounds exist for positive ones")
    return Softplus(beta, threshold)


@dataclass(frozen=True, slots=True)
class Valley(Elementwise):
    """A function of each element that falls up to its only minimum and rises after it.

    The minimum lies within `_NEAR` of `lowest`, and no value is below `least`.
    """

    function: Callable[[Tensor], Tensor]
    lowest: float
    least: float

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(inputs[0])

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        """The largest value is at an end, and so is the smallest, unless the minimum may lie in the box."""
        (box,) = inputs
        ends = box.map(partial(precisely, self.function) if rounding.is_outward else self.function)
        has_minimum = (box.lower <= self.lowest + _NEAR) & (box.upper >= self.lowest - _NEAR)
        lower = torch.where(has_minimum, self.least, torch.minimum(ends.lower, ends.upper))
        bounds = Interval(lower, torch.maximum(ends.lower, ends.upper))
        if not rounding.is_outward:
            return bounds
        # In float64 the function is off by `_COMPUTED`. The value is rounded to the type, the sum here is rounded, and
        # one more pays for all that is quadratic in u: 3 of 4 units.
        return bounds.widened(4 * rounding.unit, box.magnitude * _COMPUTED + rounding.tiny)


# Ends of boxes are compared with numbers rounded to their type: in float32 these are off by 6e-8 of at most 2, so that
# a minimum known to 1e-14 stays within 1e-6 of them. Around a minimum the functions rise by less than 1e-12 in that.
_NEAR = 1e-6
# In float64, with v = 2^-53, elementary functions are off by 14 v of themselves, as assumed above. GELU is x/2 (1 + e)
# with an error function or a tanh |e| <= 1: its argument is rounded at most 6 times, which moves e by less than 6 v,
# since |z e'(z)| < 1; with e itself and the sum 1 + e these are 22 v, times |x|/2, and two products: 13 v |x|. SiLU is
# x / (1 + exp(-x)): 14 v, the sum and the division are 16 v |f| <= 16 v |x|; where exp overflows |f| is below 1e-300.
# Hardswish: 4 v |f|. So 16 v |x| suffice; half as much again pays for rounding this product and what is quadratic in v.
_COMPUTED = 24 * 2.0**-53


@function_rule(F.gelu, layers=(nn.GELU,))
def _gelu(approximate: str = "none") -> Operation:
    """f' has the sign of 1 + x phi(x) / Phi(x) or, with tanh t, of 1 + x (1 - t) k (1 + 3 c x^2): both rise for x < 0
    and are positive after it, so that there is one minimum."""
    function = partial(F.gelu, approximate=approximate)
    if approximate == "none":
        return Valley(function, -0.751791524693564, -0.169971207479904)
    return Valley(function, -0.752461422071016, -0.170040750571255)


@function_rule(F.silu, layers=(nn.SiLU,))
def _silu(inplace: bool = False) -> Operation:
    """f' has the sign of 1 + x (1 - sigmoid(x)), which rises for x < 0 and is positive after it: one minimum."""
    return Valley(F.silu, -1.278464542761073, -0.278464542761074)


@function_rule(F.hardswish, layers=(nn.Hardswish,))
def _hardswish(inplace: bool = False) -> Operation:
    """0 up to -3, x (x + 3) / 6 up to 3, then x: the minimum is that of the parabola, and its numbers are exact."""
    return Valley(F.hardswish, -1.5, -0.375)
