"""Linear bounds at placements of a patch, for networks of one hidden layer, where they cost little more than intervals:
what a patch does to the hidden layer is linear in its few pixels. Training ranks placements by them, or by a step of an
attack, and learns from them; they are rounded to nearest.

The two lines of a unit are parallel here: between s z and s (z - l), s the slope of the chord, where the unit can bend.
Then the margin of a label against a class falls by |sum_u (V_label,u - V_class,u) s_u W_u,q| for each pixel q that
moves by 1: a difference of two products that know nothing of the label, so that no form is written out for each class.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds import Interval, Network
from patchcert.bounds.operations import Affine, ChannelScale, Linear, Operation, Reshape, is_relu
from patchcert.bounds.rounding import fast_arithmetic
from patchcert.errors import UnsupportedLayer
from patchcert.tensors import Epsilon, Images, Labels, PlacementMargins
from patchcert.threats import Patch
from patchcert.threats.patch import stamp_cells

Pixels = Annotated[Tensor, "p q"]
"""For each placement the numbers of an image that it covers, counted over channels, rows and columns."""
Numbers = Annotated[Tensor, "_"]
"""Of placements, as the threat counts them."""
Chosen = Annotated[Tensor, "n m"]
"""For each image m numbers of placements."""

_CACHE = 2**21
"""Bytes that stay in the cache of a CPU's core, where what is written is read again at once."""
_LIVE_COPIES = 4
"""How many numbers of float32 are alive at once for each unit, image and placement."""


def has_one_layer(network: Network) -> bool:
    """Whether the network is a chain of affine operations, a ReLU and a linear layer."""
    operations = [step.operation for step in network.steps]
    is_chain = all(step.inputs == (position,) for position, step in enumerate(network.steps))
    before, end = operations[:-2], operations[-2:]
    ends_well = bool(before) and is_relu(end[0]) and isinstance(end[1], Linear)
    return is_chain and ends_well and all(isinstance(each, Affine | Reshape) for each in before)


def hidden_layer(network: Network) -> tuple[Operation, ...]:
    """The affine operations before the only ReLU; other networks are refused."""
    if not has_one_layer(network):
        raise UnsupportedLayer(
            "linear bounds of all placements exist for networks of one hidden layer: affine layers, a ReLU, a linear "
            "layer",
            hint='set strategy.search = "interval" and strategy.candidates to a few',
        )
    return tuple(step.operation for step in network.steps[:-2])


@dataclass(frozen=True, slots=True)
class LinearSweep:
    """Placements of one patch on a network of one hidden layer and one size of images."""

    network: Network
    layer: tuple[Operation, ...]
    pixels: Pixels
    memory_budget: int

    @staticmethod
    def of(network: Network, images: Images, threat: Patch, memory_budget: int) -> "LinearSweep":
        """Refused for other networks."""
        budget = memory_budget if images.device.type == "cuda" else min(memory_budget, _CACHE)
        height, width = images.shape[2:]
        corners = threat.placements(height, width).corners.to(images.device)
        pixels = stamp_cells(threat, corners, images.shape[1:])
        return LinearSweep(network, hidden_layer(network), pixels, budget)

    def margins(
        self, images: Images, labels: Labels, epsilon: Epsilon, numbers: Numbers | None = None
    ) -> PlacementMargins:
        """Linear bounds at all placements or at those of the numbers; large products are of float32 in bfloat16."""
        return self._swept(_shared_margins, images.dtype, images, labels, epsilon, numbers)

    def attacked(
        self, images: Images, labels: Labels, epsilon: Epsilon, numbers: Numbers | None = None
    ) -> PlacementMargins:
        """Margins of members at the same placements: the patch's middle, moved to the corner that the gradient of the
        cross entropy points at; all products are of float32 in bfloat16."""
        return self._swept(_attacked_margins, _short(images), images, labels, epsilon, numbers)

    @torch.no_grad()
    def _swept(
        self,
        rank: Callable[["_Shared"], Annotated[Tensor, "p n k"]],
        dtype: torch.dtype,
        images: Images,
        labels: Labels,
        epsilon: Epsilon,
        numbers: Numbers | None,
    ) -> PlacementMargins:
        """What is ranked by, slice by slice of placements, from hidden units and weights of the given type."""
        pixels = self.pixels if numbers is None else self.pixels[numbers]
        with fast_arithmetic():
            hidden, weight = self._hidden(images).to(dtype), self._weight(images).to(dtype)
            readout = self._readout(_short(images))
            found = [
                rank(_Shared(images.flatten(1)[:, some], labels, hidden, weight[some], readout, epsilon))
                for some in self._slices(pixels, hidden, readout)
            ]
            return torch.cat(found)[: len(pixels)].transpose(0, 1)

    def margins_at(
        self, images: Images, labels: Labels, chosen: Chosen, epsilon: Epsilon
    ) -> Annotated[Tensor, "n m k"]:
        """Margins, with a gradient, at each image's placements: linear bounds, or the interval's where it is better."""
        count = chosen.shape[1]
        pixels, repeated = self.pixels[chosen.flatten()], labels.repeat_interleave(count)
        clean = images.flatten(1).repeat_interleave(count, dim=0).gather(1, pixels)
        patch, weight = _patch(clean, epsilon), self._weight(images)[pixels]  # nm q units
        hidden = self._hidden(images).repeat_interleave(count, dim=0)
        centre = hidden + ((patch.centre - clean).unsqueeze(1) @ weight).squeeze(1)
        box = Interval.around(centre, (patch.radius.unsqueeze(1) @ weight.abs()).squeeze(1))
        units = _Units.within(box)
        readout = self._readout(images.dtype)
        by_class = (readout.weight * units.slope.unsqueeze(1)) @ weight.transpose(1, 2)  # nm k q
        linear = readout.linear(units, repeated) - _lost(by_class.transpose(1, 2), repeated, patch.radius)
        return torch.maximum(linear, readout.interval(box, repeated)).unflatten(0, tuple(chosen.shape))

    def _hidden(self, images: Images) -> Annotated[Tensor, "n units"]:
        return self.network.values(images)[-3].flatten(1)

    def _weight(self, images: Images) -> Annotated[Tensor, "numbers units"]:
        """The hidden layer as one matrix; what only scales the numbers of an image before it scales its columns."""
        *before, last = self.layer
        if isinstance(last, Linear) and all(isinstance(each, Reshape | ChannelScale) for each in before):
            scale = self._mapped(images.new_ones(1, *images.shape[1:]), tuple(before))
            return (last.weight() * scale.flatten()).T.contiguous()
        size = images[0].numel()
        rows = torch.eye(size, dtype=images.dtype, device=images.device).reshape(size, *images.shape[1:])
        return self._mapped(rows, self.layer).flatten(1)

    def _mapped(self, rows: Tensor, operations: tuple[Operation, ...]) -> Tensor:
        """Rows through the linear parts of operations."""
        for operation in operations:
            is_affine = isinstance(operation, Affine)
            rows = operation.map(rows, precise=False) if is_affine else operation.forward(rows)
        return rows

    def _readout(self, dtype: torch.dtype) -> "_Readout":
        head = self.network.head
        assert head is not None
        return _Readout.of(head.weight(), None if head.bias is None else head.bias(), dtype)

    def _slices(
        self, pixels: Pixels, hidden: Annotated[Tensor, "n units"], readout: "_Readout"
    ) -> Iterator[Pixels]:
        """As many placements at a time as keep what is made of them within the budget; the last is repeated to a full
        slice, so that a GPU sees products of one shape."""
        of_images = _LIVE_COPIES * hidden.numel() * hidden.element_size()
        of_pixels = pixels.shape[1] * readout.weight.numel() * readout.weight.element_size()
        at_once = max(1, self.memory_budget // (of_images + of_pixels))
        slices = -(-len(pixels) // at_once)
        size = -(-len(pixels) // slices)
        repeated = pixels[-1:].expand(slices * size - len(pixels), -1)
        return iter(torch.cat([pixels, repeated]).split(size))


@dataclass(frozen=True, slots=True)
class _Units:
    """What is known of hidden units: the `slope` of their two lines, that of the chord, and 1 or 0 where a unit cannot
    bend; the lower line in the `middle` of their intervals; and how far it is below the upper one, s times -l, or 0.
    """

    slope: Annotated[Tensor, "... units"]
    middle: Annotated[Tensor, "... units"]
    lifted: Annotated[Tensor, "... units"]

    @staticmethod
    def within(box: Interval) -> "_Units":
        """For units in these intervals, with a gradient that is finite where an interval is one point."""
        slope = (box.lower >= 0).to(box.lower.dtype)
        is_bent = (box.lower < 0) & (box.upper > 0)
        slope = torch.where(is_bent, box.upper / (box.upper - box.lower).where(is_bent, 1), slope)
        return _Units(slope, slope * box.centre, slope * (-box.lower).clamp(min=0))

    @staticmethod
    def around(centre: Annotated[Tensor, "... units"], radius: Annotated[Tensor, "... _"]) -> "_Units":
        """The same without a gradient, in fewer steps; the centre is overwritten."""
        # u / (u - l) is c / 2r + 1 / 2, above 1 where 0 < l and below 0 where u < 0. Where r is 0 any slope will do at
        # c = 0, and other quotients are beyond both ends.
        slope = (centre * (0.5 / radius.clamp(min=torch.finfo(radius.dtype).tiny))).add_(0.5).clamp_(0, 1)
        lifted = (radius - centre).clamp_(min=0).mul_(slope)
        return _Units(slope, centre.mul_(slope), lifted)


@dataclass(frozen=True, slots=True)
class _Readout:
    """The last layer, and the coefficients of each pair of a label and a class with their signs kept apart."""

    weight: Annotated[Tensor, "k units"]
    bias: Annotated[Tensor, "k"] | None
    rising: Annotated[Tensor, "units pairs"]
    falling: Annotated[Tensor, "units pairs"]

    @staticmethod
    def of(
        weight: Annotated[Tensor, "k units"], bias: Annotated[Tensor, "k"] | None, dtype: torch.dtype
    ) -> "_Readout":
        """Its products with units are of the given type."""
        pairs = (weight.unsqueeze(1) - weight).flatten(0, 1).T
        rising, falling = (part.to(dtype) for part in (pairs.clamp(min=0), pairs.clamp(max=0)))
        return _Readout(weight.to(dtype), bias, rising, falling)

    def linear(self, units: _Units, labels: Labels) -> Annotated[Tensor, "... n k"]:
        """The margins' forms in the centre of the patch: lower lines for rising coefficients, upper for falling."""
        logits = self.logits(units.middle)
        return _own(logits, labels) - logits + self._by_label(units.lifted, self.falling, labels)

    def logits(self, values: Annotated[Tensor, "... units"]) -> Annotated[Tensor, "... k"]:
        """What the layer makes of values of the units."""
        found = self._times(values, self.weight.T)
        return found if self.bias is None else found + self.bias

    def interval(self, box: Interval, labels: Labels) -> Annotated[Tensor, "n k"]:
        """Margins by intervals of the units."""
        found = self._by_label(box.lower.relu(), self.rising, labels)
        found = found + self._by_label(box.upper.relu(), self.falling, labels)
        return found if self.bias is None else found + (self.bias[labels].unsqueeze(1) - self.bias)

    def _times(self, values: Annotated[Tensor, "... units"], others: Annotated[Tensor, "units _"]) -> Tensor:
        return (values.to(others.dtype) @ others).to(values.dtype)

    def _by_label(
        self,
        values: Annotated[Tensor, "... n units"],
        pairs: Annotated[Tensor, "units pairs"],
        labels: Labels,
    ) -> Annotated[Tensor, "... n k"]:
        """Products with the pairs of each image's label."""
        classes = len(self.weight)
        found = self._times(values, pairs).unflatten(-1, (classes, classes))
        index = labels[:, None, None].expand(*found.shape[:-2], 1, classes)
        return found.gather(-2, index).squeeze(-2)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Placements that all images share: the clean pixels under each, the hidden units without a patch, and the weights
    of these pixels."""

    clean: Annotated[Tensor, "n p q"]
    labels: Labels
    hidden: Annotated[Tensor, "n units"]
    weight: Annotated[Tensor, "p q units"]
    readout: _Readout
    epsilon: Epsilon


def _shared_margins(shared: _Shared) -> Annotated[Tensor, "p n k"]:
    """Linear bounds at placements that all images share, whose products with the last layer are made once for all."""
    labels, hidden, weight, readout = shared.labels, shared.hidden, shared.weight, shared.readout
    clean, epsilon = shared.clean.transpose(0, 1), shared.epsilon
    patch, short = _patch(clean, epsilon), readout.weight.dtype
    # Where all pixels are free the patch moves by 1/2 in any image, and one row stands for all.
    reach = patch.radius[:, :1] if isinstance(epsilon, float) and epsilon >= 1 else patch.radius
    centre = torch.baddbmm(hidden.expand(len(weight), -1, -1), patch.centre - clean, weight)
    units = _Units.around(centre, reach @ weight.abs())
    products = weight.to(short).unsqueeze(2) * readout.weight  # p q k units
    by_class = units.slope.to(short) @ products.flatten(1, 2).transpose(1, 2)
    by_class = by_class.to(hidden.dtype).unflatten(2, products.shape[1:3])
    return readout.linear(units, labels) - _lost(by_class, labels, patch.radius)


def _attacked_margins(shared: _Shared) -> Annotated[Tensor, "p n k"]:
    """Margins at a corner of each patch at placements that all images share."""
    labels, hidden, weight, readout = shared.labels, shared.hidden, shared.weight, shared.readout
    clean = shared.clean.transpose(0, 1)
    patch, short = _patch(clean, shared.epsilon), weight.dtype
    inputs = torch.baddbmm(hidden.expand(len(weight), -1, -1), (patch.centre - clean).to(short), weight)
    error = readout.logits(inputs.relu()).to(clean.dtype).softmax(dim=-1)
    error = error - torch.nn.functional.one_hot(labels, error.shape[-1])
    back = torch.ops.aten.threshold_backward(error.to(short) @ readout.weight, inputs, 0)
    step = (back @ weight.transpose(1, 2)).sign() * patch.radius
    logits = readout.logits(inputs.baddbmm_(step.to(short), weight).relu_()).to(clean.dtype)
    return _own(logits, labels) - logits


def _short(images: Images) -> torch.dtype:
    return torch.bfloat16 if images.dtype == torch.float32 else images.dtype


def _patch(clean: Annotated[Tensor, "... q"], epsilon: Epsilon) -> Interval:
    return Interval((clean - epsilon).clamp(min=0), (clean + epsilon).clamp(max=1))


def _lost(
    by_class: Annotated[Tensor, "... n q k"], labels: Labels, radius: Annotated[Tensor, "... n q"]
) -> Annotated[Tensor, "... n k"]:
    """By how much the pixels under the patch can lower each margin, from what they do to each logit."""
    own = by_class.gather(-1, labels[:, None, None].expand(*by_class.shape[:-1], 1))
    return ((own - by_class).abs() * radius.unsqueeze(-1)).sum(dim=-2)


def _own(logits: Annotated[Tensor, "... n k"], labels: Labels) -> Annotated[Tensor, "... n 1"]:
    return logits.gather(-1, labels[:, None].expand(*logits.shape[:-1], 1))
