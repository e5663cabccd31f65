"""Windows hold exactly what a patch can reach, and every placement is in one group."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from patchcert.bounds import trace
from patchcert.bounds.geometry import Geometry
from patchcert.testing.networks import ResidualBlock
from patchcert.threats import Patch
from patchcert.windows.geometry import _FOLLOWED, Layout, NotCovered, Window
from patchcert.windows.groups import groups
from patchcert.windows.rules import RULES
from patchcert.windows.sweep import PlacementSweep


def test_the_operations_that_windows_follow_are_those_with_rules():
    assert set(_FOLLOWED) == set(RULES)


@st.composite
def geometries(draw):
    kernel = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    stride = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    padding = tuple(draw(st.integers(0, 3)) for _ in range(4))
    dilation = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    return Geometry(kernel, stride, padding, dilation)


def touched(geometry, size, top, left, height, width):
    """Where a convolution of ones by ones answers to a rectangle of ones: the outputs that see it."""
    image = torch.zeros(1, 1, *size)
    image[..., top : top + height, left : left + width] = 1
    kernel = torch.ones(1, 1, *geometry.kernel)
    return F.conv2d(geometry.pad(image), kernel, None, geometry.stride, 0, geometry.dilation)[0, 0] > 0


@given(geometries(), st.integers(0, 7), st.integers(0, 7), st.integers(1, 4), st.integers(1, 4))
def test_a_window_holds_every_output_that_sees_it(geometry, top, left, height, width):
    size = (12, 12)
    try:
        window = Window(top, left, height, width).through(geometry)
    except NotCovered:
        assert geometry.stride != (1, 1)
        return
    seen = touched(geometry, size, top, left, height, width)
    rows, columns = seen.any(dim=1).nonzero().flatten(), seen.any(dim=0).nonzero().flatten()
    assert all(window.top <= row < window.top + window.height for row in rows.tolist())
    assert all(window.left <= column < window.left + window.width for column in columns.tolist())
    if geometry.dilation == (1, 1):
        inside = [
            (row, column)
            for row in range(window.top, window.top + window.height)
            for column in range(window.left, window.left + window.width)
            if 0 <= row < seen.shape[0] and 0 <= column < seen.shape[1]
        ]
        assert all(bool(seen[place]) for place in inside)
    assert (window.row_step, window.column_step) == geometry.stride


@given(geometries(), st.integers(2, 6), st.integers(2, 6), st.integers(1, 4), st.integers(1, 4))
def test_a_window_alone_gives_the_outputs_of_its_window(geometry, top, left, height, width):
    """The kernel on the window with its own padding is the kernel on the whole image, cut to the new
    window.
    """
    source = Window(top, left, height, width)
    try:
        target = source.through(geometry)
    except NotCovered:
        return
    image = torch.zeros(1, 1, 12, 12)
    generator = torch.Generator().manual_seed(0)
    image[..., top : top + height, left : left + width] = torch.rand(height, width, generator=generator)
    kernel = torch.rand(1, 1, *geometry.kernel, generator=generator)
    whole = F.conv2d(geometry.pad(image), kernel, None, geometry.stride, 0, geometry.dilation)[0, 0]
    pads = source.input_padding(geometry, target)
    local = F.pad(image[..., top : top + height, left : left + width], pads)
    part = F.conv2d(local, kernel, None, geometry.stride, 0, geometry.dilation)[0, 0]
    assert part.shape == (target.height, target.width)
    for row in range(max(target.top, 0), min(target.top + target.height, whole.shape[0])):
        for column in range(max(target.left, 0), min(target.left + target.width, whole.shape[1])):
            assert part[row - target.top, column - target.left] == pytest.approx(float(whole[row, column]))


def test_a_sum_has_the_window_of_both():
    assert Window(1, 2, 3, 4).union(Window(-1, 3, 2, 5)) == Window(-1, 2, 5, 6)
    with pytest.raises(NotCovered, match="different strides"):
        Window(0, 0, 1, 1).union(Window(0, 0, 1, 1, 2, 2))


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
        pixels, cells = group.cells[0], group.cells[3]
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
        r"a map is reshaped to \(1, 64\)",
    ),
    "features as a map": (
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(2, 2)),
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
