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

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar

import torch
from torch import Tensor

from patchcert.bounds import Rounding
from patchcert.bounds.geometry import NotCovered, Window
from patchcert.bounds.network import Step
from patchcert.windows.clean import Clean
from patchcert.windows.kernels import is_fused
from patchcert.windows.layout import Layout

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

Built = TypeVar("Built")


def if_covered(build: Callable[[], Built]) -> Built | None:
    """What `build` makes; None where windows cannot follow the network, so that the dense way takes over."""
    try:
        return build()
    except NotCovered as reason:
        logger.debug("the dense path takes over: %s", reason)
        return None


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
    def within(epsilon: float | Tensor, pixels: OnWindows) -> "Windows":
        """The pixels, each changed by at most epsilon and staying in [0, 1]."""
        lower, upper = (pixels - epsilon).clamp(min=0), (pixels + epsilon).clamp(max=1)
        return Windows((upper + lower) * 0.5 - pixels, (upper - lower) * 0.5)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Windows":
        """Both parts, each changed by the same function."""
        return replace(self, deviation=function(self.deviation), radius=function(self.radius))

    def times(self, weights: "Weights", product: Callable[[Tensor, Tensor], Tensor]) -> "Windows":
        """The deviation times the weights, and the radius times their absolute values."""
        return Windows(product(self.deviation, weights[0]), product(self.radius, weights[1]))

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
        self,
        key: tuple,
        form: Callable[[], Tensor],
        absolute: Callable[[Tensor], Tensor] = Tensor.abs,
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
    def outside(self, index: int) -> Outside | None:
        """Which cells of the windows on value `index` lie outside the feature map; None where none does."""

    @abstractmethod
    def clean_windows(self, index: int) -> OnWindows | Annotated[Tensor, "n features"]:
        """The clean value `index` on the windows; the value itself where it has no places."""

    @abstractmethod
    def surroundings(self, position: int, height: int, width: int) -> OnWindows:
        """The clean values that the step at `position` looks at, and its padding outside the feature map."""

    @abstractmethod
    def flat_product(self, part: Part, columns: Columns, index: int) -> Annotated[Tensor, "p _ out"]:
        """Windows on value `index` times the weights of the linear layer after it."""

    @abstractmethod
    def signed_cells(self, index: int) -> Annotated[Tensor, "p ... cells"] | None:
        """The cells of the windows on value `index`, -1 outside the map; None without places."""

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


def common_steps(windows: Iterable[Window | None]) -> tuple[int, int]:
    """How many pixels down and right placements must differ by for their windows to differ by whole cells."""
    known = [window for window in windows if window]
    return math.lcm(*(window.row_step for window in known)), math.lcm(
        *(window.column_step for window in known)
    )
