"""Functions of each element are as exact as their bounds assume, and these are tight."""

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from patchcert.bounds import Interval, Rounding, trace
from patchcert.testing.conformance import seeded

SELU = mpmath.mpf("1.0507009873554804934193349852946"), mpmath.mpf("1.6732632423543772848170429916717")


FUNCTIONS = {
    "elu": (F.elu, lambda x: x if x > 0 else mpmath.expm1(x)),
    "selu": (F.selu, lambda x: SELU[0] * (x if x > 0 else SELU[1] * mpmath.expm1(x))),
    "sigmoid": (torch.sigmoid, lambda x: 1 / (1 + mpmath.exp(-x))),
    "tanh": (torch.tanh, mpmath.tanh),
    "log sigmoid": (F.logsigmoid, lambda x: -mpmath.log1p(mpmath.exp(-x))),
    "softsign": (F.softsign, lambda x: x / (1 + abs(x))),
    "hard sigmoid": (F.hardsigmoid, lambda x: min(max(x + 3, 0), 6) / 6),
    "celu": (
        lambda x: F.celu(x, 0.7),
        lambda x: x if x > 0 else mpmath.mpf(0.7) * mpmath.expm1(x / mpmath.mpf(0.7)),
    ),
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


VALLEYS = {
    "gelu": (nn.GELU(), lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2),
    "gelu by tanh": (
        nn.GELU("tanh"),
        lambda x: x / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))),
    ),
    "silu": (nn.SiLU(), lambda x: x / (1 + mpmath.exp(-x))),
    "hardswish": (nn.Hardswish(), lambda x: x * min(max(x + 3, 0), 6) / 6),
    "softplus": (nn.Softplus(), lambda x: x if x > 20 else mpmath.log1p(mpmath.exp(x))),
    "low softplus": (
        nn.Softplus(3, 1),
        lambda x: x if 3 * x > 1 else mpmath.log1p(mpmath.exp(3 * x)) / 3,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", VALLEYS)
def test_functions_that_fall_and_rise_hold_their_exact_values_and_are_tight(name, dtype):
    """Single points of all sizes, and boxes: exact values of a grid inside are held, and the bounds are reached."""
    layer, exact = VALLEYS[name]
    network, rounding = trace(nn.Sequential(layer)), Rounding.outward(dtype)
    sizes = 10 ** (torch.rand(60, generator=seeded(0), dtype=torch.float64) * 11 - 9)
    below = -250 * torch.rand(200, generator=seeded(2), dtype=torch.float64)
    points = torch.cat([sizes, -sizes, below, torch.linspace(-900, 900, 41).double()]).to(dtype)
    held = network.bounds(Interval.point(points[None]), rounding=rounding)
    with mpmath.workprec(200):
        for lower, point, upper in zip(
            *(part.flatten().tolist() for part in (held.lower, points, held.upper)), strict=True
        ):
            assert lower <= exact(mpmath.mpf(point)) <= upper
            assert upper - lower <= 1e-5 * (abs(point) + 1)
    ends = (torch.rand(2, 40, generator=seeded(1), dtype=torch.float64) * 8 - 5).to(dtype)
    ends = torch.cat(
        [
            ends,
            torch.tensor([[-0.7518, -1.2785, -1.6, 0.2, 19.9], [-0.7517, -1.2784, -1.4, 0.4, 20.1]]).to(
                dtype
            ),
        ],
        1,
    )
    box = Interval(ends.amin(dim=0)[None], ends.amax(dim=0)[None])
    bounds = network.bounds(box, rounding=rounding)
    with mpmath.workprec(100):
        for low, high, lower, upper in zip(
            *(part.flatten().tolist() for part in (box.lower, box.upper, bounds.lower, bounds.upper)),
            strict=True,
        ):
            grid = [mpmath.mpf(low) + (mpmath.mpf(high) - mpmath.mpf(low)) * step / 60 for step in range(61)]
            values = [exact(point) for point in grid]
            assert lower <= min(values)
            assert max(values) <= upper
            steps_down = name == "low softplus" and low < 1 / 3 < high
            loose = 0.7 if steps_down else 2e-3 * (high - low) ** 2 + 2e-5
            assert min(values) - lower <= loose
            assert upper - max(values) <= loose
