"""Several patches at once: members, boxes and projections are those of all sets of placements."""

import json
from itertools import combinations_with_replacement

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchcert.errors import InvalidThreat
from patchcert.testing import check_threat
from patchcert.testing.conformance import seeded
from patchcert.threats import Patch, Patches, shapes, threat_from_dict
from patchcert.threats.patch import choices
from strategies import seeds, threats


def unions(threat, height, width):
    """What any `count` placements cover together, one after the other."""
    single = threat.patch.placements(height, width).masks(threat.patch.stamp)
    return [torch.stack(chosen).any(dim=0) for chosen in combinations_with_replacement(single, threat.count)]


@pytest.mark.parametrize(
    ("threat", "shape"),
    [
        (Patches(Patch(2)), (2, 4, 5)),
        (Patches(Patch(shapes.diamond(4), "corners")), (1, 5, 5)),
        (Patches(Patch((1, 2), [(0, 0), (1, 1), (2, 3)]), 3), (1, 3, 5)),
        (Patches(Patch(1, [(1, 1)]), 4), (2, 3, 3)),
    ],
    ids=str,
)
def test_it_is_a_threat(threat, shape):
    is_everywhere = str(threat.patch.rule) == "everywhere"
    checks = {} if is_everywhere else {"checks": _checks_of_some_placements()}
    check_threat(threat, shape=shape, **checks)


def _checks_of_some_placements():
    """All but the one that asks for every pixel of the image."""
    from patchcert.testing.threats import THREAT_CHECKS, samples_reach_every_covered_value

    return tuple(check for check in THREAT_CHECKS if check is not samples_reach_every_covered_value)


@settings(deadline=None, max_examples=60)
@given(threats(4, 4), st.integers(2, 3), seeds(), st.integers(0, 9))
def test_an_image_is_a_member_exactly_if_some_placements_cover_what_differs(patch, count, seed, pixels):
    threat, generator = Patches(patch, count), seeded(seed)
    clean = torch.full((1, 1, 4, 4), 0.5)
    inside = unions(threat, 4, 4)
    chosen = inside[int(torch.randint(len(inside), (), generator=generator))]
    drawn = torch.rand(4, 4, generator=generator).flatten().argsort().view(4, 4) < pixels
    stray = drawn & (torch.rand(4, 4, generator=generator) < 0.2)
    for wanted in (drawn, drawn & chosen, chosen, chosen | stray):
        expected = any(not bool((wanted & ~mask).any()) for mask in inside)
        assert bool(threat.contains(clean, torch.where(wanted, 1.0, clean))) == expected


@settings(deadline=None, max_examples=40)
@given(threats(3, 4), st.integers(2, 3))
def test_sets_of_corners_lose_no_member(patch, count):
    """Every union of placements, with or without repetition, lies inside one of those that are looked at."""
    threat, image = Patches(patch, count), torch.zeros(1, 1, 3, 4)
    looked_at = threat.patch.masks(image, threat.corners(3, 4)).any(dim=1)
    for mask in unions(threat, 3, 4):
        assert not bool((mask & ~looked_at).flatten(1).any(dim=1).all())
    box = threat.boxes(image + 0.25, threat.corners(3, 4), 0.5)
    assert torch.equal((box.upper == 0.75)[0, :, 0], looked_at)
    assert torch.equal((box.lower == 0.0)[0, :, 0], looked_at)


@settings(deadline=None, max_examples=30)
@given(threats(4, 3), seeds())
def test_projections_are_the_nearest_of_all_unions(patch, seed):
    threat = Patches(patch)
    clean = torch.rand(3, 2, 4, 3, generator=seeded(seed)).double()
    changed = clean + torch.randn(clean.shape, generator=seeded(seed + 1)).double()
    best = torch.full((3,), torch.inf, dtype=torch.float64)
    for mask in unions(threat, 4, 3):
        member = torch.where(mask, changed.clamp(0, 1), clean)
        best = torch.minimum(best, (member - changed).square().flatten(1).sum(dim=1))
    found = (threat.project(clean, changed) - changed).square().flatten(1).sum(dim=1)
    torch.testing.assert_close(found, best)


def test_it_is_a_value_of_its_own():
    threat = Patches(Patch(5))
    assert threat == Patches(Patch((5, 5)), 2) != Patches(Patch(5), 3)
    assert str(threat) == "Patches(2 times 5x5 square, everywhere)"
    assert threat.pixels == 50
    assert threat_from_dict(json.loads(json.dumps(threat.to_dict()))) == threat
    assert threat.to_dict() == {
        "kind": "patches",
        "stamp": "5x5",
        "placements": "everywhere",
        "count": 2,
    }


@pytest.mark.parametrize("given_values", [(Patch(2), 1), (Patch(2), 2.5), (2, 2), (Patch(2), True)])
def test_what_are_no_several_patches_is_refused(given_values):
    with pytest.raises(InvalidThreat, match="how many of it there are, at least 2"):
        Patches(*given_values)


def test_plain_types_that_are_no_patches_are_refused():
    with pytest.raises(InvalidThreat, match="kind = 'patches', stamp, placements and count"):
        Patches.from_dict({"kind": "patches", "stamp": "2x2"})
    with pytest.raises(InvalidThreat, match="a patch is a table"):
        Patches.from_dict({"kind": "patches", "count": 2})


def test_choices_are_all_sets_and_too_many_are_refused():
    assert choices(4, 2).tolist() == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    assert choices(2, 5).tolist() == [[0, 1]]
    assert choices(40, 40).shape == (1, 40)
    with pytest.raises(InvalidThreat, match=r"2 of 48,400 places .* at most 1,048,576") as caught:
        Patches(Patch(5)).corners(224, 224)
    assert "DoubleMasking" in caught.value.hint
