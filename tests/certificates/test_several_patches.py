"""Several patches at once, by every kind of proof: held to brute force over all placements of small images."""

from itertools import combinations_with_replacement, product

import pytest
import torch
from torch import nn

import patchcert as pc
from patchcert.attacks import PatchesInTurn, strongest_attack
from patchcert.bounds import Interval, trace
from patchcert.certificates.votes import Scores, masked_margins, proven_for_several, sum_margins
from patchcert.errors import InvalidInput, InvalidThreat
from patchcert.testing.brute_force import members, supports
from patchcert.testing.conformance import seeded
from patchcert.testing.networks import randomise
from written_models import per_pixel

SHAPE = (1, 3, 4)
THREATS = [
    pc.Patches(pc.Patch(1)),
    pc.Patches(pc.Patch((1, 2), [(0, 0), (0, 1), (2, 2)])),
    pc.Patches(pc.Patch(1, "corners"), 3),
]


def network(seed, gain=0.3):
    layers = nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)
    return randomise(nn.Sequential(*layers), seeded(seed), gain).double()


def images(count=6):
    return torch.rand(count, *SHAPE, generator=seeded(1)).double()


@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_interval_margins_are_the_least_over_all_unions(threat):
    """Equal to a loop over sets with repetition: nothing is lost by leaving those out, and nothing is looser."""
    model, batch = network(0), images()
    labels = model(batch).argmax(dim=1)
    found = pc.certify(model, batch, labels, threat)
    traced, expected = trace(model), torch.full((6, 3), torch.inf).double()
    for support in supports(threat, *SHAPE):
        box = Interval(torch.where(support, 0.0, batch), torch.where(support, 1.0, batch))
        expected = torch.minimum(expected, traced.margins(box, labels))
    torch.testing.assert_close(found.margins, expected)
    assert found.placements is None
    assert (found.worst_placement == -1).all()


def test_what_intervals_prove_survives_brute_force_and_one_patch_proves_no_less():
    threat, proven, lost = pc.Patches(pc.Patch(1)), 0, 0
    for seed in range(8):
        model, batch = network(seed, gain=0.15 + 0.05 * seed), images()
        labels = model(batch).argmax(dim=1)
        found = pc.certify(model, batch, labels, threat)
        single = pc.certify(model, batch, labels, threat.patch)
        assert not (found.certified & ~single.certified).any()
        lost += int((single.certified & ~found.certified).sum())
        for image, label, certified in zip(batch, labels, found.certified, strict=True):
            if certified:
                assert (model(members(threat, image, seeded())).argmax(dim=1) == label).all()
                proven += 1
    assert proven > 3
    assert lost > 3


@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_sums_of_local_votes_are_proven_exactly_where_brute_force_changes_nothing(threat):
    votes, share = pc.LocalVotes(per_pixel()), torch.linspace(0, 1, 40).view(40, 1, 1, 1)
    batch = 0.1 + 0.8 * (torch.rand(40, *SHAPE, generator=seeded(1)) < share)
    labels = votes.predict(batch)
    found = votes.certify(batch, labels, threat)
    for index, image in enumerate(batch):
        visited = members(threat, image, seeded())
        assert bool(found.certified[index]) == bool((votes.predict(visited) == labels[index]).all())
    assert 0 < found.certified.sum() < 40
    assert found.placements is None


class Certain(nn.Module):
    """Votes 0 whatever it sees."""

    def forward(self, encoded):
        return torch.tensor([[1.0, 0.0]]).expand(len(encoded), -1)


def test_bands_count_what_either_patch_touches():
    """Of eight bands of one column all vote 0, and a patch of one column turns one vote: 3 patches leave 5 : 3."""
    votes, batch, label = pc.BandVotes(Certain().eval(), width=1), torch.zeros(1, 1, 3, 8), torch.tensor([0])
    verdicts = [
        bool(votes.certify(batch, label, pc.Patches(pc.Patch(1), count)).certified) for count in (2, 3, 4, 5)
    ]
    assert verdicts == [True, True, True, False]  # of 4 : 4 class 0 wins the tie


def several(scores, labels, touched, count, ties, windows):
    """Whether the label wins for every set of placements, one image and set at a time."""
    chosen = [torch.stack(some).any(dim=0) for some in combinations_with_replacement(touched, count)]
    found = []
    for image, label in enumerate(labels):
        part = Scores(
            *(each[image : image + 1] for each in (scores.values, scores.lower, scores.upper)), scores.most
        )
        is_won = True
        for cells in chosen:
            margins_of = sum_margins if windows is None else masked_margins
            extra = () if windows is None else (windows,)
            margins = margins_of(part, label[None], cells[None], *extra)[0, 0]
            wins_ties = (torch.arange(len(margins)) > label) & (ties == "lowest")
            others = torch.arange(len(margins)) != label
            is_won &= bool(((margins > 0) | ((margins == 0) & wins_ties))[others].all())
        found.append(is_won)
    return found


@pytest.mark.parametrize(
    ("count", "ties", "masked"), list(product((2, 3), ("lowest", "abstain"), (False, True)))
)
def test_votes_against_several_are_those_of_every_union(count, ties, masked):
    proven = 0
    for seed in range(10):
        generator = seeded(seed)
        values = (torch.rand(4, 3, 12, generator=generator) < torch.tensor([0.9, 0.2, 0.1])[:, None]).double()
        scores, labels = Scores(values, values, values, 1), torch.tensor([0, 0, 0, 1])
        touched = torch.rand(5, 12, generator=generator) < 0.15
        windows = (
            torch.stack([torch.arange(12) < 6, torch.arange(12) >= 6, touched.any(dim=0)]) if masked else None
        )
        margins_of = sum_margins
        if masked:
            margins_of = lambda *given, windows=windows: masked_margins(*given, windows)  # noqa: E731
        found = proven_for_several(margins_of, scores, labels, touched, ties, count)
        assert found.tolist() == several(scores, labels, touched, count, ties, windows)
        proven += int(found.sum())
    assert 0 < proven < 40


def test_masks_for_two_serve_one_and_masks_for_one_do_not_serve_two():
    model, batch = network(0, gain=0.1).float().eval(), images().float()
    two, labels = pc.Patches(pc.Patch(1)), model(batch).argmax(dim=1)
    masking = pc.DoubleMasking(model, two, masks=(3, 4), with_map=True)
    single, double = (masking.certify(batch, labels, threat) for threat in (two.patch, two))
    assert single.placements.shape == (6, 12)
    assert double.placements is None
    assert not (double.certified & ~single.certified).any()
    with pytest.raises(InvalidThreat, match="at some placement none of them hides Patches"):
        pc.DoubleMasking(model, two.patch, masks=(3, 4)).certify(batch, labels, two)
    with pytest.raises(InvalidThreat, match="about one patch"):
        masking.placement_leads(batch, labels, two)
    detection = pc.MaskedDetection(model, two, masks=(3, 4)).certify(batch, labels, two)
    assert detection.placements is None


def test_random_ablation_counts_the_pixels_of_all_patches():
    ablation = pc.RandomAblation(Certain().eval(), retained=2, selection_samples=20, estimation_samples=200)
    batch, labels = torch.zeros(1, 1, 8, 8), torch.tensor([0])
    radius = int(ablation.certify(batch, labels, pc.Patch(1)).radius)
    for count in (radius, radius + 1):
        threat = pc.Patches(pc.Patch(1), count)
        assert bool(ablation.certify(batch, labels, threat).certified) == (count <= radius)


def test_what_does_not_cover_several_says_so():
    model, batch = network(0), images()
    labels, threat = model(batch).argmax(dim=1), pc.Patches(pc.Patch(1))
    with pytest.raises(InvalidThreat, match="margins to train on exist for one patch"):
        pc.worst_case_margins(model, batch, labels, threat)
    with pytest.raises(InvalidInput, match="has no single placement"):
        pc.placement_margins(model, batch, labels, threat)
    with pytest.raises(InvalidInput, match="linear bounds exist for one patch"):
        pc.certify(pc.IntervalBounds(model, refine="linear"), batch, labels, threat)
    with pytest.raises(InvalidInput, match=r"PatchesInTurn\(PatchAttack\(\)\)"):
        pc.PatchAttack().run(model, batch, labels, threat)
    with pytest.raises(InvalidInput, match="PatchesInTurn attacks with Patches"):
        PatchesInTurn(pc.PatchAttack()).run(model, batch, labels, threat.patch)
    with pytest.raises(InvalidThreat, match="does not fit"):
        pc.certify(model, batch, labels, pc.Patches(pc.Patch(5)))
    large = torch.zeros(1, 1, 64, 64).double()
    flat = nn.Sequential(nn.Flatten(), nn.Linear(4096, 2)).double()
    with pytest.raises(InvalidThreat, match="prove it by masks"):
        pc.certify(flat, large, torch.tensor([0]), pc.Patches(pc.Patch(5)))


class Both(nn.Module):
    """Says 1 where two opposite corners are bright: no single small patch reaches both."""

    def forward(self, images):
        seen = images[:, 0, 0, 0] + images[:, 0, -1, -1]
        return torch.stack([torch.full_like(seen, 1.5), seen], dim=1)


@pytest.mark.parametrize("search", ["random", "sweep"])
def test_two_patches_break_what_one_does_not(search):
    attack = pc.PatchAttack(steps=10, step_size=0.3, restarts=20, search=search, loss="margin")
    batch, labels = torch.full((3, 1, 5, 5), 0.1), torch.tensor([0, 0, 0])
    threat = pc.Patches(pc.Patch(2))
    assert not attack.run(Both(), batch, labels, threat.patch).succeeded.any()
    result = PatchesInTurn(attack).run(Both(), batch, labels, threat)
    assert result.succeeded.all()
    assert (result.placement == -1).all()
    assert threat.contains(batch, result.adversarial).all()
    assert strongest_attack(threat, steps=10, restarts=2).run(Both(), batch, labels, threat).succeeded.all()


def test_patches_in_turn_find_nearly_all_that_brute_force_finds_and_nothing_else():
    threat = pc.Patches(pc.Patch(1))
    attack, found, there = strongest_attack(threat, steps=10, restarts=12), 0, 0
    for seed in range(6):
        model, batch = network(seed, gain=0.4), images(4)
        labels = model(batch).argmax(dim=1)
        breakable = torch.stack(
            [
                (model(members(threat, image, seeded())).argmax(dim=1) != label).any()
                for image, label in zip(batch, labels, strict=True)
            ]
        )
        result = attack.run(model, batch, labels, threat)
        assert threat.contains(batch, result.adversarial).all()
        certified = pc.certify(model, batch, labels, threat).certified
        assert not (result.succeeded & certified).any()
        found += int((result.succeeded & breakable).sum())
        there += int(breakable.sum())
    assert there > 5
    assert found >= 0.9 * there


def test_rounds_are_at_least_one():
    with pytest.raises(InvalidInput, match="rounds is 0"):
        PatchesInTurn(pc.PatchAttack(), rounds=0)


def test_progress_is_reported_after_each_image_and_any_memory_gives_the_same():
    model, batch, heard = network(0), images(3), []
    labels, threat = model(batch).argmax(dim=1), pc.Patches(pc.Patch(1))
    plenty = pc.certify(model, batch, labels, threat, progress=lambda *done: heard.append(done))
    assert heard == sorted(heard)
    assert {(0, 3), (1, 3), (2, 3), (3, 3)} <= set(heard)
    little = pc.certify(model, batch, labels, threat, memory_budget=2**14)
    torch.testing.assert_close(plenty.margins, little.margins)
    bare = pc.certify(pc.IntervalBounds(model, verdicts_only=True), batch, labels, threat)
    assert torch.equal(plenty.certified, bare.certified)
