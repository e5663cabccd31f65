import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from attacked_models import PixelModel, normal
from patchcert import DoubleMasking, IntervalBounds
from patchcert.attacks import PatchAttack, reference_patch_attack
from patchcert.attacks.patch import random_order, vertices
from patchcert.certificates import placement_margins
from patchcert.errors import InvalidInput, UnsupportedLayer
from patchcert.testing.conformance import seeded
from patchcert.threats import Patch, SparsePixels, shapes


def linear_model(channels, height, width, classes=2, seed=0, bias=0.0) -> nn.Sequential:
    layer = nn.Linear(channels * height * width, classes, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=seeded(seed), dtype=torch.float64))
        layer.bias.copy_(torch.linspace(bias, 0, classes))
    return nn.Sequential(nn.Flatten(), layer).eval()


def small_network() -> nn.Sequential:
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    return normal(nn.Sequential(*layers).double(), 0.3)


def own_labels(model, images) -> torch.Tensor:
    return model(images).argmax(dim=1)


def random_images(count=6, channels=2, size=6, seed=0) -> torch.Tensor:
    return torch.rand(count, channels, size, size, generator=seeded(seed), dtype=torch.float64)


class OnTheWay(nn.Module):
    """Wrong only while the first pixel is near one half, but with the largest cross entropy at 1."""

    def forward(self, images):
        value = images[:, 0, 0, 0]
        high = 6 * value - 6.1
        return torch.stack([0 * value, 0.1 - 4 * (value - 0.5).abs(), high, high, high], dim=1)


def best_margin_of_linear(model, images, labels, threat) -> torch.Tensor:
    """Closed form: at the best placement every value at the end of [0, 1] that its weight prefers."""
    weight = model[1].weight.reshape(2, *images.shape[1:])
    direction = torch.where((labels == 0)[:, None, None, None], weight[1] - weight[0], weight[0] - weight[1])
    gain = torch.maximum(direction * (1 - images), -direction * images).sum(dim=1)
    masks = threat.placements(*images.shape[2:]).masks(threat.stamp)
    gains = (gain[:, None] * masks).sum(dim=(2, 3)).amax(dim=1)
    logits = model(images)
    other, own = logits.gather(1, 1 - labels[:, None])[:, 0], logits.gather(1, labels[:, None])[:, 0]
    return other - own + gains


class Checkered(nn.Module):
    """Wrong only where two neighbours are exactly 1 and 0, of which no gradient tells."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__()
        self.row, self.column = row, column

    def forward(self, images):
        left, right = images[:, 0, self.row, self.column], images[:, 0, self.row, self.column + 1]
        found = ((left == 1) & (right == 0)).to(images.dtype) + 0 * left
        return torch.stack([torch.full_like(found, 0.5), found], dim=1)


@pytest.mark.parametrize("search", ["random", "sweep", "certificate"])
@pytest.mark.parametrize("loss", ["cross-entropy", "margin"])
@pytest.mark.parametrize("stamp", [2, (1, 3), "diamond"])
def test_attains_the_exact_optimum_of_a_linear_model(search, loss, stamp):
    threat = Patch(shapes.diamond(4) if stamp == "diamond" else stamp)
    model = linear_model(2, 6, 6)
    images = random_images()
    labels = own_labels(model, images)
    attack = PatchAttack(steps=25, restarts=40, loss=loss, search=search, early_stop=False, batch_size=64)
    result = attack.run(model, images, labels, threat, seeded(1))
    expected = best_margin_of_linear(model, images, labels, threat)
    torch.testing.assert_close(result.margins, expected)
    assert torch.equal(result.succeeded, expected > 0)


def test_one_restart_at_the_weakest_place_of_the_certificate_suffices_for_a_linear_model():
    threat, model, images = Patch(2), linear_model(2, 6, 6), random_images()
    labels = own_labels(model, images)
    expected = best_margin_of_linear(model, images, labels, threat)
    one = PatchAttack(steps=25, restarts=1, search="certificate", early_stop=False)
    torch.testing.assert_close(one.run(model, images, labels, threat).margins, expected)
    blind = dataclasses.replace(one, search="random").run(model, images, labels, threat)
    assert (blind.margins < expected - 1e-6).any()


def test_certificate_search_takes_the_given_margins():
    threat, model, images = Patch(1), linear_model(1, 3, 3), random_images(4, 1, 3)
    labels = own_labels(model, images)

    def only_place_four(model, images, labels, threat):
        margins = torch.ones(len(images), 9, 2)
        margins[:, 4] = -1.0
        return margins

    attack = PatchAttack(1, 1.0, 1, search="certificate", placement_margins=only_place_four, early_stop=False)
    assert attack.run(model, images, labels, threat).placement.tolist() == [[1, 1]] * 4
    wrong = dataclasses.replace(attack, placement_margins=lambda *_: torch.ones(4, 8, 2))
    with pytest.raises(InvalidInput, match=r"shape \(4, 9, classes\), got \(4, 8, 2\)"):
        wrong.run(model, images, labels, threat)


def test_certificate_search_is_refused_where_a_classifier_has_no_bounds_and_its_model_is_named_else():
    threat, model, images = Patch(1), linear_model(1, 3, 3), random_images(4, 1, 3)
    labels, attack = own_labels(model, images), PatchAttack(1, 1.0, 1, search="certificate")
    masking = DoubleMasking(model, threat, masks=2)
    with pytest.raises(
        InvalidInput, match="bounds are weakest, and there are none for DoubleMasking"
    ) as refusal:
        attack.run(masking, images, labels, threat)
    assert "search='sweep'" in refusal.value.hint
    assert (
        len(dataclasses.replace(attack, search="sweep").run(masking, images, labels, threat).succeeded) == 4
    )
    odd = nn.Sequential(nn.ChannelShuffle(1), model).eval()
    with pytest.raises(UnsupportedLayer, match="ChannelShuffle"):
        attack.run(IntervalBounds(odd), images, labels, threat)


@pytest.mark.parametrize(("columns", "most"), [(7, 1), (7, 3), (7, 6), (7, 7), (7, 9), (8, 4)])
def test_a_sweep_of_fewer_placements_is_spread_evenly(columns, most):
    images, labels = torch.zeros(1, 1, 1, columns), torch.zeros(1, dtype=torch.long)
    attack = PatchAttack(3, 1.0, restarts=1, search="sweep", sweep_steps=3, sweep_placements=most)
    found = [
        bool(attack.run(PixelModel(0, column), images, labels, Patch(1), seeded(0)).succeeded)
        for column in range(columns)
    ]
    gone = torch.tensor(found).nonzero().flatten()
    assert len(gone) == min(columns, most)
    assert gone[0] == 0
    assert all(gone.diff() <= -(-columns // most))


def test_vertices_break_what_no_gradient_points_to():
    images, labels = torch.full((3, 1, 6, 6), 0.5), torch.zeros(3, dtype=torch.long)
    climb = PatchAttack(steps=3, restarts=5, search="sweep", sweep_steps=2)
    assert not climb.run(Checkered(4, 4), images, labels, Patch(2), seeded(0)).succeeded.any()
    result = dataclasses.replace(climb, sweep_vertices=16).run(
        Checkered(4, 4), images, labels, Patch(2), seeded(0)
    )
    assert result.succeeded.all()
    assert (result.steps == 0).all()
    assert ((result.placement - 4).abs() <= 1).all()


def test_vertices_tell_the_restarts_where_to_go():
    images, labels = torch.zeros(4, 1, 6, 6), torch.zeros(4, dtype=torch.long)
    attack = PatchAttack(steps=0, restarts=1, search="sweep", sweep_steps=0, sweep_vertices=2)
    result = attack.run(PixelModel(3, 3, 2.0), images, labels, Patch(1), seeded(0))
    assert result.placement.tolist() == [[3, 3]] * 4
    assert (result.adversarial[:, 0, 3, 3] == 1).all()


@given(st.integers(0, 40), st.integers(1, 2), st.integers(1, 2))
@settings(max_examples=25, deadline=None)
def test_vertices_are_all_patches_of_zeros_and_ones_or_as_many_as_asked_for(count, channels, side):
    images, values = random_images(3, channels, 4), channels * side * side
    drawn = list(vertices(images, Patch(side), count, seeded(0)))
    assert len(drawn) == min(count, 2**values)
    assert all(start.shape == (3, values) and (start.abs() == 1).all() for start in drawn)
    if count >= 2**values:
        assert len({tuple(start[0].tolist()) for start in drawn}) == 2**values


@pytest.mark.parametrize("search", ["random", "sweep"])
def test_every_placement_is_reached_the_last_row_and_column_included(search):
    images = torch.zeros(2, 3, 4, 5)
    labels = torch.zeros(2, dtype=torch.long)
    attack = PatchAttack(steps=2, step_size=1.0, restarts=20, search=search, sweep_steps=2)
    for row in range(4):
        for column in range(5):
            result = attack.run(PixelModel(row, column), images, labels, Patch(1), seeded(row))
            assert result.succeeded.all()
            assert result.placement.tolist() == [[row, column]] * 2
            assert result.predictions.tolist() == [1, 1]


def test_random_order_is_a_uniform_permutation_of_all_placements():
    order = random_order(4_000, 6, seeded(0))
    assert torch.equal(order.sort(dim=1).values, torch.arange(6).expand(4_000, -1))
    share = torch.nn.functional.one_hot(order, 6).double().mean(dim=0)
    assert (share - 1 / 6).abs().max() < 5 * math.sqrt(1 / 6 * 5 / 6 / 4_000)


def test_sweep_finds_the_one_weak_place_that_a_few_random_restarts_miss():
    images, labels = torch.zeros(8, 1, 12, 12), torch.zeros(8, dtype=torch.long)
    model, threat = PixelModel(11, 0), Patch(1)
    blind = PatchAttack(steps=3, step_size=0.5, restarts=2).run(model, images, labels, threat)
    swept = PatchAttack(steps=3, step_size=0.5, restarts=2, search="sweep").run(model, images, labels, threat)
    assert not blind.succeeded.all()
    assert swept.succeeded.all()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("loss", ["cross-entropy", "margin"])
@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_batched_attack_equals_the_plain_loop(early_stop, loss, batch_size):
    model, threat = small_network(), Patch(1)
    images = random_images(9)
    labels = own_labels(model, images)
    labels[0] = (labels[0] + 1) % 3
    attack = PatchAttack(12, 0.1, 5, loss, early_stop=early_stop, batch_size=batch_size, check_every=5)
    fast = attack.run(model, images, labels, threat, seeded(3))
    slow = reference_patch_attack(attack, model, images, labels, threat, seeded(3))
    assert 0 < int(fast.succeeded.sum()) < 9
    assert torch.equal(fast.succeeded, slow.succeeded)
    same = ~fast.succeeded if early_stop else torch.ones(9, dtype=torch.bool)
    torch.testing.assert_close(fast.adversarial[same], slow.adversarial[same])
    torch.testing.assert_close(fast.margins[same], slow.margins[same])
    assert torch.equal(fast.placement[same], slow.placement[same])


def test_result_is_reproducible_and_the_default_generator_starts_at_zero():
    model, threat, images = small_network(), Patch(2), random_images(4)
    labels = own_labels(model, images)
    attack = PatchAttack(steps=5, restarts=3, search="sweep", sweep_steps=2)
    first, second = (attack.run(model, images, labels, threat, seeded(0)) for _ in range(2))
    default = attack.run(model, images, labels, threat)
    other = attack.run(model, images, labels, threat, seeded(1))
    assert torch.equal(first.adversarial, second.adversarial)
    assert torch.equal(first.adversarial, default.adversarial)
    assert not torch.equal(first.adversarial, other.adversarial)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(["3", "1x4", "4x1", "diamond:4", "parallelogram:4", "line:5", "diamond:16"]),
    st.sampled_from(["everywhere", "corners"]),
    st.sampled_from(["random", "sweep"]),
    st.integers(0, 1000),
)
def test_adversarial_images_stay_in_the_threat(shape, placements, search, seed):
    threat = Patch(shapes.parse(shape), placements=placements)
    model, images = linear_model(1, 7, 8, classes=3, seed=seed), random_images(3, 1, 8, seed)[:, :, :7]
    result = PatchAttack(3, 0.3, 2, search=search, sweep_steps=1).run(
        model, images, own_labels(model, images), threat
    )
    assert threat.contains(images, result.adversarial).all()
    corners = threat.placements(7, 8).corners.tolist()
    masks = threat.placements(7, 8).masks(threat.stamp)
    for clean, changed, corner in zip(images, result.adversarial, result.placement.tolist(), strict=True):
        outside = ~masks[corners.index(corner)]
        assert torch.equal(clean[:, outside], changed[:, outside])


def test_listed_placements_are_kept_to():
    threat = Patch(2, placements=[(0, 3), (4, 1)])
    model, images = linear_model(2, 6, 6), random_images(12)
    result = PatchAttack(3, 0.3, 5).run(model, images, own_labels(model, images), threat)
    assert {tuple(corner) for corner in result.placement.tolist()} == {(0, 3), (4, 1)}


def test_images_that_are_wrong_by_themselves_are_returned_unchanged():
    model, images = linear_model(2, 6, 6), random_images(4)
    labels = 1 - own_labels(model, images)
    result = PatchAttack(steps=3, restarts=2).run(model, images, labels, Patch(2))
    assert result.succeeded.all()
    assert torch.equal(result.adversarial, images)
    assert (result.placement == -1).all()
    assert (result.steps == 0).all()
    assert result.accuracy == result.clean_accuracy == 0.0
    assert repr(result) == "AttackResult(4 images, 0 right, 0 withstood)"


def test_the_last_iterate_is_evaluated():
    images, labels = torch.zeros(20, 1, 1, 1), torch.zeros(20, dtype=torch.long)
    model = PixelModel(0, 0, threshold=0.9999)
    assert not PatchAttack(steps=0, restarts=1).run(model, images - 0.0, labels, Patch(1)).succeeded.all()
    assert (
        PatchAttack(steps=1, step_size=1.0, restarts=1).run(model, images, labels, Patch(1)).succeeded.all()
    )


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_wrong_iterate_counts_even_if_a_right_one_has_the_larger_cross_entropy(early_stop):
    images, labels = torch.zeros(5, 1, 1, 1), torch.zeros(5, dtype=torch.long)
    attack = PatchAttack(steps=60, step_size=0.02, restarts=8, early_stop=early_stop)
    assert attack.run(OnTheWay(), images, labels, Patch(1)).succeeded.all()


def test_broken_images_cost_no_further_steps():
    images, labels = torch.zeros(2, 1, 2, 2), torch.zeros(2, dtype=torch.long)
    attack = PatchAttack(steps=40, step_size=0.5, restarts=50, check_every=10, batch_size=2)
    quick = attack.run(PixelModel(0, 0, 0.4), images, labels, Patch(2))
    stubborn = attack.run(PixelModel(0, 0, 1.5), images, labels, Patch(2))
    assert quick.succeeded.all()
    assert (quick.steps == 10).all()
    assert not stubborn.succeeded.any()
    assert (stubborn.steps == 40 * 50).all()


def test_exhaustive_attack_goes_on_to_the_largest_margin():
    model, threat, images = linear_model(2, 6, 6), Patch(3), random_images()
    labels = own_labels(model, images)
    attack = PatchAttack(steps=30, restarts=16)
    first = attack.run(model, images, labels, threat)
    surest = attack.exhaustive().run(model, images, labels, threat)
    assert torch.equal(first.succeeded, surest.succeeded)
    assert (surest.margins[surest.succeeded] > first.margins[first.succeeded]).all()


def test_progress_reaches_its_total():
    reached: list[tuple[float, int]] = []
    images, labels = torch.zeros(2, 1, 2, 2), torch.zeros(2, dtype=torch.long)
    PatchAttack(steps=1, restarts=5, batch_size=4).run(
        PixelModel(0, 0, 1.5),
        images,
        labels,
        Patch(1),
        progress=lambda done, total: reached.append((done, total)),
    )
    shares = [done / total for done, total in reached]
    assert shares == sorted(shares)
    # Two restarts side by side look twice, then two more, then the last one; each look is told of.
    assert sorted(set(shares)) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.9, 1.0])


@pytest.mark.parametrize("batch_size", [1, 16, 1024])
def test_progress_of_a_sweep_and_its_restarts_is_one(batch_size):
    reached: list[tuple[float, int]] = []
    images, labels = torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.long)
    attack = PatchAttack(4, 0.1, 6, search="sweep", sweep_steps=4, batch_size=batch_size, check_every=2)
    attack.run(PixelModel(0, 0, 1.5), images, labels, Patch(1), progress=lambda *done: reached.append(done))
    shares = [done / total for done, total in reached]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    # 16 placements of 5 points each, then 6 restarts of 5; each look of the ascents of a batch is told of.
    assert any(share == pytest.approx(80 / 110) for share in shares)
    assert shares[0] == pytest.approx(min(batch_size, 32) / 2 / 110)


@pytest.mark.parametrize("margins", [None, placement_margins])
def test_bounds_of_placements_and_restarts_are_one_progress(margins):
    model, images = small_network(), random_images(3)
    attack = PatchAttack(2, 0.1, 2, search="certificate", placement_margins=margins, early_stop=False)
    reached: list[tuple[float, int]] = []
    attack.run(
        model, images, own_labels(model, images), Patch(2), progress=lambda *done: reached.append(done)
    )
    shares = [done / total for done, total in reached]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    restarts = len({share for share, (_, total) in zip(shares, reached, strict=True) if total == 3})
    assert restarts == 3  # three looks of all ascents; what comes before them are bounds
    assert len(reached) - reached.count((1, 1)) > restarts


def test_a_search_by_bounds_is_told_of_in_parts_of_images():
    model, images = small_network(), random_images(3)
    reached: list[tuple[float, int]] = []
    placement_margins(
        model,
        images,
        own_labels(model, images),
        Patch(2),
        memory_budget=2**12,
        progress=lambda *done: reached.append(done),
    )
    assert [total for _, total in reached] == [3] * len(reached)
    done = [done for done, _ in reached]
    assert done == sorted(done)
    assert done[-1] == 3
    assert done[0] == 0 < done[1] < 1


@pytest.mark.parametrize("search", ["random", "sweep", "certificate"])
@pytest.mark.parametrize("early_stop", [True, False])
def test_ascents_that_are_too_much_work_for_a_batch_find_the_same(search, early_stop, monkeypatch):
    model, threat, images = small_network(), Patch(1), random_images(9)
    labels = own_labels(model, images)
    attack = PatchAttack(12, 0.1, 5, search=search, early_stop=early_stop, check_every=5)
    whole, cut = seeded(3), seeded(3)
    expected = attack.run(model, images, labels, threat, whole)
    monkeypatch.setattr("patchcert.attacks.climbing.WORK_AT_ONCE", 1)
    found = attack.run(model, images, labels, threat, cut)
    assert torch.equal(whole.get_state(), cut.get_state())
    assert torch.equal(found.succeeded, expected.succeeded)
    assert 0 < int(found.succeeded.sum()) < 9
    same = ~found.succeeded if early_stop else torch.ones(9, dtype=torch.bool)
    torch.testing.assert_close(found.adversarial[same], expected.adversarial[same])
    assert torch.equal(found.steps[same], expected.steps[same])


def test_images_that_an_earlier_part_broke_cost_later_parts_nothing(monkeypatch):
    monkeypatch.setattr("patchcert.attacks.climbing.WORK_AT_ONCE", 1)
    images, labels = torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.long)
    model = nn.Sequential(PixelModel(0, 0, 0.4), nn.Linear(2, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(2))
        model[1].bias.zero_()
    result = PatchAttack(10, 0.5, 50, check_every=10).run(model, images, labels, Patch(2))
    assert result.succeeded.all()
    assert (result.steps == 10).all()


def test_no_images_give_an_empty_result():
    result = PatchAttack(1, 0.1, 1).run(
        PixelModel(0, 0), torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.long), Patch(1)
    )
    assert result.succeeded.shape == (0,)


def test_another_threat_is_refused():
    with pytest.raises(InvalidInput, match=r"PatchAttack attacks with a Patch, got SparsePixels\(4 pixels"):
        PatchAttack(1, 0.1, 1).run(
            PixelModel(0, 0), torch.zeros(2, 1, 3, 3), torch.zeros(2, dtype=torch.long), SparsePixels(4)
        )


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"steps": -1}, "steps is -1; expected a whole number of at least 0"),
        ({"step_size": 0.0}, "step_size is 0.0; expected a number above 0"),
        ({"step_size": math.nan}, "step_size is nan"),
        ({"restarts": 0}, "restarts is 0; expected a whole number of at least 1"),
        ({"loss": "hinge"}, "unknown loss 'hinge' of an attack"),
        ({"search": "grid"}, "unknown search 'grid' of an attack"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"sweep_steps": -1}, "sweep_steps is -1"),
        ({"sweep_vertices": -1}, "sweep_vertices is -1"),
        ({"sweep_placements": 0}, "sweep_placements is 0"),
        ({"restarts": 2.5}, "restarts is 2.5; expected a whole number"),
        ({"steps": "3"}, "steps is '3'; expected a whole number"),
        ({"check_every": 0}, "check_every is 0"),
    ],
)
def test_impossible_settings_are_refused(given_settings, message):
    with pytest.raises(InvalidInput, match=message):
        PatchAttack(**given_settings)
