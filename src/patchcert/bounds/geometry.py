"""How a kernel slides over a map, and the convolution itself: by a library, or as a product of known rounding."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from patchcert.bounds.rounding import blocked_product


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a kernel slides over a map; padding is (top, bottom, left, right), negative where it cuts."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]

    @property
    def symmetric_padding(self) -> tuple[int, int] | None:
        top, bottom, left, right = self.padding
        return (top, left) if top == bottom >= 0 and left == right >= 0 else None

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """The size of the map that comes out of one of the given size."""
        top, bottom, left, right = self.padding
        sizes = (height + top + bottom, width + left + right)
        spans = [spacing * (size - 1) + 1 for size, spacing in zip(self.kernel, self.dilation, strict=True)]
        return tuple((sizes[axis] - spans[axis]) // self.stride[axis] + 1 for axis in (0, 1))  # type: ignore[return-value]

    def pad(self, value: Tensor) -> Tensor:
        """The value with the padding made explicit, in zeros."""
        top, bottom, left, right = self.padding
        return F.pad(value, (left, right, top, bottom)) if any(self.padding) else value


def plain_average_pool(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> Geometry:
    """The geometry of an average pooling that counts its padding."""
    return Geometry(kernel, stride, (padding[0], padding[0], padding[1], padding[1]), (1, 1))


def convolve(value: Tensor, weight: Tensor, geometry: Geometry, groups: int, precise: bool) -> Tensor:
    """The convolution without offset; `precise` writes it as a matrix product, whatever the library."""
    if precise:
        return _convolve_by_product(value, weight, geometry, groups)
    padding = geometry.symmetric_padding
    if padding is None:
        value, padding = geometry.pad(value), (0, 0)
    return F.conv2d(value, weight, None, geometry.stride, padding, geometry.dilation, groups)


def _convolve_by_product(value: Tensor, weight: Tensor, geometry: Geometry, groups: int) -> Tensor:
    """Every place of the kernel becomes a row of values under it, ordered (group, row, column, channel)."""
    height, width = geometry.output_size(value.shape[-2], value.shape[-1])
    below = under_kernel(geometry.pad(value), geometry, height, width).unflatten(1, (groups, -1))
    rows = below.permute(1, 0, 5, 6, 3, 4, 2).reshape(groups, len(value) * height * width, -1)
    columns = weight.unflatten(0, (groups, -1)).permute(0, 3, 4, 2, 1).flatten(1, 3)
    is_plain = groups == 1
    output = blocked_product(rows[0], columns[0])[None] if is_plain else blocked_product(rows, columns)
    output = output.permute(1, 0, 2).reshape(len(value), height, width, weight.shape[0])
    return output.permute(0, 3, 1, 2)


def under_kernel(padded: Tensor, geometry: Geometry, height: int, width: int) -> Tensor:
    """A view (n, channels, kernel rows, kernel columns, height, width) of the values under the kernel."""
    image, channel, row, column = padded.stride()
    size = (padded.shape[0], padded.shape[1], *geometry.kernel, height, width)
    kernel_strides = (row * geometry.dilation[0], column * geometry.dilation[1])
    place_strides = (row * geometry.stride[0], column * geometry.stride[1])
    return padded.as_strided(size, (image, channel, *kernel_strides, *place_strides))
