"""The first layer under sparse changes, against every choice of pixels and extreme values."""

import copy
import random
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import patchcert as pc
from patchcert.bounds import NEAREST, Interval, Rounding, trace
from patchcert.bounds.sparse import (
    FirstLayer,
    largest_by_exchanges,
    largest_by_rounds,
    sparse_first_layer,
    sparse_margins,
    top_sum,
)
from patchcert.errors import InvalidInput, UnsupportedLayer
from patchcert.models import Normalize
from patchcert.testing.conformance import seeded
from patchcert.testing.networks import randomise
from strategies import seeds

GEOMETRIES = [(3, 1, 1), (2, 2, 1), (1, 1, 0), (2, 1, 1, 2), ((3, 2), (2, 1), (1, 2), (1, 2))]
"""Kernel, stride, padding and dilation of convolutions over 3x2 pixels."""


def first_layer_box(model, images, pixels, bound, epsilon=1.0, rounding=NEAREST):
    network = trace(model)
    layer = FirstLayer.of(network.steps)
    with torch.no_grad():
        clean = network.intervals(Interval.point(images), rounding)[layer.position + 1]
        return sparse_first_layer(layer, clean, images, pixels, bound, epsilon, rounding)


def reached(layers, image, pixels, epsilon=1.0, by_value=False):
    """The least and largest result over all choices of pixels or channel values and extreme fillings."""
    channels, height, width = image.shape
    units = [
        [(channel, row, column)] if by_value else [(c, row, column) for c in range(channels)]
        for channel, row, column in product(range(channels if by_value else 1), range(height), range(width))
    ]
    changed = []
    for chosen in combinations(units, pixels):
        places = [place for unit in chosen for place in unit]
        for signs in product((-1, 1), repeat=len(places)):
            changed.append(image.clone())
            for place, sign in zip(places, signs, strict=True):
                changed[-1][place] = (image[place] + sign * epsilon).clamp(0, 1)
    with torch.no_grad():
        results = layers(torch.stack(changed))
    return results.amin(dim=0), results.amax(dim=0)


def linear_layers(seed, channels, pixels):
    layers = nn.Sequential(
        Normalize([0.3] * channels, [0.2, 0.4][:channels]), nn.Flatten(), nn.Linear(channels * pixels, 3)
    )
    return randomise(layers, seeded(seed)).double()


def with_head(layers, features):
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(features, 2)).double().eval()


@given(seeds(), st.integers(1, 3), st.sampled_from([1.0, 0.3]))
def test_the_tight_bound_is_what_the_best_pixels_reach(seed, pixels, epsilon):
    """Two channels of 2x2 pixels: every neuron's bound equals the best of all choices."""
    layers, image = linear_layers(seed, 2, 4), torch.rand(2, 2, 2, generator=seeded(seed)).double()
    box = first_layer_box(with_head(layers, 3), image[None], pixels, "tight", epsilon)
    lowest, highest = reached(layers, image, pixels, epsilon)
    torch.testing.assert_close(box.lower[0], lowest)
    torch.testing.assert_close(box.upper[0], highest)


@given(seeds(), st.integers(1, 3), st.sampled_from(GEOMETRIES))
def test_the_tight_bound_of_a_convolution_counts_only_what_its_kernel_sees(seed, pixels, geometry):
    layers = randomise(nn.Sequential(nn.Conv2d(1, 2, *geometry)), seeded(seed)).double()
    image = torch.rand(1, 3, 2, generator=seeded(seed)).double()
    lowest, highest = reached(layers, image, pixels)
    box = first_layer_box(with_head(layers, lowest.numel()), image[None], pixels, "tight")
    torch.testing.assert_close(box.lower[0], lowest)
    torch.testing.assert_close(box.upper[0], highest)


@given(seeds(), st.integers(1, 2))
def test_single_channel_values_stay_within_their_bound(seed, values):
    layers, image = linear_layers(seed, 2, 4), torch.rand(2, 2, 2, generator=seeded(seed)).double()
    box = first_layer_box(with_head(layers, 3), image[None], values, "per-value")
    lowest, highest = reached(layers, image, values, by_value=True)
    assert (box.lower[0] <= lowest + 1e-9).all()
    assert (highest <= box.upper[0] + 1e-9).all()


@given(seeds(), st.integers(1, 9), st.booleans(), st.sampled_from([1.0, 0.4]))
def test_tight_lies_within_per_pixel(seed, pixels, convolutional, epsilon):
    generator = seeded(seed)
    images = torch.rand(3, 2, 4, 3, generator=generator).double()
    first = [nn.Conv2d(2, 3, 3, padding=1)] if convolutional else [nn.Flatten(), nn.Linear(24, 5)]
    layers = randomise(nn.Sequential(nn.BatchNorm2d(2), *first), generator).double()
    model = with_head(layers, 36 if convolutional else 5)
    tight = first_layer_box(model, images, pixels, "tight", epsilon)
    loose = first_layer_box(model, images, pixels, "per-pixel", epsilon)
    assert (loose.lower <= tight.lower + 1e-9).all()
    assert (tight.upper <= loose.upper + 1e-9).all()


@given(seeds(), st.integers(1, 6))
def test_channel_values_are_pixels_where_there_is_one_channel(seed, pixels):
    layers, images = linear_layers(seed, 1, 6), torch.rand(2, 1, 2, 3, generator=seeded(seed)).double()
    model = with_head(layers, 3)
    by_pixel, by_value = (
        first_layer_box(model, images, pixels, bound) for bound in ("per-pixel", "per-value")
    )
    torch.testing.assert_close(by_pixel.lower, by_value.lower)
    torch.testing.assert_close(by_pixel.upper, by_value.upper)


@given(seeds(), st.integers(1, 12), st.sampled_from(["tight", "per-pixel", "per-value"]))
def test_rounded_bounds_hold_the_exact_ones(seed, pixels, bound):
    generator = seeded(seed)
    layers = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 3, (3, 2), padding=1))
    model = with_head(randomise(layers, generator), 60)
    images = torch.rand(2, 2, 4, 4, generator=generator)
    exact = first_layer_box(model, images.double(), pixels, bound)
    single = copy.deepcopy(model).float()
    rounded = first_layer_box(single, images, pixels, bound, rounding=Rounding.outward(torch.float32))
    assert (rounded.lower.double() <= exact.lower).all()
    assert (exact.upper <= rounded.upper.double()).all()
    assert float((rounded.upper - exact.upper).max()) < 1e-3


def test_batch_norm_of_single_features_scales_each_pixel():
    layers = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 3))
    layers, image = randomise(layers, seeded(0)).double(), torch.rand(1, 2, 2, generator=seeded(1)).double()
    box = first_layer_box(with_head(layers, 3), image[None], 2, "tight")
    lowest, highest = reached(layers, image, 2)
    torch.testing.assert_close(box.lower[0], lowest)
    torch.testing.assert_close(box.upper[0], highest)


def test_scales_of_neither_channels_nor_features_are_refused():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(8, 3)

        def forward(self, images):
            return self.head(self.norm(images.view(-1, 4, 2)).flatten(1))

    model = randomise(Halves(), seeded(0)).double().eval()
    with pytest.raises(UnsupportedLayer, match="needs scales of the 2 channels or of single features, got 4"):
        first_layer_box(model, torch.rand(1, 2, 2, 2).double(), 1, "tight")


def test_the_sum_of_the_largest_takes_what_there_is():
    values = torch.tensor([3.0, 1.0, 2.0])
    assert [float(top_sum(values, count)) for count in (1, 2, 3, 9)] == [3, 5, 6, 6]


def values_with_ties(seed, entries):
    return torch.randint(4, (entries, 2, 3), generator=seeded(seed)).double()


@given(seeds(), st.integers(2, 9), st.data())
def test_rounds_find_the_largest_each_once(seed, entries, data):
    values, count = values_with_ties(seed, entries), data.draw(st.integers(1, entries - 1))
    places = largest_by_rounds(values, count)
    assert places.sort(dim=0).values.diff(dim=0).all()
    torch.testing.assert_close(values.gather(0, places), values.topk(count, dim=0).values)


@given(seeds(), st.integers(2, 9), st.data())
def test_exchanges_keep_the_largest_in_order(seed, entries, data):
    values, count = values_with_ties(seed, entries), data.draw(st.integers(1, entries - 1))
    held = torch.stack(largest_by_exchanges(values, count))
    torch.testing.assert_close(held, values.topk(count, dim=0).values)


@given(seeds(), st.integers(2, 9), st.integers(1, 9))
def test_the_gradient_goes_to_the_largest_alone(seed, entries, count):
    values = values_with_ties(seed, entries).requires_grad_()
    (gradient,) = torch.autograd.grad(top_sum(values, count).sum(), values)
    assert gradient.unique().tolist() in ([1], [0, 1])
    assert (gradient.sum(dim=0) == min(count, entries)).all()
    torch.testing.assert_close((gradient * values).sum(dim=0), top_sum(values, count))


def plain_moves(weight, images, epsilon, pixels):
    """How far a 2x3 convolution with padding 1 can rise and fall: values of each footprint in a row, sorted."""
    room = [
        F.unfold(room.clamp(max=epsilon), (2, 3), padding=1).unflatten(1, (2, 6))
        for room in (1 - images, images)
    ]
    parts = [part.clamp(min=0).flatten(2) for part in (weight, -weight)]
    return [
        sum(torch.einsum("fcp,ncpl->nflp", *pair) for pair in zip(parts, rooms, strict=True))
        .topk(min(pixels, 6))
        .values.sum(dim=-1)
        for rooms in (room, room[::-1])
    ]


@given(seeds(), st.integers(1, 7), st.sampled_from([1.0, 0.3]))
def test_weights_get_the_gradient_of_their_strongest_pixels(seed, pixels, epsilon):
    generator = seeded(seed)
    images = torch.rand(2, 2, 3, 4, generator=generator).double()
    layers = randomise(nn.Sequential(nn.Conv2d(2, 3, (2, 3), padding=1)), generator).double()
    layer, weight = FirstLayer.of(trace(with_head(layers, 48)).steps), layers[0].weight
    point = Interval.point(torch.zeros(2, 3, 4, 4).double())
    box = sparse_first_layer(layer, point, images, pixels, "tight", epsilon, NEAREST)
    moves, expected = (box.upper, -box.lower), plain_moves(weight, images, epsilon, pixels)
    for move, plain in zip(moves, expected, strict=True):
        torch.testing.assert_close(move.flatten(2), plain)
        share = torch.rand(plain.shape, generator=generator).double()
        gradients = [
            torch.autograd.grad((value * share).sum(), weight, retain_graph=True)
            for value in (move.flatten(2), plain)
        ]
        torch.testing.assert_close(*gradients)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pixels", [1, 4, 20])
@pytest.mark.parametrize("convolutional", [True, False])
def test_a_gpu_finds_the_same_tight_bound(pixels, convolutional):
    images = torch.rand(3, 2, 6, 6, generator=seeded(0)).double()
    first = [nn.Conv2d(2, 3, 5, padding=2)] if convolutional else [nn.Flatten(), nn.Linear(72, 5)]
    model = with_head(randomise(nn.Sequential(*first), seeded(1)), 108 if convolutional else 5)
    box = first_layer_box(model, images, pixels, "tight")
    on_gpu = first_layer_box(model.to("cuda"), images.to("cuda"), pixels, "tight")
    torch.testing.assert_close(on_gpu.lower.cpu(), box.lower)
    torch.testing.assert_close(on_gpu.upper.cpu(), box.upper)


def margins_of(model, shape=(1, 1, 4, 4), bound="tight"):
    return sparse_margins(trace(model), torch.rand(shape), torch.zeros(shape[0], dtype=torch.long), 2, bound)


class Namesakes(nn.Module):
    """The reshape before the first layer has the layer's name."""

    def __init__(self):
        super().__init__()
        self.view, self.head = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, images):
        return self.head(self.view(images.view(images.size(0), -1)))


def test_bounds_go_on_after_the_first_layer_whatever_its_name():
    model = randomise(Namesakes(), seeded(0))
    plain = nn.Sequential(nn.Flatten(), model.view, model.head)
    assert [step.name for step in trace(model).steps] == ["view", "view", "head"]
    images, labels = torch.rand(2, 1, 4, 4, generator=seeded(1)), torch.tensor([0, 1])
    margins = sparse_margins(trace(model), images, labels, 2)
    assert torch.equal(margins, sparse_margins(trace(plain), images, labels, 2))


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(1, 1, 3, padding=1), nn.Linear(16, 2)

    def forward(self, images):
        return self.head(torch.flatten(self.first(images) + images, 1))


class Reshaping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(4, 2, 1), nn.Linear(8, 2)

    def forward(self, images):
        return self.head(torch.flatten(self.first(images.view(-1, 4, 2, 2)), 1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2)),
            "needs a Linear or Conv2d layer first",
        ),
        (nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)), "needs a Linear or Conv2d layer first"),
        (Skipping(), "looks back past the layer"),
        (Reshaping(), r"a first layer that sees \(1, 4, 4\), not \(4, 2, 2\)"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(16, 2)),
            r"a first layer that sees \(16,\), not \(1, 4, 4\)",
        ),
    ],
)
def test_layers_without_a_sparse_bound_are_refused(model, message):
    with pytest.raises(UnsupportedLayer, match=message):
        margins_of(model)


def test_grouped_convolutions_are_refused():
    model = nn.Sequential(nn.Conv2d(2, 2, 1, groups=2), nn.Flatten(), nn.Linear(32, 2))
    with pytest.raises(UnsupportedLayer, match="grouped convolution"):
        margins_of(model, (1, 2, 4, 4))


def test_unknown_bounds_are_refused():
    with pytest.raises(InvalidInput, match="unknown sparse bound 'wide'; expected one of tight, per-pixel"):
        margins_of(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), bound="wide")


def test_every_scale_before_the_first_layer_is_paid_for():
    """Scales and their running product all round down: folded into the weights they lose a unit or more each."""
    stds, computed, exact = [], np.float32(1), Fraction(1)
    draw = random.Random(0)
    for _ in range(100):
        tried = [np.float32(draw.uniform(0.5, 2)) for _ in range(300)]
        kept = [std for std in tried if Fraction(1, 2) < exact / Fraction(float(std)) < 2]
        std = min(
            kept, key=lambda std: Fraction(float(computed * np.float32(1 / std))) * Fraction(float(std))
        )
        computed, exact = computed * np.float32(1 / std), exact / Fraction(float(std))
        stds.append(float(std))
    assert float(1 - Fraction(float(computed)) / exact) > 100 * 2**-24
    bar = np.float32(float(exact))
    bar = np.nextafter(bar, np.float32(0)) if Fraction(float(bar)) >= exact else bar
    scales = [pc.Normalize([0.0], [std]) for std in stds]
    model = nn.Sequential(*scales, nn.Flatten(), nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2)).eval()
    with torch.no_grad():
        model[-3].weight.fill_(1), model[-3].bias.fill_(0)
        model[-1].weight.copy_(torch.tensor([[0.0], [1.0]]))
        model[-1].bias.copy_(torch.tensor([0.0, -float(bar)]))
    found = pc.certify(model, torch.zeros(1, 1, 1, 1), torch.tensor([0]), pc.SparsePixels(1))
    assert Fraction(float(found.margins[0, 1])) <= Fraction(float(bar)) - exact
    assert not found.certified


def linear_model(seed, channels, pixels):
    return linear_layers(seed, channels, pixels).eval()


def least_margins(model, image, label, pixels, epsilon=1.0, by_value=False):
    """The least margins over all choices of pixels or channel values and extreme fillings; margins are linear."""
    margins = nn.Sequential(model, nn.Linear(3, 3, bias=False)).double()
    with torch.no_grad():
        margins[1].weight.copy_(torch.eye(3)[label] - torch.eye(3))
    return reached(margins, image, pixels, epsilon, by_value)[0]


@given(seeds(), st.integers(1, 3), st.integers(0, 2), st.sampled_from([1.0, 0.3]))
def test_margins_of_a_single_linear_layer_are_what_the_best_pixels_reach(seed, pixels, label, epsilon):
    """Bounds of the logits would let two logits move against each other by pixels that differ."""
    model, image = linear_model(seed, 2, 4), torch.rand(2, 2, 2, generator=seeded(seed)).double()
    margins = sparse_margins(trace(model), image[None], torch.tensor([label]), pixels, epsilon=epsilon)
    torch.testing.assert_close(margins[0], least_margins(model, image, label, pixels, epsilon))


def test_merging_is_tighter_than_bounds_of_logits():
    """Two equal rows of weights: no pixel changes their difference, though each logit alone moves."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[1].weight.fill_(3.0), model[1].bias.copy_(torch.tensor([1.0, 0.0]))
    found = sparse_margins(trace(model), torch.rand(1, 1, 2, 2).double(), torch.tensor([0]), 4)
    torch.testing.assert_close(found, torch.tensor([[0.0, 1.0]]).double())


@given(seeds(), st.integers(1, 2), st.sampled_from(["per-pixel", "per-value"]))
def test_margins_of_a_single_linear_layer_hold_under_the_other_bounds(seed, count, bound):
    model, image = linear_model(seed, 2, 4), torch.rand(2, 2, 2, generator=seeded(seed)).double()
    margins = sparse_margins(trace(model), image[None], torch.tensor([1]), count, bound)
    assert (margins[0] <= least_margins(model, image, 1, count, by_value=bound == "per-value") + 1e-9).all()


@given(seeds(), st.integers(1, 12), st.sampled_from(["tight", "per-pixel", "per-value"]))
def test_rounded_margins_of_a_single_linear_layer_are_below_the_exact_ones(seed, pixels, bound):
    model, generator = linear_model(seed, 2, 16).float(), seeded(seed)
    images, labels = torch.rand(5, 2, 4, 4, generator=generator), torch.tensor([0, 1, 2, 1, 0])
    exact = sparse_margins(trace(copy.deepcopy(model).double()), images.double(), labels, pixels, bound)
    rounded = sparse_margins(
        trace(model), images, labels, pixels, bound, rounding=Rounding.outward(torch.float32)
    )
    others = F.one_hot(labels, 3) == 0
    assert (rounded.double() < exact)[others].all()
    assert float((exact - rounded).detach().max()) < 1e-2


def test_the_margins_of_a_batch_are_those_of_its_images():
    model, images = linear_model(0, 2, 16), torch.rand(4, 2, 4, 4, generator=seeded(1)).double()
    labels = torch.tensor([2, 0, 2, 1])
    together = sparse_margins(trace(model), images, labels, 3)
    for image, label, margins in zip(images, labels, together, strict=True):
        torch.testing.assert_close(sparse_margins(trace(model), image[None], label[None], 3)[0], margins)
    together.sum().backward()
    assert model[2].weight.grad.abs().sum() > 0


def test_certificates_of_a_single_linear_layer_are_exact():
    """Images are certified if and only if no choice of a pixel changes the prediction."""
    model, images = linear_model(3, 1, 6).float(), torch.rand(40, 1, 2, 3, generator=seeded(4))
    with torch.no_grad():
        model[2].bias.mul_(5)
    labels = model(images).argmax(dim=1)
    found = pc.certify(model, images, labels, pc.SparsePixels(1))
    least = torch.stack(
        [
            least_margins(copy.deepcopy(model).double(), image.double(), int(label), 1)
            for image, label in zip(images, labels, strict=True)
        ]
    )
    robust = ((least > 0) | (F.one_hot(labels, 3) == 1)).all(dim=1)
    assert torch.equal(found.certified, robust)
    assert 0 < int(robust.sum()) < 40
