"""What holds for every kind of threat as a value: its plain form is canonical, and refusals name what came."""

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchcert.errors import InvalidInput, InvalidThreat
from patchcert.threats import Patch, Patches, SparsePixels, Threat, shapes, threat_from_dict
from strategies import seeds, sparse_threats, stamps, threats


def as_json(threat):
    return json.dumps(threat.to_dict(), sort_keys=True)


def any_threats():
    """Few and small, so that two draws are often equal."""
    return st.one_of(
        threats(3, 3),
        sparse_threats(2, 2),
        st.builds(SparsePixels, st.integers(1, 3), st.sampled_from(("tight", "per-value"))),
    )


@given(any_threats(), any_threats())
def test_threats_are_equal_exactly_if_their_plain_types_are(first, second):
    assert (first == second) == (as_json(first) == as_json(second))
    assert first != second or hash(first) == hash(second)


@given(any_threats())
def test_plain_types_survive_json_and_describe_an_equal_threat(threat):
    again = threat_from_dict(json.loads(as_json(threat)))
    assert again == threat
    assert hash(again) == hash(threat)
    assert as_json(again) == as_json(threat)
    assert isinstance(threat, Threat)


@given(stamps(4, 4), st.sampled_from(("everywhere", "corners")))
def test_a_stamp_is_the_same_however_it_is_given(stamp, placements):
    ways = [stamp, stamp.numpy(), stamp.tolist(), tuple(map(tuple, stamp.tolist()))]
    ways.append(torch.nn.functional.pad(stamp, (1, 2, 0, 1)))
    if stamp.all():
        height, width = stamp.shape
        ways += [(height, width), [np.int64(height), torch.tensor(width)], shapes.rectangle(height, width)]
        ways += [height, np.int32(height)] if height == width else []
    assert len({as_json(Patch(way, placements)) for way in ways}) == 1
    assert len({Patch(way, placements) for way in ways}) == 1


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6, unique=True), seeds()
)
def test_a_list_of_placements_is_the_same_in_any_order_and_type(corners, seed):
    shuffled = random.Random(seed).sample(corners, len(corners))
    ways = [corners, tuple(shuffled), [list(corner) for corner in shuffled]]
    ways += [np.array(shuffled), torch.tensor(shuffled)]
    assert len({as_json(Patch(2, way)) for way in ways}) == 1
    assert len({Patch(2, way) for way in ways}) == 1


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=3, max_size=3))
def test_a_map_of_placements_is_the_same_in_any_type(rows):
    rows[0][0] = True
    flipped_twice = np.array(rows)[::-1].copy()[::-1]
    ways = [rows, tuple(map(tuple, rows)), np.array(rows), torch.tensor(rows), flipped_twice]
    assert len({as_json(Patch(2, way)) for way in ways}) == 1
    assert len({Patch(2, way) for way in ways}) == 1


def test_two_maps_of_one_size_and_count_differ_in_plain_types():
    first, second = Patch(2, np.eye(3, dtype=bool)), Patch(2, np.eye(3, dtype=bool)[::-1])
    assert str(first) == str(second)
    assert first != second
    assert as_json(first) != as_json(second)


def test_a_map_is_another_threat_than_a_list_as_it_is_for_one_size_of_image_only():
    listed, mapped = Patch(2, [(0, 0)]), Patch(2, [[True, False], [False, False]])
    assert listed != mapped
    assert as_json(listed) != as_json(mapped)
    assert torch.equal(listed.placements(3, 3).corners, mapped.placements(3, 3).corners)
    with pytest.raises(InvalidThreat, match="map is 2x2"):
        mapped.placements(5, 5)


def test_numbers_of_other_types_are_the_same_count_of_pixels():
    assert len({as_json(SparsePixels(count)) for count in (4, np.int64(4), torch.tensor(4))}) == 1


def test_unknown_kinds_of_threat_are_refused():
    with pytest.raises(InvalidThreat, match="unknown kind of threat 'ball'"):
        threat_from_dict({"kind": "ball"})


@pytest.mark.parametrize("images", [torch.rand(3, 8, 8), torch.zeros(1, 1, 8, 8, dtype=torch.uint8)])
def test_images_of_another_kind_are_refused(images):
    with pytest.raises(InvalidInput, match=r"images must be floats of shape \(n, c, h, w\)"):
        Patch(2).sample(images, torch.Generator())


def test_batches_of_unequal_shape_are_refused():
    with pytest.raises(InvalidInput, match="same shape"):
        Patch(2).contains(torch.rand(2, 1, 4, 4), torch.rand(1, 1, 4, 4))


@pytest.mark.parametrize("threat", [Patch(2), SparsePixels(2)], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -1e-7, 1 + 1e-6])
def test_values_that_are_hardly_outside_are_no_pixels(threat, value):
    clean = torch.full((1, 1, 4, 4), 0.5)
    changed = clean.clone()
    changed[0, 0, 1, 1] = value
    assert not threat.contains(clean, changed)


@pytest.mark.parametrize(
    "threat", [Patch(2), Patches(Patch(1)), SparsePixels(2), SparsePixels(2, "per-value")]
)
def test_a_zero_of_the_other_sign_is_a_change(threat):
    """Models can tell them apart, by a division or a sign bit."""
    clean = torch.zeros(2, 1, 3, 3)
    changed = clean.clone()
    changed[0, 0, 1, 1], changed[1] = -0.0, -0.0
    assert threat.contains(clean, changed).tolist() == [True, False]
    assert threat.contains(changed, clean).tolist() == [True, False]
    assert threat.contains(clean, threat.project(clean, changed)).all()
