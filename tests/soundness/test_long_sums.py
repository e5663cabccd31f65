"""Sums of one large and many small terms, which rounding can lose one by one, on every way they go."""

import copy

import pytest
import torch
from torch import nn

from patchcert.bounds import Interval, Rounding, precise_arithmetic, trace
from patchcert.certificates import certify, placement_margins
from patchcert.testing.networks import ResidualBlock
from patchcert.threats import Patch, SparsePixels
from patchcert.windows.dense import reference_margins
from patchcert.windows.sweep import covering_sweep

LARGE, SMALL = 2.0**24, 0.49


def lossy(layer, sign=-1.0):
    """Every output takes its first input many times as strongly as all others."""
    with torch.no_grad():
        flat = layer.weight.flatten(1)
        flat.fill_(sign * SMALL)
        flat[:, 0] = sign * LARGE
        layer.bias.fill_(-sign * (LARGE + flat.shape[1] * SMALL))
    return layer


def wide_hidden(features):
    """One pixel spread to many features, which a lossy layer sums."""
    spread = nn.Linear(9, features)
    with torch.no_grad():
        spread.weight.zero_()
        spread.weight[:, 4] = 1.0
        spread.bias.zero_()
    return [nn.Flatten(), spread, nn.ReLU(), lossy(nn.Linear(features, 3)), nn.ReLU(), nn.Linear(3, 2)]


def wider_than_the_map(channels, side):
    """Windows of more terms than the map has; all of the map are summed from the first place of a large term on."""
    copies = nn.Conv2d(1, channels, (3, 1), padding=(1, 0), bias=False)
    head = nn.Linear(channels * side * side, 2)
    with torch.no_grad():
        copies.weight.zero_()
        copies.weight[:, :, 1] = 1.0
        head.weight[0] = 2 * SMALL
        head.weight[0].view(channels, side, side)[0, 2, 0] = LARGE
        head.bias[0] = 0.0
    return [copies, nn.Flatten(), head]


def residual(channels):
    branch = nn.Sequential(lossy(nn.Conv2d(channels, channels, 3, padding=1)), nn.ReLU())
    return [ResidualBlock(branch, nn.Identity()), nn.Flatten(), nn.Linear(channels * 9, 2)]


WAYS = {
    "last layer on a window": ((1, 28, 24), [nn.Flatten(), lossy(nn.Linear(672, 2))]),
    "linear layer on a window": (
        (1, 28, 24),
        [nn.Flatten(), lossy(nn.Linear(672, 3)), nn.ReLU(), nn.Linear(3, 2)],
    ),
    "last layer on a window larger than its map": ((1, 8, 8), wider_than_the_map(8, 8)),
    "linear layer on features": ((1, 3, 3), wide_hidden(700)),
    "last layer on features": (
        (1, 3, 3),
        [*wide_hidden(4)[:2], nn.ReLU(), nn.Linear(4, 600), nn.ReLU(), lossy(nn.Linear(600, 2))],
    ),
    "convolution as a matrix": (
        (64, 3, 3),
        [lossy(nn.Conv2d(64, 4, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)],
    ),
    "scattered terms in a matrix": (
        (18, 7, 7),
        [lossy(nn.Conv2d(18, 3, 3, padding=1)), nn.ReLU(), nn.Flatten(), nn.Linear(147, 2)],
    ),
    "convolution as a convolution": (
        (150, 3, 3),
        [lossy(nn.Conv2d(150, 3, 3, padding=1)), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)],
    ),
    "skip connection": ((60, 3, 3), residual(60)),
}


@pytest.mark.parametrize("dark", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_no_way_through_the_engine_loses_small_terms(way, dark):
    shape, layers = WAYS[way]
    model = copy.deepcopy(nn.Sequential(*layers)).eval()
    head = model[-1]
    with torch.no_grad():
        if "last layer" in way:
            head.weight[1], head.bias[1] = 0.0, 0.0
        else:
            head.weight.copy_(torch.tensor([[1.0], [0.0]]).expand_as(head.weight))
            head.bias.zero_()
    images, labels = torch.full((2, *shape), 0.0 if dark else 1.0), torch.tensor([0, 1])
    patch = Patch(shape[1:])
    assert covering_sweep(trace(model), images, patch, 2**24) is not None
    margins = placement_margins(model, images, labels, patch).double()
    exact = reference_margins(trace(copy.deepcopy(model).double()), images.double(), labels, patch)
    assert (margins <= exact + exact.abs() * 1e-12).all()
    assert torch.equal(certify(model, images, labels, patch).margins.double(), margins.amin(dim=1))


@pytest.mark.parametrize(("channels", "outputs"), [(64, 8), (64, 2), (256, 4), (128, 10), (20, 100)])
@pytest.mark.parametrize("count", [1, 40])
def test_no_dense_convolution_loses_small_terms(channels, outputs, count):
    layer = lossy(nn.Conv2d(channels, outputs, 3), sign=1.0)
    model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(outputs, 2))
    white = Interval.point(torch.ones(count, channels, 3, 3))
    with torch.no_grad(), precise_arithmetic():
        bounds = trace(model).intervals(white, Rounding.outward(torch.float32))[1]
        exact = layer.weight.double().sum(dim=(1, 2, 3)) + layer.bias.double()
    assert (bounds.lower.double().flatten(1) <= exact).all()
    assert (exact <= bounds.upper.double().flatten(1)).all()


def cancelling(layer, last):
    """Every output is a large term, many small ones, and the large one again with the other sign."""
    with torch.no_grad():
        flat = layer.weight.flatten(1)
        flat.fill_(SMALL)
        flat[:, 0], flat[:, -1] = LARGE, -LARGE
        if last:
            layer.weight[1:] = 0.0
    return layer


@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        ((1, 20, 20), [nn.Flatten(), nn.Linear(400, 3, bias=False), nn.ReLU(), nn.Linear(3, 2)]),
        ((40, 3, 3), [nn.Conv2d(40, 2, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2)]),
    ],
)
def test_single_points_stay_inside_although_their_large_terms_cancel(shape, layers):
    """The radius is zero and the result small, so nothing but the terms themselves can pay for their sum."""
    model = copy.deepcopy(nn.Sequential(*layers)).eval()
    position = 0 if isinstance(model[0], nn.Conv2d) else 1
    first = model[position]
    cancelling(first, last=False)
    with torch.no_grad(), precise_arithmetic():
        white = Interval.point(torch.ones(40, *shape))
        bounds = trace(model).intervals(white, Rounding.outward(torch.float32))[position + 1]
    exact = first.weight.detach().double().flatten(1).sum(dim=1)
    assert (bounds.lower.double().flatten(1) <= exact).all()
    assert (exact <= bounds.upper.double().flatten(1)).all()


@pytest.mark.parametrize("label", [0, 1])
def test_merged_margins_of_single_points_stay_below_although_large_terms_cancel(label):
    head = cancelling(nn.Linear(900, 2, bias=False), last=True)
    labels = torch.full((40,), label)
    with torch.no_grad(), precise_arithmetic():
        white = Interval.point(torch.ones(40, 900))
        margins = trace(nn.Sequential(head)).margins(white, labels, rounding=Rounding.outward(torch.float32))
    exact = head.weight.detach().double().sum(dim=1)
    assert (margins.double() <= exact[label] - exact).all()


@pytest.mark.parametrize("bound", ["tight", "per-pixel"])
@pytest.mark.parametrize(("channels", "pixels"), [(1, 2000), (700, 1)])
def test_weak_pixels_and_channels_beside_a_strong_one_are_not_lost(channels, pixels, bound):
    first = nn.Linear(2800, 2)
    model = nn.Sequential(nn.Flatten(), first, nn.Linear(2, 2))
    with torch.no_grad():
        first.weight.fill_(-SMALL)
        first.weight[:, 0] = -LARGE
        first.bias.zero_()
        model[-1].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        model[-1].bias.zero_()
    images, labels = torch.zeros(1, channels, 2800 // channels // 2, 2), torch.zeros(1, dtype=torch.long)
    margin = certify(model, images, labels, SparsePixels(pixels, bound)).margins[0, 1]
    strengths = first.weight.detach().double()[0].reshape(channels, -1).sum(dim=0)
    assert float(margin) <= float(strengths.sort().values[:pixels].sum())
