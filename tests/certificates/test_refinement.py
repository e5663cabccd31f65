"""Refinement proves more than intervals, breaks only by members of the threat, and leaves open what it cannot tell."""

import copy

import pytest
import torch
from hypothesis import event, given, settings
from torch import nn

import patchcert as pc
from patchcert.bounds import Rounding, trace
from patchcert.certificates import refinement
from patchcert.certificates.refinement import DEFAULT_BUDGET, Limits, _rounded_down
from patchcert.errors import InvalidInput
from patchcert.testing.brute_force import members, reached_margins
from patchcert.testing.networks import randomise
from patchcert.windows.dense import dense_linear_margins
from strategies import cases
from written_models import model_of as written_model

PATCH = pc.Patch(2)
OUTWARD = Rounding.outward(torch.float64)


def model_of(seed, *hidden, gain=1.0):
    layers = hidden or (
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(75, 12),
        nn.ReLU(),
        nn.Linear(12, 3),
    )
    return randomise(nn.Sequential(*layers), torch.Generator().manual_seed(seed), gain)


def images_of(model, count=24):
    images = torch.rand(count, 1, 5, 5, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return images, model(images).argmax(dim=1)


PROVEN_BY = {"none": [0, 1, 2], "linear": [104, 186], "split": [43]}
BROKEN_BY = {"linear": [6, 7], "split": [102]}
"""Images of MNIST, by the stage that decides them for the small network of the zoo."""


@pytest.fixture(scope="module")
def found():
    model, patch = pc.load("mnist-5x5-cnn2"), pc.Patch(5)
    index = [each for group in (PROVEN_BY, BROKEN_BY) for rows in group.values() for each in rows]
    chosen = pc.load_dataset("mnist-mini").split("test")[torch.tensor(index)]
    images, labels = chosen.floats(), chosen.labels
    ways = {"none": None, "linear": "linear", "split": "split"}
    return (
        model,
        patch,
        images,
        labels,
        {
            name: pc.IntervalBounds(model, refine=way).certify(images, labels, patch)
            for name, way in ways.items()
        },
    )


def test_each_stage_proves_what_the_one_before_did_and_more(found):
    *_, ways = found
    counts = {name: int(each.certified.sum()) for name, each in ways.items()}
    assert counts == {"none": 3, "linear": 5, "split": 6}
    for less, more in (("none", "linear"), ("linear", "split")):
        assert not (ways[less].certified & ~ways[more].certified).any()
        assert (ways[less].margins <= ways[more].margins).all()


def test_splitting_decides_every_image_here(found):
    *_, ways = found
    assert int(ways["linear"].broken.sum()) == 2
    assert int(ways["linear"].open.sum()) == 2
    assert int(ways["split"].broken.sum()) == 3
    assert not ways["split"].open.any()
    assert (ways["split"].certified ^ ways["split"].broken).all()


def test_counterexamples_are_members_that_the_model_gets_wrong(found):
    model, patch, images, labels, ways = found
    for name in ("linear", "split"):
        broken, examples = ways[name].broken, ways[name].counterexamples
        assert patch.contains(images, examples).all()
        with torch.no_grad():
            assert (model(examples[broken]).argmax(dim=1) != labels[broken]).all()
        assert examples[~broken].equal(images[~broken])
        assert not (broken & ways[name].certified).any()


def test_maps_and_margins_say_the_same_as_verdicts(found):
    *_, ways = found
    for each in ways.values():
        assert (each.certified == (each.least_margin > 0)).all()
        assert (each.certified == each.placements.all(dim=1)).all()


def test_without_refinement_nothing_is_broken_or_open(found):
    *_, ways = found
    assert ways["none"].broken is ways["none"].open is ways["none"].counterexamples is None
    assert "broken" in repr(ways["split"])
    assert "broken" not in repr(ways["none"])


@torch.no_grad()
@settings(max_examples=10)
@given(cases())
def test_no_member_contradicts_a_refined_certificate(case):
    if not isinstance(case.threat, pc.Patch):
        return
    found = pc.IntervalBounds(case.model, refine="split", budget=20).certify(
        case.images, case.labels, case.threat
    )
    plain = pc.certify(case.model, case.images, case.labels, case.threat)
    event(f"refined: {int(found.certified.sum() - plain.certified.sum())}")
    assert not (plain.certified & ~found.certified).any()
    assert not (found.certified & found.broken).any()
    for index, label in enumerate(case.labels.tolist()):
        generator = torch.Generator().manual_seed(index)
        tried = members(case.threat, case.images[index], generator)[:2000]
        reached = reached_margins(case.model, tried, label).amin(dim=0)
        assert (found.margins[index].double() <= reached + 1e-9 * (1 + reached.abs())).all()


def test_a_small_budget_leaves_images_open_never_proven():
    model = model_of(
        3,
        nn.Flatten(),
        nn.Linear(25, 60),
        nn.ReLU(),
        nn.Linear(60, 30),
        nn.ReLU(),
        nn.Linear(30, 3),
        gain=2.0,
    )
    images, labels = images_of(model, 30)
    patch = pc.Patch((1, 2))
    little = pc.IntervalBounds(model, refine="split", budget=1).certify(images, labels, patch)
    much = pc.IntervalBounds(model, refine="split", budget=500).certify(images, labels, patch)
    assert not (little.certified & ~much.certified).any()
    assert int(little.open.sum()) >= int(much.open.sum())


def test_images_that_are_predicted_wrongly_are_neither_broken_nor_open():
    model = model_of(0)
    images, labels = images_of(model, 4)
    found = pc.IntervalBounds(model, refine="split").certify(images, (labels + 1) % 3, PATCH)
    assert not found.certified.any()
    assert not found.broken.any()
    assert not found.open.any()


def test_memory_changes_no_verdict(found):
    model, patch, images, labels, ways = found
    rows = torch.tensor([4, 5])
    little = pc.IntervalBounds(model, refine="split", memory_budget=2**23)
    certificates = little.certify(images[rows], labels[rows], patch)
    assert certificates.certified.equal(ways["split"].certified[rows])
    assert certificates.broken.equal(ways["split"].broken[rows])


@pytest.mark.parametrize("shared", [1, 10**6])
def test_how_many_images_share_a_placement_changes_nothing(monkeypatch, shared):
    """What a patch moves at a placement is bounded for all images at once, or whole images are: both give the same."""
    model = model_of(2, gain=0.7)
    images, labels = images_of(model)
    usual = pc.IntervalBounds(model, refine="linear").certify(images, labels, PATCH)
    asked = []
    monkeypatch.setattr(refinement, "_SHARED", shared)
    restriction = refinement.Refinement.restriction
    monkeypatch.setattr(
        refinement.Refinement, "restriction", lambda *given: asked.append(given) or restriction(*given)
    )
    found = pc.IntervalBounds(model, refine="linear").certify(images, labels, PATCH)
    assert bool(asked) == (shared == 1)
    assert 0 < int(found.certified.sum()) < len(images)
    assert found.certified.equal(usual.certified)
    torch.testing.assert_close(found.margins, usual.margins, rtol=1e-6, atol=1e-6)


def test_networks_that_bend_otherwise_are_refined_by_linear_bounds_alone():
    layers = (nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2), nn.GELU(), nn.Flatten(), nn.Linear(8, 3))
    model = model_of(1, *layers)
    images, labels = images_of(model, 8)
    linear = pc.IntervalBounds(model, refine="linear").certify(images, labels, PATCH)
    split = pc.IntervalBounds(model, refine="split").certify(images, labels, PATCH)
    assert linear.certified.equal(split.certified)
    limits = pc.IntervalBounds(model, refine="split").limits(images)
    assert limits == Limits(by_interval=("3",), unsplit=("2", "3"))


def test_limits_are_those_of_images_of_the_given_size():
    """As `certify` does, they follow a forward pass that asks for sizes."""
    flat = written_model(
        lambda s, x: s.head(x.view(x.size(0), x.size(1) * x.size(2) * x.size(3))), head=nn.Linear(12, 3)
    )
    assert pc.IntervalBounds(flat, refine="split").limits(torch.rand(2, 1, 3, 4)) == Limits((), ())


def test_the_settings_stand_in_the_description():
    model = model_of(0)
    assert pc.IntervalBounds(model).describe() == {"name": "IntervalBounds", "dtype": "float32"}
    linear = {"name": "IntervalBounds", "dtype": "float32", "refine": "linear"}
    assert pc.IntervalBounds(model, refine="linear").describe() == linear
    split = {**linear, "refine": "split", "budget": DEFAULT_BUDGET}
    assert pc.IntervalBounds(model, refine="split").describe() == split
    assert pc.IntervalBounds(model, refine="split", budget=7).describe() == {**split, "budget": 7}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"refine": "exact"}, "refine is 'exact'; expected 'linear', 'split' or None"),
        ({"refine": "split", "budget": 0}, "budget is 0; expected how many parts"),
        ({"refine": "split", "budget": True}, "budget is True"),
        ({"budget": 10}, "budget is a setting of refine='split'"),
        ({"refine": "linear", "budget": 10}, "budget is a setting of refine='split'"),
        (
            {"refine": "linear", "verdicts_only": True},
            "verdicts_only does not find out which placements are open",
        ),
    ],
)
def test_settings_without_meaning_are_refused(given, message):
    with pytest.raises(InvalidInput, match=message):
        pc.IntervalBounds(model_of(0), **given)


def test_sparse_changes_are_not_refined():
    model = model_of(0)
    images, labels = images_of(model, 2)
    with pytest.raises(InvalidInput, match="linear bounds exist for one patch"):
        pc.IntervalBounds(model, refine="linear").certify(images, labels, pc.SparsePixels(1))


def test_placement_margins_are_refined_too(found):
    model, patch, images, labels, _ = found
    plain = pc.placement_margins(model, images[2:5], labels[2:5], patch)
    refined = pc.IntervalBounds(model, refine="linear").placement_margins(images[2:5], labels[2:5], patch)
    assert (refined >= plain).all()
    assert (refined > plain).any()


@torch.no_grad()
def test_open_placements_have_the_linear_bounds_of_the_dense_way(found):
    """Where intervals leave a class open, the batches of refinement give the bound of a box by itself."""
    model, patch, images, labels, _ = found
    images, labels = images[3:5], labels[3:5]
    plain = pc.placement_margins(model, images, labels, patch)
    refined = pc.IntervalBounds(model, refine="linear").placement_margins(images, labels, patch)
    network, corners = trace(copy.deepcopy(model).double()), patch.placements(28, 28).corners
    for image, placement, target in (plain < 0).nonzero().tolist():
        rows = slice(image, image + 1)
        dense = dense_linear_margins(
            network, images[rows].double(), labels[rows], patch, corners[placement][None], OUTWARD
        )
        expected = max(float(dense[0, 0, target]), float(plain[image, placement, target]))
        assert float(refined[image, placement, target]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_no_images_are_no_certificates():
    found = pc.IntervalBounds(model_of(0), refine="split").certify(
        torch.zeros(0, 1, 5, 5), torch.zeros(0).long(), PATCH
    )
    assert len(found) == 0


def test_numbers_are_never_rounded_up():
    values = torch.tensor([0.1, 1 / 3, -0.1, 1e-60, torch.nan], dtype=torch.float64)
    stored = _rounded_down(values, torch.float32)
    assert (stored.double()[:4] <= values[:4]).all()
    assert stored[4].isnan()
