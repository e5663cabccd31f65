"""Sums and products have the bounds of exact arithmetic, and nothing more."""

from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from boxes import box_around, contains
from patchcert.bounds import Interval, Rounding, trace
from patchcert.bounds.operations import Multiply
from patchcert.errors import UnsupportedLayer
from patchcert.testing.conformance import seeded
from strategies import seeds
from written_models import model_of

FORMS = {
    "a x + b": lambda x, a, b: x * a + b,
    "b - a x": lambda x, a, b: b - a * x,
    "x / a - b": lambda x, a, b: x / a - b,
    "-x": lambda x, a, b: -x,
}


class Formed(nn.Module):
    """A form of the image by two constants: numbers, or buffers with one for each channel."""

    def __init__(self, form, first, second):
        super().__init__()
        self.form = form
        for name, constant in (("first", first), ("second", second)):
            if isinstance(constant, float):
                setattr(self, name, constant)
            else:
                self.register_buffer(name, constant)

    def forward(self, images):
        return self.form(images, self.first, self.second)


@pytest.mark.parametrize("name", FORMS)
@given(seeds(), st.sampled_from([1.0, 1e-30, 1e30, 1e-44]), st.booleans())
def test_constants_hold_the_exact_ends_and_nothing_more(name, seed, scale, has_numbers):
    """In fractions, for factors up to those that are hardly numbers of the type."""
    scale = 1e-30 if "/" in name and scale == 1e-44 else scale
    first, second = torch.randn(2, 3, 1, 1, generator=seeded(seed))
    first = first * scale
    box = box_around(torch.rand(1, 3, 2, 2, generator=seeded(seed)), seed)
    if has_numbers:
        first, second = float(first[0]) or 1e-44, float(second[0])
    network = trace(Formed(FORMS[name], first, second))
    bounds = network.bounds(box, rounding=Rounding.outward(torch.float32))
    for place in product(range(3), range(2), range(2)):
        constants = [each if has_numbers else float(each[place[0], 0, 0]) for each in (first, second)]
        reached = [
            FORMS[name](*map(Fraction, (float(end[0][place]), *constants))) for end in (box.lower, box.upper)
        ]
        lower, upper = (Fraction(float(end[0][place])) for end in (bounds.lower, bounds.upper))
        assert lower <= min(reached)
        assert max(reached) <= upper
        size = max(map(abs, (*reached, Fraction(constants[1]) if name != "-x" else 0)))
        assert upper - lower <= max(reached) - min(reached) + size / 2**16 + Fraction(2) ** -90


def test_constants_in_place_are_those_of_their_operators():
    def forward(images):
        changed = images * 1
        changed += 0.5
        changed -= 2
        changed *= 3
        changed /= 7
        return changed.mul_(2).add_(1).sub_(0.25).div_(3)

    images = torch.rand(2, 3, 2, 2, generator=seeded(0))
    model = model_of(lambda model, images: forward(images))
    torch.testing.assert_close(trace(model).values(images)[-1], model(images))


@pytest.mark.parametrize("shape", [(2, 1, 1, 1), (4, 1, 1), (2, 2, 3, 2, 2), (1, 3, 2, 5)])
def test_constants_that_tell_images_apart_or_make_more_of_them_are_refused(shape):
    model = Formed(lambda x, a, b: x * a, torch.ones(shape), 0.0)
    with pytest.raises(UnsupportedLayer, match="does not fit results of shape"):
        trace(model).values(torch.rand(2, 3, 2, 2))


@given(seeds())
def test_a_product_attains_its_bounds(seed):
    ends = torch.rand(4, 1, 30, generator=seeded(seed), dtype=torch.float64) * 4 - 2
    first = Interval(ends[:2].amin(dim=0), ends[:2].amax(dim=0))
    second = Interval(ends[2:].amin(dim=0), ends[2:].amax(dim=0))
    bounds = Multiply().interval(first, second, rounding=Rounding(0.0, 0.0))
    corners = torch.stack([a * b for a in (first.lower, first.upper) for b in (second.lower, second.upper)])
    torch.testing.assert_close(bounds.lower, corners.amin(dim=0), rtol=0, atol=0)
    torch.testing.assert_close(bounds.upper, corners.amax(dim=0), rtol=0, atol=0)
    mixes = torch.rand(2, 50, 30, generator=seeded(seed), dtype=torch.float64)
    inside = torch.lerp(first.lower, first.upper, mixes[0]) * torch.lerp(second.lower, second.upper, mixes[1])
    assert contains(bounds, Interval(inside, inside), 1e-15)
