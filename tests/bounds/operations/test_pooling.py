"""A mean is bounded as the pooling that it is."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from boxes import OUTWARD, box_around, contains, networks_with_boxes, points_of
from patchcert.bounds import NEAREST, Interval, Rounding, trace
from patchcert.bounds.linear import linear_margins
from patchcert.errors import UnsupportedLayer
from patchcert.testing.conformance import seeded
from patchcert.testing.networks import ResidualBlock, randomise
from strategies import seeds
from written_models import images as random_images
from written_models import model_of


def mean_of(dim, keepdim):
    """The mean over height and width, as forward passes write it."""
    return model_of(lambda model, maps: maps.mean(dim, keepdim))


AXES = st.sampled_from([(2, 3), (3, 2), (-2, -1), (2, -1), (3, -2)])


@given(seeds(), st.tuples(*[st.integers(1, 9)] * 2), AXES, st.booleans(), st.booleans())
def test_a_mean_attains_its_bounds_which_are_those_of_the_pooling(seed, size, dim, keepdim, is_single):
    dtype = torch.float32 if is_single else torch.float64
    images = torch.rand(2, 3, *size, generator=seeded(seed), dtype=dtype)
    box, mean = box_around(images, seed), mean_of(dim, keepdim)
    twin = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Identity() if keepdim else nn.Flatten())
    outward = Rounding.outward(dtype)
    for rounding in (outward, Rounding(0.0, 0.0)):
        bounds, pooled = (trace(model).bounds(box, rounding=rounding) for model in (mean, twin))
        assert torch.equal(bounds.lower, pooled.lower)
        assert torch.equal(bounds.upper, pooled.upper)
    bounds = trace(mean).bounds(box, rounding=outward)
    lowest, highest = mean(box.lower.double()), mean(box.upper.double())
    assert contains(bounds, Interval(lowest, highest), 1e-15)
    assert contains(Interval(lowest, highest), bounds, 400 * torch.finfo(dtype).eps)
    for point in points_of(box, seed):
        assert contains(bounds, Interval.point(mean(point.double())), 1e-15)


@given(networks_with_boxes(residual=False), AXES, seeds())
def test_no_point_of_the_box_leaves_the_bounds_of_a_network_with_a_mean(case, dim, seed):
    model, box = case
    maps = nn.Sequential(
        nn.Conv2d(box.shape[1], 4, 1), nn.ReLU(), mean_of(dim, keepdim=True), nn.Conv2d(4, box.shape[1], 1)
    )
    attended = ResidualBlock(nn.Identity(), randomise(maps, seeded(seed)).double())
    whole = nn.Sequential(attended, model)
    with torch.no_grad():
        bounds = trace(whole).bounds(box, rounding=OUTWARD)
        for point in points_of(box, seed):
            assert contains(bounds, Interval.point(whole(point)), 1e-12)


@pytest.mark.parametrize("rounding", [NEAREST, OUTWARD], ids=["nearest", "outward"])
@pytest.mark.parametrize(
    "forward",
    [
        lambda model, x: x.view(x.size(0), 2, 30).mean((-2, -1), keepdim=True),
        lambda model, x: F.avg_pool2d(x[:, 0], 2),
        lambda model, x: F.adaptive_avg_pool2d(x[:, 0], 3),
    ],
)
def test_a_mean_of_what_is_no_map_is_refused_when_it_is_met(forward, rounding):
    with pytest.raises(UnsupportedLayer, match=r"mean over height and width of results of shape \(3, "):
        trace(model_of(forward)).bounds(Interval.point(random_images()), rounding=rounding)


@torch.no_grad()
@given(seeds())
def test_linear_bounds_count_the_largest_values_of_a_single_channel_by_its_interval(seed):
    layers = {"c": nn.Conv2d(2, 2, 3), "fc": nn.Linear(2, 3)}
    model = model_of(lambda model, x: model.fc(F.max_pool2d(model.c(x)[:, 0], 2).flatten(1)), **layers)
    box, labels = box_around(random_images(), seed), torch.arange(3)
    found = linear_margins(trace(model), box, labels, torch.arange(3).expand(3, -1), 3, OUTWARD)
    torch.testing.assert_close(found, trace(model).margins(box, labels, rounding=OUTWARD))
