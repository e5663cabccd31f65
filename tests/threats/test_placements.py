import numpy as np
import pytest
import torch

from patchcert.errors import InvalidThreat
from patchcert.threats import Patch, shapes


@pytest.mark.parametrize(
    ("image", "side", "count"),
    [(28, 2, 729), (28, 4, 625), (28, 5, 576), (32, 2, 961), (32, 4, 841), (32, 5, 784)],
)
def test_the_specification_counts_these_locations(image, side, count):
    placements = Patch(side).placements(image, image)
    assert len(placements) == count
    assert placements.complete


def test_corners_are_top_left_in_row_major_order_up_to_the_last_row_and_column():
    placements = Patch((2, 3)).placements(4, 6)
    assert placements.corners.tolist() == [[top, left] for top in range(3) for left in range(4)]
    assert placements.flat.tolist() == list(range(12))
    assert (placements.rows, placements.columns) == (3, 4)


def test_masks_cover_exactly_the_stamp_and_reach_every_pixel():
    patch = Patch((2, 3))
    masks = patch.placements(4, 6).masks(patch.stamp)
    assert masks.shape == (12, 4, 6)
    assert (masks.flatten(1).sum(dim=1) == 6).all()
    assert masks.any(dim=0).all()
    assert masks[-1, 2:, 3:].all()


def test_masks_refuse_a_stamp_of_another_size():
    with pytest.raises(InvalidThreat, match="placements are for a 2x2 stamp, got"):
        Patch(2).placements(4, 4).masks(shapes.square(3))


@pytest.mark.parametrize(
    ("image", "corners"),
    [
        ((5, 6), [[0, 0], [0, 4], [3, 0], [3, 4]]),
        ((2, 6), [[0, 0], [0, 4]]),
        ((5, 2), [[0, 0], [3, 0]]),
        ((2, 2), [[0, 0]]),
    ],
)
def test_the_corners_of_the_image_are_at_most_four_and_never_doubled(image, corners):
    assert Patch(2, "corners").placements(*image).corners.tolist() == corners


@pytest.mark.parametrize("size", [(5, 6), (4, 5)])
def test_a_map_may_be_as_large_as_the_image_or_as_the_corners_that_fit(size):
    allowed = torch.zeros(size, dtype=torch.bool)
    allowed[3, 4] = allowed[0, 2] = True
    for given in (allowed, allowed.numpy(), allowed.tolist()):
        assert Patch(2, given).placements(5, 6).corners.tolist() == [[0, 2], [3, 4]]


@pytest.mark.parametrize(
    "positions", [[(3, 1), (0, 4)], np.array([[3, 1], [0, 4]]), torch.tensor([[3, 1], [0, 4]])]
)
def test_listed_placements_are_put_in_row_major_order(positions):
    placements = Patch(2, positions).placements(5, 6)
    assert placements.corners.tolist() == [[0, 4], [3, 1]]
    assert not placements.complete


def test_a_list_of_all_positions_is_complete_and_equal_to_everywhere():
    every = [(top, left) for top in range(2) for left in range(3)]
    placements = Patch(2, every).placements(3, 4)
    assert placements.complete
    assert torch.equal(placements.corners, Patch(2).placements(3, 4).corners)


def test_random_corners_come_from_the_allowed_ones():
    placements = Patch(2, [(0, 0), (2, 3)]).placements(4, 5)
    drawn = placements.sample((50, 2), torch.Generator().manual_seed(0))
    assert drawn.shape == (50, 2, 2)
    assert {tuple(corner) for corner in drawn.flatten(0, 1).tolist()} == {(0, 0), (2, 3)}


@pytest.mark.parametrize("size", [(4, 9), (9, 4), (4, 4)])
def test_a_patch_larger_than_the_image_is_refused_with_both_sizes(size):
    with pytest.raises(InvalidThreat, match=rf"patch of 5x5 does not fit into images of {size[0]}x{size[1]}"):
        Patch(5).placements(*size)


@pytest.mark.parametrize("position", [(4, 0), (0, 5), (-1, 0), (0, -1)])
def test_a_placement_outside_the_image_is_refused_with_its_range(position):
    match = (
        rf"placement \({position[0]}, {position[1]}\) is outside the 5x6 image: .*0\.\.3 and left in 0\.\.4"
    )
    with pytest.raises(InvalidThreat, match=match):
        Patch(2, [position]).placements(5, 6)


def test_a_map_that_allows_a_placement_outside_the_image_is_refused():
    with pytest.raises(InvalidThreat, match=r"placement \(0, 5\) is outside the 5x6 image"):
        Patch(2, torch.ones(5, 6, dtype=torch.bool)).placements(5, 6)


def test_a_map_for_other_images_is_refused():
    with pytest.raises(InvalidThreat, match=r"map is 7x7, expected 5x6 \(the image\) or 4x5"):
        Patch(2, torch.ones(7, 7, dtype=torch.bool)).placements(5, 6)


@pytest.mark.parametrize(
    "nothing", [[], (), torch.zeros(4, 4, dtype=torch.bool), np.zeros((0, 2), dtype=int)]
)
def test_an_empty_placement_set_is_refused(nothing):
    with pytest.raises(InvalidThreat, match="no placement is allowed"):
        Patch(2, nothing)


def test_a_placement_listed_twice_is_refused():
    with pytest.raises(InvalidThreat, match=r"placement \(1, 2\) is listed twice"):
        Patch(2, [(1, 2), (0, 0), (1, 2)])


def test_unknown_words_are_refused_with_the_known_ones():
    with pytest.raises(
        InvalidThreat, match="unknown placements 'anywhere', expected one of 'everywhere', 'corners'"
    ):
        Patch(2, "anywhere")


@pytest.mark.parametrize("odd", [[(1, 2, 3)], [1, 2], [(0.5, 1)], np.ones((4, 4)), [("a", "b")]])
def test_lists_that_hold_no_pairs_are_refused(odd):
    with pytest.raises(InvalidThreat, match="a placement is a pair"):
        Patch(2, odd)


@pytest.mark.parametrize("odd", [None, 3, {"list": []}])
def test_placements_of_another_kind_are_refused(odd):
    with pytest.raises(InvalidThreat, match="placements"):
        Patch(2, odd)
