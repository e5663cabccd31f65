"""Linear bounds at all placements of a patch, for networks of one hidden layer, where they cost little more than
intervals: what a patch does to the hidden layer is linear in its few pixels. They rank placements in training, and are
rounded to nearest.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds import Interval, Network
from patchcert.bounds.linear import Slope
from patchcert.bounds.operations import Affine, Linear, Operation, Reshape, is_relu
from patchcert.bounds.rounding import fast_arithmetic
from patchcert.errors import UnsupportedLayer
from patchcert.tensors import Epsilon, Images, Labels, PlacementMargins
from patchcert.threats import Patch

Pixels = Annotated[Tensor, "p q"]
"""For each placement the numbers of an image that it covers, counted over channels, rows and columns."""


def covered_numbers(threat: Patch, images: Images) -> Pixels:
    """The numbers that each placement of the threat covers in such images."""
    channels, height, width = images.shape[1:]
    corners, stamp = threat.placements(height, width).corners, threat.stamp.nonzero()
    places = (corners[:, None] + stamp).cpu()  # p cells 2
    flat = places[..., 0] * width + places[..., 1]
    return (flat[:, None] + torch.arange(channels)[:, None] * (height * width)).flatten(1).to(images.device)


def hidden_layer(network: Network) -> list[Operation]:
    """The affine operations before the only ReLU; other networks are refused."""
    operations = [step.operation for step in network.steps]
    is_chain = all(step.inputs == (position,) for position, step in enumerate(network.steps))
    before, end = operations[:-2], operations[-2:]
    ends_well = bool(before) and is_relu(end[0]) and isinstance(end[1], Linear)
    if not is_chain or not ends_well or not all(isinstance(each, Affine | Reshape) for each in before):
        raise UnsupportedLayer(
            "linear bounds of all placements exist for networks of one hidden layer: affine layers, a ReLU, a linear "
            "layer",
            hint='set strategy.search = "interval" and strategy.candidates to a few',
        )
    return before


@dataclass(frozen=True, slots=True)
class LinearSweep:
    """All placements of one patch on a network of one hidden layer and one size of images."""

    network: Network
    layer: tuple[Operation, ...]
    pixels: Pixels
    memory_budget: int

    @staticmethod
    def of(network: Network, images: Images, threat: Patch, memory_budget: int) -> "LinearSweep":
        """Refused for other networks."""
        layer = tuple(hidden_layer(network))
        return LinearSweep(network, layer, covered_numbers(threat, images), memory_budget)

    @torch.no_grad()
    def margins(self, images: Images, labels: Labels, epsilon: Epsilon, slope: Slope) -> PlacementMargins:
        """Margins at all placements; products may run in TF32, and on a GPU the lines' in bfloat16."""
        on_gpu = images.device.type == "cuda"
        of_some, short = (_compiled(), torch.bfloat16) if on_gpu else (some_margins, images.dtype)
        with fast_arithmetic():
            hidden = self.network.values(images)[-3].flatten(1)
            weight, head = self._weight(images), self.network.head
            assert head is not None
            forms = head.weight()[labels].unsqueeze(1) - head.weight()  # n k units
            constant = 0.0 if head.bias is None else head.bias()[labels].unsqueeze(1) - head.bias()
            parts = [
                of_some(images.flatten(1)[:, pixels], hidden, weight[pixels], forms, epsilon, slope, short)
                for pixels in self._slices(forms)
            ]
            return (torch.cat(parts)[: len(self.pixels)] + constant).transpose(0, 1)

    def _weight(self, images: Images) -> Annotated[Tensor, "numbers units"]:
        """The hidden layer as one matrix."""
        size = images[0].numel()
        rows = torch.eye(size, dtype=images.dtype, device=images.device).reshape(size, *images.shape[1:])
        for operation in self.layer:
            is_affine = isinstance(operation, Affine)
            rows = operation.map(rows, precise=False) if is_affine else operation.forward(rows)
        return rows.flatten(1)

    def _slices(self, forms: Annotated[Tensor, "n k units"]) -> Iterator[Pixels]:
        """As many placements at a time as keep their lines, and what is made of them, within the budget.

        All slices have one size, for which code is compiled once: the last repeats the last placement.
        """
        at_once = max(1, self.memory_budget // (3 * forms.numel() * forms.element_size()))
        slices = -(-len(self.pixels) // at_once)
        size = -(-len(self.pixels) // slices)
        repeated = self.pixels[-1:].expand(slices * size - len(self.pixels), -1)
        return iter(torch.cat([self.pixels, repeated]).split(size))


@cache
def _compiled() -> Callable[..., Annotated[Tensor, "p n k"]]:
    """`some_margins` as torch.compile fuses it: unfused, a GPU spends its time on reading and writing lines."""
    return torch.compile(some_margins, dynamic=False)


def some_margins(
    clean: Annotated[Tensor, "n p q"],
    hidden: Annotated[Tensor, "n units"],
    weight: Annotated[Tensor, "p q units"],
    forms: Annotated[Tensor, "n k units"],
    epsilon: Epsilon,
    slope: Slope,
    short: torch.dtype,
) -> Annotated[Tensor, "p n k"]:
    """Margins at some placements, without the bias of the last layer; lines are kept in the `short` precision."""
    clean = clean.transpose(0, 1)
    patch = Interval((clean - epsilon).clamp(min=0), (clean + epsilon).clamp(max=1))
    centre = hidden + (patch.centre - clean) @ weight
    box = Interval.around(centre, patch.radius @ weight.abs())
    is_bent, straight = (box.lower < 0) & (box.upper > 0), (box.lower >= 0).to(centre.dtype)
    low = torch.where(is_bent, slope(box), straight)
    chord = torch.where(is_bent, box.upper / (box.upper - box.lower).where(is_bent, 1), straight)
    lifted = torch.where(is_bent, chord * -box.lower, 0.0)
    rising, falling = forms.clamp(min=0), forms.clamp(max=0)
    middle = _product(rising, low * centre) + _product(falling, chord * centre + lifted)
    lines = (rising * low.unsqueeze(2) + falling * chord.unsqueeze(2)).to(short)  # p n k units
    moved = lines.flatten(1, 2) @ weight.transpose(1, 2).to(short)
    reach = moved.unflatten(1, lines.shape[1:3]).to(centre.dtype).abs() * patch.radius.unsqueeze(2)
    return middle - reach.sum(dim=3)


def _product(
    forms: Annotated[Tensor, "n k units"], values: Annotated[Tensor, "p n units"]
) -> Annotated[Tensor, "p n k"]:
    return (forms @ values.permute(1, 2, 0)).permute(2, 0, 1)
