"""A traced network: its operations in order, and what they make of values and of intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds.operations import Interval, Linear, Operation
from patchcert.bounds.rounding import NEAREST, Rounding
from patchcert.bounds.sparse import FirstLayer, sparse_first_layer
from patchcert.errors import UnsupportedLayer
from patchcert.tensors import Images, Labels, Margins


@dataclass(frozen=True, slots=True)
class Step:
    """One operation and the values it takes: value 0 is the image, value i + 1 the result of step i."""

    name: str
    operation: Operation
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Network:
    """The operations of a model, in an order in which they can be carried out.

    All of them are needed for the logits, which the last one gives; so its input, if it takes only one, is
    the result of the step before it.
    """

    steps: tuple[Step, ...]

    @property
    def head(self) -> Linear | None:
        """The last layer, where it is linear and can be merged with the specification."""
        last = self.steps[-1].operation if self.steps else None
        return last if isinstance(last, Linear) else None

    def values(self, images: Annotated[Tensor, "n ..."]) -> list[Tensor]:
        """The image and the result of every step."""
        values = [images]
        for step in self.steps:
            values.append(step.operation.forward(*(values[index] for index in step.inputs)))
        return values

    def intervals(self, box: Interval, rounding: Rounding = NEAREST) -> list[Interval]:
        """Bounds for the image and for the result of every step."""
        return self._propagate([box], 0, len(self.steps), rounding)

    def bounds(self, box: Interval, rounding: Rounding = NEAREST) -> Interval:
        """Contains every result of the network for images in the box."""
        return self.intervals(box, rounding)[-1]

    def margins(self, box: Interval, labels: Labels, start: int = 0, rounding: Rounding = NEAREST) -> Margins:
        """Lower bounds of logit[label] - logit[class] over the box; 0 at the label itself.

        The box holds value `start`: the image, or the result of a step, past which no later step may look back.
        """
        values: list[Interval | None] = [*[None] * start, box]
        head = self.head if start < len(self.steps) else None
        stop = len(self.steps) - (head is not None)
        last = self._propagate(values, start, stop, rounding)[-1]
        if head is None:
            return _separate_margins(last, labels, rounding)
        return merged_margins(head, last, labels, rounding)

    def sparse_margins(
        self,
        images: Images,
        labels: Labels,
        pixels: int,
        bound: str = "tight",
        epsilon: float | Tensor = 1.0,
        rounding: Rounding = NEAREST,
    ) -> Margins:
        """Margins over every image that differs from the given one in at most `pixels` pixels."""
        layer = FirstLayer.of(self.steps)
        *_, seen, clean = self._propagate([Interval.point(images)], 0, layer.position + 1, rounding)
        layer.check_sees(seen.shape, images)
        box = sparse_first_layer(layer, clean, images, pixels, bound, epsilon, rounding)
        return self.margins(box, labels, layer.position + 1, rounding)

    def _propagate(
        self, known: Sequence[Interval | None], start: int, stop: int, rounding: Rounding
    ) -> list[Interval]:
        """The known intervals and those of the following steps; what is not known must not be needed."""
        values: list[Interval] = list(known)  # pyright: ignore[reportAssignmentType]
        for step in self.steps[start:stop]:
            inputs = [values[index] for index in step.inputs]
            if any(value is None for value in inputs):
                raise UnsupportedLayer(
                    f"layer '{step.name}' looks back past the layer from which bounds start"
                )
            values.append(step.operation.interval(*inputs, rounding=rounding))
        return values


def merged_margins(head: Linear, box: Interval, labels: Labels, rounding: Rounding) -> Margins:
    """Margins through the last layer merged with the specification: row label minus row class of its weights.

    This is tighter than subtracting bounds of the logits, which would let both move against each other.
    """
    weight, bias = head.weight(), None if head.bias is None else head.bias()
    difference = weight[labels].unsqueeze(1) - weight  # n k features
    centre, radius = box.centre, box.radius
    if rounding.is_outward:
        # A term is rounded in its difference, its product and a sum for each feature: features + 1, two to spare.
        gamma, unit = rounding.gamma(weight.shape[1] + 3), rounding.unit
        # As in `Affine`, with 2 gamma for the centre because differences may themselves be too small by u.
        radius = radius * (1 + 8 * unit) + centre.abs() * (2 * gamma + 4 * unit) + rounding.tiny
        # Differences and products make the spread too small by at most 1 - gamma, and (1 - gamma)(1 + 2 gamma) >= 1.
        radius = radius * (1 + 2 * gamma)
    middle = _row_products(difference, centre)
    spread = _row_products(difference.abs(), radius)
    if bias is not None:
        middle = middle + (bias[labels].unsqueeze(1) - bias)
    margins = middle - spread
    if rounding.is_outward:
        magnitude = middle.abs() + spread
        if bias is not None:
            magnitude = magnitude + bias[labels].abs().unsqueeze(1) + bias.abs()
        # Two sums with the bias, the one with the spread and the last one cost a unit of it each: 4 of these 8. Sums of
        # fewer than 1/u products lose less than tiny/u to underflow.
        margins = margins - (magnitude * (8 * rounding.unit) + rounding.tiny / rounding.unit)
    return zero_at_label(margins, labels)


def _row_products(
    weights: Annotated[Tensor, "n k features"], values: Annotated[Tensor, "n features"]
) -> Annotated[Tensor, "n k"]:
    """Of each row with its own weights.

    Libraries sum a lone row in another order, so it is given a copy: on a CPU, in float32, a row's result does not
    depend on how many others there are.
    """
    if len(values) != 1:
        return torch.einsum("nkf,nf->nk", weights, values)
    return torch.einsum("nkf,nf->nk", torch.cat([weights, weights]), torch.cat([values, values]))[:1]


def _separate_margins(logits: Interval, labels: Labels, rounding: Rounding) -> Margins:
    own = logits.lower.gather(1, labels.unsqueeze(1))
    margins = own - logits.upper
    if rounding.is_outward:
        # The difference is off by at most half the distance to the next number, and 2u of it are that whole distance:
        # the margin moves to the next number or further, however the last sum is rounded.
        margins = margins - margins.abs() * (2 * rounding.unit)
    return zero_at_label(margins, labels)


def zero_at_label(
    margins: Annotated[Tensor, "n ... k"], labels: Annotated[Tensor, "n ..."]
) -> Annotated[Tensor, "n ... k"]:
    """The margins with the label's own entry set to 0; the entries of a NaN row stay NaN elsewhere."""
    return margins.scatter(-1, labels.unsqueeze(-1).expand(*margins.shape[:-1], 1), 0.0)
