"""The last layer merged with the specification: from windows to margins."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from patchcert.bounds import Network, Rounding
from patchcert.bounds.operations import is_relu
from patchcert.bounds.rounding import summed_roundings
from patchcert.windows.clean import Clean
from patchcert.windows.kernels import fused_head
from patchcert.windows.passes import GroupPass, Windows
from patchcert.windows.products import product
from patchcert.windows.rules import before_head, propagate, relu_terms


@dataclass(frozen=True, slots=True)
class Moves:
    """What placements do to margins (n, p, classes): they move them by `shift`, give or take `spread`.

    Each term of the sums in them was rounded at most `roundings` times.
    """

    shift: Tensor
    spread: Tensor
    roundings: int

    @staticmethod
    def joined(parts: Sequence["Moves"]) -> "Moves":
        """The moves of one group of placements after those of another."""
        if len(parts) == 1:
            return parts[0]
        shift = torch.cat([part.shift for part in parts], dim=1)
        spread = torch.cat([part.spread for part in parts], dim=1)
        return Moves(shift, spread, max(part.roundings for part in parts))


@dataclass(frozen=True, slots=True)
class Head:
    """The rows label minus class of the last layer's weights (classes, features), and the clean margins."""

    weight: Tensor
    labels: Tensor
    clean: Tensor
    _differences: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(network: Network, clean: Clean, labels: Tensor) -> "Head":
        head = network.head
        assert head is not None
        return Head(head.weight(), labels, clean.margins.unsqueeze(1))

    def moves(self, sweep: GroupPass, start: Windows, first: int = 0) -> Moves:
        """From value `first` through all layers; on a GPU a last ReLU is taken in one pass with the last layer."""
        relu = _last_relu(sweep)
        if relu is None or relu < first:
            return self._plain_moves(sweep, before_head(sweep, start, first))
        state, clean = propagate(sweep, start, relu, first), sweep.clean.values[relu].flatten(1)
        terms = relu_terms(state, sweep, relu)
        shift, spread = fused_head(state.deviation, state.radius, clean, self.weight, self.labels, *terms)
        return Moves(shift, spread, self.weight.shape[1] + 1)

    def _plain_moves(self, sweep: GroupPass, state: Windows) -> Moves:
        """The slow twin of the fused pass, from the input of the last layer on.

        How a sum is cut into blocks depends on the terms of the window, which may be more than the map has.
        """
        cells, rounding = sweep.cells(sweep.steps[-1].inputs[0]), sweep.rounding
        (weights, absolute), radius = self._merged(), state.radius.expand_as(state.deviation)
        if cells is not None:
            parts, columns = _by_place(state.deviation, radius, weights, cells.index)
            shift = product(parts[0], columns, rounding).squeeze(2)
            spread = product(parts[1], columns.abs(), rounding).squeeze(2)
            return Moves(shift, spread, summed_roundings(columns.shape[2]))
        shift = product(state.deviation.transpose(0, 1), weights, rounding)
        spread = product(radius.transpose(0, 1), absolute, rounding)
        return Moves(shift, spread, summed_roundings(self.weight.shape[1]))

    def _merged(self) -> list[Tensor]:
        """Row label minus row class, (n, features, classes), and its absolute values."""
        if not self._differences:
            difference = self.weight[self.labels].unsqueeze(2) - self.weight.T
            self._differences.extend((difference, difference.abs()))
        return self._differences

    def margins(self, moves: Moves, rounding: Rounding) -> Tensor:
        """The clean margins moved, and lowered by the spread; rounded down where they must be sound."""
        if not rounding.is_outward:
            return (self.clean + moves.shift).sub_(moves.spread)
        return _lowered(self.clean, moves, rounding)


def _last_relu(sweep: GroupPass) -> int | None:
    """The value that a ReLU on features takes to the last layer, where kernels are fused; else None."""
    index = sweep.steps[-1].inputs[0] - 1
    if not sweep.is_fused or index < 0 or sweep.windows[index] is not None:
        return None
    step = sweep.steps[index]
    return index if is_relu(step.operation) and step.inputs == (index,) else None


def _by_place(
    deviation: Tensor, radius: Tensor, weights: Tensor, cells: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Both parts as rows (n, p, 1, k), and for each image and placement the weights (k, classes) of its window."""
    places = weights.unflatten(1, (deviation.shape[4], -1)).transpose(1, 2)  # (n, places, c, classes)
    rows = [part.transpose(0, 1).flatten(2).unsqueeze(2) for part in (deviation, radius)]
    return rows, places[:, cells].flatten(2, 3)


def _lowered(clean: Tensor, moves: Moves, rounding: Rounding) -> Tensor:
    """Rounded down: products lose gamma, weight differences a unit, and each of the three sums here a unit of its
    own size, which is at most that of all terms together."""
    gamma, unit = rounding.gamma(moves.roundings + 3), rounding.unit
    spread = moves.spread * (1 + 2 * gamma * (1 + 2 * gamma) + 8 * unit)
    spread += rounding.tiny / unit
    clean = clean.to(spread.dtype)
    margins = (moves.shift - spread).add_(clean)
    sizes = spread.add_(moves.shift.abs()).add_(clean.abs())
    return margins.sub_(sizes, alpha=8 * unit)
