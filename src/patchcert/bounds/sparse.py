"""Bounds of the first layer when any k pixels may change: each neuron gets the k pixels that move it most.

Three bounds of the same shape (specification: weights W[neuron, channel, pixel] in units of raw pixels):
`tight` uses how far each pixel can move up and down from its present value and is exact for a single neuron;
`per-pixel` forgets the present value and lets a pixel move by epsilon both ways; `per-value` counts single
channel values instead of pixels: on images with several channels it covers k channel values, not k pixels.

A first layer that is also the last is merged with the specification, so that `tight` is exact for single margins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor

from patchcert.bounds.geometry import under_kernel
from patchcert.bounds.network import Network, Step, merged_margins, zero_at_label
from patchcert.bounds.operations import ChannelScale, Convolution, Interval, Linear, Reshape
from patchcert.bounds.rounding import NEAREST, Rounding, lifted
from patchcert.errors import InvalidInput, UnsupportedLayer
from patchcert.tensors import Epsilon, Images, Labels, Margins

SparseBound = Literal["tight", "per-pixel", "per-value"]
_MOST_ROUNDS = 16
"""On a GPU, at most this many of the largest entries are found one after the other."""
_FEW_ENTRIES = 16
"""On a CPU, at most this many entries are put in order by exchanges, where no gradient is wanted."""


@dataclass(frozen=True, slots=True)
class FirstLayer:
    """The first layer with weights, with what lies before it: channel scales and reshapes of the image."""

    position: int
    operation: Linear | Convolution
    scales: tuple[ChannelScale, ...]

    @staticmethod
    def of(steps: Sequence[Step]) -> "FirstLayer":
        """Found by walking the chain of steps from the image on."""
        scales: list[ChannelScale] = []
        for position, step in enumerate(steps):
            if step.inputs != (position,):
                break
            if isinstance(step.operation, Linear | Convolution):
                return FirstLayer(position, step.operation, tuple(scales))
            if isinstance(step.operation, ChannelScale):
                scales.append(step.operation)
            elif not isinstance(step.operation, Reshape):
                break
        raise UnsupportedLayer(
            "a sparse bound needs a Linear or Conv2d layer first, after normalisation at most"
        )

    def merged(self, label: Annotated[Tensor, ""]) -> "FirstLayer":
        """A layer that gives the margins of a label: row label minus row class of the weights, and no bias."""
        weight = self.operation.weight()
        difference = weight[label] - weight
        return replace(self, operation=Linear(lambda: difference, None))

    def pixel_weight(self, channels: int, rounding: Rounding) -> Annotated[Tensor, "neurons c positions"]:
        """Weights per unit of raw pixel value; never too small by an underflow where bounds must be sound."""
        weight = self.operation.weight()
        shaped = weight.reshape(weight.shape[0], channels, -1)
        for operation in self.scales:
            scale = operation.scale().to(weight.dtype).flatten()
            scale = lifted(scale) if rounding.is_outward else scale
            by_feature = len(scale) == weight.shape[1] and isinstance(self.operation, Linear)
            if not by_feature and len(scale) not in (1, channels):
                raise UnsupportedLayer(
                    f"a sparse bound needs scales of the {channels} channels or of single features, got {len(scale)}"
                )
            shaped = shaped * scale.reshape(1, *(shaped.shape[1:] if by_feature else (-1, 1)))
            shaped = lifted(shaped) if rounding.is_outward else shaped
        return shaped


def sparse_margins(
    network: Network,
    images: Images,
    labels: Labels,
    pixels: int,
    bound: SparseBound = "tight",
    epsilon: Epsilon = 1.0,
    rounding: Rounding = NEAREST,
) -> Margins:
    """Margins over every image that differs from the given one in at most `pixels` pixels."""
    layer = FirstLayer.of(network.steps)
    before = Network(network.steps[: layer.position + 1])
    *_, seen, clean = before.intervals(Interval.point(images), rounding)
    whole = images.shape if isinstance(layer.operation, Convolution) else images.flatten(1).shape
    if seen.shape != whole:
        raise UnsupportedLayer(
            f"a sparse bound needs a first layer that sees {tuple(whole[1:])}, not {tuple(seen.shape[1:])}",
            hint="take the image as it is into a Conv2d, or flattened into a Linear layer",
        )
    head = network.head
    if head is None or layer.operation is not head:
        box = sparse_first_layer(layer, clean, images, pixels, bound, epsilon, rounding)
        return network.margins(box, labels, layer.position + 1, rounding)
    margins = merged_margins(head, seen, labels, rounding)
    for label in labels.unique():
        rows = labels == label
        unchanged, some = Interval.point(margins[rows]), images[rows]
        box = sparse_first_layer(layer.merged(label), unchanged, some, pixels, bound, epsilon, rounding)
        margins = margins.index_put((rows,), box.lower)
    return zero_at_label(margins, labels)


def sparse_first_layer(
    layer: FirstLayer,
    clean: Interval,
    images: Images,
    pixels: int,
    bound: SparseBound,
    epsilon: Epsilon,
    rounding: Rounding,
) -> Interval:
    """Contains the results of the first layer for every image that differs in at most `pixels` pixels.

    `clean` holds the layer's results on the unchanged images.
    """
    if bound not in get_args(SparseBound):
        raise InvalidInput(
            f"unknown sparse bound {bound!r}; expected one of {', '.join(get_args(SparseBound))}"
        )
    if isinstance(layer.operation, Convolution) and layer.operation.groups != 1:
        raise UnsupportedLayer(
            "a sparse bound of a grouped convolution is not known", hint="use groups=1 in the first layer"
        )
    weight = layer.pixel_weight(images.shape[1], rounding)
    if bound == "tight":
        up, down = _tight_moves(layer, weight, images, epsilon, pixels, rounding)
    else:
        up = down = _free_moves(weight, bound, pixels, clean.lower) * epsilon
    if not rounding.is_outward:
        return Interval(clean.lower - down, clean.upper + up)
    # All terms are of one sign, so that roundings cost a relative error. A term meets 2 in the room of its pixel (1 - x
    # and epsilon), 4 in each scale (in float64 sum, root, division and product; else rounding to the type and product),
    # 1 in the difference of merged weights, at most 2 channels + 1 in its own product, and `pixels` in the sum: 12 are
    # to spare.
    roundings = 2 * images.shape[1] + pixels + 4 * len(layer.scales) + 16
    # 1 / (1 - gamma) <= 1 + 2 gamma as gamma < 1/8; as much again pays for rounding the factor and the product.
    widen = 1 + 4 * rounding.gamma(roundings)
    moved = Interval(clean.lower - down * widen, clean.upper + up * widen)
    # Each of two sums costs a unit of the result: 2 of these 4. Underflow costs fewer than 1/u products less than tiny
    # each.
    return moved.widened(4 * rounding.unit, rounding.tiny / rounding.unit)


def _tight_moves(
    layer: FirstLayer,
    weight: Annotated[Tensor, "neurons c positions"],
    images: Images,
    epsilon: Epsilon,
    pixels: int,
    rounding: Rounding,
) -> tuple[Annotated[Tensor, "n neurons ..."], Annotated[Tensor, "n neurons ..."]]:
    """The most each neuron can rise and fall: per pixel, the sum over channels of the better direction.

    For each pixel a neuron sees, both are one product over twice the channels: of the room above and below
    the present values with the positive and the negative parts of the weights.
    """
    room = torch.cat([1 - images, images], dim=1).clamp(max=epsilon)
    positive, negative = weight.clamp(min=0), (-weight).clamp(min=0)
    parts = torch.cat([torch.cat([positive, negative], dim=1), torch.cat([negative, positive], dim=1)])
    below = room.flatten(2).permute(2, 1, 0)
    size: tuple[int, ...] = ()
    if isinstance(layer.operation, Convolution):
        size = layer.operation.geometry.output_size(images.shape[-2], images.shape[-1])
        below = under_kernel(layer.operation.geometry.pad(room), layer.operation.geometry, *size)
        below = below.permute(2, 3, 1, 0, 4, 5).flatten(3).flatten(0, 1)
    moves = top_sum(rounding.product(parts.permute(2, 0, 1), below), pixels)
    up, down = moves.reshape(len(parts), len(images), *size).transpose(0, 1).chunk(2, dim=1)
    return up, down


def _free_moves(
    weight: Annotated[Tensor, "neurons c positions"], bound: SparseBound, pixels: int, like: Tensor
) -> Annotated[Tensor, "neurons ..."]:
    """How far each neuron moves when the k strongest pixels or channel values move by one."""
    strength = weight.abs().sum(dim=1) if bound == "per-pixel" else weight.abs().flatten(1)
    moves = strength.topk(min(pixels, strength.shape[1]), sorted=False).values.sum(dim=1)
    return moves.reshape(-1, *[1] * (like.dim() - 2))


def top_sum(values: Annotated[Tensor, "entries ..."], count: int) -> Annotated[Tensor, "..."]:
    """The sum of the `count` largest entries of the first dimension, of all of them where there are fewer.

    Its gradient goes to exactly `count` entries, whichever they are among equals.
    """
    if count >= len(values):
        return values.sum(dim=0)
    if count == 1:
        return values.max(dim=0).values
    if values.is_cuda and count <= _MOST_ROUNDS:
        return values.gather(0, largest_by_rounds(values.detach(), count)).sum(dim=0)
    if len(values) <= _FEW_ENTRIES and not (values.is_cuda or values.requires_grad):
        return torch.stack(largest_by_exchanges(values, count)).sum(dim=0)
    return values.topk(count, dim=0, sorted=False).values.sum(dim=0)


def largest_by_rounds(values: Annotated[Tensor, "entries ..."], count: int) -> Annotated[Tensor, "count ..."]:
    """Where the `count` largest entries of the first dimension are: in each round, the largest one left.

    A round is a single pass over the values; on a GPU a few of them cost less than a search for all at once,
    above all among the few positions of a small kernel.
    """
    left, places = values.clone(), list[Tensor]()
    for _ in range(count):
        places.append(left.max(dim=0, keepdim=True).indices)
        left.scatter_(0, places[-1], -torch.inf)
    return torch.cat(places)


def largest_by_exchanges(values: Annotated[Tensor, "entries ..."], count: int) -> list[Tensor]:
    """The `count` largest entries of the first dimension, from the largest on: each entry in turn is compared
    with those held so far and continues as the smaller one.
    """
    held = list[Tensor]()
    for entry in values:
        for rank, other in enumerate(held):
            held[rank], entry = torch.maximum(other, entry), torch.minimum(other, entry)
        if len(held) < count:
            held.append(entry)
    return held
