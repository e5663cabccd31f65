"""Stored clean values and windows pay enough for rounding, checked in exact rationals."""

import copy
import random
from fractions import Fraction

import pytest
import torch
from torch import nn

from patchcert.bounds import Rounding, precise_arithmetic, trace
from patchcert.bounds.rounding import blocked_product, summed_roundings
from patchcert.threats import Patch
from patchcert.windows.passes import Windows, exact_clean_pass
from patchcert.windows.sweep import PlacementSweep


def test_stored_values_are_within_their_slack(small_model, small_batch):
    """In float64 the exact value is known a billion times better than the float32 one is stored."""
    network, images, labels = trace(small_model), small_batch[0].float(), small_batch[1]
    with torch.no_grad():
        clean = exact_clean_pass(network, images, labels, torch.float32)
        exact = network.values(images.double())
    for value, truth, slack, largest in zip(clean.values, exact, clean.slack, clean.largest, strict=True):
        assert ((value.double() - truth).abs().flatten(1).amax(dim=1) <= slack.double() + 1e-14).all()
        assert (value.abs().flatten(1).amax(dim=1) <= largest).all()
    assert (clean.margins <= exact[-1].gather(1, labels[:, None]) - exact[-1]).all()


TYPES = [torch.float32, torch.float64]


def exactly(tensor):
    return [Fraction(value) for value in tensor.flatten().tolist()]


def awkward(generator, count, dtype):
    """Numbers whose digits are nearly all ones or nearly all zeros, of either sign and of several sizes."""
    digits = {torch.float32: 24, torch.float64: 53}[dtype]
    numbers = []
    for _ in range(count):
        low = generator.choice([0, 1, 2, 3, generator.getrandbits(digits - 1)])
        mantissa = generator.choice([2**digits - 1 - low, 2 ** (digits - 1) + low])
        numbers.append(generator.choice([-1, 1]) * mantissa * 2.0 ** (generator.randint(-4, 1) - digits))
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)


def state(generator, count, dtype):
    """Deviations (1, 1, count) and radii that are no smaller, some just as large."""
    deviation = awkward(generator, count, dtype)
    radius = torch.maximum(deviation.abs(), awkward(generator, count, dtype).abs() * generator.choice([0, 1]))
    return Windows(deviation[None, None], radius[None, None])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("terms", [1, 2, 3, 7])
def test_a_widened_radius_pays_for_both_products(dtype, terms):
    generator, rounding = random.Random(0), Rounding.outward(dtype)
    for _ in range(500):
        before, weight = state(generator, terms, dtype), awkward(generator, terms, dtype)
        products = Windows(
            blocked_product(before.deviation, weight[:, None]),
            blocked_product(before.radius, weight.abs()[:, None]),
        )
        after = products.widened(summed_roundings(terms) + 1, rounding).settled(None)
        weights, deviations, radii = map(exactly, (weight, before.deviation, before.radius))
        moved = sum(w * d for w, d in zip(weights, deviations, strict=True))
        spread = sum(abs(w) * r for w, r in zip(weights, radii, strict=True))
        assert abs(moved - exactly(after.deviation)[0]) + spread <= exactly(after.radius)[0]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_widened_radius_pays_for_a_sum_of_two_branches(dtype):
    generator, rounding = random.Random(0), Rounding.outward(dtype)
    for _ in range(500):
        first, second = state(generator, 1, dtype), state(generator, 1, dtype)
        total = Windows(first.deviation + second.deviation, first.radius + second.radius)
        after = total.widened(2, rounding).settled(None)
        moved = sum(exactly(part.deviation)[0] for part in (first, second))
        spread = sum(exactly(part.radius)[0] for part in (first, second))
        assert abs(moved - exactly(after.deviation)[0]) + spread <= exactly(after.radius)[0]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("epsilon", [0.3, 0.7, 1.0])
def test_the_margins_of_a_linear_network_are_below_the_exact_ones(dtype, epsilon):
    """From the patch itself through the merged head, with weights that nearly cancel."""
    generator = random.Random(0)
    for seed in range(20):
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, dtype=dtype))
        model[1].weight.data = awkward(generator, 12, dtype).view(3, 4)
        model[1].bias.data = awkward(generator, 3, dtype)
        images = torch.rand(1, 1, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        labels, patch = torch.tensor([seed % 3]), Patch(1)
        network = trace(model)
        sweep = PlacementSweep.of(network, images, patch, 2**20)
        with torch.no_grad(), precise_arithmetic():
            clean = exact_clean_pass(trace(copy.deepcopy(model).double()), images, labels, dtype)
            margins = sweep.margins(clean, labels, epsilon, Rounding.outward(dtype))
        for placement, (top, left) in enumerate(patch.placements(2, 2).corners.tolist()):
            truth = exact_margins(model[1], images, int(labels), 2 * top + left, Fraction(epsilon))
            for found, exact in zip(exactly(margins[0, placement]), truth, strict=True):
                assert found <= exact


def exact_margins(layer, images, label, pixel, epsilon):
    """The least difference label minus class (classes,) when one pixel changes by at most epsilon within [0, 1]."""
    rows, pixels = [exactly(row) for row in layer.weight.data], exactly(images)
    biases = exactly(layer.bias.data)
    ends = max(pixels[pixel] - epsilon, Fraction(0)), min(pixels[pixel] + epsilon, Fraction(1))
    margins = []
    for row, bias in zip(rows, biases, strict=True):
        difference = [own - other for own, other in zip(rows[label], row, strict=True)]
        fixed = sum(
            w * x for place, (w, x) in enumerate(zip(difference, pixels, strict=True)) if place != pixel
        )
        margins.append(fixed + biases[label] - bias + min(difference[pixel] * end for end in ends))
    return margins
