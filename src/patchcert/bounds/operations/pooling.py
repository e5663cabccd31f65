"""The largest value, and the mean, of parts of a map."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Size, Tensor, nn

from patchcert.bounds.forms import Forms, Pulled, Slopes, shifted, summed
from patchcert.bounds.geometry import FeatureMap, Geometry, NotCovered, Places, convolve, convolve_back
from patchcert.bounds.lowering import Lowered, function_rule, pair, refuse
from patchcert.bounds.operations.affine import Affine, ChannelMaps
from patchcert.bounds.operations.base import Exact, Interval, Operation
from patchcert.bounds.operations.shaping import Reshape
from patchcert.bounds.rounding import Rounding, summed_roundings


@dataclass(frozen=True, slots=True)
class MaxPool(Exact):
    """The largest value under a kernel: non-decreasing in every input, and exact."""

    geometry: Geometry
    ceil_mode: bool
    padding: ClassVar[float] = -torch.inf

    def forward(self, *inputs: Tensor) -> Annotated[Tensor, "... _ _"]:
        return self._pooled(inputs[0], F.max_pool2d)

    def backward(self, forms: Forms, *inputs: Interval, slope: Slopes, rounding: Rounding) -> Pulled | None:
        """The largest value is at least the one with the largest lower end, and at most the largest upper end."""
        (box,) = inputs
        if box.lower.dim() != 4:
            return None
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
class AdaptiveMaxPool(Exact):
    """The largest value in each of a given number of parts of a map: non-decreasing in every input, and exact."""

    sizes: tuple[int | None, int | None]

    def forward(self, *inputs: Tensor) -> Annotated[Tensor, "... _ _"]:
        return F.adaptive_max_pool2d(inputs[0], self.sizes)  # pyright: ignore[reportArgumentType]


@function_rule(F.adaptive_max_pool2d, layers=(nn.AdaptiveMaxPool2d,))
def _adaptive_max_pool(
    output_size: int | Sequence[int | None] | None, return_indices: bool = False
) -> Operation:
    if return_indices:
        refuse("return_indices is set, bounds exist for the pooled values alone")
    pair = output_size if isinstance(output_size, Sequence) else (output_size, output_size)
    return AdaptiveMaxPool((pair[0], pair[1]))


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
        if value.dim() != 4:
            refuse(
                f"a mean over height and width of results of shape {tuple(value.shape)}, expected (n, channels, "
                "height, width)",
                hint="take it before results are flattened or reshaped, and of channels picked by slices like x[:, :1]",
            )
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
    pool = _adaptive_average_pool(1)
    return pool if keepdim else (pool, Reshape(lambda value: value.flatten(1)))


_HEIGHT_AND_WIDTH = {frozenset(axes) for axes in ((2, 3), (-2, -1), (2, -1), (-2, 3))}
