"""Branch and bound proves what is true, nothing else, and stops at its budget."""

import pytest
import torch
from torch import nn

from linear_programs import least_margin
from patchcert.bounds import Interval, Rounding, trace
from patchcert.bounds.reduction import reduced
from patchcert.bounds.splitting import Problems, Splitting
from patchcert.testing.networks import linear, randomise

OUTWARD = Rounding.outward(torch.float64)


def never(problem, values):
    return torch.zeros_like(problem, dtype=torch.bool)


def solved(model, box, budget=500, refute=never, **settings):
    network, count = trace(model), len(box.lower)
    labels, targets = torch.zeros(count, dtype=torch.long), torch.ones(count, 1, dtype=torch.long)
    with torch.no_grad():
        small = reduced(network, box, labels, targets, 2, OUTWARD)
        owners = torch.arange(count)
        problems = Problems(small, owners, torch.zeros_like(owners), owners)
        outcome = Splitting(OUTWARD, budget, **settings).solve(problems, torch.zeros_like(owners), refute)
    return outcome, small


def unit_box(count=1):
    return Interval(torch.zeros(count, 1, 2, 2).double(), torch.ones(count, 1, 2, 2).double())


@torch.no_grad()
def deep(seed, shift=0.0):
    layers = [nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)]
    model = randomise(nn.Sequential(nn.Flatten(), *layers), torch.Generator().manual_seed(seed), 2.0).double()
    model[-1].bias[0] += shift
    return model


@pytest.mark.parametrize("above", [0.02, -0.02])
def test_margins_are_proven_if_they_are_positive(above):
    """The bias puts the least margin, found by enumeration, just above or just below 0."""
    proven = 0
    for seed in range(4):
        network = trace(deep(seed))
        with torch.no_grad():
            least = least_margin(network, network.intervals(unit_box()), 0, 1)
        outcome, _ = solved(
            deep(seed, above - least), unit_box(), budget=60 if above > 0 else 8, iterations=40
        )
        assert float(outcome.lower) <= above + 1e-7
        proven += bool(outcome.lower > 0)
    assert proven == 4 if above > 0 else proven == 0


def bump():
    """A margin of 0.05 at least that no single bound sees: |x - 1/2| + |x - 1/4| - |x - 3/8| - 1/8 + 0.05."""
    starts = [0.5, 0.25, 0.375]
    first = linear(
        torch.tensor([[[[sign, 0.0], [0.0, 0.0]]] for _ in starts for sign in (1.0, -1.0)]),
        [-sign * start for start in starts for sign in (1.0, -1.0)],
    )
    weights = torch.tensor([[1.0, 1.0, 1.0, 1.0, -1.0, -1.0], [0.0] * 6])
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), linear(weights, [-0.075, 0.0])).double()


def test_halves_prove_what_the_whole_does_not():
    whole, _ = solved(bump(), unit_box(), budget=1)
    parts, _ = solved(bump(), unit_box(), budget=100)
    assert float(whole.lower) <= 0
    assert 0 < float(parts.lower) <= 0.05 + 1e-6
    assert int(parts.nodes) > 1


def test_a_budget_that_ends_early_proves_nothing():
    for budget in (1, 2):
        outcome, _ = solved(bump(), unit_box(), budget=budget)
        assert float(outcome.lower) <= 0
        assert bool(outcome.is_given_up)


def test_parts_taken_before_count_for_the_budget():
    network, box = trace(bump()), unit_box()
    nothing = torch.zeros(1, dtype=torch.long)
    with torch.no_grad():
        small = reduced(network, box, nothing, torch.ones(1, 1, dtype=torch.long), 2, OUTWARD)
        problems = Problems(small, nothing, nothing, nothing)
        outcome = Splitting(OUTWARD, 50).solve(problems, torch.tensor([50]), never)
    assert int(outcome.nodes) == 50
    assert bool(outcome.is_given_up)
    assert not (outcome.lower > 0).any()


@torch.no_grad()
def test_owners_that_are_refuted_end_and_others_go_on():
    box = unit_box(2)
    box.upper[1] = 0.1

    def refute(problem, values):
        return problem == 0

    outcome, _ = solved(bump(), box, refute=refute)
    assert not (outcome.lower[0] > 0)
    assert outcome.lower[1] > 0
    assert outcome.nodes.tolist() == [1, 1]


@torch.no_grad()
def test_candidates_lie_in_the_box():
    met = []

    def refute(problem, values):
        met.append(values)
        return torch.zeros_like(problem, dtype=torch.bool)

    solved(deep(1, -5.0), unit_box(), budget=20, refute=refute)
    assert met
    assert all(((values >= 0) & (values <= 1)).all() for values in met)


@pytest.mark.parametrize("batch", [1, 3, 512])
def test_batches_change_no_verdict(batch):
    outcome, _ = solved(bump(), unit_box(), budget=200, batch=batch)
    assert float(outcome.lower) > 0


def test_a_network_without_units_that_bend_is_given_up_or_proven_at_once():
    model = nn.Sequential(
        nn.Flatten(), linear(torch.tensor([[1.0, 0, 0, 0], [0.0, 0, 0, 0]]), [0.5, 0.0])
    ).double()
    outcome, _ = solved(model, unit_box())
    assert float(outcome.lower) == pytest.approx(0.5)
    with torch.no_grad():
        model[1].bias[0] = -0.5
    outcome, _ = solved(model, unit_box())
    assert float(outcome.lower) == pytest.approx(-0.5)
    assert bool(outcome.is_given_up)
