"""A patch before resizing is covered by the patch after it: held to what `interpolate` does to changed pixels."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import patchcert as pc
from patchcert.errors import InvalidInput, InvalidThreat
from patchcert.testing.conformance import seeded
from patchcert.threats.resizing import sight
from strategies import seeds

FILTERS = [
    ("nearest", False),
    ("nearest-exact", False),
    ("bilinear", False),
    ("bilinear", True),
    ("area", False),
]


def resize(images, size, mode, antialias):
    return F.interpolate(images, size=size, mode=mode, antialias=antialias).clamp(0, 1)


def observed(before, after, mode, antialias, dtype=torch.float32):
    """Where a pixel after resizing changes with one before it, by changing each of them to three values."""
    line = torch.rand(1, 1, 1, before, generator=seeded(1)).to(dtype)
    clean, found = resize(line, (1, after), mode, antialias), torch.zeros(after, before, dtype=torch.bool)
    for value in (0.0, 1.0, 0.3):
        changed = line.repeat(before, 1, 1, 1)
        changed[torch.arange(before), 0, 0, torch.arange(before)] = value
        found |= (resize(changed, (1, after), mode, antialias) != clean)[:, 0, 0].T
    return found


@pytest.mark.parametrize(("mode", "antialias"), FILTERS)
@settings(deadline=None, max_examples=60)
@given(before=st.integers(1, 90), after=st.integers(1, 60), double=st.booleans())
def test_no_pixel_changes_that_does_not_look_there(mode, antialias, before, after, double):
    seen = observed(before, after, mode, antialias, torch.float64 if double else torch.float32)
    assert not (seen & ~sight(before, after, mode, antialias)).any()


@pytest.mark.parametrize(("mode", "antialias"), FILTERS)
@pytest.mark.parametrize(
    ("before", "after"), [(64, 32), (32, 64), (7, 7), (96, 32), (61, 13), (13, 61), (224, 100)]
)
def test_few_pixels_look_where_nothing_changes_them(mode, antialias, before, after):
    """Only at the very edge of a filter, where a weight is zero up to rounding; never where nothing is rounded."""
    seen, stated = observed(before, after, mode, antialias), sight(before, after, mode, antialias)
    assert not (seen & ~stated).any()
    edges = (stated & ~seen).sum(dim=1)
    is_exact = before in (64, 32, 7) or (before == 96 and not antialias)
    assert edges.max() <= (0 if is_exact or mode == "area" else 2)
    assert edges.double().mean() <= (2.0 if before == 96 else 0.5)


@st.composite
def cameras(draw):
    camera = draw(st.tuples(st.integers(4, 14), st.integers(4, 14)))
    image = draw(st.tuples(st.integers(2, 10), st.integers(2, 10)))
    stamp = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    return camera, image, pc.Patch(stamp, draw(st.sampled_from(("everywhere", "corners", [(0, 0)]))))


@pytest.mark.parametrize(("mode", "antialias"), FILTERS)
@settings(deadline=None, max_examples=25)
@given(case=cameras(), seed=seeds())
def test_every_member_becomes_a_member(mode, antialias, case, seed):
    camera, image, patch = case
    try:
        covering = pc.resized_patch(patch, camera, image, mode, antialias)
    except InvalidThreat:
        covering = None  # it is never seen
    corners = patch.placements(*camera).corners
    clean = torch.rand(1, 2, *camera, generator=seeded(seed)).expand(len(corners), -1, -1, -1)
    changed = torch.where(
        patch.masks(clean, corners)[:, None], torch.rand(clean.shape, generator=seeded(seed + 1)), clean
    )
    before, after = (resize(each, image, mode, antialias) for each in (clean, changed))
    if covering is None:
        assert torch.equal(before, after)
    else:
        assert covering.contains(before, after).all()


def test_a_patch_on_a_camera_of_three_times_the_size_covers_a_third_and_a_border():
    resized = [
        pc.resized_patch(pc.Patch((60, 90)), (480, 640), (160, 160), mode, antialias)
        for mode, antialias in FILTERS
    ]
    assert [(each.height, each.width) for each in resized] == [
        (20, 23),
        (20, 23),
        (20, 23),
        (22, 25),
        (21, 24),
    ]
    assert all(str(each.rule) == "everywhere" for each in resized)


def test_placements_of_the_camera_become_placements_of_the_image():
    corner = pc.resized_patch(pc.Patch(4, [(0, 0)]), (16, 16), (8, 8), "area")
    assert corner == pc.Patch(2, [[row == column == 0 for column in range(7)] for row in range(7)])
    corners = pc.resized_patch(pc.Patch(4, "corners"), (16, 16), (8, 8), "bilinear", antialias=True)
    assert corners.placements(8, 8).corners.tolist() == [[0, 0], [0, 5], [5, 0], [5, 5]]


def test_a_patch_that_the_filter_skips_is_said_to_be_unseen():
    with pytest.raises(InvalidThreat, match="is never seen"):
        pc.resized_patch(pc.Patch(1, [(1, 1)]), (40, 40), (4, 4), "nearest")
    with pytest.raises(InvalidThreat, match="does not fit"):
        pc.resized_patch(pc.Patch(50), (40, 40), (4, 4), "nearest")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "bicubic"}, "'bicubic' is not known"),
        ({"mode": "lanczos"}, "'lanczos' is not known"),
        ({"mode": "area", "antialias": True}, "'area' has no antialias"),
        ({"mode": "bilinear", "camera": (0, 4)}, r"camera must be \(height, width\)"),
        ({"mode": "bilinear", "camera": (8, 8, 3)}, r"camera must be .* got \(8, 8, 3\)"),
        ({"mode": "bilinear", "camera": 8}, "camera must be .* got 8"),
        ({"mode": "bilinear", "image": (4, 2.5)}, "image must be .* in whole numbers"),
        ({"mode": "bilinear", "antialias": True, "image": (4, 1)}, "mixes up the rows"),
    ],
)
def test_other_filters_and_sizes_are_refused(settings, message):
    given_sizes = {"camera": (8, 8), "image": (4, 4), **settings}
    with pytest.raises(InvalidInput, match=message):
        pc.resized_patch(pc.Patch(2), **given_sizes)


def test_several_patches_are_resized_one_by_one():
    with pytest.raises(InvalidThreat, match="one patch is resized at a time"):
        pc.resized_patch(pc.Patches(pc.Patch(2)), (8, 8), (4, 4), "area")
