"""The relaxation of a network as a linear program, solved by SciPy's HiGHS, and its least margin by enumeration.

Both know chains of linear layers and ReLUs alone, on one box.
"""

from itertools import product

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from patchcert.bounds.linear import written_out
from patchcert.bounds.operations import Affine, is_relu


class Program:
    """Variables for every value of the network, equalities for linear layers, and what each ReLU allows."""

    def __init__(self, network, intervals, label, target):
        sizes = [box.lower[0].numel() for box in intervals]
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        self.network, self.intervals = network, intervals
        self.ends = [(box.lower.flatten().numpy(), box.upper.flatten().numpy()) for box in intervals]
        self.equalities, self.inequalities = [], []
        self.cost = np.zeros(self.starts[-1])
        self.cost[self.starts[-2] + label] += 1
        self.cost[self.starts[-2] + target] -= 1
        for number, step in enumerate(network.steps, start=1):
            if not is_relu(step.operation):
                self._add_equalities(step, number)

    def _add_equalities(self, step, number):
        source = step.inputs[0]
        if isinstance(step.operation, Affine):
            matrix, offset = (
                part.numpy() for part in written_out(step.operation, self.intervals[source].lower)
            )
        else:
            matrix = np.eye(self.starts[number + 1] - self.starts[number])
            offset = np.zeros(len(matrix))
        for unit, row in enumerate(matrix):
            terms = {self.starts[number] + unit: 1.0}
            for place in np.flatnonzero(row):
                terms[self.starts[source] + place] = -row[place]
            self.equalities.append((terms, offset[unit]))

    def units(self):
        """(input, output, lower, upper) of every ReLU unit."""
        for number, step in enumerate(self.network.steps, start=1):
            if is_relu(step.operation):
                lower, upper = self.ends[step.inputs[0]]
                for unit in range(len(lower)):
                    source, result = self.starts[step.inputs[0]] + unit, self.starts[number] + unit
                    yield source, result, lower[unit], upper[unit]

    def solve(self, equalities, inequalities):
        """The least margin; infinity where nothing is feasible."""
        lower, upper = self.ends[0]
        bounds = [*zip(lower, upper, strict=True), *[(None, None)] * (len(self.cost) - len(lower))]
        rows = [self._rows([*self.equalities, *equalities]), self._rows(inequalities)]
        found = linprog(
            self.cost, *(rows[1] if inequalities else (None, None)), *rows[0], bounds, method="highs"
        )
        if found.status == 2:
            return np.inf
        assert found.status == 0, found.message
        return found.fun

    def _rows(self, constraints):
        rows = np.repeat(np.arange(len(constraints)), [len(terms) for terms, _ in constraints])
        places = [place for terms, _ in constraints for place in terms]
        values = [value for terms, _ in constraints for value in terms.values()]
        table = csr_array((values, (rows, places)), shape=(len(constraints), len(self.cost)))
        return table, np.array([bound for _, bound in constraints])


def relaxed_margin(network, intervals, label, target):
    """The optimum of the relaxation that linear bounds use: no bound by lines can be above it."""
    program = Program(network, intervals, label, target)
    equalities, inequalities = [], []
    for source, result, lower, upper in program.units():
        if lower >= 0:
            equalities.append(({result: 1.0, source: -1.0}, 0.0))
        elif upper <= 0:
            equalities.append(({result: 1.0}, 0.0))
        else:
            chord = upper / (upper - lower)
            inequalities += [({result: -1.0}, 0.0), ({source: 1.0, result: -1.0}, 0.0)]
            inequalities.append(({result: 1.0, source: -chord}, -chord * lower))
    return program.solve(equalities, inequalities)


def least_margin(network, intervals, label, target):
    """The true minimum: the best over all sides of all units."""
    program = Program(network, intervals, label, target)
    units, least = list(program.units()), np.inf
    for sides in product((False, True), repeat=len(units)):
        equalities, inequalities = [], []
        for is_on, (source, result, _, _) in zip(sides, units, strict=True):
            equalities.append(({result: 1.0, source: -1.0}, 0.0) if is_on else ({result: 1.0}, 0.0))
            inequalities.append(({source: -1.0 if is_on else 1.0}, 0.0))
        least = min(least, program.solve(equalities, inequalities))
    return least
