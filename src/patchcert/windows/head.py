"""The last layer merged with the specification: from windows to margins."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds import Network, Rounding
from patchcert.bounds.operations import is_relu
from patchcert.bounds.rounding import summed_roundings
from patchcert.tensors import Labels, PlacementMargins
from patchcert.windows.clean import Clean
from patchcert.windows.groups import GroupPass
from patchcert.windows.kernels import fused_head
from patchcert.windows.passes import Windows
from patchcert.windows.products import product
from patchcert.windows.rules import before_head, propagate, relu_terms


@dataclass(frozen=True, slots=True)
class MarginChanges:
    """What placements do to margins: they move them by `shift`, give or take `spread`.

    Each term of the sums in them was rounded at most `roundings` times.
    """

    shift: PlacementMargins
    spread: PlacementMargins
    roundings: int

    @staticmethod
    def joined(parts: Sequence["MarginChanges"]) -> "MarginChanges":
        """The changes by one group of placements after those by another."""
        if len(parts) == 1:
            return parts[0]
        shift = torch.cat([part.shift for part in parts], dim=1)
        spread = torch.cat([part.spread for part in parts], dim=1)
        return MarginChanges(shift, spread, max(part.roundings for part in parts))


@dataclass(frozen=True, slots=True)
class MergedHead:
    """The weights of the last layer, of which rows label minus class count, and the clean margins."""

    weight: Annotated[Tensor, "k features"]
    labels: Labels
    clean: Annotated[Tensor, "n 1 k"]
    _differences: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(network: Network, clean: Clean, labels: Labels) -> "MergedHead":
        head = network.head
        assert head is not None
        return MergedHead(head.weight(), labels, clean.margins.unsqueeze(1))

    def changes(self, sweep: GroupPass, start: Windows, first: int = 0) -> MarginChanges:
        """From value `first` through all layers; on a GPU a last ReLU and the last layer are one kernel."""
        relu = _last_relu(sweep)
        if relu is None or relu < first:
            return self._changes_by_products(sweep, before_head(sweep, start, first))
        state, clean = propagate(sweep, start, relu, first), sweep.clean.values[relu].flatten(1)
        terms = relu_terms(state, sweep, relu)
        shift, spread = fused_head(state.deviation, state.radius, clean, self.weight, self.labels, *terms)
        # A sum of as many terms as features in any order rounds each at most that often; one more is to spare.
        return MarginChanges(shift, spread, self.weight.shape[1] + 1)

    def _changes_by_products(self, sweep: GroupPass, state: Windows) -> MarginChanges:
        """The same without the kernel, from the input of the last layer.

        How a sum is cut into blocks depends on the terms of the window, which may be more than the map has.
        """
        cells, rounding = sweep.cells(sweep.steps[-1].inputs[0]), sweep.rounding
        (weights, absolute), radius = self._merged(), state.radius.expand_as(state.deviation)
        if cells is not None:
            parts, columns = _by_place(state.deviation, radius, weights, cells.index)
            shift = product(parts[0], columns, rounding).squeeze(2)
            spread = product(parts[1], columns.abs(), rounding).squeeze(2)
            return MarginChanges(shift, spread, summed_roundings(columns.shape[2]))
        shift = product(state.deviation.transpose(0, 1), weights, rounding)
        spread = product(radius.transpose(0, 1), absolute, rounding)
        return MarginChanges(shift, spread, summed_roundings(self.weight.shape[1]))

    def _merged(self) -> list[Annotated[Tensor, "n features k"]]:
        """Row label minus row class, and its absolute values."""
        if not self._differences:
            difference = self.weight[self.labels].unsqueeze(2) - self.weight.T
            self._differences.extend((difference, difference.abs()))
        return self._differences

    def margins(self, changes: MarginChanges, rounding: Rounding) -> PlacementMargins:
        """The clean margins moved, and lowered by the spread; rounded down where they must be sound."""
        if not rounding.is_outward:
            return (self.clean + changes.shift).sub_(changes.spread)
        return _lowered(self.clean, changes, rounding)


def _last_relu(sweep: GroupPass) -> int | None:
    """The value that a ReLU on features takes to the last layer, where kernels are fused; else None."""
    index = sweep.steps[-1].inputs[0] - 1
    if not sweep.is_fused or index < 0 or sweep.windows[index] is not None:
        return None
    step = sweep.steps[index]
    return index if is_relu(step.operation) and step.inputs == (index,) else None


def _by_place(
    deviation: Annotated[Tensor, "p n h w c"],
    radius: Annotated[Tensor, "p n h w c"],
    weights: Annotated[Tensor, "n features k"],
    cells: Annotated[Tensor, "p cells"],
) -> tuple[list[Annotated[Tensor, "n p 1 terms"]], Annotated[Tensor, "n p terms k"]]:
    """Both parts as rows, and for each image and placement the weights of its window."""
    places = weights.unflatten(1, (deviation.shape[4], -1)).transpose(1, 2)  # (n, places, c, classes)
    rows = [part.transpose(0, 1).flatten(2).unsqueeze(2) for part in (deviation, radius)]
    return rows, places[:, cells].flatten(2, 3)


def _lowered(
    clean: Annotated[Tensor, "n 1 k"], changes: MarginChanges, rounding: Rounding
) -> PlacementMargins:
    # A weight difference is rounded once before the products are; counts of roundings have one to spare, and this two.
    gamma, unit = rounding.gamma(changes.roundings + 3), rounding.unit
    # As in `Windows.widened`: (1 + gamma) / (1 - gamma), and at most 4 roundings of the factor and what it is used for.
    spread = changes.spread * (1 + 2 * gamma * (1 + 2 * gamma) + 8 * unit)
    # Underflow of products, of the clean margin in its new type and of the sizes below: far below tiny / unit.
    spread += rounding.tiny / unit
    clean = clean.to(spread.dtype)
    margins = (changes.shift - spread).add_(clean)
    sizes = spread.add_(changes.shift.abs()).add_(clean.abs())
    # The clean margin in its new type and the first sum above cost a unit of all sizes, the second sum one more,
    # the difference below a third; the sum of the sizes is short of 2 units of itself at most. So 4 would suffice.
    return margins.sub_(sizes, alpha=8 * unit)
