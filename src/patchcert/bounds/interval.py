"""The interval: a lower and an upper bound for every element of a tensor."""

from dataclasses import dataclass

from torch import Size, Tensor


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

    def flatten(self, start: int, end: int) -> "Interval":
        """The same interval with the dimensions from `start` to `end` merged."""
        return Interval(self.lower.flatten(start, end), self.upper.flatten(start, end))
