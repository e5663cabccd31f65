"""Masks cover what they are made for, and hide no more than the formula says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import patchcert as pc
from patchcert.errors import InvalidInput, InvalidThreat


def covered_one_by_one(masks, threat):
    """The slow, obvious way: whether every pixel of the patch is hidden, patch by patch and mask by mask."""
    height, width = masks.hidden.shape[1:]
    patches = threat.placements(height, width).masks(threat.stamp)
    return torch.tensor([[bool(hidden[patch].all()) for hidden in masks.hidden] for patch in patches])


@pytest.mark.parametrize("size", [5, 8, 13, 28, 32])
def test_squares_anywhere_are_covered_and_masks_are_as_small_as_the_formula_says(size):
    for side in range(1, min(size, 8)):
        for count in range(2, min(size - side + 1, 8) + 1):
            masks = pc.masks_covering(pc.Patch(side), size, size, count)
            assert bool(masks.covers(pc.Patch(side)).any(dim=1).all()), (size, side, count)
            assert len(masks) == count**2
            largest = -(-(size - side + 1) // count) + side - 1
            assert int(masks.hidden.flatten(1).sum(dim=1).max()) == largest**2


@given(
    height=st.integers(3, 12),
    width=st.integers(3, 12),
    stamp=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=3),
    rows=st.integers(1, 6),
    columns=st.integers(2, 6),
    drawn=st.randoms(use_true_random=False),
)
def test_any_stamp_at_any_placements_is_covered(height, width, stamp, rows, columns, drawn):
    if not any(any(row) for row in stamp):
        return
    box = pc.shapes.trim(torch.tensor(stamp))
    fits = [(top, left) for top in range(height - len(box) + 1) for left in range(width - box.shape[1] + 1)]
    threat = pc.Patch(box, drawn.sample(fits, drawn.randint(1, len(fits))))
    try:
        masks = pc.masks_covering(threat, height, width, (rows, columns))
    except InvalidInput:
        assert min(height - len(box), width - box.shape[1]) < 3  # one mask hides the whole image
        return
    found = masks.covers(threat)
    assert bool(found.any(dim=1).all())
    assert len(masks) <= rows * columns
    assert torch.equal(found, covered_one_by_one(masks, threat))


@pytest.mark.parametrize("rows", ["##.\n#..", "#.#", "..#\n.#.\n##.", "###\n###"])
@pytest.mark.parametrize("size", [(9, 11), (60, 50)])
def test_a_mask_hides_the_patches_that_it_covers_and_no_other_pixel(rows, size):
    threat = pc.Patch(pc.shapes.from_text(rows))
    masks = pc.masks_covering(threat, *size, masks=(2, 3))
    patches = threat.placements(*size).masks(threat.stamp)
    for hidden, covered in zip(masks.hidden, masks.covers(threat).T, strict=True):
        assert torch.equal(hidden, patches[covered].any(dim=0))


def test_a_mask_set_serves_smaller_patches_and_no_larger_ones():
    masks = pc.masks_covering(pc.Patch(5), 32, 32, 6)
    for smaller in (pc.Patch(4), pc.Patch((2, 5)), pc.Patch(pc.shapes.diamond(13)), pc.Patch(5, "corners")):
        assert bool(masks.covers(smaller).any(dim=1).all())
    assert not bool(masks.covers(pc.Patch(6)).any(dim=1).all())


def test_corners_have_masks_of_the_patch_itself():
    masks = pc.masks_covering(pc.Patch(5, "corners"), 32, 32, 6)
    assert len(masks) == 4
    assert masks.hidden.flatten(1).sum(dim=1).tolist() == [25] * 4


def test_unions_cover_any_two_patches():
    threat = pc.Patch(2)
    masks = pc.masks_covering(pc.Patches(threat), 6, 6, 3)
    cover = masks.covers(threat)
    assert len(masks) == 36
    assert bool((cover[:, None] & cover[None]).any(dim=2).all())


def test_unions_cover_any_three_patches():
    threat = pc.Patch(1)
    masks = pc.masks_covering(pc.Patches(threat, 3), 1, 6, (1, 6))
    cover = masks.covers(threat)
    assert len(masks) == 20
    assert bool((cover[:, None, None] & cover[None, :, None] & cover[None, None]).any(dim=3).all())


def test_one_placement_has_one_mask_for_any_number_of_patches():
    masks = pc.masks_covering(pc.Patches(pc.Patch(2, [(1, 1)]), 3), 5, 5, 3)
    assert masks.hidden.int().sum().tolist() == 4


def test_a_set_can_be_looked_at():
    masks = pc.masks_covering(pc.Patch(1), 2, 3, (2, 3))
    assert masks.render().split("\n\n")[:2] == ["#..\n...", ".#.\n..."]
    assert masks.pairs.shape == (15, 2)


@pytest.mark.parametrize("masks", [0, -1, 2.5, (3,), "six", True, (2, 0)])
def test_odd_numbers_of_masks_are_refused(masks):
    with pytest.raises(InvalidInput, match="expected a whole number of at least 1"):
        pc.masks_covering(pc.Patch(2), 8, 8, masks)


def test_what_cannot_be_masked_is_refused():
    with pytest.raises(InvalidInput, match="hides the whole image"):
        pc.masks_covering(pc.Patch(2), 8, 8, 1)
    with pytest.raises(InvalidThreat, match="masks hide patches"):
        pc.masks_covering(pc.SparsePixels(4), 8, 8)
    with pytest.raises(InvalidThreat, match="does not fit"):
        pc.masks_covering(pc.Patch(9), 8, 8)
    with pytest.raises(InvalidInput, match="forward pass per image"):
        pc.masks_covering(pc.Patch(1), 80, 80, 80)
    with pytest.raises(InvalidInput, match="forward pass per image"):
        pc.masks_covering(pc.Patches(pc.Patch(1)), 32, 32, 16)
