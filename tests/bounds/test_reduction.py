"""A reduced network gives the margins of the whole one for every member of its box, and its bounds are no worse."""

import pytest
import torch
from hypothesis import event, given
from torch import nn

from boxes import OUTWARD, boxes_of
from patchcert.bounds import Interval, trace
from patchcert.bounds.linear import BackwardPass, linear_margins
from patchcert.bounds.reduction import marked, reduced
from patchcert.testing.networks import ResidualBlock, randomise
from strategies import cases, seeds
from written_models import unit_box


def reduced_case(case, box):
    classes = case.model(case.images[:1]).shape[1]
    targets = torch.arange(classes).expand(len(box.lower), -1)
    return reduced(trace(case.model), box, case.labels[:1].expand(len(box.lower)), targets, classes, OUTWARD)


@torch.no_grad()
@given(cases(dtype=torch.float64), seeds())
def test_members_have_the_margins_of_the_whole_network(case, seed):
    box = boxes_of(case)
    small = reduced_case(case, box)
    event(f"reduced: {small is not None}")
    if small is None:
        return
    generator = torch.Generator().manual_seed(seed)
    mix = torch.rand(small.box.shape, generator=generator, dtype=torch.float64)
    free = torch.lerp(small.box.lower, small.box.upper, mix)
    members = small.filled(torch.arange(len(free)), box.lower, free)
    assert ((box.lower <= members) & (members <= box.upper)).all()
    logits = case.model(members)
    torch.testing.assert_close(
        small.network.values(free)[-1], logits[:, case.labels[:1]] - logits, rtol=1e-8, atol=1e-8
    )
    for number, known in small.known.items():
        value = small.network.values(free)[number]
        assert ((known.lower - 1e-9 <= value) & (value <= known.upper + 1e-9)).all()


def small_network(generator):
    block = ResidualBlock(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU()), nn.Identity())
    layers = [
        nn.Conv2d(1, 2, 3, 2, 1),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        block,
        nn.Flatten(),
        nn.Linear(18, 8),
        nn.ReLU(),
    ]
    return randomise(nn.Sequential(*layers, nn.Linear(8, 3)), generator, 1.5).double()


@torch.no_grad()
def test_reduced_bounds_are_no_worse_and_better_where_units_are_tightened(generator):
    network, image = trace(small_network(generator)), torch.rand(6, 1, 6, 6, generator=generator).double()
    box = Interval(image.clone(), image.clone())
    box.lower[:, :, 1:4, 1:4], box.upper[:, :, 1:4, 1:4] = 0.0, 1.0
    labels, targets = torch.zeros(6, dtype=torch.long), torch.tensor([1, 2]).expand(6, -1)
    whole = linear_margins(network, box, labels, targets, 3, OUTWARD)
    small = reduced(network, box, labels, targets, 3, OUTWARD)
    intervals = small.network.intervals(small.box, OUTWARD, small.known)
    forms = torch.eye(2).double().expand(6, -1, -1)
    ours = (
        BackwardPass(small.network, intervals, rounding=OUTWARD).bound(forms, len(small.network.steps)).lower
    )
    assert (ours > whole - 0.1 * whole.abs()).all()
    assert (ours > whole + 1e-6).any()


@torch.no_grad()
def test_boxes_of_a_selection_are_those_of_the_whole(generator):
    network, image = trace(small_network(generator)), torch.rand(4, 1, 6, 6, generator=generator).double()
    box = Interval(image.clone(), image.clone())
    box.lower[:, :, :2], box.upper[:, :, :2] = 0.0, 1.0
    small = reduced(
        network, box, torch.zeros(4, dtype=torch.long), torch.ones(4, 1, dtype=torch.long), 3, OUTWARD
    )
    index = torch.tensor([2, 0, 2])
    chosen = small.select(index)
    free = torch.rand(3, small.box.shape[1], generator=generator).double()
    whole = torch.zeros(4, small.box.shape[1]).double()
    whole[2], whole[0] = free[0], free[1]
    expected = small.network.values(whole)[-1]
    torch.testing.assert_close(chosen.network.values(free)[-1][:2], expected[[2, 0]])


@pytest.mark.parametrize("layer", [nn.Sigmoid(), nn.MaxPool2d(2), nn.LeakyReLU(0.1)])
def test_what_bends_otherwise_is_not_reduced(layer):
    model = nn.Sequential(
        nn.Conv2d(1, 1, 1), layer, nn.Flatten(), nn.Linear(4 if isinstance(layer, nn.MaxPool2d) else 16, 2)
    ).double()
    box = unit_box(1, 1, 4, 4)
    with torch.no_grad():
        assert reduced(trace(model), box, torch.tensor([0]), torch.tensor([[1]]), 2, OUTWARD) is None


def test_an_average_of_different_counts_is_not_reduced():
    model = nn.Sequential(
        nn.AvgPool2d(2, 2, 1, count_include_pad=False), nn.Flatten(), nn.Linear(9, 2)
    ).double()
    box = unit_box(1, 1, 4, 4)
    with torch.no_grad():
        assert reduced(trace(model), box, torch.tensor([0]), torch.tensor([[1]]), 2, OUTWARD) is None


def test_marks_are_packed_into_rows():
    places, counts = marked(torch.tensor([[False, True, False, True], [False, False, True, False]]))
    assert places[counts].tolist() == [1, 3, 2]
    assert counts.tolist() == [[True, True], [True, False]]
