"""What is assumed of single operations: exact functions, kept NaN, and payment for what is rounded unseen."""

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from patchcert.bounds import Interval, Rounding, trace


def seeded(seed):
    return torch.Generator().manual_seed(seed)


FUNCTIONS = {
    "elu": (F.elu, lambda x: x if x > 0 else mpmath.expm1(x)),
    "sigmoid": (torch.sigmoid, lambda x: 1 / (1 + mpmath.exp(-x))),
    "tanh": (torch.tanh, mpmath.tanh),
    "log sigmoid": (F.logsigmoid, lambda x: -mpmath.log1p(mpmath.exp(-x))),
    "softsign": (F.softsign, lambda x: x / (1 + abs(x))),
    "hard sigmoid": (F.hardsigmoid, lambda x: min(max(x + 3, 0), 6) / 6),
    "leaky relu": (lambda x: F.leaky_relu(x, 0.01), lambda x: x if x > 0 else mpmath.mpf(0.01) * x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementary_functions_are_as_exact_as_assumed(name, dtype):
    """Within 7 units in the last place, 14 unit roundoffs, or the smallest normal number."""
    function, exact = FUNCTIONS[name]
    spread = torch.rand(300, generator=seeded(0), dtype=torch.float64)
    sizes = torch.cat([10 ** (spread[:200] * 10 - 9), spread[200:] * 80])
    points = torch.cat([sizes, -sizes]).to(dtype)
    information = torch.finfo(dtype)
    with mpmath.workprec(160):
        for point, value in zip(points.tolist(), function(points).tolist(), strict=True):
            truth = exact(mpmath.mpf(point))
            assert abs(value - truth) <= max(7 * information.eps * abs(truth), information.tiny)


@pytest.mark.parametrize(
    "layer",
    [
        nn.ReLU(),
        nn.ReLU6(),
        nn.Hardtanh(),
        nn.LeakyReLU(0.2),
        nn.ELU(),
        nn.SELU(),
        nn.Sigmoid(),
        nn.Tanh(),
        nn.Hardsigmoid(),
        nn.LogSigmoid(),
        nn.Softsign(),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.BatchNorm2d(16).eval(),
        nn.Conv2d(16, 2, 1),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_nan_is_never_lost(layer, memory):
    """A NaN that became a number would be certified."""
    value = torch.zeros(2, 16, 4, 4)
    value[0, :, 1, 1] = torch.nan
    value = value.contiguous(memory_format=memory)
    for rounding in (Rounding.outward(torch.float32), Rounding(0.0, 0.0)):
        bounds = trace(nn.Sequential(layer)).bounds(Interval.point(value), rounding=rounding)
        assert bounds.lower[0].isnan().any()
        assert bounds.upper[0].isnan().any()
        assert not bounds.lower[1].isnan().any()


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.7), (-0.3, 0.3)])
def test_limits_that_are_no_numbers_of_the_type_are_paid_for(low, high):
    """0.1 in float32 lies above the 0.1 of the layer."""
    bounds = trace(nn.Hardtanh(low, high)).bounds(
        Interval.point(torch.tensor([[-5.0, 5.0]])), rounding=Rounding.outward(torch.float32)
    )
    assert float(bounds.lower[0, 0]) <= low
    assert float(bounds.upper[0, 1]) >= high


@pytest.mark.parametrize("layer", [nn.LeakyReLU(6e-46), nn.ELU(6e-46)])
def test_constants_below_the_numbers_of_the_type_are_kept(layer):
    """A slope of 6e-46 is 0 in float32, but times -1e38 it is not."""
    bounds = trace(layer).bounds(
        Interval.point(torch.tensor([[-1e38]])), rounding=Rounding.outward(torch.float32)
    )
    exact = float(layer(torch.tensor([[-1e38]], dtype=torch.float64)))
    assert exact < 0
    assert float(bounds.lower) <= exact <= float(bounds.upper)


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
