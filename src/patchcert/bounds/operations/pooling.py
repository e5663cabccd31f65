"""Pooling: the mean or the largest value of each part of a map."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.bounds.geometry import FeatureMap, Geometry, NotCovered, Places, convolve
from patchcert.bounds.lowering import Lowered, function_rule, pair, refuse
from patchcert.bounds.operations.affine import Affine
from patchcert.bounds.operations.base import Interval, Operation
from patchcert.bounds.operations.structure import Reshape
from patchcert.bounds.rounding import Rounding

Maps = Annotated[Tensor, "n c _ _"]


@dataclass(frozen=True, slots=True)
class MaxPool(Operation):
    """The largest value under a kernel: non-decreasing in every input, and exact."""

    geometry: Geometry
    ceil_mode: bool
    padding: ClassVar[float] = -torch.inf

    def forward(self, *inputs: Tensor) -> Annotated[Tensor, "... _ _"]:
        kernel, stride, dilation = self.geometry.kernel, self.geometry.stride, self.geometry.dilation
        top, _, left, _ = self.geometry.padding
        return F.max_pool2d(inputs[0], kernel, stride, (top, left), dilation, self.ceil_mode)

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        return inputs[0].map(self.forward)

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
class AveragePool(Affine):
    """A mean over parts of a map; `pool` is the ordinary function, `most` the most values that one mean can hold.

    `geometry`, for a map of some height and width, is that of a convolution with equal weights 1/area, padding
    included; None where the pooling is not one.
    """

    pool: Callable[[Tensor], Tensor]
    most: Callable[[Tensor], int]
    geometry: Callable[[int, int], Geometry | None]

    def map(self, value: Maps, precise: bool) -> Maps:
        geometry = self.geometry(value.shape[-2], value.shape[-1]) if precise else None
        if geometry is None:
            return self.pool(value)
        return convolve(value, equal_weights(geometry, value), geometry, value.shape[1], precise)

    def absolute_map(self, value: Maps, precise: bool) -> Maps:
        return self.map(value, precise)

    def offset(self, like: Tensor) -> Tensor | None:
        return None

    def roundings(self, value: Tensor) -> int:
        # As a convolution: 1/area, the product and area - 1 sums, area + 1. As a library pools: area - 1 sums, the
        # divisor and the division, area + 1. Two are to spare.
        return self.most(value) + 3

    def places(self, area: FeatureMap) -> Geometry | Places:
        geometry = self.geometry(area.height, area.width)
        if geometry is None:
            raise NotCovered("an average pooling divides by different counts at different places")
        is_global = geometry.kernel == (area.height, area.width) and not any(geometry.padding)
        return Places.LOST if is_global else geometry


def equal_weights(geometry: Geometry, like: Maps) -> Annotated[Tensor, "c 1 _ _"]:
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
def _adaptive_average_pool(output_size: int | tuple[int | None, int | None] | None) -> AveragePool:
    sizes = output_size if isinstance(output_size, tuple) else (output_size, output_size)

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
