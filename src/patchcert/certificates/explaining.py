"""Why interval bounds prove little: how wide they are after each layer, and how many units they leave undecided."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from patchcert.bounds import Interval, Network, trace
from patchcert.bounds.operations import Monotone, Softplus, Valley
from patchcert.certificates.checks import model_of_type
from patchcert.tensors import Images
from patchcert.threats import Patch

WIDE = 10.0
"""From this many times the size of the values on, bounds say next to nothing of them."""


@final
@dataclass(frozen=True, slots=True)
class Width:
    """What bounds say of the values that one patch reaches before an activation, or of the logits.

    `reached` is the share of values that it reaches, `width` how many times as wide the mean bounds of these are
    as values are large, and `undecided` the share of them whose sign is open.
    """

    name: str
    reached: float
    width: float
    undecided: float

    @property
    def times(self) -> str:
        """The width in figures that are short and need no powers, as long as it is below a million."""
        return f"{self.width:,.0f}" if 1000 <= self.width < 1e6 else f"{self.width:.3g}"

    def __str__(self) -> str:
        return f"{self.name}: {self.reached:.0%} reached, {self.times} times as wide, {self.undecided:.0%} unstable"


def blown_up(found: list[Width]) -> Width | None:
    """The first from which on all bounds are wide; None where those of the logits are not."""
    narrow = [place for place, each in enumerate(found) if each.width <= WIDE]
    first = narrow[-1] + 1 if narrow else 0
    return found[first] if first < len(found) else None


@torch.no_grad()
def widths(
    model: nn.Module, images: Images, threat: Patch, corner: tuple[int, int] | None = None
) -> list[Width]:
    """How bounds grow from activation to activation up to the logits, with one patch at a placement.

    That is the one of this top-left corner; without one, the middle placement.
    """
    network = trace(model_of_type(model, images.dtype), images.shape[1:])
    corners = threat.placements(images.shape[-2], images.shape[-1]).corners.to(images.device)
    chosen = corners[len(corners) // 2] if corner is None else corners.new_tensor(corner)
    intervals = network.intervals(threat.boxes(images, chosen[None]).flatten(0, 1))
    values = network.values(images)
    seen = [(name, index) for name, index in _watched(network) if index > 0]
    return [_width(name, intervals[index], values[index]) for name, index in seen]


def _watched(network: Network) -> list[tuple[str, int]]:
    """The values before activations, by the names of these, and the logits."""
    smooth = (Monotone, Valley, Softplus)
    before = [(step.name, step.inputs[0]) for step in network.steps if isinstance(step.operation, smooth)]
    return [*((f"before '{name}'", index) for name, index in before), ("the logits", len(network.steps))]


def _width(name: str, box: Interval, values: Tensor) -> Width:
    size = float(values.abs().double().mean())
    wide = (box.upper - box.lower).double()
    is_reached = wide > 1e-5 * size
    count = max(int(is_reached.sum()), 1)
    is_open = (box.lower < 0) & (box.upper > 0) & is_reached
    width = float(wide[is_reached].sum()) / count / max(size, 1e-30)
    return Width(name, float(is_reached.double().mean()), width, int(is_open.sum()) / count)
