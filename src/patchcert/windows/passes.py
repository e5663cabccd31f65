"""Bounds carried as differences from the clean pass, on the small window that a patch can reach.

Where a placement can change a value it is kept as `deviation` (centre of the interval minus the clean value)
and `radius`; everywhere else both are zero and nothing is computed. An affine layer maps them by W and |W|
without its offset, which the clean pass holds already; a monotone layer looks up the clean values on the
window.

Rounding. What holds at every step, exactly: |value - clean value - deviation| <= radius for every member of the
box, as the numbers are stored. The clean image is such a member, so |deviation| <= radius, and the error
gamma |W||deviation| of a product is at most gamma |W| radius: widening the radius by the factor
(1 + gamma) / (1 - gamma) pays for the products of both. At a monotone layer the sums with the clean value z
cost a few units of |z| and of the radius, and the stored z itself may be off by its slack; both are added to
the radius before and after the function.
"""

import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from patchcert.bounds import Interval, Network, Rounding
from patchcert.bounds.geometry import FeatureMap, NotCovered, Window
from patchcert.bounds.network import Step, merged_margins
from patchcert.bounds.operations import is_relu
from patchcert.tensors import Corners, Epsilon, Images, Labels, Margins
from patchcert.threats import Placements
from patchcert.windows.layout import Cells, Layout, cells, common_steps

logger = logging.getLogger(__name__)

OnWindows = Annotated[Tensor, "p n h w c"]
"""One part of windows, or clean values there."""
Part = Annotated[Tensor, "_ _ h w c"]
"""One part of windows, which may be the same for all placements or images."""
Outside = Annotated[Tensor, "p _ h w 1"]
"""True for the cells of windows that lie outside the feature map."""
Columns = Annotated[Tensor, "places c out"]
"""The weights of a linear layer on a feature map."""

Weights = tuple[Tensor, Tensor]
"""Weights and their absolute values, alike in shape."""

_LARGE_WINDOW = 2**20
"""The number of weights under a window from which a CPU reads them in place instead of gathering them."""

Built = TypeVar("Built")


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_fused(value: Tensor) -> bool:
    """Whether steps on such values run as single kernels: they are float32 on CUDA, and Triton is installed."""
    return value.is_cuda and value.dtype == torch.float32 and _has_triton()


def if_covered(build: Callable[[], Built]) -> Built | None:
    """What `build` makes; None where windows cannot follow the network, so that the dense way takes over."""
    try:
        return build()
    except NotCovered as reason:
        logger.debug("the dense path takes over: %s", reason)
        return None


@dataclass(frozen=True, slots=True)
class Clean:
    """The value of every step on the unchanged images, and the margins there.

    `slack` bounds, per step and image, how far a stored value can be from the exact one; None where bounds
    need not be sound. `largest` is the largest absolute value, on which the rounding of later sums depends.
    """

    values: list[Annotated[Tensor, "n ..."]]
    margins: Margins
    slack: list[Annotated[Tensor, "n"]] | None = None
    largest: list[Annotated[Tensor, "n"]] | None = None
    _places: dict[int, Tensor] = field(default_factory=dict)

    def select(self, images: Annotated[Tensor, "chosen"]) -> "Clean":
        """The clean pass of some of the images, given by their numbers."""

        def chosen(parts: list[Tensor] | None) -> list[Tensor] | None:
            return None if parts is None else [part.index_select(0, images) for part in parts]

        values = [value.index_select(0, images) for value in self.values]
        return Clean(values, self.margins.index_select(0, images), chosen(self.slack), chosen(self.largest))

    def detached(self) -> "Clean":
        """The same values, cut off from the gradient."""
        values = [value.detach() for value in self.values]
        return Clean(values, self.margins.detach(), self.slack, self.largest)

    def places(self, index: int, layout: Layout) -> Annotated[Tensor, "n places c"]:
        """Value `index`, laid out for windows to be read from it."""
        if index not in self._places:
            area = layout.area(index)
            value = self.values[index].reshape(-1, area.channels, area.height, area.width)
            self._places[index] = value.permute(0, 2, 3, 1).flatten(1, 2).contiguous()
        return self._places[index]


def clean_pass(network: Network, images: Images, labels: Labels) -> Clean:
    """Values rounded to nearest, for training."""
    values = network.values(images)
    logits = values[-1]
    return Clean(values, logits.gather(1, labels.unsqueeze(1)) - logits)


def exact_clean_pass(audit: Network, images: Images, labels: Labels, dtype: torch.dtype) -> Clean:
    """Values of the given type with proven slack, from intervals around single points, outward-rounded in float64.

    `audit` is the network with weights of float64.
    """
    rounding, head = Rounding.outward(torch.float64), audit.head
    assert head is not None
    intervals = audit.intervals(Interval.point(images.double()), rounding)
    margins = merged_margins(head, intervals[-2], labels, rounding)
    values, slack, largest = [], [], []
    for position, interval in enumerate(intervals):
        value = _stored(audit, position, interval, values, dtype)
        # The centre is off the middle by 1.2e-16 of itself at most, the radius by as much of its own; `_round_up` pays
        # for the rounding of these sums.
        error = (
            (value.double() - interval.centre).abs()
            + interval.radius * (1 + 1e-9)
            + interval.centre.abs() * 1e-15
        )
        values.append(value)
        slack.append(_round_up(error.flatten(1).amax(dim=1), dtype))
        largest.append(_round_up(value.flatten(1).abs().amax(dim=1), dtype))
    return Clean(values, margins, slack, largest)


def _stored(
    audit: Network, index: int, interval: Interval, before: list[Tensor], dtype: torch.dtype
) -> Tensor:
    """The numbers kept for value `index`; after a ReLU those of the kept input, as kernels compute them."""
    step = audit.steps[index - 1] if index else None
    if step is not None and is_relu(step.operation):
        return torch.relu(before[step.inputs[0]])
    return interval.centre.to(dtype)


def _round_up(values: Annotated[Tensor, "n"], dtype: torch.dtype) -> Annotated[Tensor, "n"]:
    # Rounding to float32 loses 6e-8 of a normal number at most, the sums before it some 1e-16. Passes add tiny for the
    # numbers that are not normal.
    return (values.double() * (1 + 1e-6)).to(dtype)


@dataclass(frozen=True, slots=True)
class Windows:
    """Deviation and radius (p, n, h, w, c) on each placement's window, or (p, n, features) without windows.

    The radius may have p = 1 or n = 1 where it is the same for all. The radius meant is `radius * factor +
    extra`, and cells outside the feature map count as zero, whatever they hold: `settled` carries both out, a
    monotone layer does so in passing.
    """

    deviation: Annotated[Tensor, "p n ..."]
    radius: Annotated[Tensor, "_ _ ..."]
    factor: float = 1.0
    extra: float = 0.0
    is_ragged: bool = False

    @staticmethod
    def within(epsilon: Epsilon, pixels: OnWindows) -> "Windows":
        """The pixels, each changed by at most epsilon and staying in [0, 1]."""
        lower, upper = (pixels - epsilon).clamp(min=0), (pixels + epsilon).clamp(max=1)
        return Windows((upper + lower) * 0.5 - pixels, (upper - lower) * 0.5)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Windows":
        """Both parts, each changed by the same function."""
        return replace(self, deviation=function(self.deviation), radius=function(self.radius))

    def times(self, weights: "Weights", product: Callable[[Tensor, Tensor], Tensor]) -> "Windows":
        """The deviation times the weights, and the radius times their absolute values."""
        return Windows(product(self.deviation, weights[0]), product(self.radius, weights[1]))

    def masked(self, masks: Annotated[Tensor, "b members _ h w 1"]) -> "Windows":
        """The windows (b, n, h, w, c) on the pixels of each member, and nothing elsewhere."""
        return self.map(lambda part: (part.unsqueeze(1) * masks).flatten(0, 1))

    def slice(self, start: int, stop: int) -> "Windows":
        """The windows of some of the placements."""
        return self.map(lambda part: part if len(part) == 1 else part[start:stop])

    def settled(self, outside: Outside | None) -> "Windows":
        """The same windows with nothing left to apply."""
        deviation, radius = self.deviation, self.radius
        if self.factor != 1 or self.extra:
            radius = radius * self.factor + self.extra
        if self.is_ragged and outside is not None:
            deviation, radius = (_emptied(part, outside) for part in (deviation, radius))
        return Windows(deviation, radius)

    def widened(self, roundings: int, rounding: Rounding) -> "Windows":
        """With a radius that pays for sums of products in which each term is rounded `roundings` times."""
        if not rounding.is_outward:
            return self
        gamma = rounding.gamma(roundings)
        # (1 + g) / (1 - g) <= 1 + 2 g (1 + 2 g) for g <= 1/2, and gamma is below 1/8. Then the factor is rounded to the
        # type of the radius (in float64: when it is made, twice), multiplied and added to: at most 4 units. Counts of
        # roundings have besides one to spare, which is 2 units more.
        factor = 1 + 2 * gamma * (1 + 2 * gamma) + 4 * rounding.unit
        # A product that underflows is off by unit * tiny at most, and a sum has fewer than 1 / (2 unit^2) of them.
        return replace(self, factor=factor, extra=rounding.tiny / rounding.unit)


def _emptied(part: Tensor, outside: Outside) -> Tensor:
    """The part with zeros outside; written in place where no gradient needs it and it does not stand for several."""
    is_shared = part.shape[0] != outside.shape[0]
    if torch.is_grad_enabled() or is_shared:
        return part.masked_fill(outside, 0.0)
    return part.masked_fill_(outside, 0.0)


@dataclass(frozen=True, slots=True)
class SharedByPasses:
    """What the passes over one batch of images share: the clean pass, and weights in the forms that windows need."""

    layout: Layout
    clean: Clean
    rounding: Rounding
    _weights: dict[tuple, Weights] = field(default_factory=dict)
    _slacks: dict[tuple, Tensor] = field(default_factory=dict)

    def weights(
        self, key: tuple, form: Callable[[], Tensor], absolute: Callable[[Tensor], Tensor] = Tensor.abs
    ) -> Weights:
        """The weights that `form` gives, and their absolute values, made once for all passes."""
        if key not in self._weights:
            formed = form()
            self._weights[key] = (formed, absolute(formed))
        return self._weights[key]

    def slack(self, index: int, units: int, extra: float) -> Annotated[Tensor, "n"]:
        """How far the stored clean value `index` can be from the exact one, with `units` roundings of sums with it, and
        `extra`."""
        key = (index, units, extra)
        if key not in self._slacks:
            assert self.clean.slack is not None
            assert self.clean.largest is not None
            slack = self.clean.slack[index] + self.clean.largest[index] * (units * self.rounding.unit)
            # Two products and two sums here, the sum with the radius and the one with the clean value round these terms
            # 6 times, for which 8 units pay; underflow costs less than 2 tiny, and rounding less than a second `extra`.
            self._slacks[key] = slack * (1 + 8 * self.rounding.unit) + (2 * self.rounding.tiny + 2 * extra)
        return self._slacks[key]


class WindowPass(ABC):
    """Placements on their way through the network; which placements they are decides where their windows lie."""

    shared: SharedByPasses
    windows: tuple[Window | None, ...]
    has_gradient: bool = False

    @abstractmethod
    def flat_product(self, part: Part, columns: Columns, index: int) -> Annotated[Tensor, "p _ out"]:
        """Windows on value `index` times the weights of the linear layer after it."""

    @abstractmethod
    def _gather(self, window: Window, index: int) -> OnWindows:
        """The clean value `index` where the window lies for each placement."""

    @abstractmethod
    def _signed(self, window: Window, index: int) -> Annotated[Tensor, "p ... cells"]:
        """The cells of the window on its map for each placement, as flat indices, -1 outside."""

    @abstractmethod
    def _outside(self, window: Window, index: int) -> Outside | None:
        """Which cells of the window lie outside the map for each placement; None where none does."""

    def clean_windows(self, index: int) -> OnWindows | Annotated[Tensor, "n features"]:
        """The clean value `index` on the windows; the value itself where it has no places."""
        window = self.windows[index]
        return self.clean.values[index].flatten(1) if window is None else self._gather(window, index)

    def signed_cells(self, index: int) -> Annotated[Tensor, "p ... cells"] | None:
        """The cells of the windows on value `index`, -1 outside the map; None without places."""
        window = self.windows[index]
        return None if window is None else self._signed(window, index)

    def outside(self, index: int) -> Outside | None:
        """Which cells of the windows on value `index` lie outside the feature map; None where none does."""
        window = self.windows[index]
        return None if window is None else self._outside(window, index)

    def surroundings(self, position: int) -> OnWindows:
        """The clean values that the step at `position` looks at, and its padding outside the feature map."""
        step, seen = self.steps[position], self.layout.seen(position, self.windows)
        assert seen is not None
        values, outside = self._gather(seen, step.inputs[0]), self._outside(seen, step.inputs[0])
        return values if outside is None else values.masked_fill(outside, step.operation.padding)

    def spans(self, index: int) -> Annotated[Tensor, "p 6"] | None:
        """Which part of the windows on value `index` lies in the map, and where, as in `Cells`; None where each image
        has windows of its own."""
        return None

    @property
    def is_fused(self) -> bool:
        """Whether steps run as single kernels."""
        return is_fused(self.clean.values[0])

    @property
    def layout(self) -> Layout:
        return self.shared.layout

    @property
    def clean(self) -> Clean:
        return self.shared.clean

    @property
    def rounding(self) -> Rounding:
        return self.shared.rounding

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.layout.network.steps

    def window(self, index: int) -> Window:
        """The window on value `index`, which must have places."""
        window = self.windows[index]
        assert window is not None
        return window


def repeated(table: Tensor, count: int) -> Tensor:
    """Each row `count` times in a row."""
    return table if count == 1 else table.unsqueeze(1).expand(-1, count, *table.shape[1:]).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Group:
    """Placements whose windows differ by whole cells on every feature map, so that one geometry serves them all.

    `cells` are those of the windows and, for steps that go by their interval bound, of what their output windows look
    at: by the window of the first member and its map.
    """

    members: Annotated[Tensor, "p"]
    windows: tuple[Window | None, ...]
    cells: dict[tuple[Window, FeatureMap], Cells]

    def __len__(self) -> int:
        return len(self.members)


def groups(layout: Layout, placements: Placements, device: torch.device) -> list[Group]:
    """All placements, grouped by their alignment to the strides of the network."""
    windows = layout.windows(Window(0, 0, placements.height, placements.width))
    row_step, column_step = common_steps(windows)
    corners = placements.corners.cpu()
    alignment = (corners[:, 0] % row_step) * column_step + corners[:, 1] % column_step
    return [
        _group(layout, placements, corners, (alignment == value).nonzero().flatten(), device)
        for value in alignment.unique().tolist()
    ]


def _group(
    layout: Layout, placements: Placements, corners: Corners, members: Tensor, device: torch.device
) -> Group:
    first = corners[members[0]]
    windows = layout.windows(Window(int(first[0]), int(first[1]), placements.height, placements.width))
    shifts = (corners[members] - first).numpy()
    needed = list(zip(windows, layout.maps, strict=True))
    for position, step in enumerate(layout.network.steps):
        needed.append((layout.seen(position, windows), layout.maps[step.inputs[0]]))
    known = dict.fromkeys((window, area) for window, area in needed if window and area)
    covered = {(window, area): cells(window, shifts, area, device) for window, area in known}
    return Group(members.to(device), windows, covered)


@final
class GroupPass(WindowPass):
    """A slice of one group: the same placements for every image, aligned alike to the strides of the network, each
    `count` times in a row."""

    def __init__(self, shared: SharedByPasses, group: Group, start: int, stop: int, count: int = 1) -> None:
        self.shared, self.windows = shared, group.windows
        self.group, self.start, self.stop, self.count = group, start, stop, count

    def repeated(self, count: int) -> "GroupPass":
        """Each placement `count` times in a row."""
        return GroupPass(self.shared, self.group, self.start, self.stop, count)

    def cells(self, window: Window, index: int) -> Cells:
        """The cells of the window on value `index` for each placement, once for all copies."""
        return self.group.cells[window, self.layout.area(index)].slice(self.start, self.stop)

    def spans(self, index: int) -> Annotated[Tensor, "p 6"] | None:
        window = self.windows[index]
        return None if window is None or self.count > 1 else self.cells(window, index).spans

    def flat_product(self, part: Part, columns: Columns, index: int) -> Annotated[Tensor, "p _ out"]:
        if self.count > 1:
            # Copies count as further images, which share their weights.
            images = part.unflatten(0, (-1, self.count)).flatten(1, 2)
            moved = self.repeated(1).flat_product(images, columns, index)
            return moved.unflatten(1, (self.count, -1)).flatten(0, 1)
        window = self.window(index)
        cells = self.cells(window, index)
        if not part.is_cuda and cells.index.shape[1] * columns[0].numel() >= _LARGE_WINDOW:
            rows = cells.signed.view(-1, window.height, window.width).numpy()
            return torch.stack(
                [self._by_rows(part[min(one, len(part) - 1)], columns, rows[one]) for one in range(len(rows))]
            )
        chosen = columns.index_select(0, cells.index.flatten()).reshape(
            len(cells.index), -1, columns.shape[2]
        )
        return self.rounding.product(part.flatten(2), chosen)

    def _by_rows(
        self, part: Annotated[Tensor, "n h w c"], columns: Columns, cells: np.ndarray
    ) -> Annotated[Tensor, "n out"]:
        """One placement's window times its weights, row by row: those of a row lie side by side."""
        total = part.new_zeros(len(part), columns.shape[2])
        for row, places in enumerate(cells):
            inside = np.flatnonzero(places >= 0)
            if len(inside):
                first, count = int(inside[0]), len(inside)
                weights = columns[int(places[first]) :][:count].flatten(0, 1)
                total += self.rounding.product(part[:, row, first : first + count].flatten(1), weights)
        return total

    def _gather(self, window: Window, index: int) -> OnWindows:
        cells, places = self.cells(window, index).index, self.clean.places(index, self.layout)
        values = places.index_select(1, cells.flatten()).unflatten(1, cells.shape).transpose(0, 1)
        return repeated(values.unflatten(2, (window.height, window.width)), self.count)

    def _signed(self, window: Window, index: int) -> Annotated[Tensor, "p cells"]:
        return repeated(self.cells(window, index).signed, self.count)

    def _outside(self, window: Window, index: int) -> Outside | None:
        outside = self.cells(window, index).outside
        return None if outside is None else repeated(outside, self.count)
