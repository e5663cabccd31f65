"""How a kernel slides over a map, which outputs see a window of its inputs, and the convolution itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from patchcert.bounds.rounding import blocked_product


class NotCovered(Exception):
    """Windows cannot follow the network; the dense path takes over."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a kernel slides over a map; padding is (top, bottom, left, right), negative where it cuts."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)

    @property
    def symmetric_padding(self) -> tuple[int, int] | None:
        top, bottom, left, right = self.padding
        return (top, left) if top == bottom >= 0 and left == right >= 0 else None

    @property
    def unpadded(self) -> "Geometry":
        return replace(self, padding=(0, 0, 0, 0))

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """The size of the map that comes out of one of the given size."""
        top, bottom, left, right = self.padding
        sizes = (height + top + bottom, width + left + right)
        spans = [spacing * (size - 1) + 1 for size, spacing in zip(self.kernel, self.dilation, strict=True)]
        return tuple((sizes[axis] - spans[axis]) // self.stride[axis] + 1 for axis in (0, 1))  # type: ignore[return-value]

    def pad(self, value: Annotated[Tensor, "... h w"]) -> Annotated[Tensor, "... _ _"]:
        """The value with the padding made explicit, in zeros."""
        top, bottom, left, right = self.padding
        return F.pad(value, (left, right, top, bottom)) if any(self.padding) else value


@dataclass(frozen=True, slots=True)
class FeatureMap:
    """The shape of a value that has places; a flattened one keeps the shape it had."""

    channels: int
    height: int
    width: int
    is_flat: bool = field(default=False, compare=False)

    @staticmethod
    def of(shape: Sequence[int]) -> "FeatureMap":
        """The map of a value of shape (channels, height, width); raises NotCovered for other shapes."""
        if len(shape) != 3:
            raise NotCovered(f"a result of shape {tuple(shape)} is no map")
        channels, height, width = shape
        return FeatureMap(channels, height, width)

    @property
    def size(self) -> int:
        return self.channels * self.height * self.width

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value itself, without the batch."""
        return (self.size,) if self.is_flat else (self.channels, self.height, self.width)


class Places(Enum):
    """What an operation that is not a sliding kernel does to the places of a map."""

    KEPT = "an output depends on the inputs at its own place alone"
    LOST = "an output may depend on the inputs at every place"


@dataclass(frozen=True, slots=True)
class Window:
    """A rectangle of a feature map; it may stick out over the map's border.

    `row_step` and `column_step` are how many image pixels one step on the map is worth.
    """

    top: int
    left: int
    height: int
    width: int
    row_step: int = 1
    column_step: int = 1

    def through(self, geometry: Geometry) -> "Window":
        """The outputs of a sliding kernel that see any of this window."""
        top, height = _touched(self.top, self.height, geometry, axis=0)
        left, width = _touched(self.left, self.width, geometry, axis=1)
        stride = geometry.stride
        return Window(top, left, height, width, self.row_step * stride[0], self.column_step * stride[1])

    def union(self, other: "Window") -> "Window":
        """The smallest window that holds both, as at the end of a skip connection."""
        if (self.row_step, self.column_step) != (other.row_step, other.column_step):
            raise NotCovered("two branches of different strides are added")
        top, left = min(self.top, other.top), min(self.left, other.left)
        bottom = max(self.top + self.height, other.top + other.height)
        right = max(self.left + self.width, other.left + other.width)
        return Window(top, left, bottom - top, right - left, self.row_step, self.column_step)

    def local(self, geometry: Geometry, output: "Window") -> Geometry:
        """The kernel padded (or, where negative, cut) so that it takes this window to just the output window."""
        top, bottom = _overhang(self.top, self.height, output.top, output.height, geometry, axis=0)
        left, right = _overhang(self.left, self.width, output.left, output.width, geometry, axis=1)
        return replace(geometry, padding=(top, bottom, left, right))

    def seen(self, geometry: Geometry, output: "Window") -> "Window":
        """All inputs that the kernel looks at for the output window, those around this window included."""
        top, bottom, left, right = self.local(geometry, output).padding
        height, width = self.height + top + bottom, self.width + left + right
        return Window(self.top - top, self.left - left, height, width, self.row_step, self.column_step)


def _touched(origin: int, extent: int, geometry: Geometry, axis: int) -> tuple[int, int]:
    stride, padding = geometry.stride[axis], geometry.padding[2 * axis]
    span = geometry.dilation[axis] * (geometry.kernel[axis] - 1)
    first = -((span - origin - padding) // stride)
    last = (origin + extent - 1 + padding) // stride
    if last < first:
        raise NotCovered("a patch can fall between the steps of a kernel")
    return first, last - first + 1


def _overhang(
    origin: int, extent: int, output_origin: int, output_extent: int, geometry: Geometry, axis: int
) -> tuple[int, int]:
    """How far what the outputs look at reaches beyond the window, before and after it."""
    stride, span = geometry.stride[axis], geometry.dilation[axis] * (geometry.kernel[axis] - 1)
    first = stride * output_origin - geometry.padding[2 * axis]
    last = first + stride * (output_extent - 1) + span
    return origin - first, last - (origin + extent - 1)


def convolve(
    value: Annotated[Tensor, "n c _ _"],
    weight: Annotated[Tensor, "outputs _ _ _"],
    geometry: Geometry,
    groups: int,
    precise: bool,
) -> Annotated[Tensor, "n outputs _ _"]:
    """The convolution without offset; `precise` writes it as a matrix product, whatever the library would do."""
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
    output = _product_by_groups(rows, columns)
    output = output.permute(1, 0, 2).reshape(len(value), height, width, weight.shape[0])
    return output.permute(0, 3, 1, 2)


def convolve_back(
    value: Annotated[Tensor, "n outputs _ _"],
    weight: Annotated[Tensor, "outputs _ _ _"],
    geometry: Geometry,
    groups: int,
    size: tuple[int, int],
    precise: bool,
) -> Annotated[Tensor, "n c _ _"]:
    """The transposed map of the convolution of maps of this size: what each output weighs, summed where it looks.

    `precise` writes it as a matrix product. A product is summed over the outputs of its group, and then over at most as
    many places as the kernel has.
    """
    top, bottom, left, right = geometry.padding
    padded = (size[0] + top + bottom, size[1] + left + right)
    if precise:
        rows = value.unflatten(1, (groups, -1)).permute(1, 0, 3, 4, 2).flatten(1, 3)
        below = _product_by_groups(rows, weight.flatten(1).unflatten(0, (groups, -1)))
        below = below.unflatten(1, (len(value), -1)).permute(1, 0, 3, 2).flatten(1, 2)
        moved = F.fold(below, padded, geometry.kernel, geometry.dilation, 0, geometry.stride)
    else:
        moved = F.conv_transpose2d(value, weight, None, geometry.stride, 0, 0, groups, geometry.dilation)
        # What no kernel reaches, because strides do not come out even, gets zeros.
        if moved.shape[2:] != padded:
            moved = F.pad(moved, (0, padded[1] - moved.shape[3], 0, padded[0] - moved.shape[2]))
    return moved[:, :, top : top + size[0], left : left + size[1]]


def _product_by_groups(
    rows: Annotated[Tensor, "groups _ inner"], columns: Annotated[Tensor, "groups inner outputs"]
) -> Annotated[Tensor, "groups _ outputs"]:
    """The products of all groups; of a single one as the plain product it is."""
    return blocked_product(rows[0], columns[0])[None] if len(rows) == 1 else blocked_product(rows, columns)


def under_kernel(
    padded: Annotated[Tensor, "n c _ _"], geometry: Geometry, height: int, width: int
) -> Annotated[Tensor, "n c _ _ _ _"]:
    """A view (n, channels, kernel rows, kernel columns, height, width) of the values under the kernel."""
    image, channel, row, column = padded.stride()
    size = (padded.shape[0], padded.shape[1], *geometry.kernel, height, width)
    kernel_strides = (row * geometry.dilation[0], column * geometry.dilation[1])
    place_strides = (row * geometry.stride[0], column * geometry.stride[1])
    return padded.as_strided(size, (image, channel, *kernel_strides, *place_strides))
