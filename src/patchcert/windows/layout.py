"""Where a patch can be seen in each feature map: the operations are asked, the answers are put together. Which cells of
a map that is for each placement. And convolutions on windows as matrices, where windows are small."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from patchcert.bounds import Network
from patchcert.bounds.geometry import FeatureMap, Geometry, NotCovered, Places, Window, convolve
from patchcert.bounds.operations import (
    Add,
    AveragePool,
    ChannelScale,
    Concatenate,
    Convolution,
    Linear,
    Monotone,
    Operation,
    Rescale,
    Reshape,
)
from patchcert.threats import Patch

Shape = tuple[int, ...]

Weight = Annotated[Tensor, "out _ _ _"]
"""The weights of a convolution: outputs, channels of a group, height and width of the kernel."""

WITH_OWN_RULES = (
    Convolution,
    AveragePool,
    Linear,
    ChannelScale,
    Rescale,
    Monotone,
    Add,
    Concatenate,
    Reshape,
)
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
        if any(0 in shape for shape in shapes):
            raise NotCovered("a result has no values")
        maps: list[FeatureMap | None] = [FeatureMap.of(shapes[0])]
        for position, step in enumerate(network.steps):
            first, joins = step.inputs[0], isinstance(step.operation, Concatenate)
            if len({_places_of(maps[index], shapes[index], joins) for index in step.inputs}) > 1:
                raise NotCovered("a sum whose terms do not have the same places")
            maps.append(_next_map(step.operation, maps[first], shapes[first], shapes[position + 1]))
        return Layout(network, tuple(maps))

    def area(self, index: int) -> FeatureMap:
        """The map of value `index`, which must have places."""
        area = self.maps[index]
        assert area is not None
        return area

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


def _places_of(area: FeatureMap | None, shape: Shape, joins: bool) -> tuple[object, ...]:
    """What branches must have in common: all of their shape, or all but the channels that are joined."""
    if not joins:
        return area, shape
    return (None if area is None else (area.height, area.width, area.is_flat)), shape[1:]


def _next_map(
    operation: Operation, source: FeatureMap | None, taken: Shape, given: Shape
) -> FeatureMap | None:
    """The map of a result of shape `given`, from an input of shape `taken` on the map `source`."""
    if source is None:
        if len(given) != 1:
            area = FeatureMap.of(taken)
            if area.height * area.width > 1 or operation.places(area) is not Places.KEPT:
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


def common_steps(windows: Iterable[Window | None]) -> tuple[int, int]:
    """How many pixels down and right placements must differ by for their windows to differ by whole cells."""
    known = [window for window in windows if window]
    rows = math.lcm(*(window.row_step for window in known))
    return rows, math.lcm(*(window.column_step for window in known))


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of the feature map that each placement's window covers, as flat indices.

    `signed` is -1 for cells outside the map; `index` has some cell of the map there, and `outside` says which they
    are: None where no window sticks out. `spans` are the rows of the window that lie in the map, from and to, the
    columns likewise, and the row and column of the map at which the window begins.
    """

    index: Annotated[Tensor, "p cells"]
    signed: Annotated[Tensor, "p cells"]
    outside: Annotated[Tensor, "p 1 h w 1"] | None
    spans: Annotated[Tensor, "p 6"]

    def slice(self, start: int, stop: int) -> "Cells":
        """The cells of some of the placements."""
        outside = None if self.outside is None else self.outside[start:stop]
        return Cells(self.index[start:stop], self.signed[start:stop], outside, self.spans[start:stop])


def cells(window: Window, shifts: np.ndarray, area: FeatureMap, device: torch.device) -> Cells:
    """The cells of the window on the map when it is shifted by these numbers of image pixels (p, 2)."""
    rows = _axis_cells(window.top, window.height, shifts[:, 0], window.row_step)
    columns = _axis_cells(window.left, window.width, shifts[:, 1], window.column_step)
    rows_inside, columns_inside = (rows >= 0) & (rows < area.height), (columns >= 0) & (columns < area.width)
    inside = rows_inside[:, :, None] & columns_inside[:, None, :]
    flat = np.where(inside, rows[:, :, None] * area.width + columns[:, None, :], -1).astype(np.int32)
    signed = torch.from_numpy(flat).to(device)
    outside = None if inside.all() else (signed < 0)[:, None, :, :, None]
    signed = signed.flatten(1)
    spans = np.stack([*_span(rows_inside), *_span(columns_inside), rows[:, 0], columns[:, 0]], axis=1)
    spans = torch.from_numpy(spans.astype(np.int32)).to(device)
    return Cells(signed.clamp(min=0).long(), signed, outside, spans)


def _span(inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the run of true flags in each row (p, extent) begins and ends, each (p,)."""
    first = inside.argmax(axis=1)
    return first, first + inside.sum(axis=1)


def _axis_cells(origin: int, extent: int, shifts: np.ndarray, step: int) -> np.ndarray:
    return (origin + shifts // step)[:, None] + np.arange(extent)


@dataclass(frozen=True, slots=True)
class CommonWindows:
    """One geometry for all placements: each window begins at the multiple of the network's strides at or before its
    placement, and reaches as much further.

    `step` are these strides down and right, and `bases` the corners (b, 2) at which windows can begin, row by row. What
    depends on them alone is tabled once.
    """

    layout: Layout
    windows: tuple[Window | None, ...]
    step: tuple[int, int]
    bases: np.ndarray
    device: torch.device
    _cells: dict[tuple[Window, FeatureMap], Tensor] = field(default_factory=dict)
    _shifts: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @staticmethod
    def of(
        layout: Layout, step: tuple[int, int], extent: tuple[int, int], device: torch.device
    ) -> "CommonWindows":
        """Windows of this height and width on the image."""
        image = layout.area(0)
        bases = np.mgrid[0 : image.height : step[0], 0 : image.width : step[1]].reshape(2, -1).T
        return CommonWindows(layout, layout.windows(Window(0, 0, *extent)), step, bases, device)

    def base(
        self, rows: Annotated[Tensor, "..."], columns: Annotated[Tensor, "..."]
    ) -> Annotated[Tensor, "..."]:
        """Which base the windows of placements begin at."""
        in_row = -(-self.layout.area(0).width // self.step[1])
        return rows // self.step[0] * in_row + columns // self.step[1]

    def cells(self, window: Window, area: FeatureMap) -> Annotated[Tensor, "bases cells"]:
        """The cells of a window on its map from every base; -1 outside."""
        if (window, area) not in self._cells:
            self._cells[window, area] = cells(window, self.bases, area, self.device).signed
        return self._cells[window, area]

    def shifts(self, window: Window) -> Annotated[Tensor, "bases 2"]:
        """How far down and right a window lies on its map from every base."""
        step = (window.row_step, window.column_step)
        if step not in self._shifts:
            self._shifts[step] = torch.from_numpy(self.bases // step).int().to(self.device)
        return self._shifts[step]


def covered_pixels(threat: Patch, rows: int, columns: int) -> Annotated[Tensor, "offsets h w 1"]:
    """True where the stamp covers a window when it lies 0 to `rows` - 1 rows and 0 to `columns` - 1 columns inside it.

    Offsets are counted row by row; the window is just large enough for all of them.
    """
    height, width = threat.height + rows - 1, threat.width + columns - 1
    masks = torch.zeros(rows, columns, height, width, 1, dtype=torch.bool)
    for top, left in itertools.product(range(rows), range(columns)):
        masks[top, left, top : top + threat.height, left : left + threat.width, 0] = threat.stamp
    return masks.flatten(0, 1)
