"""Where a patch can be seen in each feature map: the operations are asked, the answers are put together. And
convolutions on windows as matrices, where windows are small."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds import Network
from patchcert.bounds.geometry import FeatureMap, Geometry, NotCovered, Places, Window, convolve
from patchcert.bounds.operations import (
    Add,
    AveragePool,
    ChannelScale,
    Convolution,
    Linear,
    Monotone,
    Operation,
    Reshape,
)

Shape = tuple[int, ...]

Weight = Annotated[Tensor, "out _ _ _"]
"""The weights of a convolution: outputs, channels of a group, height and width of the kernel."""

WITH_OWN_RULES = (Convolution, AveragePool, Linear, ChannelScale, Monotone, Add, Reshape)
"""The operations that have a rule of their own in `rules`; all others go by their interval bound."""


_MOST_INPUTS, _MOST_WORK = 1024, 8


def is_worth_a_matrix(inputs: int, taps: int) -> bool:
    """Whether the window is small, and its matrix costs at most `_MOST_WORK` times a convolution of `taps` a place."""
    return inputs <= min(_MOST_INPUTS, _MOST_WORK * taps)


@dataclass(frozen=True, slots=True)
class ConvolutionMatrix:
    """Which weight of a convolution stands where in its matrix (inputs, outputs) on a window, if any does.

    Where none does, `index` names weights in turn: adding up a gradient of zeros there then has no bottleneck.
    """

    index: Annotated[Tensor, "entries"]
    is_empty: Annotated[Tensor, "inputs outputs"]

    @staticmethod
    def of(geometry: Geometry, weight: Weight, groups: int, shape: Sequence[int]) -> "ConvolutionMatrix":
        """For weights of this shape, on windows of the given (height, width, channels)."""
        with torch.no_grad():
            numbers = torch.arange(1.0, weight.numel() + 1, dtype=torch.float64, device=weight.device)
            numbers = window_matrix(geometry, numbers.view(weight.shape), groups, shape).long()
        in_turn = torch.arange(numbers.numel(), device=weight.device) % weight.numel()
        index = (numbers - 1).flatten().where(numbers.flatten() > 0, in_turn)
        return ConvolutionMatrix(index, numbers == 0)

    def matrix(self, weight: Weight) -> Annotated[Tensor, "inputs outputs"]:
        """The convolution with these weights, exactly, and differentiable in them."""
        chosen = weight.flatten().index_select(0, self.index).view(self.is_empty.shape)
        return chosen.masked_fill(self.is_empty, 0.0)


def window_matrix(
    geometry: Geometry, weight: Weight, groups: int, shape: Sequence[int]
) -> Annotated[Tensor, "inputs outputs"]:
    """The convolution on a window of the given (height, width, channels) as a matrix, exactly."""
    count = shape[0] * shape[1] * shape[2]
    basis = (
        torch.eye(count, dtype=weight.dtype, device=weight.device).reshape(count, *shape).permute(0, 3, 1, 2)
    )
    return convolve(basis, weight, geometry, groups, precise=True).permute(0, 2, 3, 1).flatten(1)


@dataclass(frozen=True, slots=True)
class Layout:
    """The feature map of every value of a network; None from the first fully connected layer on."""

    network: Network
    maps: tuple[FeatureMap | None, ...]
    _matrices: dict[tuple[object, ...], ConvolutionMatrix] = field(
        default_factory=dict, repr=False, compare=False
    )

    @staticmethod
    def of(network: Network, values: Sequence[Tensor]) -> "Layout":
        """Read off the values of one pass; raises NotCovered at a step that windows cannot follow."""
        if network.head is None:
            raise NotCovered("the last layer is not linear")
        shapes = [tuple(value.shape[1:]) for value in values]
        maps: list[FeatureMap | None] = [FeatureMap.of(shapes[0])]
        for position, step in enumerate(network.steps):
            first = step.inputs[0]
            if len({(maps[index], shapes[index]) for index in step.inputs}) > 1:
                raise NotCovered("a sum whose terms do not have the same places")
            maps.append(_next_map(step.operation, maps[first], shapes[first], shapes[position + 1]))
        return Layout(network, tuple(maps))

    def convolution_matrix(
        self, geometry: Geometry, weight: Tensor, groups: int, shape: Shape
    ) -> ConvolutionMatrix:
        """How a convolution becomes a matrix on windows of this shape; kept for every later step."""
        key = (geometry, groups, weight.shape, shape, weight.device)
        if key not in self._matrices:
            self._matrices[key] = ConvolutionMatrix.of(geometry, weight, groups, shape)
        return self._matrices[key]

    def windows(self, start: Window) -> tuple[Window | None, ...]:
        """The window on every value for a patch that covers the window `start` of the image."""
        windows: list[Window | None] = [start]
        for step in self.network.steps:
            inputs = [windows[index] for index in step.inputs]
            windows.append(_next_window(step.operation, inputs, self.maps[step.inputs[0]]))
        return tuple(windows)

    def seen(self, position: int, windows: Sequence[Window | None]) -> Window | None:
        """What the outputs in the window after a step look at, which goes by its interval bound; None for others."""
        step = self.network.steps[position]
        area, source, target = self.maps[step.inputs[0]], windows[step.inputs[0]], windows[position + 1]
        if isinstance(step.operation, WITH_OWN_RULES) or area is None or source is None or target is None:
            return None
        places = step.operation.places(area)
        return source.seen(places, target) if isinstance(places, Geometry) else source


def _next_map(
    operation: Operation, source: FeatureMap | None, taken: Shape, given: Shape
) -> FeatureMap | None:
    """The map of a result of shape `given`, from an input of shape `taken` on the map `source`."""
    if source is None:
        if len(given) != 1 and operation.places(FeatureMap.of(taken)) is not Places.KEPT:
            raise NotCovered("features are used as a map again")
        return None
    places = _places(operation, source)
    if places is Places.LOST:
        return None
    height, width = source.height, source.width
    if isinstance(places, Geometry):
        height, width = places.output_size(height, width)
    target = FeatureMap(source.channels if len(given) == 1 else given[0], height, width, len(given) == 1)
    if target.shape != given:
        raise NotCovered(f"{type(operation).__name__} makes {given} of a map, not {target.shape}")
    return target


def _next_window(
    operation: Operation, inputs: Sequence[Window | None], area: FeatureMap | None
) -> Window | None:
    known = [window for window in inputs if window is not None]
    if area is None or len(known) < len(inputs):
        return None
    places = _places(operation, area)
    if places is Places.LOST:
        return None
    window = reduce(Window.union, known)
    return window.through(places) if isinstance(places, Geometry) else window


def _places(operation: Operation, area: FeatureMap) -> Geometry | Places:
    """What the operation says of a map, if windows can follow it.

    The interval bound of an operation without a rule is taken on windows as small maps: of one input that is a map.
    """
    places = operation.places(area)
    is_small_map = operation.arity == 1 and not area.is_flat and places is not Places.LOST
    if not is_small_map and not isinstance(operation, WITH_OWN_RULES):
        raise NotCovered(f"windows have no rule for {type(operation).__name__} here")
    return places
