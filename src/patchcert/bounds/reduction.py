"""What is left of a network on one small box: the units that can bend there, as functions of the inputs that can move.

Most units of a network are on one side of their ReLU for all of a box, and pass their input on or give 0. What remains
is a network of a few units: each takes the free inputs and the remaining units before it, with weights of its own for
every box. It is small whatever the network was, so that thousands of bounds of it are cheap.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds.forms import Forms, summed
from patchcert.bounds.geometry import NotCovered
from patchcert.bounds.linear import (
    BackwardPass,
    adaptive,
    linear_interval,
    margin_forms,
    parallel,
)
from patchcert.bounds.mixture import Mixture
from patchcert.bounds.network import Network, Step
from patchcert.bounds.operations import Add, Affine, Interval, Moved, Operation, Reshape, is_relu
from patchcert.bounds.rounding import Rounding
from patchcert.tensors import Labels


@dataclass(frozen=True, slots=True)
class Reduced:
    """A network of the units that can bend in each of n boxes; its outputs are margins to `targets`.

    Its input are the values of the box that can move, at `places` of the flattened image, where `is_free`; the rest
    fills up the rows.
    """

    network: Network
    box: Interval
    known: dict[int, Interval]
    places: Annotated[Tensor, "n free"]
    is_free: Annotated[Tensor, "n free"]

    def select(self, boxes: Annotated[Tensor, "chosen"]) -> "Reduced":
        """The same for some of the boxes, by their numbers."""
        steps = tuple(
            replace(step, operation=step.operation.select(boxes))
            if isinstance(step.operation, Mixture)
            else step
            for step in self.network.steps
        )
        known = {number: _selected(interval, boxes) for number, interval in self.known.items()}
        places, is_free = self.places.index_select(0, boxes), self.is_free.index_select(0, boxes)
        return Reduced(Network(steps), _selected(self.box, boxes), known, places, is_free)

    def filled(
        self,
        boxes: Annotated[Tensor, "chosen"],
        images: Annotated[Tensor, "chosen ..."],
        values: Annotated[Tensor, "chosen free"],
    ) -> Annotated[Tensor, "chosen ..."]:
        """Images in some of the boxes, with the free places filled."""
        places, is_free, rows = self.places[boxes], self.is_free[boxes], images.flatten(1)
        chosen = torch.where(is_free, values, rows.gather(1, places))
        return rows.scatter(1, places, chosen).reshape(images.shape)


def _selected(interval: Interval, boxes: Annotated[Tensor, "chosen"]) -> Interval:
    return interval.map(lambda part: part.index_select(0, boxes))


def reduced(
    network: Network,
    box: Interval,
    labels: Labels,
    targets: Annotated[Tensor, "n m"],
    classes: int,
    rounding: Rounding,
) -> Reduced | None:
    """What is left of the network on the boxes; None where something other than a ReLU bends.

    Layer by layer: the bounds of the units that remain are tightened before those of later layers are computed.
    """
    if not all(is_lossless(step.operation) for step in network.steps):
        return None
    made = _Reduction(network, box, rounding)
    try:
        for number, step in enumerate(network.steps, start=1):
            if is_relu(step.operation):
                made.add_units(step, number)
        made.append(margin_forms(labels, targets, classes, box.lower.dtype), len(network.steps))
    except NotCovered:
        return None
    return Reduced(made.small, made.free, made.known_small, made.places, made.is_free)


def is_lossless(operation: Operation) -> bool:
    """Whether forms are carried back through the operation without loss, where it is a ReLU by its straight units."""
    return is_relu(operation) or isinstance(operation, Affine | Add | Moved | Reshape)


def marked(mask: Annotated[Tensor, "n ..."]) -> tuple[Annotated[Tensor, "n _"], Annotated[Tensor, "n _"]]:
    """Where each row is true, in rows as long as the longest; the second says which entries count."""
    rows = mask.flatten(1)
    longest = max(1, int(rows.sum(dim=1).amax()))
    order = rows.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :longest]
    return order, rows.gather(1, order)


@dataclass(frozen=True, slots=True)
class _Units:
    """Units of a ReLU that remain: their places in its flattened result, which of them count, and their number in the
    reduced network."""

    places: Annotated[Tensor, "n v"]
    counts: Annotated[Tensor, "n v"]
    number: int

    def mask(self, like: Annotated[Tensor, "n ..."]) -> Annotated[Tensor, "n ..."]:
        """True at these units of a result."""
        flags = torch.zeros_like(like, dtype=torch.bool).flatten(1)
        return flags.scatter(1, self.places, self.counts).reshape(like.shape)


class _Reduction:
    """The reduced network, as far as it is built: the units that remain of each ReLU, by the number of its result."""

    def __init__(self, network: Network, box: Interval, rounding: Rounding) -> None:
        self.network, self.box, self.rounding = network, box, rounding
        self.places, self.is_free = marked(box.upper > box.lower)
        self.free = box.map(lambda part: part.flatten(1).gather(1, self.places) * self.is_free)
        self.small = Network(())
        self.intervals = network.intervals(box, rounding)
        self.known: dict[int, Interval] = {}
        self.known_small: dict[int, Interval] = {}
        self.units: dict[int, _Units] = {}

    def add_units(self, step: Step, number: int) -> None:
        """The units of a ReLU that can bend, with bounds as tight as linear ones."""
        (source,) = step.inputs
        before = self.intervals[source]
        # Intervals that are computed anew later may differ in their last bits: this makes sure that what cannot bend
        # now never can.
        self.known[source] = before
        places, counts = marked((before.lower < 0) & (before.upper > 0))
        if not bool(counts.any()):
            return
        forms = torch.nn.functional.one_hot(places, before.lower[0].numel()).to(before.lower.dtype)
        forms = (forms * counts.unsqueeze(2)).reshape(*places.shape, *before.shape[1:])
        self.append(forms, source)
        last = len(self.small.steps)
        self.known_small[last] = before.map(lambda part: part.flatten(1).gather(1, places) * counts)
        intervals = self.small.intervals(self.free, self.rounding, self.known_small)
        for slope in (adaptive, parallel):
            look = BackwardPass(self.small, intervals, slope, self.rounding)
            self.known_small[last] = self.known_small[last].intersection(linear_interval(look, last))
        bounds = self.known_small[last]
        self.known[source] = Interval(
            _replaced(before.lower, places, counts, bounds.lower),
            _replaced(before.upper, places, counts, bounds.upper),
        )
        self.intervals = self.network.intervals(self.box, self.rounding, self.known)
        self.small = Network((*self.small.steps, Step(step.name, step.operation, (last,))))
        self.units[number] = _Units(places, counts, last + 1)

    def append(self, forms: Forms, index: int) -> None:
        """Forms of value `index`, as the next step of the reduced network.

        All that can bend on the way is kept. So nothing is lost but by rounding, and the error holds for both sides.
        """
        kept = {number: units.mask(self.intervals[number].lower) for number, units in self.units.items()}
        whole = BackwardPass(self.network, self.intervals, rounding=self.rounding, kept=kept)
        carried = whole.carry(forms, index)
        if carried.by_interval:
            raise NotCovered(f"layer {carried.by_interval[0]!r} has no linear rule")
        image, is_free = carried.image.flatten(2), self.is_free.unsqueeze(1)
        moving = _gathered(image, self.places) * is_free
        fixed = image.masked_fill((self.box.upper > self.box.lower).flatten(1).unsqueeze(1), 0.0)
        constant, error = summed(fixed * self.box.lower.flatten(1).unsqueeze(1), 1, self.rounding)
        inputs, weights = [0], [moving]
        for number, units in self.units.items():
            if number in carried.seen:
                inputs.append(units.number)
                seen = carried.seen[number].flatten(2)
                weights.append(_gathered(seen, units.places) * units.counts.unsqueeze(1))
        total = carried.constant + constant
        # As in `BackwardPass`: the sum is off by a unit of itself, and an error counts twice.
        error = 2 * (carried.error + error + total.abs() * (2 * self.rounding.unit))
        step = Step("units", Mixture(tuple(weights), total, error), tuple(inputs))
        self.small = Network((*self.small.steps, step))


def _gathered(
    forms: Annotated[Tensor, "n m _"], places: Annotated[Tensor, "n v"]
) -> Annotated[Tensor, "n m v"]:
    return forms.gather(2, places.unsqueeze(1).expand(-1, forms.shape[1], -1))


def _replaced(
    whole: Annotated[Tensor, "n ..."],
    places: Annotated[Tensor, "n v"],
    counts: Annotated[Tensor, "n v"],
    values: Annotated[Tensor, "n v"],
) -> Annotated[Tensor, "n ..."]:
    """The whole with other values at some places, where they count."""
    rows = whole.flatten(1)
    return rows.scatter(1, places, torch.where(counts, values, rows.gather(1, places))).reshape(whole.shape)
