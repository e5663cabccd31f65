"""Maps W x + b: linear layers, convolutions, and scales of channels, as of batch normalisation."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Size, Tensor, nn

from patchcert.bounds.forms import Forms, Pulled, Slopes, shifted, summed, underflow
from patchcert.bounds.geometry import FeatureMap, Geometry, NotCovered, Places, convolve, convolve_back
from patchcert.bounds.lowering import function_rule, pair, refuse
from patchcert.bounds.operations.base import Interval, Operation, Source, check_maps
from patchcert.bounds.rounding import NEAREST, Rounding, blocked_product, lifted, summed_roundings
from patchcert.errors import ModelError

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

    def backward(self, forms: Forms, *inputs: Interval, slope: Slopes, rounding: Rounding) -> Pulled | None:
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
        if rounding.is_outward:
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
        check_maps(value)
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
        check_maps(value)
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
