"""Branch and bound: a margin on a box is proven by parts, in each of which some units are on one side of their ReLU.

The two halves of a unit's range cover it, so that a margin which is proven on both is proven. In a half the unit is
linear, and the sign that its input has there enters the bound by a multiplier (Wang et al. 2021, Beta-CROWN).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds.linear import BackwardPass, Halves, LinearBound
from patchcert.bounds.operations import Interval, is_relu
from patchcert.bounds.programs import solve
from patchcert.bounds.reduction import Reduced
from patchcert.bounds.rounding import NEAREST, Rounding

Table = dict[int, Annotated[Tensor, "d _"]]
"""Numbers for the units of each ReLU, by the number of its input."""

_SHORTER = 0.95
"""By this factor a step of ascent is shorter than the one before."""

_WORTH_CUTTING = 0.2
"""A part is cut where a unit loses at least this share of what is missing."""

_LOWER_LINE, _A_LITTLE = 0.1, 1e-9
_GAP = 1e-6
"""A linear program whose units are all this near to their ReLU says nothing of where to cut."""

Refute = Callable[[Annotated[Tensor, "d"], Annotated[Tensor, "d free"]], Annotated[Tensor, "d"]]
"""Whether problems, given by their numbers, are refuted by values of the free inputs."""


@dataclass(frozen=True, slots=True)
class Problems:
    """Outputs of reduced networks that are to be proven positive, each of an owner with whom it stands or falls."""

    reduced: Reduced
    boxes: Annotated[Tensor, "problems"]
    outputs: Annotated[Tensor, "problems"]
    owners: Annotated[Tensor, "problems"]

    def __len__(self) -> int:
        return len(self.boxes)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Proven lower bounds of all problems; by owners, how many parts were bounded in all, and who was given up."""

    lower: Annotated[Tensor, "problems"]
    nodes: Annotated[Tensor, "owners"]
    is_given_up: Annotated[Tensor, "owners"]


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of problems: the sides on which units are (1, -1, or 0 for both), and what has bounded them best so far."""

    problem: Annotated[Tensor, "d"]
    signs: Table
    multipliers: Table
    slopes: Table

    def __len__(self) -> int:
        return len(self.problem)

    @staticmethod
    def whole(problems: Problems) -> "Parts":
        """Every problem as one part."""
        known = {number: box.lower[problems.boxes] for number, box in problems.reduced.known.items()}
        nothing = {number: torch.zeros_like(value) for number, value in known.items()}
        halves = {number: torch.full_like(value, 0.5) for number, value in known.items()}
        return Parts(torch.arange(len(problems), device=problems.boxes.device), nothing, nothing, halves)

    def select(self, index: Annotated[Tensor, "chosen"]) -> "Parts":
        """Some of the parts."""
        tables = [{number: value[index] for number, value in table.items()} for table in self._tables]
        return Parts(self.problem[index], *tables)

    @staticmethod
    def joined(parts: "Sequence[Parts]") -> "Parts":
        """All of them in one."""
        tables = [
            {number: torch.cat([each._tables[place][number] for each in parts]) for number in table}
            for place, table in enumerate(parts[0]._tables)
        ]
        return Parts(torch.cat([each.problem for each in parts]), *tables)

    def halved(self, number: int, unit: Annotated[Tensor, "d"]) -> "Parts":
        """Both halves of each part, at one unit of the ReLU whose input has this number."""
        pair = Parts.joined([self, self])
        signs = pair.signs[number].scatter(1, unit.repeat(2).unsqueeze(1), 1.0)
        signs[len(self) :].scatter_(1, unit.unsqueeze(1), -1.0)
        return replace(pair, signs={**pair.signs, number: signs})

    @property
    def halves(self) -> dict[int, Halves]:
        """The sides with their multipliers."""
        return {number: Halves(sign, self.multipliers[number]) for number, sign in self.signs.items()}

    @property
    def _tables(self) -> tuple[Table, Table, Table]:
        return self.signs, self.multipliers, self.slopes


@dataclass(frozen=True, slots=True)
class Splitting:
    """Bounds `batch` parts at a time, by `iterations` steps of ascent on slopes and multipliers.

    An owner is given up once `budget` of its parts were bounded.
    """

    rounding: Rounding
    budget: int
    iterations: int = 20
    batch: int = 512
    rate: float = 0.1

    def solve(self, problems: Problems, spent: Annotated[Tensor, "owners"], refute: Refute) -> Outcome:
        """Bounds of all problems; those that are not proven have the bound of the whole.

        `spent` are the parts that owners have taken before, which count for the budget.
        """
        return _Search(self, problems, spent, refute).outcome()


class _Search:
    """One call: the parts that wait, depth first, and what is known of problems and owners."""

    def __init__(self, settings: Splitting, problems: Problems, spent: Tensor, refute: Refute) -> None:
        self.settings, self.problems, self.refute = settings, problems, refute
        count, ends = len(problems), problems.reduced.box.lower
        self.whole = ends.new_full((count,), -torch.inf)
        self.is_new = torch.ones_like(problems.boxes, dtype=torch.bool)
        self.least = ends.new_full((count,), torch.inf)
        self.nodes = spent.clone()
        self.is_given_up = torch.zeros_like(spent, dtype=torch.bool)
        self.is_refuted = torch.zeros_like(self.is_given_up)
        self.waiting = [Parts.whole(problems)] if count else []

    def outcome(self) -> Outcome:
        while self.waiting:
            parts = self._next()
            if len(parts):
                self._step(parts)
        failed = (self.is_refuted | self.is_given_up)[self.problems.owners]
        # Of an owner that failed, problems may have parts that were never bounded: only the bound of the whole is sure.
        return Outcome(torch.where(failed, self.whole, self.least), self.nodes, self.is_given_up)

    def _next(self) -> Parts:
        """The last parts that wait, those of owners who failed left out."""
        taken, missing = [], self.settings.batch
        while self.waiting and missing > 0:
            parts = self.waiting.pop()
            owners = self.problems.owners[parts.problem]
            self.is_given_up[owners[self.nodes[owners] >= self.settings.budget]] = True
            index = (~(self.is_refuted | self.is_given_up)[owners]).nonzero().flatten()
            if len(index) > missing:
                self.waiting.append(parts.select(index[:-missing]))
                index = index[-missing:]
            taken.append(parts.select(index))
            missing -= len(index)
        return Parts.joined(taken)

    def _step(self, parts: Parts) -> None:
        """Bounds parts; halves those that are not proven."""
        problem, problems = parts.problem, self.problems
        owners = problems.owners[problem]
        self.nodes.index_add_(0, owners, torch.ones_like(owners))
        look = _Look.of(parts, problems, self.settings)
        polished = look.polished(*look.ascended(parts))
        parts, bound = polished.parts, polished.bound
        lower = torch.where(look.is_empty, torch.inf, bound.lower[:, 0])
        self._note(problem, lower)
        rest = (~(lower > 0)).nonzero().flatten()
        if not len(rest):
            return
        for candidates in (bound.minimisers(look.reduced.box)[:, 0], polished.points):
            refuted = self.refute(problem[rest], candidates[rest])
            self.is_refuted[owners[rest][refuted]] = True
        self._halve(parts.select(rest), {number: score[rest] for number, score in polished.scores.items()})

    def _halve(self, parts: Parts, scores: Table) -> None:
        """Each part at the unit of the highest score; the owner of a part without one is given up."""
        largest = [score.amax(dim=1) for score in scores.values()]
        tops = torch.stack([torch.zeros_like(self.least[parts.problem]), *largest], dim=1)
        best = tops.nan_to_num(0.0).argmax(dim=1)
        self.is_given_up[self.problems.owners[parts.problem[best == 0]]] = True
        for place, (number, score) in enumerate(scores.items(), start=1):
            chosen = (best == place).nonzero().flatten()
            if len(chosen):
                self.waiting.append(parts.select(chosen).halved(number, score[chosen].argmax(dim=1)))

    def _note(self, problem: Tensor, lower: Tensor) -> None:
        """Keep the bounds: the first part of a problem is the whole."""
        first = self.is_new[problem]
        self.whole[problem[first]] = lower[first]
        self.is_new[problem] = False
        proven = lower > 0
        self.least.scatter_reduce_(0, problem[proven], lower[proven], "amin")


@dataclass(frozen=True, slots=True)
class _Polished:
    """Parts with their bound, inputs that may refute them, and what each unit is worth cutting."""

    parts: Parts
    bound: LinearBound
    points: Annotated[Tensor, "d free"]
    scores: Table


@dataclass(frozen=True, slots=True)
class _Look:
    """Parts with the reduced networks of their problems, and the intervals that hold in them."""

    reduced: Reduced
    intervals: list[Interval]
    forms: Annotated[Tensor, "d 1 _"]
    is_empty: Annotated[Tensor, "d"]
    settings: Splitting

    @staticmethod
    def of(parts: Parts, problems: Problems, settings: Splitting) -> "_Look":
        small = problems.reduced.select(problems.boxes[parts.problem])
        known = {number: _on_side(box, parts.signs[number]) for number, box in small.known.items()}
        intervals = small.network.intervals(small.box, settings.rounding, known)
        is_empty = torch.stack([(box.lower > box.upper).any(dim=1) for box in intervals]).any(dim=0)
        outputs = problems.outputs[parts.problem]
        size = intervals[-1].lower.shape[1]
        forms = torch.nn.functional.one_hot(outputs, size).to(small.box.lower.dtype).unsqueeze(1)
        return _Look(small, intervals, forms, is_empty, settings)

    def bound(self, parts: Parts, rounding: Rounding) -> LinearBound:
        whole = BackwardPass(self.reduced.network, self.intervals, parts.slopes, rounding, parts.halves)
        return whole.bound(self.forms, len(self.reduced.network.steps))

    def ascended(self, parts: Parts) -> tuple[Parts, LinearBound]:
        """The parts with slopes and multipliers that bound them better, and the sound bound by these.

        Steps are those of Adam, and grow shorter. Multipliers are in units of the largest coefficient that an input of
        a ReLU had at first: how the logits are scaled does not matter.
        """
        first = self.bound(parts, NEAREST)
        best, highest = parts, first.lower[:, 0]
        keys = [(name, number) for name in ("multipliers", "slopes") for number in parts.signs]
        scale = _largest(
            [first.carried.seen[number] for number in parts.signs if number in first.carried.seen]
        )
        units = {key: scale if key[0] == "multipliers" else 1.0 for key in keys}
        values = {(name, number): getattr(parts, name)[number] for name, number in keys}
        means = {key: (torch.zeros_like(values[key]), torch.zeros_like(values[key])) for key in keys}
        for step in range(1, self.settings.iterations + 1 if keys else 1):
            with torch.enable_grad():
                values = {key: value.detach().requires_grad_() for key, value in values.items()}
                tried = replace(
                    parts,
                    **{name: {number: values[name, number] for number in parts.signs} for name, _ in keys},
                )
                lower = self.bound(tried, NEAREST).lower[:, 0]
                gradients = torch.autograd.grad(lower.sum(), list(values.values()), allow_unused=True)
            best, highest = _better(best, highest, tried, lower.detach())
            if bool(((highest > 0) | self.is_empty).all()):
                break
            rate = self.settings.rate * _SHORTER**step
            for key, gradient in zip(keys, gradients, strict=True):
                if gradient is not None:
                    move, means[key] = _adam(gradient * units[key], means[key], step)
                    values[key] = values[key].detach() + rate * units[key] * move
                    values[key] = values[key].clamp(0, None if key[0] == "multipliers" else 1)
        return best, self.bound(best, self.settings.rounding)

    def polished(self, parts: Parts, bound: LinearBound) -> "_Polished":
        """The parts with the best slopes and multipliers there are, where the ascent has not found them.

        It has not where even the unit that loses most loses little of what is missing: cutting it would not help. There
        a linear program says where to cut, and its least point may well be a counterexample.
        """
        scores, lower, points = self.scores(bound), bound.lower[:, 0], self.reduced.box.centre
        most = torch.stack([lower.new_zeros(len(lower)), *(score.amax(dim=1) for score in scores.values())])
        is_weak = ~(lower > 0) & ~self.is_empty & (most.amax(dim=0) < _WORTH_CUTTING * -lower)
        if not scores or not bool(is_weak.any()):
            return _Polished(parts, bound, points, scores)
        tried = replace(parts, multipliers=_copied(parts.multipliers), slopes=_copied(parts.slopes))
        for row in is_weak.nonzero().flatten().tolist():
            signs = {number: sign[row].cpu().numpy() for number, sign in parts.signs.items()}
            output = int(self.forms[row, 0].argmax())
            found = solve(self.reduced.network, self.intervals, signs, output, row)
            if found is not None:
                points[row] = torch.from_numpy(found.values).to(points)
                for number, duals in found.duals.items():
                    tried.multipliers[number][row] = torch.from_numpy(duals.multipliers).to(points)
                    tried.slopes[number][row] = torch.from_numpy(duals.slopes).to(points)
                    if any(each.gaps.max(initial=0.0) > _GAP for each in found.duals.values()):
                        scores[number][row] = torch.from_numpy(duals.gaps).to(points).clamp(min=0)
        better, _ = _better(parts, lower, tried, self.bound(tried, self.settings.rounding).lower[:, 0])
        sound = self.bound(better, self.settings.rounding)
        return _Polished(better, sound, self.reduced.box.clamped(points), scores)

    def scores(self, bound: LinearBound) -> Table:
        """How much the bound may lose at each unit that can bend, a little at least; 0 at the others.

        The chord is furthest from the ReLU at its bend. Lower lines count less: their slopes can still ascend.
        """
        found = {}
        for number, step in enumerate(self.reduced.network.steps, start=1):
            if not is_relu(step.operation):
                continue
            source = step.inputs[0]
            box = self.intervals[source]
            is_bent = (box.lower < 0) & (box.upper > 0)
            forms = bound.carried.seen.get(number)
            weight = torch.zeros_like(box.lower) if forms is None else forms[:, 0]
            gap = box.upper * -box.lower / (box.upper - box.lower)
            size = torch.where(weight < 0, -weight, _LOWER_LINE * weight) + _A_LITTLE
            found[source] = torch.where(is_bent, size * gap, 0.0)
        return found


def _copied(table: Table) -> Table:
    return {number: value.clone() for number, value in table.items()}


def _on_side(box: Interval, signs: Tensor) -> Interval:
    lower = torch.where(signs > 0, box.lower.clamp(min=0), box.lower)
    return Interval(lower, torch.where(signs < 0, box.upper.clamp(max=0), box.upper))


Means = tuple[Tensor, Tensor]


def _adam(gradient: Tensor, means: Means, step: int) -> tuple[Tensor, Means]:
    """The direction of a step of Adam (Kingma and Ba 2015), and the means of gradients and of their squares."""
    first, second = 0.9 * means[0] + 0.1 * gradient, 0.999 * means[1] + 0.001 * gradient.square()
    root = (second / (1 - 0.999**step)).sqrt()
    return first / (1 - 0.9**step) / (root + 1e-12), (first, second)


def _largest(forms: Sequence[Annotated[Tensor, "d 1 _"]]) -> Annotated[Tensor, "d 1"] | float:
    """The largest coefficient of each part, 1 where all are 0."""
    if not forms:
        return 1.0
    found = torch.stack([each.abs().amax(dim=2) for each in forms]).amax(dim=0)
    return torch.where(found > 0, found, 1.0)


def _better(best: Parts, highest: Tensor, tried: Parts, lower: Tensor) -> tuple[Parts, Tensor]:
    is_higher = (lower > highest).unsqueeze(1)

    def chosen(old: Table, new: Table) -> Table:
        return {number: torch.where(is_higher, new[number].detach(), old[number]) for number in old}

    multipliers = chosen(best.multipliers, tried.multipliers)
    better = replace(best, multipliers=multipliers, slopes=chosen(best.slopes, tried.slopes))
    return better, torch.maximum(highest, lower)
