import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchcert.errors import InvalidInput, InvalidThreat
from patchcert.testing.conformance import seeded
from patchcert.threats import Patch, Threat, shapes, threat_from_dict
from patchcert.threats.patch import stamp_cells
from strategies import image_batches, seeds, threats


@st.composite
def patches_with_images(draw):
    height, width = draw(st.integers(3, 7)), draw(st.integers(3, 7))
    images = draw(image_batches((draw(st.integers(1, 3)), height, width)))
    return draw(threats(height, width)), images


def masks_of(patch, images):
    return patch.placements(*images.shape[2:]).masks(patch.stamp)


@settings(deadline=None, max_examples=50)
@given(patches_with_images(), st.sampled_from((0.0, 0.3, 1.0)))
def test_boxes_equal_a_loop_over_images_placements_and_pixels(case, epsilon):
    patch, images = case
    corners = patch.placements(*images.shape[2:]).corners
    box = patch.boxes(images, corners, epsilon)
    lower, upper = torch.empty_like(box.lower), torch.empty_like(box.upper)
    for n, image in enumerate(images):
        for p, (top, left) in enumerate(corners.tolist()):
            lower[n, p], upper[n, p] = image, image
            for row, column in patch.stamp.nonzero().tolist():
                pixel = image[:, top + row, left + column]
                lower[n, p, :, top + row, left + column] = (pixel - epsilon).clamp(min=0)
                upper[n, p, :, top + row, left + column] = (pixel + epsilon).clamp(max=1)
    assert torch.equal(box.lower, lower)
    assert torch.equal(box.upper, upper)


@pytest.mark.parametrize("stamp", [2, shapes.diamond(5)])
def test_boxes_take_other_corners_for_every_image_and_epsilon_as_a_tensor(stamp):
    patch, images = Patch(stamp), torch.rand(3, 2, 6, 5, generator=seeded())
    corners = patch.placements(6, 5).sample((3, 4), seeded(1))
    each = patch.boxes(images, corners, torch.tensor(0.25, dtype=torch.float64))
    assert each.shape == (3, 4, 2, 6, 5)
    assert each.lower.dtype == torch.float32
    for n in range(3):
        alone = patch.boxes(images[n : n + 1], corners[n], 0.25)
        assert torch.equal(each.lower[n], alone.lower[0])
        assert torch.equal(each.upper[n], alone.upper[0])


def test_boxes_at_full_epsilon_are_exactly_the_unit_box_on_the_stamp():
    patch, images = Patch(2), torch.rand(5, 3, 4, 4, generator=seeded())
    box = patch.boxes(images, patch.placements(4, 4).corners)
    covered = masks_of(patch, images)[None, :, None].expand_as(box.lower)
    assert (box.lower[covered] == 0).all()
    assert (box.upper[covered] == 1).all()


@pytest.mark.parametrize("shape", [(3, 4, 2), (2, 3), (2,)])
def test_boxes_refuse_corners_of_the_wrong_shape(shape):
    with pytest.raises(InvalidInput, match=r"corners must have shape \(p, 2\) or \(2, p, 2\), got"):
        Patch(2).boxes(torch.rand(2, 1, 4, 4), torch.zeros(shape, dtype=torch.long))


@settings(deadline=None, max_examples=80)
@given(patches_with_images(), seeds(), st.integers(0, 3))
def test_contains_agrees_with_a_loop_over_placements(case, seed, strays):
    patch, images = case
    generator = seeded(seed)
    changed = patch.sample(images, generator)
    for _ in range(strays):
        row, column = (int(torch.randint(size, (1,), generator=generator)) for size in images.shape[2:])
        changed[:, -1, row, column] = 0.123
    different = (images != changed).any(dim=1)
    expected = [any(not (image & ~mask).any() for mask in masks_of(patch, images)) for image in different]
    assert patch.contains(images, changed).tolist() == expected


@settings(deadline=None, max_examples=50)
@given(patches_with_images(), seeds())
def test_projection_is_as_near_as_the_best_placement_and_keeps_members(case, seed):
    patch, images = case
    generator = seeded(seed)
    changed = images + torch.randn(images.shape, generator=generator, dtype=images.dtype)
    projected = patch.project(images, changed)
    assert patch.contains(images, projected).all()
    assert torch.equal(patch.project(images, projected), projected)
    masks = masks_of(patch, images)[:, None, None]
    every = torch.where(masks, changed.clamp(0, 1), images)
    best = (every - changed).square().flatten(2).sum(dim=2).amin(dim=0)
    torch.testing.assert_close((projected - changed).square().flatten(1).sum(dim=1), best)


def test_projection_loses_no_change_however_small():
    clean = torch.full((1, 1, 5, 5), 0.5, dtype=torch.float64)
    changed = clean.clone()
    changed[0, 0, 1, 1], changed[0, 0, 2, 2] = 1.0, 0.5 + 1e-15
    assert torch.equal(Patch(2).project(clean, changed), changed)


def test_projection_treats_nan_as_unchanged():
    clean = torch.full((1, 1, 4, 4), 0.5)
    changed = clean.clone()
    changed[0, 0, 1, 1], changed[0, 0, 3, 3] = torch.nan, 2.0
    projected = Patch(2).project(clean, changed)
    assert projected[0, 0, 1, 1] == 0.5
    assert projected[0, 0, 3, 3] == 1


def test_an_unchanged_nan_is_not_contained():
    clean = torch.full((1, 1, 4, 4), torch.nan)
    assert not Patch(4).contains(clean, clean)
    assert not Patch(4).contains(clean, torch.zeros_like(clean))


def test_the_free_pixels_of_a_stamp_may_not_change():
    patch = Patch(shapes.diamond(4))
    clean = torch.zeros(1, 1, 3, 3)
    changed = clean.clone()
    changed[0, 0, 1, 1] = 1
    assert not patch.contains(clean, changed)
    ring = patch.stamp.float()[None, None]
    assert patch.contains(clean, ring)


def test_every_placement_is_drawn_with_both_kinds_of_filling():
    patch = Patch((1, 2), placements=[(0, 0), (2, 3), (4, 4)])
    clean = torch.full((300, 1, 5, 6), 0.5)
    changed = patch.sample(clean, seeded())
    assert patch.contains(clean, changed).all()
    corners = [tuple((image[0] != 0.5).nonzero()[0].tolist()) for image in changed]
    assert set(corners) == {(0, 0), (2, 3), (4, 4)}
    extreme = [bool(((image == 0.5) | (image == 0) | (image == 1)).all()) for image in changed]
    assert 50 < sum(extreme) < 250


@pytest.mark.parametrize(
    ("patch", "text"),
    [
        (Patch(5), "Patch(5x5 square, everywhere)"),
        (Patch((2, 8), "corners"), "Patch(2x8 rectangle, corners)"),
        (Patch((1, 8)), "Patch(1x8 line, everywhere)"),
        (Patch(shapes.diamond(25)), "Patch(diamond of 25 pixels, everywhere)"),
        (Patch(shapes.parallelogram(16, mirrored=True)), "Patch(parallelogram of 16 pixels, everywhere)"),
        (Patch(2, [(3, 1), (0, 0)]), "Patch(2x2 square, at (0, 0), (3, 1))"),
        (Patch(1, [(0, n) for n in range(5)]), "Patch(1x1 square, 5 listed placements)"),
        (Patch(2, np.eye(3, dtype=bool)), "Patch(2x2 square, 3 mapped placements)"),
        (Patch(shapes.from_text("#..\n.##")), "Patch(stamp of 3 pixels in 2x3, everywhere)"),
    ],
)
def test_patches_print_compare_and_survive_plain_types(patch, text):
    assert repr(patch) == text
    again = threat_from_dict(patch.to_dict())
    assert again == patch
    assert hash(again) == hash(patch)
    assert copy.deepcopy(patch) == patch
    assert isinstance(patch, Threat)


def test_patches_with_other_stamps_or_placements_differ():
    every = [Patch(2), Patch(3), Patch((2, 3)), Patch((3, 2)), Patch(2, "corners"), Patch(2, [(0, 0)])]
    assert len(set(every)) == len(every)


def test_empty_borders_of_a_stamp_are_cut_off():
    wide = torch.zeros(5, 6, dtype=torch.bool)
    wide[1:3, 2:5] = True
    assert Patch(wide) == Patch((2, 3))


def test_empty_borders_are_refused_where_they_would_shift_the_placements():
    wide = torch.zeros(3, 3, dtype=torch.bool)
    wide[1, 1] = True
    with pytest.raises(InvalidThreat, match="unclear which pixel"):
        Patch(wide, [(0, 0)])


@pytest.mark.parametrize(
    "stamp", [np.ones((2, 2)), torch.ones(2, 2, dtype=torch.long), 2.5, "5", True, (1, 2, 3)]
)
def test_stamps_that_are_not_boolean_are_refused(stamp):
    with pytest.raises(InvalidThreat, match=r"boolean mask, got .*\n?hint: give Patch\(5\)"):
        Patch(stamp)


def test_ragged_masks_are_refused():
    with pytest.raises(InvalidThreat, match="rows of unequal length"):
        Patch([[True], [True, False]])


def test_an_empty_stamp_is_refused():
    with pytest.raises(InvalidThreat, match="covers no pixel"):
        Patch(torch.zeros(3, 3, dtype=torch.bool))


@pytest.mark.parametrize("size", [0, -1, (0, 3), (3, 0)])
def test_sizes_below_one_are_refused(size):
    with pytest.raises(InvalidThreat, match="height and width of at least 1"):
        Patch(size)


@pytest.mark.parametrize(
    "plain",
    [{"kind": "patch"}, {"kind": "patch", "stamp": "2", "extra": 1}, {"kind": "sparse", "stamp": "2"}],
)
def test_tables_that_are_no_patch_are_refused(plain):
    with pytest.raises(InvalidThreat, match="a patch is a table"):
        Patch.from_dict(plain)


def test_a_table_may_name_a_shape():
    assert Patch.from_dict({"stamp": "diamond:25"}) == Patch(shapes.diamond(25))
    assert Patch.from_dict({"stamp": 5, "placements": "corners"}) == Patch(5, "corners")


def test_a_patch_stays_as_it_is_whatever_is_done_to_its_stamp_and_corners():
    patch = Patch([[True, True], [True, False]])
    patch.stamp.fill_(False)
    patch.placements(4, 4).corners.clamp_(min=1)
    assert torch.equal(patch.stamp, torch.tensor([[True, True], [True, False]]))
    corners = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    assert torch.equal(patch.placements(4, 4).corners, corners)


def test_projection_tells_huge_values_apart():
    """Values far outside [0, 1] are clamped whatever they are; the placement that saves most distance is kept."""
    clean = torch.full((1, 1, 1, 3), 0.5, dtype=torch.float64)
    changed = torch.tensor([2e16, 0.5, 9e16], dtype=torch.float64).reshape(1, 1, 1, 3)
    assert Patch(1).project(clean, changed).flatten().tolist() == [0.5, 0.5, 1.0]


@pytest.fixture
def _on_meta():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("_on_meta")
@pytest.mark.parametrize("stamp", ["5x5", "line:4:vertical", "diamond:13", "parallelogram:16", "square:4"])
@pytest.mark.parametrize("placements", ["everywhere", "corners", [(0, 0), (1, 2)]])
def test_a_patch_has_values_whatever_the_default_device(stamp, placements):
    patch = Patch(shapes.parse(stamp), placements)
    corners = patch.placements(16, 16).corners
    assert patch.stamp.device == corners.device == torch.device("cpu")
    assert int(patch.stamp.sum()) == patch.pixels
    assert Patch.from_dict(patch.to_dict()) == patch


@pytest.mark.parametrize(("stamp", "placements"), [("meta", "cpu"), ("cpu", "meta")])
def test_masks_without_values_are_refused(stamp, placements):
    masks = [torch.ones(2, 2, dtype=torch.bool, device=device) for device in (stamp, placements)]
    with pytest.raises(InvalidThreat, match="is on the device 'meta', where it has no values"):
        Patch(*masks)


def test_cells_under_a_stamp_are_counted_over_channels():
    stamp = Patch(torch.tensor([[True, False], [True, True]]))
    cells = stamp_cells(stamp, torch.tensor([[1, 2], [0, 0]]), (2, 4, 5))
    for row, (top, left) in zip(cells, [(1, 2), (0, 0)], strict=True):
        marked = torch.zeros(2 * 20).index_fill(0, row, 1).reshape(2, 4, 5)
        mask = torch.zeros(4, 5)
        mask[top : top + 2, left : left + 2] = stamp.stamp.float()
        assert torch.equal(marked, mask.expand(2, -1, -1))
        assert (row.diff() > 0).all()
