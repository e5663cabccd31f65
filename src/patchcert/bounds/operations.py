"""What a layer does to a value and to an interval: one small class per kind of operation.

A model is lowered to these operations (see `lowering`); each states its forward map and its interval rule.
Weights are read from the layer at every call, so bounds can be differentiated and trained through.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from patchcert.bounds.geometry import Geometry, convolve
from patchcert.bounds.interval import Interval
from patchcert.bounds.rounding import Rounding, blocked_product, lifted, summed_roundings
from patchcert.errors import ModelError, UnsupportedLayer

Source = Callable[[], Tensor]
"""Reads a weight where it lives, so that a trained layer is seen as it is now."""


class Operation(ABC):
    """One step of a network."""

    @abstractmethod
    def forward(self, *inputs: Tensor) -> Tensor:
        """The ordinary value of the step."""

    @abstractmethod
    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        """Contains every output for inputs in the given intervals, and for one input is the tightest."""


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
        """At most so many roundings meet one product on its way into the output."""

    def offset_magnitude(self, like: Tensor) -> Tensor | None:
        """Bounds the absolute values whose rounding the offset carries."""
        offset = self.offset(like)
        return None if offset is None else offset.abs()

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

    def _outward_interval(self, box: Interval, rounding: Rounding) -> Interval:
        """Each rounded operation adds its error bound to the radius, which is widened for its own rounding.

        centre: |fl(Wc + b) - (Wc + b)| <= gamma (|W||c| + |b|), so gamma |c| joins the radius before |W|; the
        halving of lower and upper costs a unit of |c| and r, the final lower and upper two units more.
        Underflow costs at most `tiny` in the radius and, as fewer than 1/unit products are summed, tiny/unit
        after.
        """
        gamma, unit = rounding.gamma(self.roundings(box.lower) + 2), rounding.unit
        centre, radius = box.centre, box.radius
        output = self.map(centre, precise=True)
        radius = radius * (1 + 8 * unit) + centre.abs() * (gamma + 4 * unit) + rounding.tiny
        spread = self.absolute_map(radius, precise=True)
        offset = self.offset(output)
        if offset is not None:
            output = output + offset
            magnitude = self.offset_magnitude(output)
            spread = spread if magnitude is None else spread + 2 * gamma * magnitude
        underflow = rounding.tiny / unit
        spread = spread * (1 + 2 * gamma) + output.abs() * (4 * unit) + underflow
        return Interval.around(output, spread * (1 + 8 * unit))


@dataclass(frozen=True, slots=True)
class Linear(Affine):
    """A fully connected layer."""

    weight: Source
    bias: Source | None

    def map(self, value: Tensor, precise: bool) -> Tensor:
        return _product(value, self.weight(), precise)

    def absolute_map(self, value: Tensor, precise: bool) -> Tensor:
        return _product(value, self.weight().abs(), precise)

    def offset(self, like: Tensor) -> Tensor | None:
        return None if self.bias is None else self.bias()

    def roundings(self, value: Tensor) -> int:
        return summed_roundings(self.weight().shape[1])


def _product(value: Tensor, weight: Tensor, precise: bool) -> Tensor:
    return blocked_product(value, weight.T) if precise else F.linear(value, weight)


@dataclass(frozen=True, slots=True)
class Convolution(Affine):
    """A two-dimensional convolution with zero padding."""

    weight: Source
    bias: Source | None
    geometry: Geometry
    groups: int

    def map(self, value: Tensor, precise: bool) -> Tensor:
        return convolve(value, self.weight(), self.geometry, self.groups, precise)

    def absolute_map(self, value: Tensor, precise: bool) -> Tensor:
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


@dataclass(frozen=True, slots=True)
class AveragePool(Affine):
    """A mean over windows; `pool` is the ordinary function, `window` the most values one mean can hold.

    `geometry` is set where the pooling is a convolution with equal weights 1/area, padding included.
    """

    pool: Callable[[Tensor], Tensor]
    window: Callable[[Tensor], int]
    geometry: Callable[[Tensor], Geometry | None]

    def map(self, value: Tensor, precise: bool) -> Tensor:
        geometry = self.geometry(value) if precise else None
        if geometry is None:
            return self.pool(value)
        area, channels = geometry.kernel[0] * geometry.kernel[1], value.shape[1]
        weight = value.new_full((channels, 1, *geometry.kernel), 1 / area)
        return convolve(value, weight, geometry, channels, precise)

    def absolute_map(self, value: Tensor, precise: bool) -> Tensor:
        return self.map(value, precise)

    def offset(self, like: Tensor) -> Tensor | None:
        return None

    def roundings(self, value: Tensor) -> int:
        return self.window(value) + 3


@dataclass(frozen=True, slots=True)
class ChannelScale(Affine):
    """y = (x - mean) / deviation * gain + shift, per channel: batch norm in eval mode, normalisation."""

    mean: Source
    deviation: Source
    gain: Source | None
    shift: Source | None

    def scale(self) -> Tensor:
        """gain / deviation, computed in float64."""
        gain = 1.0 if self.gain is None else self.gain().double()
        return gain / self.deviation().double()

    def map(self, value: Tensor, precise: bool) -> Tensor:
        return value * _per_channel(self.scale(), value)

    def absolute_map(self, value: Tensor, precise: bool) -> Tensor:
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
        return 8


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Broadcast over all but the channels; more values than those would make channels of nothing."""
    if values.numel() not in (1, like.shape[1]):
        raise ModelError(
            f"a scale of {values.numel()} channels cannot take images or results of {like.shape[1]}",
            hint="give images with as many channels as the model was made for",
        )
    return values.to(like.dtype).reshape(-1, *[1] * (like.dim() - 2))


@dataclass(frozen=True, slots=True)
class Monotone(Operation):
    """A non-decreasing function of each element, computed to within `units` unit roundoffs."""

    function: Callable[[Tensor], Tensor]
    units: int
    is_relu: bool = False

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(inputs[0])

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        (box,) = inputs
        slack = self.units * rounding.unit
        if not slack:
            return Interval(self.function(box.lower), self.function(box.upper))
        lower, upper = self.precisely(box.lower), self.precisely(box.upper)
        lower = lower - (lower.abs() * slack + rounding.tiny)
        return Interval(lower, upper + (upper.abs() * slack + rounding.tiny))

    def precisely(self, value: Tensor) -> Tensor:
        """The function rounded from float64: a float32 may not hold its constants, such as a tiny slope, and libraries
        compute it differently in the last bits for other sizes."""
        return self.function(value.double()).to(value.dtype)


def is_relu(operation: Operation) -> bool:
    """Whether the operation is max(x, 0), for which there are kernels."""
    return isinstance(operation, Monotone) and operation.is_relu


@dataclass(frozen=True, slots=True)
class MaxPool(Operation):
    """The largest value of each window: non-decreasing in every input."""

    pool: Callable[[Tensor], Tensor]
    geometry: Geometry
    ceil_mode: bool

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.pool(inputs[0])

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        (box,) = inputs
        return Interval(self.pool(box.lower), self.pool(box.upper))


@dataclass(frozen=True, slots=True)
class Add(Operation):
    """The sum of two branches, as at the end of a skip connection."""

    def forward(self, *inputs: Tensor) -> Tensor:
        _check_terms(*inputs)
        return inputs[0] + inputs[1]

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        first, second = inputs
        _check_terms(first.lower, second.lower)
        lower, upper = first.lower + second.lower, first.upper + second.upper
        if rounding.is_outward:
            lower, upper = (
                lower - lower.abs() * (4 * rounding.unit),
                upper + upper.abs() * (4 * rounding.unit),
            )
        return Interval(lower, upper)


def _check_terms(first: Tensor, second: Tensor) -> None:
    if first.dim() != second.dim():
        raise UnsupportedLayer(
            f"a sum of results of shapes {tuple(first.shape)} and {tuple(second.shape)} would mix images",
            hint="give both terms the same dimensions",
        )


@dataclass(frozen=True, slots=True)
class Reshape(Operation):
    """The same values in another shape; the first dimension, the batch, stays."""

    reshape: Callable[[Tensor], Tensor]

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.reshape(inputs[0])

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        (box,) = inputs
        return Interval(self.reshape(box.lower), self.reshape(box.upper))


def dtype_holds(target: torch.dtype, source: torch.dtype) -> bool:
    """Every number of the source type is a number of the target type."""
    return torch.promote_types(target, source) == target
