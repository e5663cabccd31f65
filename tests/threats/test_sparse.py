from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchcert.errors import InvalidThreat
from patchcert.testing.conformance import seeded
from patchcert.threats import SparsePixels, Threat, threat_from_dict
from strategies import seeds

BOUNDS = ("tight", "per-pixel", "per-value")


@pytest.mark.parametrize("bound", BOUNDS)
def test_samples_change_as_many_units_as_allowed_and_are_members(bound):
    threat = SparsePixels(3, bound)
    clean = torch.full((50, 2, 4, 5), 0.5)
    changed = threat.sample(clean, seeded())
    assert threat.contains(clean, changed).all()
    different = clean != changed
    units = different if bound == "per-value" else different.any(dim=1)
    assert (units.flatten(1).sum(dim=1) == 3).all()
    assert different.any(dim=0).all()


def test_one_pixel_more_is_not_contained():
    threat, clean = SparsePixels(2), torch.zeros(1, 3, 4, 4)
    changed = clean.clone()
    changed[0, :, 0, 0] = changed[0, 1, 3, 3] = 1
    assert threat.contains(clean, changed)
    changed[0, 2, 2, 1] = 0.1
    assert not threat.contains(clean, changed)


def test_the_per_value_bound_counts_channels_not_pixels():
    clean = torch.zeros(1, 3, 4, 4)
    changed = clean.clone()
    changed[0, :, 0, 0] = 1
    assert SparsePixels(1).contains(clean, changed)
    assert not SparsePixels(1, "per-value").contains(clean, changed)
    assert SparsePixels(3, "per-value").contains(clean, changed)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3), st.sampled_from(BOUNDS), seeds())
def test_projection_is_as_near_as_the_best_choice_of_units_and_keeps_members(pixels, bound, seed):
    threat = SparsePixels(pixels, bound)
    clean = torch.rand(2, 2, 2, 3, generator=seeded(seed), dtype=torch.float64)
    changed = clean + torch.randn(clean.shape, generator=seeded(seed + 1), dtype=torch.float64)
    projected = threat.project(clean, changed)
    assert threat.contains(clean, projected).all()
    assert torch.equal(threat.project(clean, projected), projected)
    for image, target, found in zip(clean, changed, projected, strict=True):
        distance = min(_distances(image, target, pixels, per_value=bound == "per-value"))
        torch.testing.assert_close((found - target).square().sum(), distance)


def _distances(image, target, pixels, per_value):
    shape = image.shape if per_value else (1, *image.shape[1:])
    for places in combinations(range(torch.Size(shape).numel()), pixels):
        mask = torch.zeros(shape, dtype=torch.bool)
        mask.view(-1)[list(places)] = True
        yield (torch.where(mask, target.clamp(0, 1), image) - target).square().sum()


@pytest.mark.parametrize("bound", BOUNDS)
def test_no_images_have_no_members(bound):
    threat, none = SparsePixels(2, bound), torch.zeros(0, 3, 4, 5)
    assert threat.sample(none, seeded()).shape == threat.project(none, none).shape == none.shape


def test_sparse_pixels_print_compare_and_survive_plain_types():
    threat = SparsePixels(4)
    assert repr(threat) == "SparsePixels(4 pixels, tight bound)"
    assert repr(SparsePixels(1)) == "SparsePixels(1 pixel, tight bound)"
    assert repr(SparsePixels(4, "per-value")) == "SparsePixels(4 channel values, per-value bound)"
    assert threat_from_dict(threat.to_dict()) == threat
    assert len({threat, SparsePixels(4), SparsePixels(4, "per-pixel"), SparsePixels(5)}) == 3
    assert isinstance(threat, Threat)


@pytest.mark.parametrize("pixels", [0, -1, 1.5, True, "4"])
def test_counts_that_are_no_positive_whole_number_are_refused(pixels):
    with pytest.raises(InvalidThreat, match="whole number of pixels of at least 1, got"):
        SparsePixels(pixels)


def test_unknown_bounds_are_refused_with_the_known_ones():
    with pytest.raises(
        InvalidThreat, match="unknown bound 'loose' of sparse pixels\nhint: choose one of tight"
    ):
        SparsePixels(4, "loose")


def test_more_pixels_than_the_image_has_are_refused():
    with pytest.raises(InvalidThreat, match="5 pixels do not fit into images of 2x2 with 3 channels"):
        SparsePixels(5).contains(torch.zeros(1, 3, 2, 2), torch.zeros(1, 3, 2, 2))


@pytest.mark.parametrize("plain", [{"kind": "sparse"}, {"kind": "sparse", "pixels": 4, "size": 1}])
def test_tables_that_are_no_sparse_pixels_are_refused(plain):
    with pytest.raises(InvalidThreat, match="sparse pixels are a table"):
        SparsePixels.from_dict(plain)
