"""What keeps bounds tight while a network learns on them: its first weights, its batch norms and two regularisers.

Shi et al. 2021, Fast Certified Robust Training with Short Warmup. There every pixel is free; here only those of a patch
are, so that a layer is judged by the units that the patch can reach.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from patchcert.bounds import Interval, Network
from patchcert.bounds.operations import is_relu
from patchcert.errors import SpecError
from patchcert.threats import Patch
from patchcert.train.batch_norms import NormedNetwork
from patchcert.train.strategies.placements import PlacedPatch
from patchcert.train.strategy import Batch, Scalar, TrainedThreat

TOLERATED = 0.5
"""Ratios from here on cost nothing."""


@dataclass(frozen=True, slots=True)
class BoundSettings:
    """What training on bounds may add to its loss; nothing by default.

    With `initialisation = "interval"` weights begin so that no layer widens bounds. Batch norms have the `statistics`
    of clean images, or of these and of bounds at a random placement. `tightness` and `relu_balance` are the weights of
    the two regularisers, which fall to 0 as epsilon grows to 1.
    """

    initialisation: Literal["default", "interval"] = "default"
    statistics: Literal["clean", "both"] = "both"
    tightness: float = 0.0
    relu_balance: float = 0.0

    def __post_init__(self) -> None:
        for key in ("tightness", "relu_balance"):
            if not 0 <= getattr(self, key) < math.inf:
                raise SpecError(f"{key} is {getattr(self, key)}; expected a weight of at least 0")

    @property
    def has_regularisers(self) -> bool:
        """Whether anything is added to the loss."""
        return self.tightness > 0 or self.relu_balance > 0


@torch.no_grad()
def initialise_for_intervals(model: nn.Module, generator: Generator) -> None:
    """Draw the weights of all layers but the first from N(0, 2 pi / n^2), for n inputs, and let their biases be 0.

    A sum of n weights of deviation s has a radius of n s sqrt(2 / pi) times that of its inputs, on average, and of that
    a ReLU leaves a half: with s = sqrt(2 pi) / n the radius stays as it is. The first layer, of whose inputs a patch
    can change only a few, keeps its weights.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    for layer in layers[1:]:
        deviation = math.sqrt(2 * math.pi) / layer.weight[0].numel()
        drawn = torch.randn(layer.weight.shape, generator=generator, device=generator.device)
        layer.weight.copy_(drawn * deviation)
        if layer.bias is not None:
            layer.bias.zero_()


@dataclass(frozen=True, slots=True)
class Observation:
    """What a step sees of a batch before it is bounded: statistics of batch norms, and what regularisers add.

    Both look at the bounds of one placement for each image, drawn at random, at the present epsilon.
    """

    network: Network
    patch: PlacedPatch | None
    settings: BoundSettings
    regularises: bool

    @staticmethod
    def of(
        network: Network, threat: TrainedThreat, settings: BoundSettings, regularises: bool
    ) -> "Observation | None":
        """None where there is nothing to see; refused where bounds are asked for that a single box does not give."""
        is_normed, regularises = isinstance(network, NormedNetwork), regularises and settings.has_regularisers
        if not is_normed and not settings.has_regularisers:
            return None
        if settings.has_regularisers and not _bent(network):
            raise SpecError(
                "regularisers of bounds look at ReLUs, but the model has none",
                hint="set bounds.tightness = 0.0 and bounds.relu_balance = 0.0",
            )
        if isinstance(threat, Patch):
            return Observation(network, PlacedPatch(network, threat), settings, regularises)
        if settings.has_regularisers or settings.statistics == "both":
            raise SpecError(
                f"statistics and regularisers of bounds are those of a patch's boxes, but the threat is {threat}",
                hint='set bounds.statistics = "clean", and leave bounds.tightness and bounds.relu_balance out',
            )
        return Observation(network, None, settings, regularises)

    def __call__(self, batch: Batch, epsilon: float | Tensor, generator: Generator) -> Scalar | None:
        """Batch norms normalise by this batch from now on; what is to be added to its loss, where anything is."""
        network, is_both, box = self.network, self.settings.statistics == "both", None
        is_normed = isinstance(network, NormedNetwork)
        if self.patch is not None and (self.regularises or (is_normed and is_both)):
            corners = self.patch.draw(batch, 1, generator)
            box = self.patch.boxes(batch.own_images, corners, epsilon)
        if is_normed:
            boxes = network.observe(batch.own_images, box, is_both)
        else:
            boxes = [] if box is None else network.intervals(box)
        return self._added([boxes[index] for index in _bent(network)], epsilon) if self.regularises else None

    def _added(self, boxes: Sequence[Interval], epsilon: float | Tensor) -> Scalar:
        settings, total = self.settings, boxes[0].lower.new_zeros(())
        if settings.tightness:
            total = total + settings.tightness * tightness_loss(boxes)
        if settings.relu_balance:
            total = total + settings.relu_balance * balance_loss(boxes)
        return total * (1 - epsilon)


def _bent(network: Network) -> list[int]:
    """The values that ReLUs take."""
    return [step.inputs[0] for step in network.steps if is_relu(step.operation)]


def tightness_loss(boxes: Sequence[Interval]) -> Scalar:
    """How much wider the bounds of later layers are than those of the first, by the mean radius of reached units.

    A layer of r times the radius costs nothing while r is at most 2, and 1 - 2 / r beyond: the mean over later layers.
    """
    first, *later = [_mean_radius(box) for box in boxes]
    costs = [torch.relu(TOLERATED - first / _positive(radius)) / TOLERATED for radius in later]
    return torch.stack(costs).mean() if costs else torch.zeros_like(first)


def balance_loss(boxes: Sequence[Interval]) -> Scalar:
    """How unevenly units of a layer are on for good and off for good, by their centres and the squares of these.

    Of two sums of the centres of units, of those always on and of those always off, the smaller should be half of the
    larger one; likewise of their squared distances from the mean. What is missing of both counts: the mean over layers.
    """
    return torch.stack([_imbalance(box) for box in boxes]).mean()


def _imbalance(box: Interval) -> Scalar:
    centre, is_reached = box.centre, box.upper > box.lower
    count = is_reached.sum().clamp(min=1)
    spread = (centre - (centre * is_reached).sum() / count).square()
    is_on, is_off = is_reached & (box.lower > 0), is_reached & (box.upper < 0)
    sizes = ((centre * is_on).sum(), -(centre * is_off).sum())
    squares = ((spread * is_on).sum(), (spread * is_off).sum())
    return sum(
        (torch.relu(TOLERATED - _ratio(*pair)) / TOLERATED for pair in (sizes, squares)), centre.new_zeros(())
    )


def _mean_radius(box: Interval) -> Scalar:
    radius = box.radius
    return radius.sum() / (radius > 0).sum().clamp(min=1)


def _ratio(first: Scalar, second: Scalar) -> Scalar:
    return torch.minimum(first, second) / _positive(torch.maximum(first, second))


def _positive(value: Scalar) -> Scalar:
    """A divisor that is 0 while epsilon is, or where no unit counts; its ratio and gradient are then 0 or finite."""
    return value.clamp(min=1e-12)
