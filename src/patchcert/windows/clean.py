"""The pass over the unchanged images, which every placement shares."""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from patchcert.bounds import Interval, Network, Rounding, trace
from patchcert.bounds.network import merged_margins
from patchcert.bounds.operations import is_relu
from patchcert.windows.layout import Layout


@dataclass(frozen=True, slots=True)
class Clean:
    """The value of every step on the unchanged images, and the margins there.

    `slack` bounds, per step and image, how far a stored value can be from the exact one; None where bounds
    need not be sound. `largest` is the largest absolute value, on which the rounding of later sums depends.
    """

    values: list[Tensor]
    margins: Tensor
    slack: list[Tensor] | None = None
    largest: list[Tensor] | None = None
    _places: dict[int, Tensor] = field(default_factory=dict)

    def select(self, images: Tensor) -> "Clean":
        """The clean pass of some of the images."""

        def chosen(parts: list[Tensor] | None) -> list[Tensor] | None:
            return None if parts is None else [part.index_select(0, images) for part in parts]

        values = [value.index_select(0, images) for value in self.values]
        return Clean(values, self.margins.index_select(0, images), chosen(self.slack), chosen(self.largest))

    def detached(self) -> "Clean":
        """The same values, without their way back to the weights."""
        return Clean(
            [value.detach() for value in self.values], self.margins.detach(), self.slack, self.largest
        )

    def places(self, index: int, layout: Layout) -> Tensor:
        """Value `index` as (n, places, channels), laid out for windows to be read from it."""
        if index not in self._places:
            area = layout.maps[index]
            assert area is not None
            value = self.values[index].reshape(-1, area.channels, area.height, area.width)
            self._places[index] = value.permute(0, 2, 3, 1).flatten(1, 2).contiguous()
        return self._places[index]


def clean_pass(network: Network, images: Tensor, labels: Tensor) -> Clean:
    """Plain values, for training."""
    values = network.values(images)
    logits = values[-1]
    return Clean(values, logits.gather(1, labels.unsqueeze(1)) - logits)


def exact_clean_pass(audit: Network, images: Tensor, labels: Tensor, dtype: torch.dtype) -> Clean:
    """Values of the given type with proven slack: intervals around single points, outward-rounded in float64."""
    rounding = Rounding.outward(torch.float64)
    intervals = audit.intervals(Interval.point(images.double()), rounding)
    head = audit.head
    assert head is not None
    margins = merged_margins(head, intervals[-2], labels, rounding)
    values, slack, largest = [], [], []
    for position, interval in enumerate(intervals):
        value = _stored(audit, position, interval, values, dtype)
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
    """The number kept for value `index`; after a ReLU that of the kept input, from which kernels compute it."""
    step = audit.steps[index - 1] if index else None
    if step is not None and is_relu(step.operation):
        return torch.relu(before[step.inputs[0]])
    return interval.centre.to(dtype)


def _round_up(values: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.double() * (1 + 1e-6)).to(dtype)


def audit_network(model: nn.Module) -> Network:
    """The model's operations with a float64 copy of its weights."""
    return trace(copy.deepcopy(model).double())
