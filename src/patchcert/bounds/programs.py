"""The linear program behind a bound: slopes and multipliers that no ascent improves on.

The program's dual variables are such numbers. They come from a solver that rounds as it likes; what is proven with them
is computed anew, by a pass that pays for its own rounding, so that they may be anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from patchcert.bounds.mixture import Mixture
from patchcert.bounds.network import Network
from patchcert.bounds.operations import Interval, is_relu

_PENALTY = 1e4
"""What leaving the side of a unit costs, in units of the largest weight of the output: multipliers stay below it."""
_MOST_ENTRIES = 2**19
"""Of the table of a program: one of 2^15 takes the solver 11 ms, one of a residual network a quarter of a minute, and
cannot be interrupted."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Duals:
    """Of the units of one ReLU: the multipliers of their sides, the slopes of their lower lines, and `gaps`, how far
    from the ReLU the program has them."""

    multipliers: Array
    slopes: Array
    gaps: Array


@dataclass(frozen=True, slots=True)
class Solution:
    """Values of the free inputs where the program is least and, by the number of each ReLU's input, what bounds it."""

    values: Array
    duals: Mapping[int, Duals]


def solve(
    network: Network, intervals: Sequence[Interval], signs: Mapping[int, Array], output: int, row: int
) -> Solution | None:
    """The least value of an output of a reduced network on one of its boxes, up to the lines that bound bent units.

    None where the solver fails, or the program is too large for it.
    """
    return _Program(network, intervals, signs, output, row).solution()


class _Program:
    """Variables: the free inputs, the results of all units, and by how much sides are left."""

    def __init__(
        self,
        network: Network,
        intervals: Sequence[Interval],
        signs: Mapping[int, Array],
        output: int,
        row: int,
    ) -> None:
        ends = [(box.lower[row].cpu().numpy(), box.upper[row].cpu().numpy()) for box in intervals]
        self.starts, self.bounds = {0: 0}, list(zip(*ends[0], strict=True))
        self.free = len(self.bounds)
        self.rows: list[Array] = []
        self.limits: list[float] = []
        self.equal: list[tuple[Array, float]] = []
        self.places: dict[int, list[tuple[int, int]]] = {number: [] for number in signs}
        self.bends: dict[int, list[tuple[int, int, int]]] = {number: [] for number in signs}
        self.units = {number: len(sign) for number, sign in signs.items()}
        relus = [number for number, step in enumerate(network.steps, start=1) if is_relu(step.operation)]
        self.size = sum(len(ends[number][0]) for number in (0, *relus)) + 1
        for number, step in enumerate(network.steps, start=1):
            if is_relu(step.operation):
                source = step.inputs[0]
                before = network.steps[source - 1]
                table, offset = self._table(before.operation, before.inputs, row)
                self.starts[number] = len(self.bounds)
                for unit in range(len(offset)):
                    self._add_unit(source, unit, table[unit], offset[unit], ends[source], signs[source][unit])
        last = network.steps[-1]
        table, offset = self._table(last.operation, last.inputs, row)
        self.cost = table[output]
        self.cost[-1] = _PENALTY * max(np.abs(self.cost).max(), 1e-9)
        self.bounds.append((0.0, None))

    def _table(self, operation: object, inputs: Sequence[int], row: int) -> tuple[Array, Array]:
        assert isinstance(operation, Mixture)
        table = np.zeros((operation.offset.shape[1], self.size))
        for index, weight in zip(inputs, operation.weights, strict=True):
            start = self.starts[index]
            table[:, start : start + weight.shape[2]] = weight[row if len(weight) > 1 else 0].cpu().numpy()
        return table, operation.offset[row].cpu().numpy()

    def _add_unit(
        self, source: int, unit: int, weights: Array, offset: float, ends: tuple[Array, Array], sign: float
    ) -> None:
        lower, upper, own = ends[0][unit], ends[1][unit], len(self.bounds)
        result = np.zeros(self.size)
        result[own] = 1.0
        if sign:
            left = -sign * weights
            left[-1] = -1.0
            self.places[source].append((unit, self._add(left, sign * offset)))
        if lower >= 0:
            self.equal.append((result - weights, offset))
            self.bounds.append((None, None))
        elif upper <= 0:
            self.bounds.append((0.0, 0.0))
        else:
            chord = upper / (upper - lower)
            self.bends[source].append((unit, self._add(weights - result, -offset), own))
            self._add(result - chord * weights, chord * (offset - lower))
            self.bounds.append((0.0, None))

    def _add(self, row: Array, limit: float) -> int:
        self.rows.append(row)
        self.limits.append(limit)
        return len(self.rows) - 1

    def solution(self) -> Solution | None:
        """Where the solver ends, and what its dual variables say; None of programs that would take it seconds."""
        if len(self.rows) * len(self.cost) > _MOST_ENTRIES:
            return None
        rows = (np.array(self.rows), np.array(self.limits)) if self.rows else (None, None)
        equal = (np.array([row for row, _ in self.equal]), [end for _, end in self.equal])
        found = linprog(
            self.cost, *rows, *(equal if self.equal else (None, None)), self.bounds, method="highs"
        )
        if found.status != 0 or not self.rows:
            return None
        above, below = -found.ineqlin.marginals, found.lower.marginals
        duals = {}
        for number in self.places:
            multipliers, slopes, gaps = (np.full(self.units[number], value) for value in (0.0, 0.5, 0.0))
            for unit, place in self.places[number]:
                multipliers[unit] = max(above[place], 0.0)
            for unit, place, own in self.bends[number]:
                total = max(above[place], 0.0) + max(below[own], 0.0)
                slopes[unit] = max(above[place], 0.0) / total if total > 0 else 0.5
                before = self.rows[place] @ found.x + found.x[own] - self.limits[place]
                gaps[unit] = found.x[own] - max(before, 0.0)
            duals[number] = Duals(multipliers, slopes, gaps)
        return Solution(found.x[: self.free], duals)
