"""Linear bounds at all placements of a patch, for networks of one hidden layer, where they cost little more than
intervals: what a patch does to the hidden layer is linear in its few pixels. They rank placements in training, and are
rounded to nearest.
"""

from dataclasses import dataclass
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
        """Margins at all placements; products may run in TF32."""
        with fast_arithmetic():
            hidden = self.network.values(images)[-3].flatten(1)
            weight, head = self._weight(images), self.network.head
            assert head is not None
            forms = head.weight()[labels].unsqueeze(1) - head.weight()  # n k units
            constant = 0.0 if head.bias is None else head.bias()[labels].unsqueeze(1) - head.bias()
            parts = [
                self._part(images, hidden, weight[pixels], forms, pixels, epsilon, slope)
                for pixels in self.pixels.split(self._at_once(forms))
            ]
            return (torch.cat(parts) + constant).transpose(0, 1)

    def _part(
        self,
        images: Images,
        hidden: Annotated[Tensor, "n units"],
        weight: Annotated[Tensor, "p q units"],
        forms: Annotated[Tensor, "n k units"],
        pixels: Pixels,
        epsilon: Epsilon,
        slope: Slope,
    ) -> Annotated[Tensor, "p n k"]:
        """Margins at some placements, without the bias of the last layer."""
        clean = images.flatten(1)[:, pixels].transpose(0, 1)  # p n q
        patch = Interval((clean - epsilon).clamp(min=0), (clean + epsilon).clamp(max=1))
        centre = hidden + (patch.centre - clean) @ weight
        box = Interval.around(centre, patch.radius @ weight.abs())
        is_bent, straight = (box.lower < 0) & (box.upper > 0), (box.lower >= 0).to(centre.dtype)
        low = torch.where(is_bent, slope(box), straight)
        chord = torch.where(is_bent, box.upper / (box.upper - box.lower).where(is_bent, 1), straight)
        lifted = torch.where(is_bent, chord * -box.lower, 0.0)
        rising, falling = forms.clamp(min=0), forms.clamp(max=0)
        middle = self._product(rising, low * centre) + self._product(falling, chord * centre + lifted)
        lines = torch.addcmul(rising * low.unsqueeze(2), falling, chord.unsqueeze(2))  # p n k units
        moved = (lines.flatten(1, 2) @ weight.transpose(1, 2)).unflatten(1, lines.shape[1:3]).abs_()
        return middle - (moved @ patch.radius.unsqueeze(3)).squeeze(3)

    @staticmethod
    def _product(
        forms: Annotated[Tensor, "n k units"], values: Annotated[Tensor, "p n units"]
    ) -> Annotated[Tensor, "p n k"]:
        return (forms @ values.permute(1, 2, 0)).permute(2, 0, 1)

    def _weight(self, images: Images) -> Annotated[Tensor, "numbers units"]:
        """The hidden layer as one matrix."""
        size = images[0].numel()
        rows = torch.eye(size, dtype=images.dtype, device=images.device).reshape(size, *images.shape[1:])
        for operation in self.layer:
            is_affine = isinstance(operation, Affine)
            rows = operation.map(rows, precise=False) if is_affine else operation.forward(rows)
        return rows.flatten(1)

    def _at_once(self, forms: Annotated[Tensor, "n k units"]) -> int:
        """As many placements as keep their lines, and what is made of them, within the budget."""
        return max(1, self.memory_budget // (3 * forms.numel() * forms.element_size()))
