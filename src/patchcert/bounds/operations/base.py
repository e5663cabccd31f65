"""What every operation states: its value, its interval bound, and which outputs see which places of a map."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Size, Tensor

from patchcert.bounds.geometry import FeatureMap, Geometry, NotCovered, Places
from patchcert.bounds.rounding import Rounding

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

    def map(self, function: Callable[[Tensor], Tensor]) -> "Interval":
        """Both ends through a function that never falls."""
        return Interval(function(self.lower), function(self.upper))

    def flatten(self, start: int, end: int) -> "Interval":
        """The same interval with the dimensions from `start` to `end` merged."""
        return self.map(lambda part: part.flatten(start, end))


class Operation(ABC):
    """One step of a network. A class of operations is either abstract or final: no subclass has subclasses.

    `forward` and `interval` suffice for certificates. With `places`, patches are bounded on windows alone, which is
    much faster. An operation without a rule of its own in `patchcert.windows` is then bounded by its `interval` on
    what the outputs of a window see of the map.
    """

    arity: ClassVar[int] = 1
    """How many results of the network it takes."""
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

    def places(self, area: FeatureMap) -> Geometry | Places:
        """How outputs see the places of a map: through a sliding kernel, at their own place alone, or all of them.

        Raises NotCovered where none of these holds.
        """
        raise NotCovered(f"windows have no rule for {type(self).__name__}")

    def unpadded(self) -> "Operation":
        """The same operation on maps that come with their padding; needed where the geometry of `places` has any."""
        return self
