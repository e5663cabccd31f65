"""Dual variables of the linear program give the program's own value as a bound, in a pass that is sound by itself."""

import pytest
import torch
from torch import nn

from linear_programs import relaxed_margin
from patchcert.bounds import Interval, Rounding, programs, trace
from patchcert.bounds.linear import BackwardPass, Halves
from patchcert.bounds.programs import solve
from patchcert.bounds.reduction import reduced
from patchcert.testing.networks import randomise
from written_models import unit_box

OUTWARD = Rounding.outward(torch.float64)


def reduced_network(seed):
    layers = [nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)]
    model = randomise(nn.Sequential(nn.Flatten(), *layers), torch.Generator().manual_seed(seed), 2.0).double()
    box = unit_box(1, 1, 2, 2)
    with torch.no_grad():
        return (
            trace(model),
            reduced(trace(model), box, torch.tensor([0]), torch.tensor([[1]]), 2, OUTWARD),
            box,
        )


def bound(small, intervals, signs, solution):
    """The sound bound by the dual variables."""
    halves = {
        number: Halves(sign, torch.from_numpy(solution.duals[number].multipliers)[None])
        for number, sign in signs.items()
    }
    slopes = {number: torch.from_numpy(duals.slopes)[None] for number, duals in solution.duals.items()}
    forms = torch.ones(1, 1, 1).double()
    whole = BackwardPass(small.network, intervals, slopes, OUTWARD, halves)
    return float(whole.bound(forms, len(small.network.steps)).lower)


def no_sides(small):
    return {number: torch.zeros_like(box.lower) for number, box in small.known.items()}


def solved(small, intervals, signs):
    plain = {number: sign[0].numpy() for number, sign in signs.items()}
    return solve(small.network, intervals, plain, 0, 0)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(6))
def test_the_bound_by_dual_variables_is_the_optimum_of_another_program(seed):
    """The other program is of the whole network, with the intervals of the reduced one at its units."""
    network, small, box = reduced_network(seed)
    intervals = small.network.intervals(small.box, OUTWARD, small.known)
    signs = no_sides(small)
    ours = bound(small, intervals, signs, solved(small, intervals, signs))
    known = {}
    for (number, step), units in zip(
        ((n, s) for n, s in enumerate(network.steps, start=1) if s.name in ("2", "4")),
        small.known.values(),
        strict=False,
    ):
        before = network.intervals(box, OUTWARD, known)[step.inputs[0]]
        is_bent = (before.lower < 0) & (before.upper > 0)
        lower, upper = before.lower.clone(), before.upper.clone()
        lower[is_bent], upper[is_bent] = units.lower[0], units.upper[0]
        known[step.inputs[0]] = Interval(lower, upper)
        assert number > step.inputs[0]
    program = relaxed_margin(network, network.intervals(box, OUTWARD, known), 0, 1)
    assert ours == pytest.approx(program, rel=1e-6, abs=1e-6)


@torch.no_grad()
def test_sides_raise_the_bound_and_sides_that_exclude_each_other_prove_anything():
    raised, excluded = 0, 0
    for seed in range(4):
        _, small, _ = reduced_network(seed)
        first = min(small.known)
        units = small.known[first].lower.shape[1]
        whole = small.network.intervals(small.box, OUTWARD, small.known)
        plain = bound(small, whole, no_sides(small), solved(small, whole, no_sides(small)))
        for number in range(2**units):
            signs = no_sides(small)
            signs[first][0] = torch.tensor([2.0 * (number >> unit & 1) - 1 for unit in range(units)])
            known = {**small.known, first: sided(small.known[first], signs[first])}
            intervals = small.network.intervals(small.box, OUTWARD, known)
            if any((box.lower > box.upper).any() for box in intervals):
                continue
            solution = solved(small, intervals, signs)
            ours = plain if solution is None else bound(small, intervals, signs, solution)
            raised += ours > plain + 1e-3
            excluded += ours > 100
    assert raised > 10
    assert excluded > 0


def sided(box, signs):
    lower = torch.where(signs > 0, box.lower.clamp(min=0), box.lower)
    return Interval(lower, torch.where(signs < 0, box.upper.clamp(max=0), box.upper))


@torch.no_grad()
def test_the_least_point_lies_in_the_box_and_gaps_are_those_of_bent_units():
    _, small, _ = reduced_network(1)
    intervals = small.network.intervals(small.box, OUTWARD, small.known)
    solution = solved(small, intervals, no_sides(small))
    assert ((solution.values >= -1e-9) & (solution.values <= 1 + 1e-9)).all()
    for number, duals in solution.duals.items():
        box = small.known[number]
        is_bent = ((box.lower < 0) & (box.upper > 0))[0].numpy()
        assert (duals.gaps[~is_bent] == 0).all()
        assert (duals.gaps >= -1e-9).all()
        assert ((duals.slopes >= 0) & (duals.slopes <= 1)).all()
        assert (duals.multipliers >= 0).all()


@torch.no_grad()
def test_programs_that_a_solver_would_take_seconds_for_are_left_out(monkeypatch):
    _, small, _ = reduced_network(0)
    intervals = small.network.intervals(small.box, OUTWARD, small.known)
    assert solved(small, intervals, no_sides(small)) is not None
    monkeypatch.setattr(programs, "_MOST_ENTRIES", 4)
    assert solved(small, intervals, no_sides(small)) is None
