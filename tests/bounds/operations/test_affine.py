"""The bounds of maps W x + b are attained, and pay for rounding."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from boxes import OUTWARD, box_around
from patchcert.bounds import Interval, Rounding, trace
from patchcert.models import Normalize
from patchcert.testing.conformance import seeded
from patchcert.testing.networks import randomise
from strategies import seeds


def extreme_point(weight, box, row, upper=True):
    """The corner of the box at which one row of a linear map is largest."""
    takes_upper = (weight[row] > 0) == upper
    return torch.where(takes_upper, box.upper, box.lower)


@given(seeds(), st.integers(1, 12), st.integers(1, 5))
def test_one_linear_layer_attains_its_bounds(seed, inputs, outputs):
    layer = randomise(nn.Linear(inputs, outputs), seeded(seed)).double()
    box = box_around(torch.rand(1, inputs, generator=seeded(seed), dtype=torch.float64), seed)
    with torch.no_grad():
        bounds = trace(layer).bounds(box)
        for row in range(outputs):
            highest = layer(extreme_point(layer.weight, box, row))[0, row]
            lowest = layer(extreme_point(layer.weight, box, row, upper=False))[0, row]
            torch.testing.assert_close(bounds.upper[0, row], highest)
            torch.testing.assert_close(bounds.lower[0, row], lowest)


@given(seeds(), st.sampled_from([(3, 1, 1), (2, 2, 0), (3, 2, 2)]), st.sampled_from([1, 2]))
def test_one_convolution_attains_its_bounds(seed, geometry, dilation):
    kernel, stride, padding = geometry
    layer = nn.Conv2d(2, 3, (kernel, kernel), stride, padding, dilation)
    layer = randomise(layer, seeded(seed)).double()
    box = box_around(torch.rand(1, 2, 7, 6, generator=seeded(seed), dtype=torch.float64), seed)
    bounds = trace(layer).bounds(box)
    weights = torch.autograd.functional.jacobian(lambda image: layer(image)[0], box.centre)
    for place in [(0, 0, 0), (1, 1, 0), (2, -1, -1)]:
        rows = weights[place].flatten(1)
        flat = Interval(box.lower.flatten(1), box.upper.flatten(1))
        corner = extreme_point(rows, flat, 0).reshape(box.shape)
        torch.testing.assert_close(bounds.upper[0][place], layer(corner)[0][place])


@given(
    seeds(),
    st.sampled_from([(1, 0, 0, 1), (2, 1, 1, 1), (3, 0, 2, 2), (2, 3, 1, 1)]),
    st.sampled_from([1, 2]),
)
def test_one_transposed_convolution_attains_its_bounds(seed, geometry, groups):
    stride, padding, more, dilation = geometry
    layer = nn.ConvTranspose2d(2, 2, 3, stride, padding, min(more, stride - 1), groups, dilation=dilation)
    box = box_around(torch.rand(1, 2, 5, 4, generator=seeded(seed), dtype=torch.float64), seed)
    layer = layer.double()
    weights = torch.autograd.functional.jacobian(lambda image: layer(image)[0], box.centre).detach()
    highest = ((weights.clamp(min=0) * box.upper + weights.clamp(max=0) * box.lower).flatten(3)).sum(dim=-1)
    with torch.no_grad():
        highest = highest + layer.bias[:, None, None]
        for rounding in (OUTWARD, Rounding(0.0, 0.0)):
            torch.testing.assert_close(trace(layer).bounds(box, rounding=rounding).upper[0], highest)


@given(seeds(), st.integers(1, 8), st.integers(2, 5))
def test_merged_margins_are_attained_and_no_looser(seed, features, classes):
    layer = randomise(nn.Linear(features, classes), seeded(seed)).double()
    box = box_around(torch.rand(2, features, generator=seeded(seed), dtype=torch.float64), seed)
    labels = torch.tensor([0, classes - 1])
    with torch.no_grad():
        merged, logits = trace(layer).margins(box, labels), trace(layer).bounds(box)
        separate = logits.lower.gather(1, labels[:, None]) - logits.upper
        difference = layer.weight[labels][:, None] - layer.weight
        worst = torch.where(difference > 0, box.lower[:, None], box.upper[:, None])
        reached = (difference * worst).sum(dim=2) + layer.bias[labels][:, None] - layer.bias
    assert (merged >= separate - 1e-12).all()
    torch.testing.assert_close(merged, reached)


def test_normalisation_and_batch_norm_are_bounded_like_the_layers_they_are():
    model = nn.Sequential(Normalize([0.4, 0.1], [0.2, 0.5]), nn.BatchNorm2d(2))
    model = randomise(model, seeded(0)).double()
    box = box_around(torch.rand(1, 2, 3, 3, generator=seeded(1), dtype=torch.float64), 2)
    bounds, ends = trace(model).bounds(box), torch.stack([model(box.lower), model(box.upper)])
    torch.testing.assert_close(bounds.lower, ends.amin(dim=0))
    torch.testing.assert_close(bounds.upper, ends.amax(dim=0))


def test_a_convolution_has_the_same_values_and_gradients_with_channels_last():
    layer = nn.Conv2d(3, 5, 3, padding=1).double()
    images = torch.rand(4, 3, 6, 7, generator=seeded(0), dtype=torch.float64)
    network, found = trace(layer), []
    for memory in (torch.contiguous_format, torch.channels_last):
        output = network.values(images.contiguous(memory_format=memory))[-1]
        assert output.is_contiguous(memory_format=memory)
        found.append((output, *torch.autograd.grad(output.square().sum(), list(layer.parameters()))))
    for plain, last in zip(*found, strict=True):
        torch.testing.assert_close(last, plain)


def test_numbers_too_small_to_multiply_are_paid_for():
    """A pixel of 1e-39 times a weight of 1e38 is rounded although its error bound underflows."""
    layer = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1e38, -1e38, 3e37]]))
        pixels = torch.tensor([[1e-39, 3e-40, 7e-40]])
        bounds = trace(layer).bounds(Interval.point(pixels), rounding=Rounding.outward(torch.float32))
        exact = float((layer.weight.double() * pixels.double()).sum())
    assert float(bounds.lower) <= exact <= float(bounds.upper)
    assert float(bounds.upper - bounds.lower) > 0
