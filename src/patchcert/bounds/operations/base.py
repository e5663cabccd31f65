"""Intervals, and what is known of any operation."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Size, Tensor

from patchcert.bounds.forms import Forms, Pulled, Slopes
from patchcert.bounds.geometry import FeatureMap, Geometry, NotCovered, Places
from patchcert.bounds.rounding import Rounding
from patchcert.errors import UnsupportedLayer

ANY_NUMBER = 0
"""The arity of an operation that takes however many results it is given."""

Source = Callable[[], Tensor]
"""Reads a weight where it lives, so that a trained layer is seen as it is now."""


@dataclass(frozen=True, slots=True)
class Interval:
    """All tensors that lie elementwise between `lower` and `upper`, both ends included."""

    lower: Tensor
    upper: Tensor

    @staticmethod
    def around(centre: Tensor, radius: Tensor) -> "Interval":
        """The interval that reaches `radius` to both sides of `centre`."""
        return Interval(centre - radius, centre + radius)

    @staticmethod
    def point(value: Tensor) -> "Interval":
        """The interval that holds `value` alone."""
        return Interval(value, value)

    @property
    def centre(self) -> Tensor:
        return (self.upper + self.lower) * 0.5

    @property
    def radius(self) -> Tensor:
        return (self.upper - self.lower) * 0.5

    @property
    def shape(self) -> Size:
        return self.lower.shape

    @property
    def magnitude(self) -> Tensor:
        """The largest absolute values."""
        return torch.maximum(self.lower.abs(), self.upper.abs())

    def intersection(self, other: "Interval") -> "Interval":
        """What lies in both; `lower` above `upper` where nothing does."""
        return Interval(torch.maximum(self.lower, other.lower), torch.minimum(self.upper, other.upper))

    def clamped(self, value: Tensor) -> Tensor:
        """The nearest member."""
        return torch.minimum(torch.maximum(value, self.lower), self.upper)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Interval":
        """Both ends through a function that never falls."""
        return Interval(function(self.lower), function(self.upper))

    def widened(self, relative: float, absolute: float | Tensor = 0.0) -> "Interval":
        """Both ends moved outwards, by `relative` of themselves and `absolute`."""
        below, above = (end.abs() * relative + absolute for end in (self.lower, self.upper))
        return Interval(self.lower - below, self.upper + above)

    def flatten(self, start: int, end: int) -> "Interval":
        """The same interval with the dimensions from `start` to `end` merged."""
        return self.map(lambda part: part.flatten(start, end))


class Operation(ABC):
    """One step of a network. A class of operations is either abstract or final: no subclass has subclasses.

    `forward` and `interval` suffice for certificates. With `backward`, linear bounds follow it. With `places`, patches
    are bounded on windows alone, which is much faster. An operation without a rule of its own in `patchcert.windows` is
    then bounded by its `interval` on what the outputs of a window see of the map.
    """

    arity: ClassVar[int] = 1
    """How many results of the network it takes; `ANY_NUMBER` of them where it joins a list."""
    may_share_memory: ClassVar[bool] = False
    """Whether its result may be a view of its input, so that a change in place of one changes the other."""
    padding: ClassVar[float] = 0.0
    """What lies around a map, where the geometry of `places` has padding."""

    def __init_subclass__(cls) -> None:
        """What others know of an operation, they know of its class; a subclass might compute something else."""
        for base in cls.__bases__:
            if issubclass(base, Operation) and not inspect.isabstract(base):
                raise TypeError(
                    f"{cls.__name__} extends {base.__name__}, a final class: extend Operation instead"
                )

    @abstractmethod
    def forward(self, *inputs: Tensor) -> Tensor:
        """The ordinary value of the step."""

    @abstractmethod
    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        """Contains every output for inputs in the given intervals, and for one input is the tightest such bound."""

    def backward(self, forms: Forms, *inputs: Interval, slope: Slopes, rounding: Rounding) -> Pulled | None:
        """Forms of the output, written by inputs in the given intervals; see `forms` for what then holds.

        None where there is no rule: the output then counts by its interval alone.
        """
        return None

    def places(self, area: FeatureMap) -> Geometry | Places:
        """How outputs see the places of a map: through a sliding kernel, at their own place alone, or all of them.

        Raises NotCovered where none of these holds.
        """
        raise NotCovered(f"windows have no rule for {type(self).__name__}")

    def unpadded(self) -> "Operation":
        """The same operation on maps that come with their padding; needed where the geometry of `places` has any."""
        return self


class Elementwise(Operation):
    """An operation whose outputs depend on the inputs at their own place alone."""

    def places(self, area: FeatureMap) -> Places:
        return Places.KEPT


class Exact(Operation):
    """An operation that never falls in any input, and rounds nothing: it moves or picks values."""

    def interval(self, *inputs: Interval, rounding: Rounding) -> Interval:
        lower = self.forward(*(box.lower for box in inputs))
        return Interval(lower, self.forward(*(box.upper for box in inputs)))


def check_terms(first: Tensor, second: Tensor, kind: str = "sum") -> None:
    """Refuses two results whose sum, or what else is made of them, would mix images."""
    if first.dim() != second.dim():
        raise UnsupportedLayer(
            f"a {kind} of results of shapes {tuple(first.shape)} and {tuple(second.shape)} would mix images",
            hint="give both terms the same dimensions",
        )


def check_maps(value: Tensor) -> None:
    """Refuses results that are no maps: of three dimensions PyTorch would take the images for channels."""
    if value.dim() != 4:
        raise UnsupportedLayer(
            f"maps of shape (n, channels, height, width) are expected, the results have shape {tuple(value.shape)}",
            hint="shape them with x.view(x.size(0), ...), and pick channels by slices like x[:, :1]",
        )
