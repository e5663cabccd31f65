"""Linear bounds hold for every member of a box, are those of the obvious reference, and lie between intervals and the
linear program of the same relaxation."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import event, given
from scipy.optimize import linprog
from torch import nn

import patchcert as pc
from boxes import OUTWARD, boxes_of
from linear_programs import least_margin, relaxed_margin
from patchcert.bounds import NEAREST, Interval, Rounding, trace
from patchcert.bounds.linear import (
    SLOPES,
    BackwardPass,
    Halves,
    adaptive,
    flat,
    interval_bound,
    linear_margins,
    margin_forms,
    parallel,
    reference_margin,
)
from patchcert.bounds.reduction import reduced
from patchcert.bounds.splitting import Problems, Splitting
from patchcert.testing.networks import ResidualBlock, linear, randomise
from strategies import cases, seeds
from written_models import unit_box


def all_targets(box, classes):
    return torch.arange(classes).expand(len(box.lower), -1)


def margins_of(case, box, rounding=OUTWARD, slopes=SLOPES):
    classes = case.model(case.images[:1]).shape[1]
    labels = case.labels[:1].expand(len(box.lower))
    return linear_margins(
        trace(case.model), box, labels, all_targets(box, classes), classes, rounding, slopes
    )


def reached(case, members):
    logits = case.model(members)
    return logits[:, case.labels[:1]] - logits


@torch.no_grad()
@given(cases(dtype=torch.float64), seeds())
def test_every_member_of_a_box_has_at_least_the_bound(case, seed):
    box, generator = boxes_of(case), torch.Generator().manual_seed(seed)
    lower = margins_of(case, box)
    for round_ in range(4):
        mix = torch.rand(box.lower.shape, generator=generator, dtype=torch.float64)
        mix = mix.round() if round_ % 2 else mix
        found = reached(case, torch.lerp(box.lower, box.upper, mix))
        assert (lower <= found + 1e-9 * (1 + found.abs())).all()


@torch.no_grad()
@given(cases(dtype=torch.float64))
def test_rounding_to_nearest_goes_through_other_products_to_nearly_the_same_bound(case):
    box = boxes_of(case)
    sound, nearest = margins_of(case, box), margins_of(case, box, NEAREST)
    assert (sound <= nearest + 1e-9).all()
    torch.testing.assert_close(sound, nearest, rtol=1e-6, atol=1e-6)


@torch.no_grad()
@given(cases(dtype=torch.float64))
def test_the_bound_of_forms_by_intervals_is_that_of_margins(case):
    box, network = boxes_of(case), trace(case.model)
    classes = case.model(case.images[:1]).shape[1]
    labels = case.labels[:1].expand(len(box.lower))
    forms = margin_forms(labels, all_targets(box, classes), classes, torch.float64)
    found = interval_bound(network, network.intervals(box), forms)
    torch.testing.assert_close(found, network.margins(box, labels), rtol=1e-9, atol=1e-9)


@torch.no_grad()
@given(cases(dtype=torch.float64))
def test_the_minimisers_of_the_form_are_members_too(case):
    box, network = boxes_of(case), trace(case.model)
    classes = case.model(case.images[:1]).shape[1]
    forms = margin_forms(
        case.labels[:1].expand(len(box.lower)), all_targets(box, classes), classes, box.lower.dtype
    )
    found = BackwardPass(network, network.intervals(box, OUTWARD), rounding=OUTWARD).bound(
        forms, len(network.steps)
    )
    corners = found.minimisers(box)
    for target in range(classes):
        corner = corners[:, target]
        assert ((box.lower <= corner) & (corner <= box.upper)).all()
        assert (found.lower[:, target] <= reached(case, corner)[:, target] + 1e-9).all()


@torch.no_grad()
@given(cases(dtype=torch.float64))
def test_batches_give_the_bounds_of_the_slow_reference(case):
    box, network = boxes_of(case), trace(case.model)
    box = Interval(box.lower[:2], box.upper[:2])
    label, classes = int(case.labels[0]), case.model(case.images[:1]).shape[1]
    has_pools = any(isinstance(layer, nn.MaxPool2d) for layer in case.model.modules())
    event(f"max pooling: {has_pools}")
    for slope in SLOPES:
        found = margins_of(case, box, Rounding(0.0, 0.0), (slope,))
        for row, target in product(range(len(box.lower)), range(classes)):
            single = Interval(box.lower[row : row + 1], box.upper[row : row + 1])
            expected = reference_margin(network, single, label, target, slope)
            if has_pools:
                assert found[row, target] >= expected - 1e-9 * (1 + abs(expected))
            else:
                assert found[row, target] == pytest.approx(expected, rel=1e-9, abs=1e-9)


@torch.no_grad()
@given(cases(dtype=torch.float64))
def test_a_box_of_one_point_has_the_margins_of_the_forward_pass(case):
    lower = margins_of(case, Interval.point(case.images[:1]))
    found = reached(case, case.images[:1])
    assert (lower <= found + 1e-12 * (1 + found.abs())).all()
    torch.testing.assert_close(lower, found, rtol=1e-8, atol=1e-8)


@torch.no_grad()
@given(cases())
def test_outward_rounding_only_lowers_bounds_and_by_little(case):
    box, dtype = boxes_of(case), case.images.dtype
    sound = margins_of(case, box, Rounding.outward(dtype))
    nearest = margins_of(case, box, Rounding(0.0, 0.0))
    scale = 1 + nearest.abs().amax()
    assert (sound <= nearest + (1e-12 if dtype == torch.float64 else 1e-4) * scale).all()
    assert (nearest - sound <= (1e-9 if dtype == torch.float64 else 0.02) * scale).all()


def two_hidden_layers(seed, widths=(3, 2), gain=2.0):
    layers = [
        nn.Flatten(),
        nn.Linear(4, widths[0]),
        nn.ReLU(),
        nn.Linear(*widths),
        nn.ReLU(),
        nn.Linear(widths[1], 2),
    ]
    return randomise(nn.Sequential(*layers), torch.Generator().manual_seed(seed), gain).double()


@torch.no_grad()
@pytest.mark.parametrize("seed", range(12))
def test_bounds_lie_below_the_linear_program_and_that_below_the_least_margin(seed):
    network = trace(two_hidden_layers(seed))
    box = unit_box(1, 1, 2, 2)
    intervals = network.intervals(box)
    ours = float(linear_margins(network, box, torch.tensor([0]), torch.tensor([[1]]), 2, OUTWARD))
    program, least = relaxed_margin(network, intervals, 0, 1), least_margin(network, intervals, 0, 1)
    assert ours <= program + 1e-7
    assert program <= least + 1e-7
    assert float(network.margins(box, torch.tensor([0]))[0, 1]) <= program + 1e-7


@torch.no_grad()
def test_linear_bounds_attain_the_linear_program_on_some_networks():
    """A lazy bound, below the program everywhere, would fail."""
    attained = 0
    for seed in range(12):
        network = trace(two_hidden_layers(seed, (3, 1)))
        box = unit_box(1, 1, 2, 2)
        ours = float(linear_margins(network, box, torch.tensor([0]), torch.tensor([[1]]), 2, OUTWARD))
        attained += ours > relaxed_margin(network, network.intervals(box), 0, 1) - 1e-6
    assert attained >= 4


@torch.no_grad()
def test_units_that_move_together_are_better_than_intervals():
    """relu(x) - relu(x - 1/2) is never below 0, but intervals let one unit move without the other."""
    first = linear(torch.tensor([[[[1.0]]], [[[1.0]]]]), [0.0, -0.5])
    model = nn.Sequential(
        nn.Flatten(), first, nn.ReLU(), linear(torch.tensor([[1.0, -1.0], [0.0, 0.0]]), [0.125, 0.0])
    )
    network, labels = trace(model.double()), torch.tensor([0])
    box = unit_box(1, 1, 1, 1)
    assert float(network.margins(box, labels, rounding=OUTWARD)[0, 1]) < -0.37
    ours = float(linear_margins(network, box, labels, torch.tensor([[1]]), 2, OUTWARD))
    assert ours == pytest.approx(0.125, abs=1e-9)


@torch.no_grad()
def test_one_layer_is_bounded_exactly(generator):
    model = randomise(
        nn.Sequential(
            nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.AvgPool2d(2, 1), nn.Flatten(), nn.Linear(12, 3)
        ),
        generator,
    )
    network = trace(model.double())
    box = unit_box(1, 2, 4, 4)
    ours = linear_margins(network, box, torch.tensor([1]), torch.tensor([[0, 2]]), 3, OUTWARD)
    matrix = torch.eye(32).double().reshape(32, 2, 4, 4)
    offset = model(torch.zeros_like(box.lower))
    slopes = model(matrix) - offset
    difference = slopes[:, 1:2] - slopes[:, [0, 2]]
    expected = difference.clamp(max=0).sum(dim=0) + (offset[0, 1] - offset[0, [0, 2]])
    torch.testing.assert_close(ours[0], expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_step_without_a_rule_counts_by_its_interval_and_is_named():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)).double()
    network = trace(model)
    box = unit_box(1, 1, 2, 2)
    intervals = network.intervals(box, OUTWARD)
    forms = margin_forms(torch.tensor([0]), torch.tensor([[1]]), 2, torch.float64)
    found = BackwardPass(network, intervals, rounding=OUTWARD).bound(forms, len(network.steps))
    assert found.carried.by_interval == ("2",)
    assert not found.carried.image.any()
    expected = network.margins(box, torch.tensor([0]), rounding=OUTWARD)[0, 1]
    assert float(found.lower) == pytest.approx(float(expected), abs=1e-9)


@torch.no_grad()
def test_the_largest_of_values_that_move_together_is_better_than_its_interval():
    """max(x, y) - x is never below 0, but intervals let the largest move against x."""
    first = nn.Conv2d(1, 1, 1, bias=False)
    first.weight.fill_(1.0)
    pool, same = nn.MaxPool2d((1, 2), 1), nn.Conv2d(1, 1, (1, 2), bias=False)
    same.weight.copy_(torch.tensor([[[[-1.0, 0.0]]]]))
    head = linear(torch.tensor([[1.0], [0.0]]), [0.5, 0.0])
    network = trace(nn.Sequential(first, ResidualBlock(pool, same), nn.Flatten(), head).double())
    box = unit_box(1, 1, 1, 2)
    labels = torch.tensor([0])
    assert float(network.margins(box, labels)[0, 1]) == pytest.approx(-0.5)
    assert float(linear_margins(network, box, labels, torch.tensor([[1]]), 2, OUTWARD)) == pytest.approx(0.5)


@torch.no_grad()
def test_branches_that_share_a_value_move_together():
    """x and -x added through a skip connection cancel, which intervals do not see."""
    mirror = nn.Conv2d(1, 1, 1, bias=False)
    mirror.weight.fill_(-1.0)
    head = linear(torch.tensor([[1.0], [0.0]]), [0.25, 0.0])
    model = nn.Sequential(ResidualBlock(mirror, nn.Identity()), nn.Flatten(), head).double()
    network, labels = trace(model), torch.tensor([0])
    box = unit_box(1, 1, 1, 1)
    assert float(network.margins(box, labels)[0, 1]) == pytest.approx(-0.75)
    assert float(linear_margins(network, box, labels, torch.tensor([[1]]), 2, OUTWARD)) == pytest.approx(0.25)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_never_a_positive_bound(bad):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    with torch.no_grad():
        model[1].weight[0, 0] = bad
        model[3].bias.copy_(torch.tensor([1e6, 0.0]))
        network = trace(model)
        box = unit_box(1, 1, 2, 2)
        found = linear_margins(network, box, torch.tensor([0]), torch.tensor([[1]]), 2, OUTWARD)
    assert not (found.isfinite() & (found > 0)).any()


def test_slopes_are_what_they_say():
    box = Interval(torch.tensor([-1.0, -3.0, 1.0, -2.0]), torch.tensor([3.0, 1.0, 2.0, -1.0]))
    assert adaptive(box).tolist() == [1.0, 0.0, 1.0, 0.0]
    assert flat(box).tolist() == [0.0] * 4
    assert parallel(box)[:2].tolist() == [0.75, 0.25]


def test_multipliers_never_help_where_the_sign_is_as_said():
    forms, signs = torch.randn(5, 1, 7), torch.randint(-1, 2, (5, 7)).float()
    weighed = Halves(signs, torch.randn(5, 7) * 3).weighed(forms)
    values = torch.rand(5, 1, 7) * signs.unsqueeze(1)
    assert ((weighed - forms) * values <= 0).all()
    assert (weighed[signs.unsqueeze(1) == 0] == forms[signs.unsqueeze(1) == 0]).all()


def test_the_linear_program_is_itself_sound():
    """The helper's relaxation of one unit on [-1, 3]: at least max(0, z), at most the chord."""
    model = nn.Sequential(
        nn.Flatten(),
        linear(torch.tensor([[[[4.0]]]]), [-1.0]),
        nn.ReLU(),
        linear(torch.tensor([[-1.0], [0.0]]), [0.0, 0.0]),
    )
    network = trace(model.double())
    box = unit_box(1, 1, 1, 1)
    with torch.no_grad():
        intervals = network.intervals(box)
        assert relaxed_margin(network, intervals, 0, 1) == pytest.approx(-3.0)
        assert least_margin(network, intervals, 0, 1) == pytest.approx(-3.0)
    assert linprog(np.array([1.0]), bounds=[(0, 1)]).status == 0


def open_properties(name, patch, count):
    """The traced network, and boxes of images of MNIST with classes that intervals leave open."""
    model, digits = pc.load(name), pc.load_dataset("mnist-mini").split("test")[torch.arange(40)]
    images, labels = digits.floats(), digits.labels
    left = pc.placement_margins(model, images, labels, patch) < 0
    image, placement, target = left.nonzero()[:: int(left.sum()) // count][:count].T
    corners = patch.placements(28, 28).corners[placement]
    boxes = patch.boxes(images[image].double(), corners[:, None])
    return trace(model.double()), Interval(boxes.lower[:, 0], boxes.upper[:, 0]), labels[image], target


@torch.no_grad()
def test_no_bound_of_a_trained_network_is_above_its_linear_program():
    """HiGHS solves the relaxation from the other side; with slopes that ascend, ours comes close to it."""
    network, box, labels, targets = open_properties("mnist-1-pixel-mlp", pc.Patch(5), 4)
    ours = linear_margins(network, box, labels, targets[:, None], 10, OUTWARD)[:, 0]
    small = reduced(network, box, labels, targets[:, None], 10, OUTWARD)
    rows = torch.arange(len(labels))
    problems = Problems(small, rows, torch.zeros_like(rows), rows)
    whole = Splitting(OUTWARD, budget=1, iterations=60).solve(
        problems, torch.zeros_like(rows), lambda problem, _: problem < 0
    )
    for row in rows.tolist():
        single = Interval(box.lower[row : row + 1], box.upper[row : row + 1])
        intervals = network.intervals(single, OUTWARD)
        program = relaxed_margin(network, intervals, int(labels[row]), int(targets[row]))
        apart = program - float(network.margins(single, labels[row : row + 1])[0, targets[row]])
        assert ours[row] <= program + 1e-6
        assert whole.lower[row] <= program + 1e-6
        assert whole.lower[row] >= min(0.0, program - 0.05 * apart) - 1e-6
