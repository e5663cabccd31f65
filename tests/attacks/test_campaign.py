import pytest
import torch
from torch import nn

from patchcert.attacks import PatchAttack, SparseAttack, attack_certified, strongest_attack
from patchcert.certificates import certify, placement_margins
from patchcert.errors import InvalidInput
from patchcert.threats import Patch, SparsePixels


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(scale: float, lead: float) -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 3)
    )
    generator = seeded(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        model[3].bias.copy_(torch.tensor([lead, 0.0, -lead]))
    return model.eval()


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
    found = attack_certified(model, images, labels, threat, claimed)
    assert not found.withstood
    assert found.broken.tolist() == [0, 1, 2]


def test_catches_a_proof_about_an_image_that_is_wrong_anyway():
    model = fragile_at(0, 0)
    found = attack_certified(
        model,
        torch.ones(1, 1, 6, 6),
        torch.tensor([0]),
        Patch(1),
        torch.tensor([True]),
        PatchAttack(0, 0.1, 1),
    )
    assert found.broken.tolist() == [0]


@pytest.mark.parametrize(
    ("threat", "scale", "lead"),
    [(Patch(2), 0.2, 0.1), (Patch((1, 3)), 0.2, 0.1), (SparsePixels(2), 0.08, 0.15)],
)
def test_interval_certificates_withstand_everything(threat, scale, lead):
    model = network(scale, lead)
    images = torch.rand(40, 1, 8, 8, generator=seeded(2))
    labels = model(images).argmax(dim=1).detach()
    certified = certify(model, images, labels, threat).certified
    assert 3 < int(certified.sum()) < 40
    attack = strongest_attack(threat, steps=15, restarts=2)
    found = attack_certified(model, images, labels, threat, certified, attack, seeded(3))
    assert found.withstood
    assert torch.equal(found.index, certified.nonzero().flatten())
    if isinstance(threat, Patch):
        others = attack.run(model, images[~certified], labels[~certified], threat, seeded(3))
        assert others.succeeded.any()


def test_only_certified_images_are_attacked_and_none_is_fine():
    model = fragile_at(0, 0)
    images, labels = torch.zeros(4, 1, 6, 6), torch.zeros(4, dtype=torch.long)
    found = attack_certified(model, images, labels, Patch(1), torch.tensor([False, True, False, True]))
    assert found.broken.tolist() == [1, 3]
    nothing = attack_certified(model, images, labels, Patch(1), torch.zeros(4, dtype=torch.bool))
    assert nothing.withstood
    assert len(nothing.index) == 0


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


def test_flags_that_do_not_fit_are_refused():
    images, labels = torch.zeros(2, 1, 6, 6), torch.zeros(2, dtype=torch.long)
    with pytest.raises(InvalidInput, match=r"certified must be bool \(2,\), got torch.float32 \(2,\)"):
        attack_certified(fragile_at(0, 0), images, labels, Patch(1), torch.zeros(2))
