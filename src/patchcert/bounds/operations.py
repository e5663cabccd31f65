"""The operations that networks are made of. Each states, side by side, all that is known of it: its value, its interval
bound and its linear bound with rounding, which outputs see which inputs, and which layers and functions of PyTorch are
lowered to it.

Weights are read from the layer at every call, so bounds can be differentiated and trained through.
"""

import inspect
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Annotated, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Size, Tensor, nn

from patchcert.bounds.forms import Forms, Pulled, shifted, summed, underflow
from patchcert.bounds.geometry import FeatureMap, Geometry, NotCovered, Places, convolve, convolve_back
from patchcert.bounds.lowering import (
    BATCH_SIZE,
    Lowered,
    function_rule,
    instead_of,
    layer_rule,
    pair,
    refuse,
    splitting_rule,
)
from patchcert.bounds.rounding import NEAREST, Rounding, blocked_product, lifted, summed_roundings
from patchcert.errors import ModelError, UnsupportedLayer

ANY_NUMBER = 0
"""The arity of an operation that takes however many results it is given."""

Source = Callable[[], Tensor]
"""Reads a weight where it lives, so that a trained layer is seen as it is now."""


@dataclass(frozen=True, slots=True)
class Interval:
    """All tensors that lie elementwise between `lower` and `upper`, both ends included."""

    lower: Tensor
    upper: Tensor

    @staticmethod
    def around(centre: Tensor, radius: Tensor) -> "Interval":
        """The interval that reaches `radius` to both sides of `centre`."""
        return Interval(centre - radius, centre + radius)

    @staticmethod
    def point(value: Tensor) -> "Interval":
        """The interval that holds `value` alone."""
        return Interval(value, value)

    @property
    def centre(self) -> Tensor:
        return (self.upper + self.lower) * 0.5

    @property
    def radius(self) -> Tensor:
        return (self.upper - self.lower) * 0.5

    @property
    def shape(self) -> Size:
        return self.lower.shape

    @property
    def magnitude(self) -> Tensor:
        """The largest absolute values."""
        return torch.maximum(self.lower.abs(), self.upper.abs())

    def intersection(self, other: "Interval") -> "Interval":
        """What lies in both; `lower` above `upper` where nothing does."""
        return Interval(torch.maximum(self.lower, other.lower), torch.minimum(self.upper, other.upper))

    def clamped(self, value: Tensor) -> Tensor:
        """The nearest member."""
        return torch.minimum(torch.maximum(value, self.lower), self.upper)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Interval":
        """Both ends through a function that never falls."""
        return Interval(function(self.lower), function(self.upper))

    def flatten(self, start: int, end: int) -> "Interval":
        """The same interval with the dimensions from `start` to `end` merged."""
        return self.map(lambda part: part.flatten(start, end))


class Operation(ABC):
    """One step of a network. A class of operations is either abstract or final: no subclass has subclasses.

    `forward` and `interval` suffice for certificates. With `backward`, linear bounds follow it. With `places`, patches
    are bounded on windows alone, which is much faster. An operation without a rule of its own in `patchcert.windows` is
    then bounded by its `interval` on what the outputs of a window see of the map.
    """

    arity: ClassVar[int] = 1
    """How many results of the network it takes; `ANY_NUMBER` of them where it joins a list."""
    may_share_memory: ClassVar[bool] = False
    """Whether its result may be a view of its input, so that a change in place of one changes the other."""
    padding: ClassVar[float] = 0.0
    """What lies around a map, where the geometry of `places` has padding."""

    def __init_subclass__(cls) -> None:
        """What others know of an operation, they know of its class; a subclass might compute something else."""
        for base in cls.__bases__:
            if issubclass(base, Operation) and not inspect.isabstract(base):
                raise TypeError(
                    f"{cls.__name__} extends {base.__name__}, a final class: extend Operation instead"
                )

    @abstractmethod
    def forward(self, *inputs: Tensor) -> Tensor:
        """The ordinary value of the step."""

    @abstractmethod
    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        """Contains every output for inputs in the given intervals, and for one input is the tightest such bound."""

    def backward(
        self, forms: Forms, *inputs: Interval, slope: Tensor | None, rounding: Rounding
    ) -> Pulled | None:
        """Forms of the output, written by inputs in the given intervals; see `forms` for what then holds.

        `slope` is, for activations that bend, the slope in [0, 1] of the lower line of each element, which may be any.
        None where there is no rule: the output then counts by its interval alone.
        """
        return None

    def places(self, area: FeatureMap) -> Geometry | Places:
        """How outputs see the places of a map: through a sliding kernel, at their own place alone, or all of them.

        Raises NotCovered where none of these holds.
        """
        raise NotCovered(f"windows have no rule for {type(self).__name__}")

    def unpadded(self) -> "Operation":
        """The same operation on maps that come with their padding; needed where the geometry of `places` has any."""
        return self


@dataclass(frozen=True, slots=True)
class Add(Operation):
    """The sum of two branches, as at the end of a skip connection."""

    arity: ClassVar[int] = 2

    def forward(self, *inputs: Tensor) -> Tensor:
        _check_terms(inputs[0], inputs[1])
        return inputs[0] + inputs[1]

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        first, second = inputs
        _check_terms(first.lower, second.lower)
        lower, upper = first.lower + second.lower, first.upper + second.upper
        if rounding.is_outward:
            # A sum is off by u of itself, and so is the new end; sums so small that 4u of them underflow are exact.
            lower = lower - lower.abs() * (4 * rounding.unit)
            upper = upper + upper.abs() * (4 * rounding.unit)
        return Interval(lower, upper)

    def backward(
        self, forms: Forms, *inputs: Interval, slope: Tensor | None, rounding: Rounding
    ) -> Pulled | None:
        is_plain = inputs[0].shape == inputs[1].shape
        return Pulled.exactly(forms, forms, forms) if is_plain else None

    def places(self, area: FeatureMap) -> Places:
        return Places.KEPT


def _check_terms(first: Tensor, second: Tensor, kind: str = "sum") -> None:
    if first.dim() != second.dim():
        raise UnsupportedLayer(
            f"a {kind} of results of shapes {tuple(first.shape)} and {tuple(second.shape)} would mix images",
            hint="give both terms the same dimensions",
        )


@function_rule(operator.add, operator.iadd, torch.add, "add", "add_")
def _add(*terms: object, alpha: float = 1) -> Operation:
    if alpha != 1:
        refuse(f"alpha is {alpha}, bounds exist for a plain sum")
    return Rescale(shift=_constant(*terms)) if terms else Add()


@dataclass(frozen=True, slots=True)
class Multiply(Operation):
    """The product of two branches, as where a squeezed map scales the channels of another."""

    arity: ClassVar[int] = 2

    def forward(self, *inputs: Tensor) -> Tensor:
        _check_terms(inputs[0], inputs[1], "product")
        return inputs[0] * inputs[1]

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        """A product is linear in either factor, so that its extremes lie at corners of the two intervals."""
        first, second = inputs
        corners = [self.forward(left, right) for left in _ends(first) for right in _ends(second)]
        lower, upper = reduce(torch.minimum, corners), reduce(torch.maximum, corners)
        if rounding.is_outward:
            # A product is off by u of itself, and so is the new end; products that underflow are off by less than tiny.
            lower = lower - (lower.abs() * (4 * rounding.unit) + rounding.tiny)
            upper = upper + (upper.abs() * (4 * rounding.unit) + rounding.tiny)
        return Interval(lower, upper)

    def places(self, area: FeatureMap) -> Places:
        return Places.KEPT


def _ends(box: Interval) -> tuple[Tensor, Tensor]:
    return box.lower, box.upper


@function_rule(operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply")
def _multiply(*factors: object) -> Operation:
    return Rescale(factor=_constant(*factors)) if factors else Multiply()


@dataclass(frozen=True, slots=True)
class Concatenate(Operation):
    """Results one after the other along a dimension that is not the batch."""

    dim: int
    arity: ClassVar[int] = ANY_NUMBER

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.dim % inputs[0].dim() == 0:
            raise UnsupportedLayer(
                f"results of shape {tuple(inputs[0].shape)} are joined along the batch",
                hint="join along dim=1",
            )
        return torch.cat(inputs, self.dim)

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        lower = self.forward(*(box.lower for box in inputs))
        return Interval(lower, self.forward(*(box.upper for box in inputs)))

    def places(self, area: FeatureMap) -> Places:
        if self.dim not in (1, -3) or area.is_flat:
            raise NotCovered("results are joined along another dimension than their channels")
        return Places.KEPT


@function_rule(torch.cat, torch.concat, torch.concatenate)
def _concatenate(dim: int = 0) -> Operation:
    if dim == 0:
        refuse("dim is 0: it joins the images of a batch", hint="join channels or features by dim=1")
    return Concatenate(dim)


@dataclass(frozen=True, slots=True)
class Part(Operation):
    """Some of the values of each image; `is_by_channel` says that they are all places of some channels of a map."""

    take: Callable[[Tensor], Tensor]
    is_by_channel: bool
    may_share_memory: ClassVar[bool] = True

    def forward(self, *inputs: Tensor) -> Annotated[Tensor, "n ..."]:
        return self.take(inputs[0])

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        return inputs[0].map(self.take)

    def backward(
        self, forms: Forms, *inputs: Interval, slope: Tensor | None, rounding: Rounding
    ) -> Pulled | None:
        """Coefficients go to where the values were taken from; all others are 0."""
        shape = inputs[0].shape[1:]
        numbers = torch.arange(math.prod(shape), device=forms.device).reshape(1, *shape)
        moved = forms.new_zeros(*forms.shape[:2], numbers.numel())
        moved = moved.index_copy(2, self.take(numbers).flatten(), forms.flatten(2))
        return Pulled.exactly(forms, moved.unflatten(2, shape))

    def places(self, area: FeatureMap) -> Places:
        if not self.is_by_channel or area.is_flat:
            raise NotCovered("values are picked by another dimension than their channels")
        return Places.KEPT


def _piece(pieces: Callable[[Tensor], Sequence[Tensor]], dim: int, index: object) -> Operation:
    if not isinstance(index, int):
        refuse(f"its pieces are picked by {index}, bounds exist for single ones, by whole numbers")

    def take(value: Tensor) -> Tensor:
        if dim % value.dim() == 0:
            refuse(
                f"results of shape {tuple(value.shape)} are split along the batch", hint="split along dim=1"
            )
        return pieces(value)[index]

    return Part(take, is_by_channel=dim in (1, -3))


@splitting_rule(torch.chunk, "chunk")
def _chunk(index: object, chunks: int, dim: int = 0) -> Operation:
    return _piece(lambda value: value.chunk(chunks, dim), dim, index)


@splitting_rule(torch.split, "split")
def _split(index: object, split_size: int | tuple[int, ...], dim: int = 0) -> Operation:
    sizes = split_size if isinstance(split_size, int) else list(split_size)
    return _piece(lambda value: value.split(sizes, dim), dim, index)


@function_rule(operator.getitem)
def _getitem(index: object) -> Operation:
    chosen = index if isinstance(index, tuple) else (index,)
    picked = tuple(each for each in chosen if isinstance(each, int | slice) and not isinstance(each, bool))
    if len(picked) < len(chosen) or chosen[0] != slice(None):
        refuse(f"it picks {list(chosen)}: the first must be all of the batch, the others numbers or slices")
    is_by_channel = isinstance(chosen[-1], slice) and all(each == slice(None) for each in chosen[2:])
    return Part(lambda value: value[picked], is_by_channel)


@dataclass(frozen=True, slots=True)
class Permute(Operation):
    """The same values with their dimensions in another order; the first, the batch, stays."""

    reorder: Callable[[Tensor], Tensor]
    may_share_memory: ClassVar[bool] = True

    def forward(self, *inputs: Tensor) -> Annotated[Tensor, "n ..."]:
        return self.reorder(inputs[0])

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        return inputs[0].map(self.reorder)


@function_rule(torch.permute, "permute")
def _permute(*dims: object) -> Operation:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple) else dims
    numbers = [dim for dim in order if isinstance(dim, int)]
    if len(numbers) != len(order) or not numbers or numbers[0] != 0:
        refuse(f"it permutes to {order}: the first dimension, the batch, must stay")
    return Permute(lambda value: value.permute(numbers))


@function_rule(torch.transpose, "transpose")
def _transpose(dim0: int, dim1: int) -> Operation:
    def reorder(value: Tensor) -> Tensor:
        if 0 in (dim0 % value.dim(), dim1 % value.dim()):
            refuse(f"dimensions {dim0} and {dim1} are exchanged: the batch must stay the first")
        return value.transpose(dim0, dim1)

    return Permute(reorder)


@dataclass(frozen=True, slots=True)
class ExpandAs(Operation):
    """A result repeated to the shape of another."""

    arity: ClassVar[int] = 2
    may_share_memory: ClassVar[bool] = True

    def forward(self, *inputs: Tensor) -> Tensor:
        _check_terms(inputs[0], inputs[1], "pair")
        return inputs[0].expand_as(inputs[1])

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        return inputs[0].map(lambda part: self.forward(part, inputs[1].lower))


@function_rule("expand_as")
def _expand_as() -> Operation:
    return ExpandAs()


@dataclass(frozen=True, slots=True)
class Reshape(Operation):
    """The same values in another shape; the first dimension, the batch, stays."""

    reshape: Callable[[Tensor], Tensor]
    may_share_memory: ClassVar[bool] = True

    def forward(self, *inputs: Tensor) -> Annotated[Tensor, "n ..."]:
        return self.reshape(inputs[0])

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        return inputs[0].map(self.reshape)

    def backward(
        self, forms: Forms, *inputs: Interval, slope: Tensor | None, rounding: Rounding
    ) -> Pulled | None:
        return Pulled.exactly(forms, forms.reshape(*forms.shape[:2], *inputs[0].shape[1:]))

    def places(self, area: FeatureMap) -> Places:
        return Places.KEPT


@function_rule(torch.flatten, "flatten", layers=(nn.Flatten,))
def _flatten(start_dim: int = 0, end_dim: int = -1) -> Operation:
    if start_dim < 1:
        refuse(
            f"start_dim is {start_dim}: the batch dimension must stay", hint="start flattening at dimension 1"
        )
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


def _reshape_each(sizes: Sequence[int], value: Annotated[Tensor, "n ..."]) -> Annotated[Tensor, "n ..."]:
    """The results of each image in another shape; it must hold all of them and nothing of other images."""
    whole, part = math.prod(value.shape[1:]), math.prod(size for size in sizes if size != -1)
    if part == 0 or whole % part or (whole != part and -1 not in sizes):
        raise UnsupportedLayer(
            f"a reshape to (batch, {', '.join(map(str, sizes))}) of {tuple(value.shape[1:])} mixes images",
            hint="use nn.Flatten",
        )
    return value.reshape(value.shape[0], *sizes)


@function_rule(F.dropout, F.dropout2d, layers=(nn.Dropout, nn.Dropout2d))
def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
    if training and p > 0:
        raise ModelError("it drops values at random (training mode)", hint="call model.eval()")


@function_rule("contiguous", layers=(nn.Identity,))
def _identity() -> None:
    return None


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

    def backward(
        self, forms: Forms, *inputs: Interval, slope: Tensor | None, rounding: Rounding
    ) -> Pulled | None:
        return _relu_backward(forms, inputs[0], slope, rounding) if self.is_relu else None

    def precisely(self, value: Tensor) -> Tensor:
        """The function rounded from float64: a float32 may not hold its constants, such as a tiny slope, and libraries
        compute it differently in the last bits for other sizes."""
        return self.function(value.double()).to(value.dtype)

    def places(self, area: FeatureMap) -> Places:
        return Places.KEPT


def is_relu(operation: Operation) -> bool:
    """Whether the operation is max(x, 0), for which there are kernels."""
    return isinstance(operation, Monotone) and operation.is_relu


def _relu_backward(forms: Forms, box: Interval, slope: Tensor | None, rounding: Rounding) -> Pulled:
    """Where a form counts an output positively, the output is at least slope * z; negatively, at most the chord.

    Products of a coefficient with a number in [0, 1] lie, rounded, between 0 and the coefficient: so the new one is the
    old one times some slope in [0, 1] exactly, and no line has to be rounded. The intercept is that of this very slope:
    |A| max(z, 0) <= |A'| z + t at both ends of l <= z <= u, and so between them, if t is |A'| (-l) at least, and
    (|A| - |A'|) u at least.
    """
    lower, upper = box.lower.unsqueeze(1), box.upper.unsqueeze(1)
    if slope is None:
        slope = (upper > -lower).to(forms.dtype)
    is_bent = (lower < 0) & (upper > 0)
    straight = (lower >= 0).to(forms.dtype)
    slope = torch.where(is_bent, slope.clamp(0, 1), straight)
    chord = torch.where(is_bent, upper / (upper - lower).where(is_bent, 1), straight)
    rising, falling = forms.clamp(min=0) * slope, forms.clamp(max=0) * chord.clamp(0, 1)
    lost = forms.clamp(max=0) - falling
    intercept = torch.minimum(falling * (-lower).clamp(min=0), lost * upper.clamp(min=0))
    # A difference and a product.
    constant, error = summed(intercept, 2, rounding)
    return Pulled((rising + falling,), constant, error)


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
    layer_rule(layer)(lambda layer: operation)
    function_rule(*functions)(lambda inplace=False: operation)


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
    if not isinstance(min_val, int | float) or not isinstance(max_val, int | float):
        refuse("its limits are tensors, bounds exist for limits that are plain numbers")
    return Monotone(partial(F.hardtanh, min_val=min_val, max_val=max_val), _ROUNDED_LIMIT)


@function_rule(F.leaky_relu, layers=(nn.LeakyReLU,))
def _leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> Operation:
    if negative_slope < 0:
        refuse(f"negative_slope is {negative_slope}, bounds exist for slopes of at least 0")
    return Monotone(partial(F.leaky_relu, negative_slope=negative_slope), _ROUNDED_PRODUCT)


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
class Softplus(Operation):
    """log(1 + exp(beta x)) / beta, which PyTorch replaces by x, falling a little, where beta x is above a threshold."""

    beta: float
    threshold: float

    def forward(self, *inputs: Tensor) -> Tensor:
        return F.softplus(inputs[0], self.beta, self.threshold)

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        (box,) = inputs
        bounds = Monotone(self.forward, _ELEMENTARY).interval(box, rounding=rounding)
        # The smooth function s never falls; before the threshold f = s, beyond it s - fall <= f <= s: so f lies between
        # f(lower) - fall and f(upper) + fall. Boxes that end before half the threshold stay clear of it, however it
        # and their ends are rounded. Twice the fall pays for rounding it, and 2u of the bound for rounding the sum.
        fall = 2 * math.log1p(math.exp(-self.threshold)) / self.beta
        extra = torch.where(box.upper > self.threshold / self.beta / 2, fall, 0.0).to(box.upper.dtype)
        lower = bounds.lower - (extra + bounds.lower.abs() * (2 * rounding.unit))
        return Interval(lower, bounds.upper + (extra + bounds.upper.abs() * (2 * rounding.unit)))

    def places(self, area: FeatureMap) -> Places:
        return Places.KEPT


@function_rule(F.softplus, layers=(nn.Softplus,))
def _softplus(beta: float = 1.0, threshold: float = 20.0) -> Operation:
    if beta <= 0 or threshold <= 0:
        refuse(f"beta is {beta} and threshold {threshold}, bounds exist for positive ones")
    return Softplus(beta, threshold)


@dataclass(frozen=True, slots=True)
class Valley(Operation):
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
        first, last = (
            self._precisely(end) if rounding.is_outward else self.function(end) for end in _ends(box)
        )
        lower, upper = torch.minimum(first, last), torch.maximum(first, last)
        has_minimum = (box.lower <= self.lowest + _NEAR) & (box.upper >= self.lowest - _NEAR)
        lower = torch.where(has_minimum, self.least, lower)
        if rounding.is_outward:
            # The value is rounded to the type, the sum here is rounded, and one more pays for all that is quadratic in
            # u: 3 of 4 units.
            relative, away = 4 * rounding.unit, torch.maximum(box.lower.abs(), box.upper.abs())
            slack = away * _COMPUTED + rounding.tiny
            lower = lower - (lower.abs() * relative + slack)
            upper = upper + (upper.abs() * relative + slack)
        return Interval(lower, upper)

    def _precisely(self, value: Tensor) -> Tensor:
        """Rounded from float64, in which the error is known; see `_COMPUTED`."""
        return self.function(value.double()).to(value.dtype)

    def places(self, area: FeatureMap) -> Places:
        return Places.KEPT


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


Maps = Annotated[Tensor, "n _ _ _"]
ChannelMaps = Annotated[Tensor, "n c _ _"]
ByChannel = Annotated[Tensor, "n c ..."]


class Affine(Operation):
    """A map x -> W x + b: the centre of an interval moves through W, its radius through |W|."""

    @abstractmethod
    def map(self, value: Tensor, precise: bool) -> Tensor:
        """W x, without the offset; `precise` asks for plain sums of products (see `rounding`)."""

    @abstractmethod
    def absolute_map(self, value: Tensor, precise: bool) -> Tensor:
        """|W| x."""

    @abstractmethod
    def offset(self, like: Tensor) -> Tensor | None:
        """b, shaped to be added to an output like the given one."""

    @abstractmethod
    def roundings(self, value: Tensor) -> int:
        """The most roundings that one product meets on its way into the output, that of its weight included."""

    def offset_magnitude(self, like: Tensor) -> Tensor | None:
        """Bounds the absolute values whose rounding the offset carries."""
        offset = self.offset(like)
        return None if offset is None else offset.abs()

    def transposed(self, value: Tensor, inputs: Size, precise: bool) -> tuple[Tensor, int] | None:
        """W' y for inputs of this shape, and the most roundings that a product meets, that of its weight included.

        These count where it is `precise`. None where there is no rule.
        """
        return None

    def forward(self, *inputs: Tensor) -> Tensor:
        output = self.map(inputs[0], precise=False)
        offset = self.offset(output)
        return output if offset is None else output + offset

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        (box,) = inputs
        if rounding.is_outward:
            return self._outward_interval(box, rounding)
        centre = self.forward(box.centre)
        return Interval.around(centre, self.absolute_map(box.radius, precise=False))

    def backward(
        self, forms: Forms, *inputs: Interval, slope: Tensor | None, rounding: Rounding
    ) -> Pulled | None:
        (box,) = inputs
        found = self.transposed(forms.flatten(0, 1), box.shape[1:], rounding.is_outward)
        if found is None:
            return None
        rows, roundings = found
        moved = rows.unflatten(0, forms.shape[:2])
        constant, error = self._offset_of(forms, rounding)
        if rounding.is_outward:
            magnitude = box.magnitude
            reached = self.absolute_map(magnitude, precise=True)
            error = error + shifted(forms, reached, roundings, rounding) + underflow(magnitude, rounding)
        return Pulled((moved,), constant, error)

    def _offset_of(self, forms: Forms, rounding: Rounding) -> tuple[Tensor, Tensor]:
        """What the forms make of the offset, and the error of that."""
        like = forms[0, :1].detach()
        offset, magnitude = self.offset(like), self.offset_magnitude(like)
        if offset is None or magnitude is None:
            nothing = forms.new_zeros(forms.shape[:2])
            return nothing, nothing
        constant, error = summed(forms * offset, 0, NEAREST)
        if not rounding.is_outward:
            return constant, error
        # The offset may be rounded as often as a scale, and its product once.
        _, error = summed(forms * magnitude, SCALE_ROUNDINGS + 1, rounding)
        return constant, error

    def _outward_interval(self, box: Interval, rounding: Rounding) -> Interval:
        """Each rounded operation adds its error bound to the radius, which is widened for its own rounding.

        Below, c and r are the exact centre and radius, u the unit, and g the gamma of all roundings of a product.
        Constants of the form 1 + k u are exact in the type; every other product and sum costs a factor 1 - u.
        """
        # Two more than the product's own: one for adding the offset, one to spare.
        gamma, unit = rounding.gamma(self.roundings(box.lower) + 2), rounding.unit
        centre, radius = box.centre, box.radius
        output = self.map(centre, precise=True)
        # r and c are each off by u: r (1 + 2u) + 2u |c| hold the box around the stored centre, and W c is off by
        # g |W||c|. Three roundings here leave (1 + 8u)(1 - 3u) > 1 + 2u and (g + 4u)(1 - 4u) > g + 2u, as g < 1/8.
        # An underflow, here or in the halving, costs less than tiny.
        radius = radius * (1 + 8 * unit) + centre.abs() * (gamma + 4 * unit) + rounding.tiny
        spread = self.absolute_map(radius, precise=True)
        offset = self.offset(output)
        if offset is not None:
            output = output + offset
            magnitude = self.offset_magnitude(output)
            # The offset is off by at most g times its terms; twice that leaves room for rounding it here.
            spread = spread if magnitude is None else spread + 2 * gamma * magnitude
        # A sum of fewer than 1/u products loses less than tiny/u to underflow, each of them less than tiny.
        underflow = rounding.tiny / unit
        # |W| r may come out smaller by a factor 1 - g, and (1 - g)(1 + 2g) >= 1 as g < 1/8. Adding the offset costs
        # u |output|, and so does each new end: 2u of these 4u. The spread is rounded six times, and u of it is lost at
        # the ends: less than its 8u.
        spread = spread * (1 + 2 * gamma) + output.abs() * (4 * unit) + underflow
        return Interval.around(output, spread * (1 + 8 * unit))


@dataclass(frozen=True, slots=True)
class Linear(Affine):
    """A fully connected layer."""

    weight: Source
    bias: Source | None

    def map(self, value: Annotated[Tensor, "... _"], precise: bool) -> Annotated[Tensor, "... _"]:
        return _product(value, self.weight(), precise)

    def absolute_map(self, value: Annotated[Tensor, "... _"], precise: bool) -> Annotated[Tensor, "... _"]:
        return _product(value, self.weight().abs(), precise)

    def offset(self, like: Tensor) -> Tensor | None:
        return None if self.bias is None else self.bias()

    def roundings(self, value: Tensor) -> int:
        return summed_roundings(self.weight().shape[1])

    def transposed(
        self, value: Annotated[Tensor, "... _"], inputs: Size, precise: bool
    ) -> tuple[Tensor, int] | None:
        weight, flat = self.weight(), value.flatten(0, -2)
        rows = blocked_product(flat, weight) if precise else flat @ weight
        return rows.unflatten(0, value.shape[:-1]), summed_roundings(weight.shape[0])

    def places(self, area: FeatureMap) -> Places:
        if not area.is_flat:
            raise NotCovered("a linear layer acts on an unflattened map")
        return Places.LOST


def _product(
    value: Annotated[Tensor, "... features"], weight: Annotated[Tensor, "outputs features"], precise: bool
) -> Annotated[Tensor, "... outputs"]:
    return blocked_product(value, weight.T) if precise else F.linear(value, weight)


@function_rule(F.linear, layers=(nn.Linear,))
def _linear(weight: Source, bias: Source | None = None) -> Operation:
    return Linear(weight, bias)


@dataclass(frozen=True, slots=True)
class Convolution(Affine):
    """A two-dimensional convolution with zero padding."""

    weight: Source
    bias: Source | None
    geometry: Geometry
    groups: int

    def map(self, value: Maps, precise: bool) -> Maps:
        return convolve(value, self.weight(), self.geometry, self.groups, precise)

    def absolute_map(self, value: Maps, precise: bool) -> Maps:
        return convolve(value, self.weight().abs(), self.geometry, self.groups, precise)

    def offset(self, like: Tensor) -> Tensor | None:
        """With channels last one for each image: CUDA sums its gradient faster by image first than all at once."""
        if self.bias is None:
            return None
        is_last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
        bias = self.bias().expand(len(like), -1) if like.requires_grad and is_last else self.bias()
        return bias[..., None, None]

    def roundings(self, value: Tensor) -> int:
        return summed_roundings(math.prod(self.weight().shape[1:]))

    def transposed(self, value: Maps, inputs: Size, precise: bool) -> tuple[Tensor, int] | None:
        weight = self.weight()
        moved = convolve_back(value, weight, self.geometry, self.groups, (inputs[1], inputs[2]), precise)
        return moved, summed_roundings(len(weight) // self.groups) + math.prod(self.geometry.kernel)

    def places(self, area: FeatureMap) -> Geometry:
        return self.geometry

    def unpadded(self) -> "Convolution":
        return replace(self, geometry=self.geometry.unpadded)


@function_rule(F.conv2d, torch.conv2d, layers=(nn.Conv2d,))
def _convolution(
    weight: Source,
    bias: Source | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Operation:
    if padding_mode != "zeros":
        refuse(f"padding_mode is {padding_mode!r}, bounds exist for 'zeros'")
    kernel, spacing = (weight().shape[2], weight().shape[3]), pair(dilation)
    geometry = Geometry(kernel, pair(stride), _explicit_padding(padding, kernel, spacing), spacing)
    return Convolution(weight, bias, geometry, groups)


@dataclass(frozen=True, slots=True)
class TransposedConvolution(Affine):
    """A two-dimensional transposed convolution, with `cut` for its padding: the map of a convolution's gradient.

    Precisely it is a convolution, with turned weights, of the map with zeros between its values and around it.
    """

    weight: Source
    bias: Source | None
    stride: tuple[int, int]
    cut: tuple[int, int]
    output_padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def map(self, value: Maps, precise: bool) -> Maps:
        return self._spread(value, self.weight(), precise)

    def absolute_map(self, value: Maps, precise: bool) -> Maps:
        return self._spread(value, self.weight().abs(), precise)

    def _spread(self, value: Maps, weight: Tensor, precise: bool) -> Maps:
        if not precise:
            settings = (self.stride, self.cut, self.output_padding, self.groups, self.dilation)
            return F.conv_transpose2d(value, weight, None, *settings)
        rows, columns = (
            (size - 1) * step + 1 for size, step in zip(value.shape[2:], self.stride, strict=True)
        )
        apart = value.new_zeros(*value.shape[:2], rows, columns)
        apart[..., :: self.stride[0], :: self.stride[1]] = value
        kernel = (weight.shape[2], weight.shape[3])
        before = [
            spacing * (size - 1) - cut
            for size, spacing, cut in zip(kernel, self.dilation, self.cut, strict=True)
        ]
        after = [edge + more for edge, more in zip(before, self.output_padding, strict=True)]
        geometry = Geometry(
            kernel, padding=(before[0], after[0], before[1], after[1]), dilation=self.dilation
        )
        turned = weight.flip(2, 3).unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1)
        return convolve(apart, turned, geometry, self.groups, precise)

    def offset(self, like: Tensor) -> Tensor | None:
        return None if self.bias is None else self.bias()[:, None, None]

    def roundings(self, value: Tensor) -> int:
        weight = self.weight()
        return summed_roundings(weight.shape[0] // self.groups * weight.shape[2] * weight.shape[3])


@function_rule(F.conv_transpose2d, torch.conv_transpose2d, layers=(nn.ConvTranspose2d,))
def _transposed_convolution(
    weight: Source,
    bias: Source | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
) -> Operation:
    settings = (pair(stride), pair(padding), pair(output_padding), pair(dilation))
    return TransposedConvolution(weight, bias, *settings, groups)


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


@dataclass(frozen=True, slots=True)
class ChannelScale(Affine):
    """y = (x - mean) / deviation * gain + shift, per channel: batch norm in eval mode, normalisation."""

    mean: Source
    deviation: Source
    gain: Source | None
    shift: Source | None

    def scale(self) -> Annotated[Tensor, "..."]:
        """gain / deviation, computed in float64."""
        gain = 1.0 if self.gain is None else self.gain().double()
        return gain / self.deviation().double()

    def map(self, value: ByChannel, precise: bool) -> ByChannel:
        return value * _per_channel(self.scale(), value)

    def absolute_map(self, value: ByChannel, precise: bool) -> ByChannel:
        scale = _per_channel(self.scale().abs(), value)
        return value * (lifted(scale) if precise else scale)

    def offset(self, like: Tensor) -> Tensor | None:
        offset = -self.mean().double() * self.scale()
        return _per_channel(offset if self.shift is None else offset + self.shift().double(), like)

    def offset_magnitude(self, like: Tensor) -> Tensor | None:
        magnitude = self.mean().double().abs() * lifted(self.scale().abs())
        return _per_channel(
            magnitude if self.shift is None else magnitude + self.shift().double().abs(), like
        )

    def roundings(self, value: Tensor) -> int:
        return SCALE_ROUNDINGS

    def transposed(self, value: ByChannel, inputs: Size, precise: bool) -> tuple[Tensor, int] | None:
        return self.map(value, precise), SCALE_ROUNDINGS

    def places(self, area: FeatureMap) -> Places:
        if area.is_flat:
            raise NotCovered("a flattened map is scaled feature by feature")
        return Places.KEPT


# The scale is rounded 4 times: in the sum and root of the deviation, in the division, and to the type. Its product with
# x is rounded once; that with the mean, the sum with the shift, and their rounding to the type are 3. One is to spare.
SCALE_ROUNDINGS = 8


def _per_channel(values: Tensor, like: ByChannel) -> Tensor:
    """Broadcast over all but the channels; more values than those would make channels of nothing."""
    if values.numel() not in (1, like.shape[1]):
        raise ModelError(
            f"a scale of {values.numel()} channels cannot take images or results of {like.shape[1]}",
            hint="give images with as many channels as the model was made for",
        )
    return values.to(like.dtype).reshape(-1, *[1] * (like.dim() - 2))


@dataclass(frozen=True, slots=True)
class Rescale(Affine):
    """y = factor x + shift by constants, in float64, that are the same for all images; None for 1 and for 0."""

    factor: Source | None = None
    shift: Source | None = None

    def map(self, value: Annotated[Tensor, "n ..."], precise: bool) -> Annotated[Tensor, "n ..."]:
        return value if self.factor is None else value * _for_each_image(self.factor(), value)

    def absolute_map(self, value: Annotated[Tensor, "n ..."], precise: bool) -> Annotated[Tensor, "n ..."]:
        if self.factor is None:
            return value
        factor = _for_each_image(self.factor().abs(), value)
        return value * (lifted(factor) if precise else factor)

    def offset(self, like: Tensor) -> Tensor | None:
        return None if self.shift is None else _for_each_image(self.shift(), like)

    def roundings(self, value: Tensor) -> int:
        # The factor is rounded where it is a quotient, and to the type; its product with x is rounded once. One is to
        # spare. The shift is rounded to the type.
        return 4

    def transposed(
        self, value: Annotated[Tensor, "n ..."], inputs: Size, precise: bool
    ) -> tuple[Annotated[Tensor, "n ..."], int] | None:
        return self.map(value, precise), 4

    def places(self, area: FeatureMap) -> Places:
        for constant in (self.factor, self.shift):
            shape = () if constant is None else constant().shape
            is_by_channel = len(shape) > 2 and math.prod(shape[-2:]) == 1 and not area.is_flat
            if math.prod(shape) > 1 and not is_by_channel:
                raise NotCovered("a constant differs from place to place")
        return Places.KEPT


def _for_each_image(constant: Tensor, like: Annotated[Tensor, "n ..."]) -> Tensor:
    """The constant in the type of the values; one that would make more of them, or tell images apart, is refused."""
    shape = torch.broadcast_shapes(constant.shape, (1, *like.shape[1:])) if _fits(constant, like) else ()
    if shape != (1, *like.shape[1:]):
        raise UnsupportedLayer(
            f"a constant of shape {tuple(constant.shape)} does not fit results of shape {tuple(like.shape)}, image by "
            "image",
            hint="give it the shape of a result, with 1 or nothing for the batch, or the size 1",
        )
    return constant.to(like)


def _fits(constant: Tensor, like: Tensor) -> bool:
    pairs = zip(reversed(constant.shape), reversed((1, *like.shape[1:])), strict=False)
    return constant.dim() <= like.dim() and all(size in (1, whole) for size, whole in pairs)


def _constant(*given: object, make: Callable[[Tensor], Tensor] = lambda value: value) -> Source:
    """What `make` gives for a number, or for a weight whenever it is read; both in float64."""
    (value,) = given
    if callable(value):
        source = cast("Source", value)
        return lambda: make(source().double())
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse(f"its constant is {value!r}, bounds exist for numbers, parameters and buffers")
    number = make(torch.tensor(value, dtype=torch.float64))
    if not number.isfinite():
        refuse(f"its constant {value!r} gives no finite factor")
    return lambda: number


@function_rule(operator.sub, operator.isub, torch.sub, torch.subtract, "sub", "sub_")
def _subtract(*terms: object, alpha: float = 1) -> Operation:
    if not terms or alpha != 1:
        refuse("bounds exist for the difference of a result and a constant", instead_of(torch.sub))
    return Rescale(shift=_constant(*terms, make=torch.neg))


@function_rule(torch.rsub)
def _subtract_from(other: object, alpha: float = 1) -> Operation:
    if alpha != 1:
        refuse(f"alpha is {alpha}, bounds exist for a plain difference")
    return Rescale(_constant(-1), _constant(other))


@function_rule(operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide, "div", "div_")
def _divide(*divisors: object) -> Operation:
    if not divisors:
        refuse("bounds exist for the quotient of a result and a constant", instead_of(torch.div))
    return Rescale(factor=_constant(*divisors, make=torch.reciprocal))


@function_rule(operator.neg, torch.neg, torch.negative, "neg")
def _negate() -> Operation:
    return Rescale(factor=_constant(-1))


@function_rule(F.batch_norm, layers=(nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm))
def _batch_norm(
    running_mean: Source | None,
    running_var: Source | None,
    weight: Source | None = None,
    bias: Source | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Operation:
    if training or running_mean is None or running_var is None:
        raise ModelError(
            "it normalises by the statistics of the batch (training mode, training=True, or none are kept): no "
            "function of the image alone",
            hint="call model.eval() and keep track_running_stats=True",
        )
    return ChannelScale(running_mean, lambda: (running_var().double() + eps).sqrt(), weight, bias)


@dataclass(frozen=True, slots=True)
class MaxPool(Operation):
    """The largest value under a kernel: non-decreasing in every input, and exact."""

    geometry: Geometry
    ceil_mode: bool
    padding: ClassVar[float] = -torch.inf

    def forward(self, *inputs: Tensor) -> Annotated[Tensor, "... _ _"]:
        return self._pooled(inputs[0], F.max_pool2d)

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        return inputs[0].map(self.forward)

    def backward(
        self, forms: Forms, *inputs: Interval, slope: Tensor | None, rounding: Rounding
    ) -> Pulled | None:
        """The largest value is at least the one with the largest lower end, and at most the largest upper end."""
        (box,) = inputs
        _, chosen = self._pooled(box.lower, F.max_pool2d_with_indices)
        rising = forms.clamp(min=0)
        places = chosen.flatten(2).unsqueeze(1).expand(*forms.shape[:3], -1)
        moved = forms.new_zeros(*forms.shape[:3], box.shape[2] * box.shape[3])
        moved = moved.scatter_add(3, places, rising.flatten(3)).unflatten(3, box.shape[2:])
        constant, error = summed(forms.clamp(max=0) * self.forward(box.upper).unsqueeze(1), 1, rounding)
        # A value can be chosen by as many kernels as have it in sight.
        reached = self.forward(box.magnitude)
        error = error + shifted(rising, reached, math.prod(self.geometry.kernel), rounding)
        return Pulled((moved,), constant, error)

    def _pooled(self, value: Tensor, pool: Callable[..., Any]) -> Any:  # noqa: ANN401 - what the function gives
        top, _, left, _ = self.geometry.padding
        kernel, stride, dilation = self.geometry.kernel, self.geometry.stride, self.geometry.dilation
        return pool(value, kernel, stride, (top, left), dilation, self.ceil_mode)

    def places(self, area: FeatureMap) -> Geometry:
        if self.ceil_mode:
            raise NotCovered("a max pooling with ceil_mode")
        return self.geometry

    def unpadded(self) -> "MaxPool":
        return replace(self, geometry=self.geometry.unpadded)


@function_rule(F.max_pool2d, torch.max_pool2d, layers=(nn.MaxPool2d,))
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
    return MaxPool(
        Geometry(kernel, pair(stride or kernel), (top, top, left, left), pair(dilation)), ceil_mode
    )


@dataclass(frozen=True, slots=True)
class AdaptiveMaxPool(Operation):
    """The largest value in each of a given number of parts of a map: non-decreasing in every input, and exact."""

    sizes: tuple[int | None, int | None]

    def forward(self, *inputs: Tensor) -> Annotated[Tensor, "... _ _"]:
        return F.adaptive_max_pool2d(inputs[0], self.sizes)  # pyright: ignore[reportArgumentType]

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        return inputs[0].map(self.forward)


@function_rule(F.adaptive_max_pool2d, layers=(nn.AdaptiveMaxPool2d,))
def _adaptive_max_pool(
    output_size: int | Sequence[int | None] | None, return_indices: bool = False
) -> Operation:
    if return_indices:
        refuse("return_indices is set, bounds exist for the pooled values alone")
    pair = output_size if isinstance(output_size, Sequence) else (output_size, output_size)
    return AdaptiveMaxPool((pair[0], pair[1]))


@dataclass(frozen=True, slots=True)
class ZeroPad(Operation):
    """Zeros around a map, on the sides (top, bottom, left, right); negative numbers cut."""

    sides: tuple[int, int, int, int]

    def forward(self, *inputs: Tensor) -> Tensor:
        return Geometry((1, 1), padding=self.sides).pad(inputs[0])

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        return inputs[0].map(self.forward)

    def places(self, area: FeatureMap) -> Geometry:
        return Geometry(kernel=(1, 1), padding=self.sides)

    def unpadded(self) -> "ZeroPad":
        return ZeroPad((0, 0, 0, 0))


@layer_rule(nn.ZeroPad2d)
def _zero_pad(layer: nn.ZeroPad2d) -> Operation:
    left, right, top, bottom = layer.padding
    return ZeroPad((top, bottom, left, right))


@function_rule(F.pad)
def _pad(pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Operation:
    if mode != "constant" or value or len(pad) not in (2, 4):
        refuse(f"it pads by {pad} with mode {mode!r} and value {value}, bounds exist for zeros around a map")
    left, right, top, bottom = (*pad, 0, 0)[:4]
    return ZeroPad((top, bottom, left, right))


@dataclass(frozen=True, slots=True)
class NearestUpsample(Operation):
    """Each value of a larger map is one of the given map: non-decreasing in every input, and exact."""

    size: tuple[int, int] | None
    scale: tuple[float, float] | None

    def forward(self, *inputs: Tensor) -> Maps:
        return F.interpolate(inputs[0], self.size, self.scale)  # pyright: ignore[reportArgumentType]

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        return inputs[0].map(self.forward)


@function_rule(F.interpolate)
def _interpolate(
    size: int | tuple[int, ...] | None = None,
    scale_factor: float | tuple[float, ...] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Operation:
    if mode != "nearest" or recompute_scale_factor:
        refuse(f"mode is {mode!r}, bounds exist for 'nearest', and without recompute_scale_factor")
    scale = (scale_factor, scale_factor) if isinstance(scale_factor, int | float) else scale_factor
    return NearestUpsample(None if size is None else pair(size), scale)  # pyright: ignore[reportArgumentType]


@layer_rule(nn.Upsample, nn.UpsamplingNearest2d)
def _upsample(layer: nn.Upsample) -> Operation:
    return _interpolate(
        layer.size, layer.scale_factor, layer.mode, recompute_scale_factor=layer.recompute_scale_factor
    )


@dataclass(frozen=True, slots=True)
class AveragePool(Affine):
    """A mean over parts of a map; `pool` is the ordinary function, `most` the most values that one mean can hold.

    `geometry`, for a map of some height and width, is that of a convolution with equal weights 1/area, padding
    included; None where the pooling is not one.
    """

    pool: Callable[[Tensor], Tensor]
    most: Callable[[Tensor], int]
    geometry: Callable[[int, int], Geometry | None]

    def map(self, value: ChannelMaps, precise: bool) -> ChannelMaps:
        geometry = self.geometry(value.shape[-2], value.shape[-1]) if precise else None
        if geometry is None:
            return self.pool(value)
        return convolve(value, equal_weights(geometry, value), geometry, value.shape[1], precise)

    def absolute_map(self, value: ChannelMaps, precise: bool) -> ChannelMaps:
        return self.map(value, precise)

    def offset(self, like: Tensor) -> Tensor | None:
        return None

    def roundings(self, value: Tensor) -> int:
        # As a convolution: 1/area, the product and area - 1 sums, area + 1. As a library pools: area - 1 sums, the
        # divisor and the division, area + 1. Two are to spare.
        return self.most(value) + 3

    def transposed(self, value: ChannelMaps, inputs: Size, precise: bool) -> tuple[Tensor, int] | None:
        geometry = self.geometry(inputs[1], inputs[2])
        if geometry is None:
            return None
        weights = equal_weights(geometry, value)
        moved = convolve_back(value, weights, geometry, value.shape[1], (inputs[1], inputs[2]), precise)
        # 1/area, a product of one term, and the sums over the places of the kernel.
        return moved, 1 + summed_roundings(1) + math.prod(geometry.kernel)

    def places(self, area: FeatureMap) -> Geometry | Places:
        geometry = self.geometry(area.height, area.width)
        if geometry is None:
            raise NotCovered("an average pooling divides by different counts at different places")
        is_global = geometry.kernel == (area.height, area.width) and not any(geometry.padding)
        return Places.LOST if is_global else geometry


def equal_weights(geometry: Geometry, like: ChannelMaps) -> Annotated[Tensor, "c 1 _ _"]:
    """The weights of a mean as a convolution in as many groups as there are channels."""
    area = geometry.kernel[0] * geometry.kernel[1]
    return like.new_full((like.shape[1], 1, *geometry.kernel), 1 / area)


@function_rule(F.avg_pool2d, layers=(nn.AvgPool2d,))
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
    kernel, (top, left) = pair(kernel_size), pair(padding)
    stride = pair(stride or kernel)
    counts_alike = (count_include_pad or top == left == 0) and not ceil_mode and divisor_override is None
    geometry = Geometry(kernel, stride, (top, top, left, left)) if counts_alike else None

    def pool(value: Tensor) -> Tensor:
        return F.avg_pool2d(
            value, kernel, stride, (top, left), ceil_mode, count_include_pad, divisor_override
        )

    return AveragePool(pool, lambda value: kernel[0] * kernel[1], lambda height, width: geometry)


@function_rule(F.adaptive_avg_pool2d, layers=(nn.AdaptiveAvgPool2d,))
def _adaptive_average_pool(output_size: int | Sequence[int | None] | None) -> AveragePool:
    pair = output_size if isinstance(output_size, Sequence) else (output_size, output_size)
    sizes = (pair[0], pair[1])

    def geometry(*extents: int) -> Geometry | None:
        outputs = [extent if size is None else size for extent, size in zip(extents, sizes, strict=True)]
        if extents[0] % outputs[0] or extents[1] % outputs[1]:
            return None
        kernel = (extents[0] // outputs[0], extents[1] // outputs[1])
        return Geometry(kernel, kernel)

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
        most=lambda value: whole.most(_checked_maps(value)),
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
