from dataclasses import replace

import pytest
import torch
from torch import nn

from attacked_models import Bright, normal, one_pixel
from patchcert.attacks import (
    AdaptiveAfterTransfer,
    AdaptiveAttack,
    AttackLeftThreat,
    AttackSeries,
    AttackWithin,
    PatchAttack,
    PatchesInTurn,
    SparseAttack,
    TransferAttack,
    strongest_attack,
)
from patchcert.attacks.base import AttackJob
from patchcert.certificates import certify, placement_margins
from patchcert.defenses import Defended, Defense, DigitalWatermarking, LocalGradientSmoothing
from patchcert.errors import InvalidInput
from patchcert.testing.conformance import seeded
from patchcert.threats import Patch, Patches, SparsePixels


class Never(nn.Module):
    """Says 0 of every image."""

    def forward(self, images):
        value = images[:, 0, 0, 0]
        return torch.stack([2 + value, value], dim=1)


class Mirror(Defense):
    """Inverts the images, so that patches for the undefended model help the defended one."""

    def forward(self, images):
        return 1 - images

    def surrogates(self):
        return (self.forward,)


class Wall(Defense):
    """The straight gradient is nothing; only the second surrogate sees through."""

    def forward(self, images):
        return 1 - images

    def surrogates(self):
        return (lambda images: self(images).detach() + 0 * images, self.forward)


ATTACK = PatchAttack(steps=10, step_size=0.2, restarts=2, search="random")


def test_transfer_optimises_on_the_undefended_model_and_judges_on_the_defended_one():
    images = one_pixel(0.9, 0.8, 0.2)  # the defended model sees 0.1, 0.2, 0.8
    labels = torch.tensor([0, 0, 0])
    result = TransferAttack(ATTACK).run(Defended(Mirror(), Bright()), images, labels, Patch(1))
    assert result.clean_predictions.tolist() == [0, 0, 1]
    assert result.adversarial.flatten().tolist() == [1.0, 1.0, 1.0]
    assert result.predictions.tolist() == [0, 0, 0]
    assert not result.succeeded.any()
    assert result.clean_accuracy < result.accuracy == 1.0


def test_adaptive_attack_breaks_what_the_transferred_patch_does_not():
    images, labels = one_pixel(0.9, 0.8), torch.tensor([0, 0])
    result = AdaptiveAttack(ATTACK).run(Defended(Mirror(), Bright()), images, labels, Patch(1))
    assert result.succeeded.all()
    assert (result.adversarial < 0.5).all()
    assert result.placement.tolist() == [[0, 0], [0, 0]]
    assert (result.steps > ATTACK.steps * ATTACK.restarts).all()


def test_every_surrogate_gets_its_turn():
    images, labels = one_pixel(*[1.0] * 6), torch.zeros(6, dtype=torch.long)
    blind = PatchAttack(steps=10, step_size=0.2, restarts=1)
    result = AdaptiveAttack(blind).run(Defended(Wall(), Bright()), images, labels, Patch(1), seeded(0))
    assert result.succeeded.all()


class Through(Defense):
    """Leaves images alone but hides every gradient, so that only transferred patches can work."""

    def forward(self, images):
        return images + 0

    def surrogates(self):
        return (lambda images: images.detach() + 0 * images,)


class Cliff(nn.Module):
    """As `Bright`, at a threshold that no random start reaches."""

    def forward(self, images):
        value = images[:, 0, 0, 0]
        return torch.stack([0.9999 - value, value - 0.9999], dim=1)


def test_adaptive_attack_includes_the_transferred_examples():
    images, labels = one_pixel(*[0.0] * 4), torch.zeros(4, dtype=torch.long)
    defended = Defended(Through(), Cliff())
    attack = PatchAttack(steps=10, step_size=0.2, restarts=1)
    blocked = attack.run(defended.surrogates()[0], images, labels, Patch(1), seeded(1))
    assert not blocked.succeeded.all()
    assert AdaptiveAttack(attack).run(defended, images, labels, Patch(1), seeded(1)).succeeded.all()


def network() -> nn.Sequential:
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 3)
    return normal(nn.Sequential(*layers), 0.3)


@pytest.mark.parametrize("kind", ["lgs", "dw"])
def test_adaptive_is_never_weaker_than_transfer_on_real_defenses(kind):
    model = network()
    defense = LocalGradientSmoothing(3, 1, 0.1, 2.0) if kind == "lgs" else DigitalWatermarking(model, 3)
    defended = Defended(defense, model)
    images = torch.rand(24, 1, 8, 8, generator=seeded(1))
    labels = defended(images).argmax(dim=1).detach()
    attack = PatchAttack(steps=10, step_size=0.1, restarts=4, loss="margin")
    weak = TransferAttack(attack).run(defended, images, labels, Patch(3))
    strong = AdaptiveAttack(attack).run(defended, images, labels, Patch(3))
    assert int(strong.succeeded.sum()) > int(weak.succeeded.sum())
    assert not (weak.succeeded & ~strong.succeeded).any()
    assert not any(module._forward_hooks for module in model.modules())


def test_series_spares_broken_images_and_takes_the_best():
    images, labels = torch.zeros(6, 1, 4, 4), torch.zeros(6, dtype=torch.long)
    nothing = PatchAttack(steps=0, restarts=1)
    full = PatchAttack(steps=10, step_size=0.2, restarts=16)
    series = AttackSeries((nothing, full))
    result = series.run(Bright(), images, labels, Patch(1))
    assert result.succeeded.all()
    assert series.batch_size == 1024
    assert series.exhaustive().attacks[1] == full.exhaustive()
    with pytest.raises(InvalidInput, match="a series of attacks needs at least one"):
        AttackSeries(())


def test_progress_runs_over_all_stages():
    reached: list[tuple[float, int]] = []
    AdaptiveAttack(ATTACK).run(
        Defended(Mirror(), Bright()),
        one_pixel(0.9),
        torch.tensor([0]),
        Patch(1),
        progress=lambda done, total: reached.append((done, total)),
    )
    shares = [done / total for done, total in reached]
    assert 0.5 in shares  # half of it is transferred, half knows the defense
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_attacks_of_a_series_count_by_the_points_they_look_at():
    reached: list[tuple[float, int]] = []
    series = AttackSeries((PatchAttack(steps=8, restarts=3), PatchAttack(steps=2, restarts=1)))
    images, labels = torch.zeros(2, 1, 3, 3), torch.zeros(2, dtype=torch.long)
    series.run(Never(), images, labels, Patch(1), progress=lambda *done: reached.append(done))
    shares = [done / total for done, total in reached]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(3 / 30)  # three restarts look side by side, 27 and 3 looks are all
    assert any(share == pytest.approx(27 / 30) for share in shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("attack", "threat", "looks"),
    [
        (PatchAttack(steps=4, restarts=3), Patch(1), 15),
        (
            PatchAttack(steps=4, restarts=3, search="sweep", sweep_steps=1, sweep_vertices=9),
            Patch(1),
            15 + 4 * 9,
        ),
        (SparseAttack(steps=4, restarts=3, selections=2), SparsePixels(1), 3 * 8),
        (AttackWithin(PatchAttack(steps=4, restarts=3), Patch(1)), SparsePixels(1), 15),
        (TransferAttack(PatchAttack(steps=4, restarts=3)), Patch(1), 15),
        (PatchesInTurn(PatchAttack(steps=4, restarts=3), rounds=2), Patches(Patch(1), 3), 90),
        (AttackSeries((PatchAttack(steps=4, restarts=3), PatchAttack(steps=0, restarts=1))), Patch(1), 16),
    ],
)
def test_looks_are_counted_before_any_is_taken(attack, threat, looks):
    job = AttackJob(torch.zeros(1, 1, 3, 3), torch.zeros(1, dtype=torch.long), threat, seeded(0))
    assert attack.looks(job) == looks


@pytest.mark.parametrize(
    "attack", [TransferAttack(ATTACK), AdaptiveAttack(ATTACK), AdaptiveAfterTransfer(ATTACK, ATTACK)]
)
def test_an_undefended_model_is_refused(attack):
    with pytest.raises(InvalidInput, match="this attack is for a defended model, got Bright"):
        attack.run(Bright(), one_pixel(0.1), torch.tensor([0]), Patch(1))


@pytest.mark.parametrize("kind", ["lgs", "dw"])
def test_an_adaptive_attack_continues_from_exactly_the_patches_of_a_weak_one(kind):
    model = network()
    defense = LocalGradientSmoothing(3, 1, 0.1, 2.0) if kind == "lgs" else DigitalWatermarking(model, 3)
    defended, images = Defended(defense, model), torch.rand(24, 1, 8, 8, generator=seeded(1))
    labels = defended(images).argmax(dim=1).detach()
    labels[:3] = (labels[:3] + 1) % 3
    attack = PatchAttack(steps=10, step_size=0.1, restarts=2)
    weak = TransferAttack(attack).run(defended, images, labels, Patch(2), seeded(0))
    after = AdaptiveAfterTransfer(attack, replace(attack, loss="margin"))
    strong = after.run(defended, images, labels, Patch(2), seeded(0))
    assert not (weak.succeeded & ~strong.succeeded).any()
    assert strong.succeeded[:3].all()
    assert torch.equal(strong.adversarial[:3], images[:3])
    broken = weak.succeeded.clone()
    broken[:3] = False
    assert broken.any()
    assert torch.equal(strong.adversarial[broken], weak.adversarial[broken])
    assert strong.succeeded.sum() > weak.succeeded.sum()
    none = after.run(defended, images, (weak.clean_predictions + 1) % 3, Patch(2), seeded(0))
    assert none.succeeded.all()
    assert torch.equal(none.adversarial, images)
    assert after.exhaustive().attack == replace(attack, loss="margin", early_stop=False)


def test_an_attack_within_a_smaller_threat_answers_for_the_larger_one():
    model, images = network(), torch.rand(12, 1, 8, 8, generator=seeded(1))
    labels = model(images).argmax(dim=1).detach()
    within = AttackWithin(PatchAttack(10, 0.2, 4), Patch(2))
    result = within.run(model, images, labels, SparsePixels(4), seeded(0))
    inner = PatchAttack(10, 0.2, 4).run(model, images, labels, Patch(2), seeded(0))
    assert torch.equal(result.adversarial, inner.adversarial)
    assert torch.equal(result.succeeded, inner.succeeded)
    assert (result.placement == -1).all()
    assert within.exhaustive().attack == PatchAttack(10, 0.2, 4, early_stop=False)
    with pytest.raises(AttackLeftThreat, match="left its threat SparsePixels"):
        within.run(model, images, labels, SparsePixels(3), seeded(0))


def small_network(scale: float, lead: float) -> nn.Sequential:
    layers = nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 3)
    model = normal(nn.Sequential(*layers), scale)
    with torch.no_grad():
        model[3].bias.copy_(torch.tensor([lead, 0.0, -lead]))
    return model


class LeavesOutOnePlacement:
    """Proves everything but what a patch at one placement can do."""

    def __init__(self, left_out: int) -> None:
        self.left_out = left_out

    def certify(self, model, images, labels, threat):
        margins = placement_margins(model, images, labels, threat)
        kept = torch.ones(margins.shape[1], dtype=torch.bool)
        kept[self.left_out] = False
        least = margins[:, kept].amin(dim=1).scatter(1, labels[:, None], 1.0)
        return (least > 0).all(dim=1) & (model(images).argmax(dim=1) == labels)


def fragile_at(row: int, column: int) -> nn.Sequential:
    """A linear model that only one pixel can change."""
    layer = nn.Linear(36, 2)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[1, row * 6 + column] = 1.0
        layer.bias.copy_(torch.tensor([0.5, 0.0]))
    return nn.Sequential(nn.Flatten(), layer).eval()


@pytest.mark.parametrize(("left_out", "corner"), [(0, (0, 0)), (24, (5, 5)), (4, (0, 5)), (20, (5, 0))])
def test_catches_a_certifier_that_leaves_out_one_placement(left_out, corner):
    model, threat = fragile_at(*corner), Patch(2)
    images, labels = torch.zeros(3, 1, 6, 6), torch.zeros(3, dtype=torch.long)
    honest = certify(model, images, labels, threat).certified
    assert not honest.any()
    claimed = LeavesOutOnePlacement(left_out).certify(model, images, labels, threat)
    assert claimed.all()
    assert strongest_attack(threat).run(model, images, labels, threat).succeeded.all()


@pytest.mark.parametrize(
    ("threat", "scale", "lead"),
    [(Patch(2), 0.2, 0.1), (Patch((1, 3)), 0.2, 0.1), (SparsePixels(2), 0.08, 0.15)],
)
def test_interval_certificates_withstand_everything(threat, scale, lead):
    model = small_network(scale, lead)
    images = torch.rand(40, 1, 8, 8, generator=seeded(2))
    labels = model(images).argmax(dim=1).detach()
    certified = certify(model, images, labels, threat).certified
    assert 3 < int(certified.sum()) < 40
    attack = strongest_attack(threat, steps=15, restarts=2)
    assert not attack.run(model, images[certified], labels[certified], threat, seeded(3)).succeeded.any()
    if isinstance(threat, Patch):
        others = attack.run(model, images[~certified], labels[~certified], threat, seeded(3))
        assert others.succeeded.any()


def test_strongest_attack_sweeps_all_placements_with_both_losses():
    series = strongest_attack(Patch(3))
    assert [(attack.search, attack.loss, attack.restarts) for attack in series.attacks] == [
        ("sweep", "margin", 20),
        ("sweep", "cross-entropy", 20),
    ]


@pytest.mark.parametrize(("pixels", "side"), [(1, 1), (4, 2), (10, 3)])
def test_strongest_sparse_attack_also_sweeps_square_patches_of_as_many_pixels(pixels, side):
    *climbs, first, second = strongest_attack(SparsePixels(pixels)).attacks
    assert [(type(attack), attack.loss) for attack in climbs] == [
        (SparseAttack, "margin"),
        (SparseAttack, "cross-entropy"),
    ]
    assert first.threat == second.threat == Patch(side)
    assert [inner.attack.search for inner in (first, second)] == ["sweep", "sweep"]
    values = strongest_attack(SparsePixels(pixels, "per-value"))
    assert {type(attack) for attack in values.attacks} == {SparseAttack}


def test_a_weak_place_that_has_no_gradient_at_the_clean_image_is_found_by_the_sweep():
    hidden = nn.Linear(36, 1)
    last = nn.Linear(1, 2)
    with torch.no_grad():
        hidden.weight.zero_()
        hidden.weight[0, 17] = 1.0
        hidden.bias.fill_(-0.3)
        last.weight.copy_(torch.tensor([[0.0], [1.0]]))
        last.bias.copy_(torch.tensor([0.6, 0.0]))
    model = nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), last).eval()
    images, labels = torch.zeros(40, 1, 6, 6), torch.zeros(40, dtype=torch.long)
    alone = SparseAttack(20, restarts=2, loss="margin").run(model, images, labels, SparsePixels(1))
    together = strongest_attack(SparsePixels(1), 20, 2).run(model, images, labels, SparsePixels(1))
    assert together.succeeded.sum() > alone.succeeded.sum()
    assert SparsePixels(1).contains(images, together.adversarial).all()
    assert (together.placement == -1).all()
