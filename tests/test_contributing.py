"""The layers that CONTRIBUTING.md adds as an example are bounded soundly and tightly, and by windows as densely."""

import copy
import re
from pathlib import Path

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from patchcert.bounds import Interval, Rounding, precise_arithmetic, trace
from patchcert.bounds.lowering import LAYER_RULES
from patchcert.errors import UnsupportedLayer
from patchcert.testing.conformance import seeded
from patchcert.testing.networks import randomise
from patchcert.threats import Patch
from patchcert.windows.dense import dense_margins, reference_margins
from patchcert.windows.passes import clean_pass, exact_clean_pass
from patchcert.windows.sweep import covering_sweep
from patchcert.windows.training import covering_placements
from strategies import seeds

PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
LAYERS = (nn.Softshrink, nn.ConstantPad2d)


@pytest.fixture(autouse=True, scope="module")
def _example():
    """Run as the page shows it, and taken back, so that other tests know what patchcert brings alone."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert not any(layer in LAYER_RULES for layer in LAYERS)
    exec(compile(code, "example", "exec"), {"__name__": "example"})
    yield
    for layer in LAYERS:
        del LAYER_RULES[layer]


def network(sides, seed=0, dtype=torch.float32):
    layers = [
        nn.Conv2d(2, 3, 3),
        nn.Softshrink(0.07),
        nn.ConstantPad2d(sides, 0.25),
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
    ]
    model = nn.Sequential(
        *layers, nn.Softshrink(0.1), nn.Flatten(), nn.LazyLinear(8), nn.Softshrink(0.1), nn.Linear(8, 3)
    )
    model(torch.rand(1, 2, 9, 8))
    return randomise(model, seeded(seed)).to(dtype).eval()


def images(seed=1, dtype=torch.float32):
    return torch.rand(2, 2, 9, 8, generator=seeded(seed), dtype=dtype)


SIDES = st.tuples(*[st.integers(-1, 3)] * 4)


@given(SIDES, seeds(), st.sampled_from([torch.float32, torch.float64]))
def test_no_point_leaves_the_bounds_and_one_point_is_the_forward_pass(sides, seed, dtype):
    model, batch = network(sides, seed, dtype), images(seed, dtype)
    reach = torch.rand(2, *batch.shape, generator=seeded(seed), dtype=dtype) * 0.2
    box = Interval(batch - reach[0], batch + reach[1])
    with torch.no_grad():
        bounds = trace(model).bounds(box, rounding=Rounding.outward(dtype))
        exact = model.double()
        for mix in (0.0, 0.3, 1.0):
            logits = exact(torch.lerp(box.lower.double(), box.upper.double(), mix))
            assert ((bounds.lower <= logits + 1e-12) & (logits <= bounds.upper + 1e-12)).all()
        point = trace(exact).bounds(Interval.point(batch.double()))
        torch.testing.assert_close(point.lower, exact(batch.double()))


@given(SIDES, seeds())
def test_the_bounds_of_a_single_layer_are_attained(sides, seed):
    batch = images(seed, torch.float64)
    for layer in (nn.ConstantPad2d(sides, -0.5), nn.Softshrink(0.3)):
        bounds = trace(nn.Sequential(layer)).bounds(Interval(batch - 0.9, batch + 0.1))
        torch.testing.assert_close(bounds.lower, layer(batch - 0.9), rtol=0, atol=0)
        torch.testing.assert_close(bounds.upper, layer(batch + 0.1), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_units_pay_for_computing_the_activation(dtype):
    points = torch.randn(1, 400, generator=seeded(0), dtype=dtype) * torch.logspace(-8, 2, 400, dtype=dtype)
    bounds = trace(nn.Sequential(nn.Softshrink(0.07))).bounds(
        Interval.point(points), rounding=Rounding.outward(dtype)
    )
    with mpmath.workprec(160):
        for lower, point, upper in zip(
            bounds.lower[0].tolist(), points[0].tolist(), bounds.upper[0].tolist(), strict=True
        ):
            away = mpmath.mpf(abs(point)) - mpmath.mpf(0.07)
            exact = max(away, 0) * (1 if point > 0 else -1)
            assert lower <= exact <= upper


@given(SIDES, st.sampled_from([Patch(2), Patch((3, 1)), Patch(2, "corners")]), seeds())
def test_windows_give_the_margins_of_the_dense_path(sides, threat, seed):
    model, batch = network(sides, seed, torch.float64), images(seed, torch.float64)
    labels, traced = torch.tensor([0, 2]), trace(model)
    with torch.no_grad():
        sweep = covering_sweep(traced, batch, threat, 2**20)
        assert sweep is not None
        margins = sweep.margins(clean_pass(traced, batch, labels), labels)
        torch.testing.assert_close(margins, reference_margins(traced, batch, labels, threat))
        chosen = covering_placements(traced, batch, threat)
        corners = threat.placements(9, 8).corners.expand(2, -1, -1)
        torch.testing.assert_close(chosen.margins(batch, labels, corners, 1.0), margins)


@given(SIDES, seeds())
def test_outward_rounded_windows_are_below_the_dense_margins_of_more_digits_and_close_to_them(sides, seed):
    model, batch, threat, labels = network(sides, seed), images(seed), Patch(2), torch.tensor([0, 2])
    traced, audit = trace(model), trace(copy.deepcopy(model).double())
    corners = threat.placements(9, 8).corners
    with torch.no_grad(), precise_arithmetic():
        clean = exact_clean_pass(audit, batch, labels, torch.float32)
        sweep = covering_sweep(traced, batch, threat, 2**20)
        margins = sweep.margins(clean, labels, rounding=Rounding.outward(torch.float32)).double()
        exact = dense_margins(audit, batch.double(), labels, threat, corners)
    others = torch.arange(3) != labels[:, None, None]
    assert ((margins <= exact + 1e-12) | ~others).all()
    assert (exact - margins).abs().max() < 1e-3 * exact.abs().max()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            nn.Softshrink(-1.0),
            r"layer '0' \(Softshrink\): lambd is -1.0, bounds exist for lambd of at least 0",
        ),
        (nn.ConstantPad2d(1, 0.1), r"layer '0' \(ConstantPad2d\): value is 0.1, bounds exist for multiples"),
    ],
)
def test_settings_without_a_bound_are_refused(layer, message):
    with pytest.raises(UnsupportedLayer, match=message):
        trace(nn.Sequential(layer))
