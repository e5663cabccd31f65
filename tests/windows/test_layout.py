"""Every placement is in one group, and what windows cannot follow is left to the dense path."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from patchcert.bounds import Interval, trace
from patchcert.bounds.geometry import Geometry, NotCovered, Places
from patchcert.bounds.lowering import FUNCTION_RULES, LAYER_RULES
from patchcert.bounds.operations import Operation
from patchcert.testing.networks import ResidualBlock
from patchcert.threats import Patch
from patchcert.windows.dense import reference_margins
from patchcert.windows.layout import WITH_OWN_RULES, ConvolutionMatrix, Layout, window_matrix
from patchcert.windows.passes import clean_pass, groups
from patchcert.windows.rules import RULES
from patchcert.windows.sweep import PlacementSweep
from written_models import model_of


def test_the_operations_with_rules_of_their_own_are_those_in_the_table():
    assert set(WITH_OWN_RULES) == set(RULES)


def layout_of(model, height, width):
    network, images = trace(model.eval()), torch.rand(1, 1, height, width)
    return Layout.of(network, network.values(images))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["everywhere", "corners"]))
def test_every_placement_is_in_one_group_and_its_cells_are_its_own(first, second, side, placements):
    model = nn.Sequential(
        nn.Conv2d(1, 1, 3, first, 1),
        nn.ReLU(),
        nn.Conv2d(1, 1, 3, (second, 1), 1),
        nn.Flatten(),
        nn.LazyLinear(2),
    )
    model(torch.rand(1, 1, 9, 8))
    layout, patch = layout_of(model, 9, 8), Patch(side, placements)
    found = patch.placements(9, 8)
    parts = groups(layout, found, torch.device("cpu"))
    members = torch.cat([group.members for group in parts])
    assert sorted(members.tolist()) == list(range(len(found)))
    masks = found.masks(patch.stamp).flatten(1)
    for group in parts:
        pixels, cells = (group.cells[group.windows[index], layout.maps[index]] for index in (0, 3))
        assert pixels.outside is None
        for row, member in enumerate(group.members.tolist()):
            covered = torch.zeros(72, dtype=torch.bool)
            covered[pixels.index[row]] = True
            assert torch.equal(covered, masks[member])
        area = layout.maps[3]
        assert int(cells.signed.max()) < area.height * area.width
        outside = torch.zeros_like(cells.signed, dtype=torch.bool)
        if cells.outside is not None:
            outside = cells.outside.flatten(1).expand_as(cells.signed)
        assert torch.equal(cells.signed < 0, outside)


class Sum(nn.Module):
    """The sum of two branches, whatever their shapes; then a linear layer."""

    def __init__(self, first, second, features):
        super().__init__()
        self.first, self.second, self.head = first, second, nn.Linear(features, 2)

    def forward(self, images):
        return self.head(torch.flatten(self.first(images) + self.second(images), 1))


NOT_COVERED = {
    "no linear layer last": (
        nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.ReLU()),
        "the last layer is not linear",
    ),
    "a pool that rounds up": (
        nn.Sequential(nn.MaxPool2d(3, ceil_mode=True), nn.Flatten(), nn.Linear(9, 2)),
        "a max pooling with ceil_mode",
    ),
    "an average without its padding": (
        nn.Sequential(nn.AvgPool2d(3, padding=1, count_include_pad=False), nn.Flatten(), nn.Linear(9, 2)),
        "divides by different counts",
    ),
    "uneven adaptive pooling": (
        nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(9, 2)),
        "divides by different counts",
    ),
    "a linear layer on rows": (
        nn.Sequential(nn.Linear(8, 3), nn.Flatten(), nn.Linear(24, 2)),
        "a linear layer acts on an unflattened map",
    ),
    "batch norm of flat maps": (
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 2)),
        "a flattened map is scaled feature by feature",
    ),
    "a reshaped map": (
        nn.Sequential(nn.Flatten(2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)),
        r"Reshape makes \(1, 64\) of a map, not \(1, 8, 8\)",
    ),
    "features as a map": (
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(2, 2)),
        "features are used as a map again",
    ),
    "features as channels of several places": (
        model_of(
            lambda s, x: s.head(s.norm(s.pool(s.stem(x)).view(-1, 2, 2, 1)).flatten(1)),
            stem=nn.Conv2d(1, 4, 1),
            pool=nn.AdaptiveAvgPool2d(1),
            norm=nn.BatchNorm2d(2),
            head=nn.Linear(4, 2),
        ).float(),
        "features are used as a map again",
    ),
    "a patch between the steps of a kernel": (
        nn.Sequential(nn.Conv2d(1, 1, 1, stride=3), nn.Flatten(), nn.Linear(9, 2)),
        "fall between the steps of a kernel",
    ),
    "branches of different strides": (
        Sum(nn.Conv2d(1, 1, 2, stride=2), nn.Conv2d(1, 1, 5), 16),
        "two branches of different strides",
    ),
    "a sum of a map and its mean": (
        Sum(nn.Conv2d(1, 2, 3, padding=1), nn.Sequential(nn.Conv2d(1, 2, 1), nn.AdaptiveAvgPool2d(1)), 128),
        "a sum whose terms do not have the same places",
    ),
    "a sum of a map and one number per channel": (
        Sum(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(1, 2, 8), 128),
        "a sum whose terms do not have the same places",
    ),
    "a sum over channels": (
        Sum(nn.Conv2d(1, 2, 3, padding=1), nn.Identity(), 128),
        "a sum whose terms do not have the same places",
    ),
    "a sum of a flattened map and features": (
        Sum(nn.Flatten(), nn.Sequential(nn.Flatten(), nn.Linear(64, 64)), 64),
        "a sum whose terms do not have the same places",
    ),
    "a sum of flattened maps of different shapes": (
        Sum(nn.Flatten(), nn.Sequential(nn.Conv2d(1, 64, 8), nn.Flatten()), 64),
        "a sum whose terms do not have the same places",
    ),
    "a linear layer on unflattened features": (
        nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Linear(1, 2), nn.Flatten(), nn.Linear(6, 2)
        ),
        "a linear layer acts on an unflattened map",
    ),
}


@pytest.mark.parametrize("name", NOT_COVERED)
def test_what_windows_cannot_follow_is_not_covered(name):
    model, reason = NOT_COVERED[name]
    with pytest.raises(NotCovered, match=reason):
        PlacementSweep.of(trace(model.eval()), torch.rand(1, 1, 8, 8), Patch(1), 2**20)


def test_skip_connections_of_one_stride_are_covered():
    block = ResidualBlock(nn.Conv2d(1, 2, 3, 2, 1), nn.Conv2d(1, 2, 1, 2))
    model = nn.Sequential(block, nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)).eval()
    assert PlacementSweep.of(trace(model), torch.rand(1, 1, 8, 8), Patch(2), 2**20).groups


@dataclass(frozen=True)
class Halved(Operation):
    """x / 2, which is exact, without a rule of its own."""

    answer: Geometry | Places | None

    def forward(self, *inputs):
        return sum(inputs) / 2

    def interval(self, *inputs, rounding):
        return Interval(sum(box.lower for box in inputs) / 2, sum(box.upper for box in inputs) / 2)

    def places(self, area):
        return super().places(area) if self.answer is None else self.answer


@dataclass(frozen=True)
class Mean(Operation):
    """The mean of two results."""

    arity: ClassVar[int] = 2
    forward = Halved.forward
    interval = Halved.interval

    def places(self, area):
        return Places.KEPT


class Half(nn.Module):
    def forward(self, value):
        return value / 2


class Doubled(nn.Module):
    """A layer whose input counts twice."""

    def forward(self, value):
        return torch.mul(value, value)


def halving(monkeypatch, operation, *layers):
    monkeypatch.setitem(LAYER_RULES, Half, lambda layer: operation)
    return trace(nn.Sequential(*layers).eval())


MAP_LAYERS = (nn.Conv2d(1, 2, 3), Half(), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4), nn.Linear(4, 2))
FLAT_LAYERS = (nn.Conv2d(1, 2, 3), nn.Flatten(), Half(), nn.Linear(72, 2))
FEATURE_LAYERS = (nn.Flatten(), nn.Linear(64, 4), Half(), nn.ReLU(), nn.Linear(4, 2))
POOLED_LAYERS = (nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), Half(), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("answer", "layers"),
    [
        (Places.KEPT, MAP_LAYERS),
        (Places.KEPT, POOLED_LAYERS),
        (Places.KEPT, FEATURE_LAYERS),
        (None, FEATURE_LAYERS),
    ],
)
def test_an_operation_without_a_rule_goes_by_its_interval(monkeypatch, answer, layers):
    network, images = halving(monkeypatch, Halved(answer), *layers), torch.rand(2, 1, 8, 8)
    labels = torch.tensor([0, 1])
    with torch.no_grad():
        margins = PlacementSweep.of(network, images, Patch(2), 2**20).margins(
            clean_pass(network, images, labels), labels
        )
        torch.testing.assert_close(margins, reference_margins(network, images, labels, Patch(2)))


@pytest.mark.parametrize(
    ("answer", "layers"),
    [(None, MAP_LAYERS), (Places.LOST, MAP_LAYERS), (Places.KEPT, FLAT_LAYERS), (None, POOLED_LAYERS)],
)
def test_an_operation_without_a_rule_must_say_what_it_sees_of_a_map(monkeypatch, answer, layers):
    network = halving(monkeypatch, Halved(answer), *layers)
    with pytest.raises(NotCovered, match="windows have no rule for Halved"):
        PlacementSweep.of(network, torch.rand(1, 1, 8, 8), Patch(2), 2**20)


def test_an_operation_of_two_maps_needs_a_rule_of_its_own(monkeypatch):
    monkeypatch.setitem(FUNCTION_RULES, torch.mul, Mean)
    network = trace(nn.Sequential(nn.Conv2d(1, 2, 3), Doubled(), nn.Flatten(), nn.Linear(72, 2)))
    with pytest.raises(NotCovered, match="windows have no rule for Mean"):
        PlacementSweep.of(network, torch.rand(1, 1, 8, 8), Patch(2), 2**20)
    network = trace(nn.Sequential(nn.Flatten(), nn.Linear(64, 4), Doubled(), nn.Linear(4, 2)))
    images, labels = torch.rand(2, 1, 8, 8), torch.tensor([0, 1])
    with torch.no_grad():
        margins = PlacementSweep.of(network, images, Patch(2), 2**20).margins(
            clean_pass(network, images, labels), labels
        )
        torch.testing.assert_close(margins, reference_margins(network, images, labels, Patch(2)))


def test_a_geometry_that_does_not_fit_the_result_is_not_covered(monkeypatch):
    network = halving(monkeypatch, Halved(Geometry((2, 2))), *MAP_LAYERS)
    with pytest.raises(NotCovered, match=r"Halved makes \(2, 6, 6\) of a map, not \(2, 5, 5\)"):
        PlacementSweep.of(network, torch.rand(1, 1, 8, 8), Patch(2), 2**20)


CONVOLUTIONS = [
    (Geometry((3, 3), (1, 1), (1, 1, 1, 1), (1, 1)), 1),
    (Geometry((4, 2), (2, 3), (1, 2, 0, 3), (1, 1)), 2),
    (Geometry((2, 3), (1, 2), (-1, 0, 2, -1), (2, 1)), 1),
]


@pytest.mark.parametrize(("geometry", "groups"), CONVOLUTIONS, ids=str)
def test_the_matrix_and_its_gradient_are_those_of_the_convolution(geometry, groups):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4 // groups, *geometry.kernel, generator=generator, requires_grad=True)
    places = ConvolutionMatrix.of(geometry, weight, groups, (7, 9, 4))
    slow, ours = window_matrix(geometry, weight, groups, (7, 9, 4)), places.matrix(weight)
    assert torch.equal(ours, slow)
    weights = torch.randn(ours.shape, generator=generator)
    (expected,) = torch.autograd.grad((slow * weights).sum(), weight)
    (found,) = torch.autograd.grad((ours * weights).sum(), weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_weights_that_are_not_finite_stay_where_they_are():
    geometry, weight = CONVOLUTIONS[0][0], torch.full((1, 1, 3, 3), torch.inf)
    matrix = ConvolutionMatrix.of(geometry, weight, 1, (4, 4, 1)).matrix(weight)
    assert set(matrix.unique().tolist()) == {0.0, torch.inf}
