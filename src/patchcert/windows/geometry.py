"""Where a patch can be seen in each feature map: windows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from patchcert.bounds import Network
from patchcert.bounds.geometry import Geometry
from patchcert.bounds.operations import (
    Add,
    AveragePool,
    ChannelScale,
    Convolution,
    Linear,
    MaxPool,
    Monotone,
    Operation,
    Reshape,
)
from patchcert.windows.products import ConvolutionMatrix

Shape = tuple[int, ...]


_FOLLOWED = (Convolution, AveragePool, Linear, ChannelScale, Monotone, MaxPool, Add, Reshape)
"""The operations that have rules for windows."""


class NotCovered(Exception):
    """The network holds a step that windows cannot follow; the dense path takes over."""


@dataclass(frozen=True, slots=True)
class Window:
    """The rectangle of a feature map that one placement can reach; it may stick out over the map's border.

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

    def input_padding(self, geometry: Geometry, output: "Window") -> tuple[int, int, int, int]:
        """Zeros to add (or, where negative, rows and columns to cut) left, right, top and bottom of this
        window so that the kernel without padding produces just the output window."""
        top, bottom = _overhang(self.top, self.height, output.top, output.height, geometry, axis=0)
        left, right = _overhang(self.left, self.width, output.left, output.width, geometry, axis=1)
        return (left, right, top, bottom)

    def local(self, geometry: Geometry, output: "Window") -> Geometry:
        """The kernel padded so that it takes this window to just the output window."""
        left, right, top, bottom = self.input_padding(geometry, output)
        return Geometry(geometry.kernel, geometry.stride, (top, bottom, left, right), geometry.dilation)


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
    stride, padding = geometry.stride[axis], geometry.padding[2 * axis]
    first = stride * output_origin - padding
    last = (
        stride * (output_origin + output_extent - 1)
        - padding
        + geometry.dilation[axis] * (geometry.kernel[axis] - 1)
    )
    return origin - first, last - (origin + extent - 1)


@dataclass(frozen=True, slots=True)
class FeatureMap:
    """The shape of a value that still has places; a flattened one keeps the shape it had."""

    channels: int
    height: int
    width: int

    @property
    def size(self) -> int:
        return self.channels * self.height * self.width


@dataclass(frozen=True, slots=True)
class Layout:
    """The feature map of every value of a network; None from the first fully connected layer on."""

    network: Network
    maps: tuple[FeatureMap | None, ...]
    _taps: dict[tuple[object, ...], ConvolutionMatrix] = field(
        default_factory=dict, repr=False, compare=False
    )

    @staticmethod
    def of(network: Network, values: Sequence[Tensor]) -> "Layout":
        """Read off the values of one pass; a step that windows cannot follow is not covered."""
        if network.head is None:
            raise NotCovered("the last layer is not linear")
        maps: list[FeatureMap | None] = [FeatureMap(*values[0].shape[1:])]
        for position, step in enumerate(network.steps):
            if type(step.operation) not in _FOLLOWED:
                raise NotCovered(f"windows have no rule for {type(step.operation).__name__}")
            source, shape = maps[step.inputs[0]], tuple(values[position + 1].shape[1:])
            if len({(maps[index], values[index].shape) for index in step.inputs}) > 1:
                raise NotCovered("a sum whose terms do not have the same places")
            maps.append(_next_map(step.operation, source, values[step.inputs[0]].dim(), shape))
        return Layout(network, tuple(maps))

    def taps(self, geometry: Geometry, weight: Tensor, groups: int, shape: Shape) -> ConvolutionMatrix:
        """How a convolution becomes a matrix on windows of this shape; kept for every later step."""
        key = (geometry, groups, weight.shape, shape, weight.device)
        if key not in self._taps:
            self._taps[key] = ConvolutionMatrix.of(geometry, weight, groups, shape)
        return self._taps[key]

    def windows(self, start: Window) -> tuple[Window | None, ...]:
        """The window on every value for a patch that covers the window `start` of the image."""
        windows: list[Window | None] = [start]
        for step in self.network.steps:
            inputs = [windows[index] for index in step.inputs]
            windows.append(_next_window(step.operation, inputs, self.maps[step.inputs[0]]))
        return tuple(windows)


def _next_map(
    operation: Operation, source: FeatureMap | None, dimensions: int, shape: Shape
) -> FeatureMap | None:
    if isinstance(operation, Linear):
        if dimensions != 2:
            raise NotCovered("a linear layer acts on an unflattened map")
        return None
    if source is None:
        if not isinstance(operation, Monotone | ChannelScale | Add) and len(shape) != 1:
            raise NotCovered("features are used as a map again")
        return None
    if isinstance(operation, Reshape):
        if shape not in ((source.size,), (source.channels, source.height, source.width)):
            raise NotCovered(f"a map is reshaped to {shape}")
        return source
    if isinstance(operation, ChannelScale) and dimensions == 2:
        raise NotCovered("a flattened map is scaled feature by feature")
    if isinstance(operation, AveragePool) and is_global(operation, source):
        return None
    return source if len(shape) == 1 else FeatureMap(*shape)


def _pool_geometry(operation: AveragePool, source: FeatureMap) -> Geometry | None:
    return operation.geometry(torch.empty(1, source.height, source.width, device="meta"))


def is_global(operation: AveragePool, source: FeatureMap) -> bool:
    """The pooling takes the mean of the whole map, so that places end there."""
    geometry = _pool_geometry(operation, source)
    return (
        geometry is not None
        and geometry.kernel == (source.height, source.width)
        and not any(geometry.padding)
    )


def _next_window(
    operation: Operation, inputs: list[Window | None], source: FeatureMap | None
) -> Window | None:
    window = inputs[0]
    if window is None or source is None or isinstance(operation, Linear):
        return None
    if isinstance(operation, Convolution | MaxPool):
        if isinstance(operation, MaxPool) and operation.ceil_mode:
            raise NotCovered("a max pooling with ceil_mode")
        return window.through(operation.geometry)
    if isinstance(operation, AveragePool):
        if is_global(operation, source):
            return None
        geometry = _pool_geometry(operation, source)
        if geometry is None:
            raise NotCovered("an average pooling divides by different counts at different places")
        return window.through(geometry)
    if isinstance(operation, Add):
        return None if inputs[1] is None else window.union(inputs[1])
    return window


def seen_by_pool(operation: Operation, source: Window | None, target: Window | None) -> Window | None:
    """What the outputs in the target window of a max pooling look at; None for other operations."""
    if not isinstance(operation, MaxPool) or source is None or target is None:
        return None
    left, right, top, bottom = source.input_padding(operation.geometry, target)
    height, width = source.height + top + bottom, source.width + left + right
    return Window(source.top - top, source.left - left, height, width, source.row_step, source.column_step)
