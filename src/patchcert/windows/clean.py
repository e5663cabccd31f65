"""The pass over the unchanged images, which every placement shares."""

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds import Interval, Network, Rounding
from patchcert.bounds.network import merged_margins
from patchcert.bounds.operations import is_relu
from patchcert.tensors import Images, Labels, Margins
from patchcert.windows.layout import Layout


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
            area = layout.maps[index]
            assert area is not None
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
    rounding = Rounding.outward(torch.float64)
    intervals = audit.intervals(Interval.point(images.double()), rounding)
    head = audit.head
    assert head is not None
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
