import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import patchcert as pc
from patchcert.certificates import ABSTAINED
from patchcert.certificates.ablation import (
    RandomAblation,
    VoteRules,
    certified_radius,
    draw_retained,
    encode_ablated,
    is_decided,
    probability_lower_bound,
    seen_probability,
)
from patchcert.errors import InvalidInput, ModelError
from patchcert.models import ModelSpec, build
from patchcert.testing.conformance import seeded


class CornerModel(nn.Module):
    """Says 1 where the top-left pixel is retained and bright, else 0; remembers the shapes it is given."""

    def __init__(self):
        super().__init__()
        self.shapes = []
        self.eval()

    def forward(self, encoded):
        self.shapes.append(tuple(encoded.shape))
        bright = encoded[:, 0, 0, 0]
        return torch.stack([torch.full_like(bright, 0.5), bright], dim=1)


@pytest.mark.parametrize(
    ("pixels", "retained", "expected"),
    [(784, 45, {1: 0.0574, 4: 0.2109, 10: 0.4482}), (1024, 75, {1: 0.0732, 4: 0.2627, 10: 0.5343})],
)
def test_seen_probability_has_the_papers_values(pixels, retained, expected):
    for changed, value in expected.items():
        assert float(seen_probability(pixels, retained, changed)) == pytest.approx(value, abs=5e-5)


@pytest.mark.parametrize(
    ("pixels", "retained", "changed"), [(9, 3, 2), (10, 10, 1), (7, 1, 7), (50176, 1000, 3)]
)
def test_seen_probability_counts_subsets(pixels, retained, changed):
    unseen = Fraction(math.comb(pixels - changed, retained), math.comb(pixels, retained))
    assert seen_probability(pixels, retained, changed) == 1 - unseen


@pytest.mark.parametrize(("pixels", "retained", "largest"), [(784, 45, 11), (1024, 75, 9)])
def test_largest_possible_radius(pixels, retained, largest):
    unanimous = probability_lower_bound(np.array([10_000]), 10_000, 0.05)
    assert certified_radius(unanimous, pixels, retained)[0] == largest


def test_radius_ten_on_cifar_needs_at_most_68_retained_pixels():
    unanimous = probability_lower_bound(np.array([10_000]), 10_000, 0.05)
    assert [int(certified_radius(unanimous, 1024, kept)[0]) for kept in (68, 69)] == [10, 9]


def test_radius_is_strict_at_the_threshold():
    threshold = 0.5 + float(seen_probability(784, 45, 4))
    probability = np.array([0.5, 0.5 + 1e-9, threshold - 1e-9, threshold, threshold + 1e-9])
    assert certified_radius(probability, 784, 45).tolist() == [-1, 0, 3, 3, 4]


@pytest.mark.parametrize("votes", [1, 37, 5_000, 9_999, 10_000])
def test_lower_bound_is_where_so_many_votes_become_unlikely(votes):
    bound = probability_lower_bound(np.array([votes]), 10_000, 0.05)[0]
    assert stats.binom.sf(votes - 1, 10_000, bound) == pytest.approx(0.05, rel=1e-6)


def test_lower_bound_without_votes_is_zero():
    assert probability_lower_bound(np.array([0]), 10_000, 0.05)[0] == 0.0


def test_decision_is_the_two_sided_binomial_test():
    first, second = np.array([60, 59, 10, 0, 7]), np.array([40, 41, 0, 0, 6])
    decided = is_decided(first, second, 0.05)
    chances = [
        stats.binomtest(int(a), int(a + b), 0.5).pvalue if a + b else 1.0
        for a, b in zip(first, second, strict=True)
    ]
    assert decided.tolist() == [chance <= 0.05 for chance in chances]
    assert decided.tolist() == [False, False, True, False, False]


def test_masks_keep_exactly_so_many_pixels_each_equally_often():
    masks = draw_retained(4_000, 3, 4, retained=5, generator=seeded(0))
    assert (masks.flatten(1).sum(dim=1) == 5).all()
    share = masks.mean(dim=0)
    assert (share - 5 / 12).abs().max() < 5 * math.sqrt(5 / 12 * 7 / 12 / 4_000)


def test_encoding_separates_ablated_from_black():
    images = torch.tensor([[[[0.0, 0.25]]]])
    encoded = encode_ablated(images, torch.tensor([[[1.0, 0.0]]]))
    assert encoded[0, :, 0, 0].tolist() == [0.0, 1.0]
    assert encoded[0, :, 0, 1].tolist() == [0.0, 0.0]


def test_votes_count_every_sample_once_and_do_not_depend_on_batches():
    images = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1).expand(2, 1, 4, 4)
    ablation = RandomAblation(CornerModel(), retained=4, estimation_samples=2_000, batch_size=77)
    votes = ablation.ballots(images).estimation
    assert votes.sum(dim=1).tolist() == [2_000, 2_000]
    assert votes[0].tolist() == [2_000, 0]
    assert abs(int(votes[1, 1]) - 500) < 5 * math.sqrt(2_000 * 0.25 * 0.75)


def test_certificates_follow_from_the_votes():
    images = torch.tensor([0.0, 1.0, 1.0]).reshape(3, 1, 1, 1).expand(3, 1, 28, 28)
    ablation = RandomAblation(CornerModel(), 45, selection_samples=100, estimation_samples=2_000)
    reached: list[tuple[int, int]] = []
    certificates = ablation.certify(
        images,
        torch.tensor([0, 0, 1]),
        pc.SparsePixels(11),
        lambda done, total: reached.append((done, total)),
    )
    assert certificates.predictions.tolist() == ablation.predict(images).tolist() == [0, 0, 0]
    dark = probability_lower_bound(np.array([2_000]), 2_000, 0.05)
    assert int(certificates.radius[0]) == int(certified_radius(dark, 784, 45)[0]) == 11
    assert 0 <= int(certificates.radius[1]) < 11
    assert int(certificates.radius[2]) == -1
    assert certificates.certified.tolist() == [True, False, False]
    assert not ablation.certify(images, torch.tensor([0, 0, 1]), pc.SparsePixels(12)).certified.any()
    assert certificates.guarantee.confidence == 0.95
    assert not certificates.guarantee.is_deterministic
    assert reached[-1] == (3, 3)


def test_a_patch_is_certified_as_so_few_changed_pixels():
    images, labels = torch.zeros(1, 1, 28, 28), torch.tensor([0])
    ablation = RandomAblation(CornerModel(), 45, selection_samples=100, estimation_samples=2_000)
    assert ablation.certify(images, labels, pc.Patch(3)).certified.all()
    assert not ablation.certify(images, labels, pc.Patch(4)).certified.any()


def test_the_same_images_have_the_same_votes_and_no_seed_draws_anew():
    images = torch.rand(2, 1, 4, 4, generator=seeded(6)).round()
    ablation = RandomAblation(CornerModel(), retained=8, selection_samples=50, estimation_samples=500)
    first, second = ablation.ballots(images), ablation.ballots(images.clone())
    assert torch.equal(first.selection, second.selection)
    assert torch.equal(first.estimation, second.estimation)
    bright = torch.ones(4, 1, 4, 4)
    anew = RandomAblation(CornerModel(), 8, 50, 500, seed=None)
    assert len({tuple(anew.ballots(bright).estimation[:, 0].tolist()) for _ in range(3)}) > 1


def test_prediction_abstains_when_the_vote_is_too_close():
    images = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1).expand(2, 1, 1, 2)
    ablation = RandomAblation(CornerModel(), retained=1, estimation_samples=400)
    assert ablation.predict(images).tolist() == [0, ABSTAINED]


def test_all_votes_come_from_batches_of_one_shape():
    model = CornerModel()
    ablation = RandomAblation(model, retained=4, selection_samples=30, estimation_samples=100, batch_size=64)
    ballots = ablation.ballots(torch.rand(3, 1, 4, 4, generator=seeded(8)))
    assert model.shapes == [(64, 2, 4, 4)] * 11
    assert ballots.selection.sum(dim=1).tolist() == [30] * 3
    assert ballots.estimation.sum(dim=1).tolist() == [100] * 3


def test_selection_and_estimation_are_separate_votes():
    """Were votes for the selection counted again, an image with one vote of each would have two in one."""
    images = torch.ones(1, 1, 1, 2).expand(400, 1, 1, 2)
    ablation = RandomAblation(CornerModel(), retained=1, selection_samples=1, estimation_samples=1)
    ballots = ablation.ballots(images)
    agree = (ballots.selected == ballots.estimation.argmax(dim=1)).double().mean()
    assert abs(float(agree) - 0.5) < 5 * 0.5 / math.sqrt(400)


@pytest.mark.parametrize(
    ("weights", "pixels"), [(torch.float64, torch.float32), (torch.float32, torch.float64)]
)
def test_images_are_shown_in_the_type_of_the_weights(weights, pixels):
    model = nn.Sequential(nn.Conv2d(2, 3, 4), nn.Flatten()).eval().to(weights)
    votes = RandomAblation(model, 2, 5, 20).ballots(torch.rand(2, 1, 4, 4, dtype=pixels)).estimation
    assert votes.sum(dim=1).tolist() == [20, 20]


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_votes_are_cast_in_the_precision_asked_for_whatever_is_set_around(precision):
    seen = []

    class Probe(nn.Module):
        def forward(self, encoded):
            seen.append((encoded.flatten(1) @ torch.ones(encoded[0].numel(), 3)).dtype)
            return torch.zeros(len(encoded), 3)

    ablation = RandomAblation(Probe().eval(), 2, 1, 4, precision=precision)
    with torch.autocast("cpu", torch.bfloat16):
        ablation.ballots(torch.rand(1, 1, 4, 4))
    assert set(seen) == {torch.bfloat16 if precision == "bfloat16" else torch.float32}


@given(
    counts=st.lists(st.lists(st.integers(0, 60), min_size=3, max_size=3).filter(any), min_size=1, max_size=5)
)
def test_the_decided_class_leads_by_more_than_chance(counts):
    votes = np.array(counts, np.uint16)
    for row, found in zip(counts, VoteRules(60, 16, 4, 0.05).predictions(votes), strict=True):
        second, first = sorted(row)[-2:]
        if stats.binomtest(first, first + second, 0.5).pvalue <= 0.05:
            assert row[found] == first
        else:
            assert found == ABSTAINED


def test_the_coverage_of_the_bound_is_what_it_says():
    """Of many counts with a known probability, at most the error rate have a bound above it."""
    votes = np.random.default_rng(0).binomial(200, 0.8, 20_000)
    above = (probability_lower_bound(votes, 200, 0.05) > 0.8).mean()
    assert 0.02 < above <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 20_000)


def test_certificates_hold_against_every_change_of_so_many_pixels():
    """On tiny images the vote's exact probabilities can be computed for all masks and all changes."""
    pixels, retained = 6, 1
    weights = torch.randn(2 * pixels, 3, generator=seeded(11)) + torch.tensor([2.0, 0.0, 0.0])

    def exact(image):
        masks = torch.eye(pixels).reshape(pixels, 1, pixels)
        encoded = encode_ablated(image.expand(pixels, 1, 1, pixels), masks)
        votes = (encoded.flatten(1) @ weights).argmax(dim=1)
        return torch.bincount(votes, minlength=3).double() / pixels

    radii = []
    for seed in range(30):
        image = torch.rand(1, 1, 1, pixels, generator=seeded(seed)).round()
        share, leader = exact(image).max(dim=0)
        radii.append(int(certified_radius(np.array([float(share)]), pixels, retained)[0]))
        for changed in itertools.combinations(range(pixels), max(radii[-1], 0)):
            for values in itertools.product((0.0, 1.0), repeat=len(changed)):
                other = image.clone()
                other[0, 0, 0, list(changed)] = torch.tensor(values)
                assert radii[-1] < 0 or exact(other).argmax() == leader
    assert max(radii) > 0


def test_impossible_settings_are_refused():
    with pytest.raises(InvalidInput, match="whole numbers retained, samples and batch_size of at least 1"):
        RandomAblation(CornerModel(), retained=0)
    with pytest.raises(InvalidInput, match="whole numbers"):
        RandomAblation(CornerModel(), retained=4.5)
    with pytest.raises(InvalidInput, match="an error rate between 0 and 1, got .* and 5%"):
        RandomAblation(CornerModel(), error_rate="5%")
    with pytest.raises(InvalidInput, match="precision is 'half'; expected one of float32, tf32, bfloat16"):
        RandomAblation(CornerModel(), retained=5, precision="half")
    with pytest.raises(InvalidInput, match="20 pixels cannot be retained in images of 4x4"):
        RandomAblation(CornerModel(), retained=20).ballots(torch.rand(1, 1, 4, 4))
    with pytest.raises(InvalidInput, match="base model is in training mode"):
        RandomAblation(CornerModel().train(), retained=2).ballots(torch.rand(1, 1, 4, 4))
    with pytest.raises(InvalidInput, match="got 9 retained and 1 changed of 8"):
        seen_probability(8, 9, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_votes_on_a_gpu_are_complete_and_reproducible(precision):
    model = build(ModelSpec("cnn2_ablation", 1, 28, 28, hidden=16), seeded(0)).to("cuda")
    images = torch.rand(3, 1, 28, 28, generator=seeded(1)).to("cuda")
    ablation = RandomAblation(model, 45, 100, 400, batch_size=600, precision=precision)
    first, second = (ablation.ballots(images) for _ in range(2))
    assert torch.equal(first.estimation, second.estimation)
    assert first.selection.sum(dim=1).tolist() == [100] * 3
    assert first.estimation.sum(dim=1).tolist() == [400] * 3
    masks = draw_retained(1_000, 28, 28, 45, torch.Generator("cuda").manual_seed(3))
    assert (masks.flatten(1).sum(dim=1) == 45).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_model_that_gives_no_numbers_proves_nothing(value):
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 3)).eval()
    with torch.no_grad():
        model[1].weight.fill_(value)
    ablation = RandomAblation(model, 5, 10, 50, batch_size=64)
    images, labels = torch.full((4, 1, 4, 4), 0.5), torch.arange(4) % 3
    found = ablation.certify(images, labels, pc.SparsePixels(1))
    assert (found.radius == -1).all()
    assert (ablation.predict(images) == ABSTAINED).all()


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.rand(4, 1, 4, 4) * torch.nan, torch.zeros(4).long(), "images must lie in"),
        (torch.rand(4, 1, 4, 4) * 255, torch.zeros(4).long(), "images must lie in"),
        (torch.rand(4, 1, 4, 4), torch.zeros(4, 1).long(), "labels must be a long tensor"),
        (torch.rand(4, 1, 4, 4), torch.zeros(1).long(), "labels must be a long tensor"),
        (torch.rand(4, 1, 4, 4), torch.zeros(4), "labels must be a long tensor"),
        (torch.rand(4, 1, 4, 4), torch.full((4,), 99), "99"),
        (torch.rand(0, 1, 4, 4), torch.zeros(0).long(), "one image at least"),
    ],
)
def test_images_and_labels_are_checked_before_votes_are_believed(images, labels, message):
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 3)).eval()
    with pytest.raises(InvalidInput, match=message):
        RandomAblation(model, 5, 10, 50, batch_size=64).certify(images, labels, pc.SparsePixels(1))


class Coupled(nn.Module):
    """A linear model whose logits depend on the whole batch."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 3)

    def forward(self, encoded):
        features = encoded.flatten(1)
        return self.head(features - features.mean(dim=0))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten(), nn.Linear(32, 3)),
            "layer '0'",
        ),
        (nn.Sequential(nn.Flatten(), nn.BatchNorm1d(32), nn.Linear(32, 3)), "statistics of the batch"),
        (
            nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(32, 3)),
            "layer '1' .Dropout. drops values at random",
        ),
        (Coupled(), "when others are in their batch"),
        (nn.Sequential(nn.Flatten(), nn.Linear(32, 1)), "1 logit for each image"),
        (nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (1, -1)), nn.LazyLinear(3)), "must return logits"),
    ],
)
def test_votes_that_depend_on_each_other_are_refused(model, message):
    """In eval mode at the root alone: layers below may still be in training mode."""
    model.eval()
    for layer in model.children():
        if isinstance(layer, nn.BatchNorm1d | nn.Dropout):
            layer.train()
    ablation = pc.RandomAblation(model, 5, 10, 50, batch_size=64)
    with pytest.raises(ModelError, match=message):
        ablation.certify(torch.rand(2, 1, 4, 4), torch.zeros(2).long(), pc.SparsePixels(1))
    with pytest.raises(ModelError, match=message):
        ablation.predict(torch.rand(2, 1, 4, 4))
