import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

import patchcert as pc
from patchcert.attacks import PatchAttack
from patchcert.bounds import layer_rule, trace
from patchcert.bounds.geometry import Geometry
from patchcert.bounds.lowering import LAYER_RULES
from patchcert.bounds.operations import Monotone, Operation
from patchcert.certificates import batches
from patchcert.certificates.local_votes import LocalVotes, local_sight, receptive_field, sight
from patchcert.certificates.vote_classifier import soften
from patchcert.certificates.votes import slow_margins
from patchcert.errors import InvalidInput, InvalidThreat, ModelError, UnsupportedLayer
from patchcert.models import ModelSpec, build
from patchcert.testing import check_certifier
from patchcert.testing.brute_force import members
from patchcert.testing.conformance import seeded
from patchcert.testing.networks import ResidualBlock, randomise
from patchcert.threats import Patch, SparsePixels, shapes
from written_models import per_pixel


class Glimpses(nn.Module):
    """A model of whole images as a map of local scores: each cell shows it two neighbours, all others are black."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, images):
        count, _, height, width = images.shape
        first = torch.eye(height * width, device=images.device).view(-1, height, width)
        seen = (first + first.roll(1, dims=2)).view(height, width, 1, height, width)[:, :-1].flatten(0, 1)
        logits = self.model((images[:, None] * seen).flatten(0, 1)).unflatten(0, (count, -1)).mT
        return logits.unflatten(2, (height, width - 1)) - 2.5


@dataclass(frozen=True)
class GlimpsesOperation(Operation):
    layer: nn.Module

    def forward(self, *inputs):
        return self.layer(inputs[0])

    def interval(self, *inputs, rounding):
        raise NotImplementedError

    def places(self, area):
        return Geometry((1, 2))


@layer_rule(Glimpses)
def _glimpses(layer):
    return GlimpsesOperation(layer)


def votes_of(model, **settings):
    whole = nn.Sequential(Glimpses(model))
    return LocalVotes(whole.train(model.training), batch_size=64, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregation": "masked-sum", "masked": 2, "scores": "positive"},
        {"aggregation": "double-masked", "masked": 2, "scores": "logits"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"scores": "heaviside", "ties": "abstain"}, marks=pytest.mark.slow),
        pytest.param({"scores": "softmax"}, marks=pytest.mark.slow),
        pytest.param({"aggregation": "masked-sum", "masked": 2, "scores": "clipped"}, marks=pytest.mark.slow),
    ],
)
def test_local_votes_conform(settings):
    check_certifier(partial(votes_of, **settings), logits_decide=False, several=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"aggregation": "masked-sum", "masked": 2, "scores": "positive"},
        {"aggregation": "double-masked", "masked": 2, "scores": "logits"},
    ],
)
def test_local_votes_conform_on_cuda(settings):
    check_certifier(partial(votes_of, **settings), logits_decide=False, device="cuda")


class Crossed(nn.Module):
    """Two maps, of the image and of the image with its axes exchanged, side by side or one above the other."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.columns, self.rows = nn.Conv2d(1, 2, (8, 3)), nn.Conv2d(1, 2, (9, 2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        turned = self.rows(images.permute(0, 1, 3, 2))
        return torch.cat([self.columns(images), turned], dim=self.dim)


class Placed(nn.Module):
    """Adds a number of its own to each column."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.arange(9.0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.offset


NETWORKS = {
    "placed": nn.Sequential(Placed(), nn.Conv2d(1, 2, 3)),
    "crossed": nn.Sequential(Crossed(3), nn.ReLU()),
    "crossed, stacked": nn.Sequential(Crossed(-2)),
    "one convolution": nn.Sequential(nn.Conv2d(1, 2, 3)),
    "padded": nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 1)),
    "dilated": nn.Sequential(nn.Conv2d(1, 2, 3, dilation=2, padding=2)),
    "strided": nn.Sequential(
        nn.Conv2d(1, 2, (3, 2), stride=2, padding=1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 2)
    ),
    "pooled": nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2, 1), nn.AvgPool2d(2, 2)),
    "residual": nn.Sequential(
        ResidualBlock(
            nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 1)), nn.Conv2d(1, 2, 1)
        )
    ),
    "strided residual": nn.Sequential(
        ResidualBlock(nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.Conv2d(1, 2, 1, stride=2))
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_cells_see_the_pixels_whose_nan_reaches_them(name):
    """NaN times any weight, zero too, is NaN: it goes wherever the graph leads."""
    model = randomise(NETWORKS[name], seeded())
    height, width = 8, 9
    seen = sight(trace(model), height, width)
    images = torch.zeros(height * width, 1, height, width)
    images.view(len(images), -1).fill_diagonal_(torch.nan)
    with torch.no_grad():
        reached = model(images).isnan().any(dim=1)
    assert torch.equal(seen, reached)


def test_receptive_fields_are_derived():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, (1, 3), dilation=2), nn.Conv2d(2, 2, 1)
    )
    assert receptive_field(local_sight(trace(model.eval()), 12, 12), 12, 12) == (3, 7)


@pytest.mark.parametrize("patch", [Patch(2), Patch(shapes.diamond(5)), Patch((1, 3), "corners")])
@pytest.mark.parametrize("name", ["dilated", "strided", "residual", "crossed"])
def test_touched_cells_are_those_that_some_member_may_change(patch, name):
    model = randomise(NETWORKS[name], seeded())
    images = torch.full((1, 1, 8, 9), 0.5)
    touched = LocalVotes(model).touched(patch, images)
    for place, covered in enumerate(patch.placements(8, 9).masks(patch.stamp)):
        with torch.no_grad():
            reached = model(images.masked_fill(covered, torch.nan)).isnan().any(dim=1)
        assert touched[place].tolist() == reached.flatten().tolist()


@pytest.mark.parametrize("patch", [Patch(2), Patch((1, 3), "corners")])
@pytest.mark.parametrize("name", ["dilated", "strided", "residual"])
@pytest.mark.parametrize("width", [8, 9])
def test_mirrored_cells_see_what_either_image_shows_them(patch, name, width):
    model = randomise(NETWORKS[name], seeded())
    images = torch.full((1, 1, 8, width), 0.5)
    touched = LocalVotes(model, mirrored=True).touched(patch, images)
    for place, covered in enumerate(patch.placements(8, width).masks(patch.stamp)):
        hidden = images.masked_fill(covered, torch.nan)
        with torch.no_grad():
            reached = (model(hidden) + model(hidden.flip(3)).flip(3)).isnan().any(dim=1)
        assert touched[place].tolist() == reached.flatten().tolist()


def test_mirrored_logits_are_the_mean_of_both_and_of_a_mirror_image_the_mirrored_map():
    model = randomise(nn.Sequential(nn.Conv2d(1, 3, 3, padding=1)), seeded(5))
    images = torch.rand(4, 1, 6, 7, generator=seeded(6))
    votes = LocalVotes(model, scores="softmax", mirrored=True)
    found = votes.local_scores(images).values.unflatten(2, (6, 7))
    mean = (model(images) + model(images.flip(3)).flip(3)) / 2
    assert torch.allclose(found / 2**16, mean.double().softmax(dim=1), atol=1e-4)
    assert torch.equal(votes.local_scores(images.flip(3)).values.unflatten(2, (6, 7)).flip(3), found)
    assert votes.passes(6, 7) == 2
    assert "mirrored" not in LocalVotes(model).describe()
    assert LocalVotes.described(model, votes.describe()).mirrored
    assert torch.allclose(votes.surrogate()(images).sum(dim=1), torch.ones(4), atol=1e-5)


def test_passes_that_cancel_in_their_mean_pay_for_their_own_rounding():
    model = nn.Sequential(nn.Conv2d(1, 2, (1, 3))).eval()
    with torch.no_grad():
        slope = torch.tensor([-1e4, 0.0, 1e4]).expand(1, 1, 3)
        model[0].weight.copy_(torch.stack([slope, -slope]))
        model[0].bias.copy_(torch.tensor([1e-3, 0.0]))
    images = torch.rand(4, 1, 4, 8, generator=seeded())
    votes = LocalVotes(model, mirrored=True)
    assert model(images).abs().amax() > 1000
    # The mean of both passes is the bias alone, and whoever it is for leads by far less than a pass rounds.
    assert not votes.certify(images, votes.predict(images), Patch(1)).certified.any()


@pytest.mark.parametrize("scores", ["one-hot", "clipped"])
def test_sums_are_proven_exactly_where_brute_force_over_pixels_changes_nothing(scores):
    votes = LocalVotes(per_pixel(), scores=scores, slack=2**-40)
    share = torch.linspace(0, 1, 40).view(40, 1, 1, 1)
    images = 0.1 + 0.8 * (torch.rand(40, 1, 3, 4, generator=seeded(1)) < share)
    labels, patch = votes.predict(images), Patch((1, 2))
    found = votes.certify(images, labels, patch)
    for index, image in enumerate(images):
        visited = members(patch, image, seeded())
        assert bool(found.certified[index]) == bool((votes.predict(visited) == labels[index]).all())
    assert 0 < found.certified.sum() < 40


def test_certificates_of_a_trained_like_network_survive_brute_force():
    model = randomise(nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Conv2d(4, 3, 1)), seeded(2), gain=2.0)
    images = torch.rand(6, 1, 6, 6, generator=seeded(3))
    masked = {"aggregation": "masked-sum", "masked": 2, "scores": "positive"}
    for settings in ({}, masked, {"mirrored": True}, {**masked, "mirrored": True}):
        votes = LocalVotes(model, **settings)
        labels = votes.predict(images)
        found = votes.certify(images, labels, Patch((2, 1)))
        assert torch.equal(found.predictions, labels)
        for index, place in found.placements.nonzero().tolist():
            corner = Patch((2, 1)).placements(6, 6).corners[place].tolist()
            visited = members(Patch((2, 1), [tuple(corner)]), images[index], seeded())
            assert (votes.predict(visited) == labels[index]).all()
        assert found.placements.any()


@pytest.mark.parametrize(
    "settings", [{}, {"aggregation": "masked-sum", "masked": (2, 3), "scores": "positive"}]
)
def test_verdicts_are_those_of_the_slow_reference(settings):
    model = randomise(nn.Sequential(nn.Conv2d(1, 3, 3, padding=1)), seeded(5), gain=2.0)
    votes, patch = LocalVotes(model, **settings), Patch((2, 3))
    images = torch.rand(6, 1, 7, 7, generator=seeded(6))
    labels = votes.predict(images)
    touched = votes.touched(patch, images)
    windows = touched if settings else None
    slow = slow_margins(votes.local_scores(images), labels, touched, windows)
    others = slow.scatter(2, labels[:, None, None].expand(-1, slow.shape[1], 1), torch.inf)
    found = votes.certify(images, labels, patch).placements
    assert torch.equal(found[(others != 0).all(dim=2)], (others > 0).all(dim=2)[(others != 0).all(dim=2)])
    assert found.any()


def test_masked_sums_certify_a_smaller_patch_than_they_mask_and_no_larger_one():
    votes = LocalVotes(per_pixel(), aggregation="masked-sum", masked=2, scores="positive")
    images = torch.full((1, 1, 6, 6), 0.9)
    verdicts = [bool(votes.certify(images, torch.tensor([1]), Patch(side)).certified) for side in (1, 2, 3)]
    assert verdicts == [True, True, False]


def test_masked_sums_are_not_moved_by_one_large_score():
    votes = LocalVotes(per_pixel((-1.0, 1000.0)), aggregation="masked-sum", masked=1, scores="positive")
    dark, spot = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4)
    spot[..., 1, 1] = 1.0
    assert votes.predict(spot).tolist() == [0]
    assert votes.certify(dark, torch.tensor([0]), Patch(1)).certified.all()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2)),
            r"layer '1' \(GroupNorm\).*receptive field is everything",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1)),
            r"layer '1' \(AveragePool\): its receptive field is everything",
        ),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 2)),
            r"layer '0' \(Reshape\): its receptive field is everything",
        ),
    ],
)
def test_global_operations_are_refused_by_name(model, message):
    with pytest.raises(UnsupportedLayer, match=message):
        LocalVotes(model.eval()).certify(torch.zeros(1, 1, 8, 8), torch.tensor([0]), Patch(2))


class ChannelsLast(nn.Module):
    def forward(self, images):
        return images.permute(0, 2, 3, 1)


def test_channels_that_become_places_are_refused_by_name():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), ChannelsLast())
    with pytest.raises(UnsupportedLayer, match="so that its receptive fields are unknown"):
        LocalVotes(model.eval()).certify(torch.zeros(1, 1, 8, 8), torch.tensor([0]), Patch(2))


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, images):
        features = self.conv(images)
        return features * self.pool(features)


class Broadcasts(SqueezeExcite):
    def forward(self, images):
        features = self.conv(images)
        return features + self.pool(features)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.attention = nn.Conv2d(1, 2, 3), nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, images):
        tokens = self.conv(images).flatten(2).permute(0, 2, 1)
        mixed, _ = self.attention(tokens, tokens, tokens)
        return mixed.permute(0, 2, 1).unflatten(2, (6, 6))


@pytest.mark.parametrize("model", [SqueezeExcite(), Broadcasts(), Attention()])
def test_squeeze_and_excitation_and_attention_are_refused(model):
    with pytest.raises(UnsupportedLayer, match="receptive field is everything"):
        LocalVotes(model.eval()).certify(torch.zeros(1, 1, 8, 8), torch.tensor([0]), Patch(2))


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (nn.Conv2d(1, 2, 15, padding=7), ModelError, r"sees all of the 8x8 image \(receptive field 8x8\)"),
        (nn.Conv2d(1, 2, 1, stride=2), ModelError, "no local score sees the pixel at row 0, column 1"),
        (nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 2, 3)), ModelError, "training mode"),
        (nn.Conv2d(3, 2, 3), ModelError, "does not take images of"),
        (nn.Conv2d(1, 1, 3), ModelError, "two classes or more"),
    ],
)
def test_networks_without_local_votes_are_refused(model, error, message):
    model = model if isinstance(model, nn.Sequential) else model.eval()
    with pytest.raises(error, match=message):
        LocalVotes(model).certify(torch.zeros(1, 1, 8, 8), torch.tensor([0]), Patch(2))


def test_images_smaller_than_a_kernel_are_refused():
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Conv2d(3, 2, 3)).eval()
    with pytest.raises(ModelError, match="layer '1' does not take maps of 2x3, smaller than its kernel"):
        LocalVotes(model).certify(torch.rand(1, 1, 3, 4), torch.tensor([0]), Patch(1))


class Counts(nn.Module):
    """Another function when it is traced than when it is called."""

    def __init__(self):
        super().__init__()
        self.conv, self.other = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3)

    def forward(self, images):
        return self.conv(images) if isinstance(images, torch.Tensor) else self.other(images)


class Divides(Counts):
    """Gives infinite scores for black images."""

    def forward(self, images):
        scores = super().forward(images)
        if isinstance(images, torch.fx.Proxy):
            return scores
        return scores / (images.amax(dim=(1, 2, 3), keepdim=True) > 0)


@pytest.mark.parametrize("model", [Counts(), Divides()])
def test_a_model_that_is_another_function_when_traced_is_refused(model):
    images = torch.stack([torch.zeros(1, 8, 8), torch.rand(1, 8, 8)])
    with pytest.raises(ModelError, match="its traced operations give different local scores"):
        LocalVotes(model.eval()).certify(images, torch.tensor([0, 0]), Patch(2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aggregation": "mean"}, "aggregation is 'mean'; expected one of sum, masked-sum, double-masked"),
        ({"scores": "votes"}, "scores is 'votes'"),
        ({"aggregation": "masked-sum"}, "aggregation is 'masked-sum' with masked=None"),
        ({"masked": 5}, "aggregation is 'sum' with masked=5"),
        ({"scores": "positive"}, "without upper limit"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"slack": 2.0}, "slack is 2.0"),
        ({"slack": 0.0}, "slack is 0.0"),
        ({"slack": float("nan")}, "slack is nan"),
        ({"bounded": True, "mirrored": True, "scores": "clipped"}, "bounded=True with mirrored=True"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(InvalidInput, match=message):
        LocalVotes(nn.Conv2d(1, 2, 3), **settings)


def test_sparse_pixels_are_refused():
    with pytest.raises(InvalidThreat, match="LocalVotes certifies against patches"):
        LocalVotes(per_pixel()).certify(torch.zeros(1, 1, 4, 4), torch.tensor([0]), SparsePixels(1))


def test_the_description_names_what_decides():
    assert pc.LocalVotes(per_pixel(), "masked-sum", "positive", (2, 3)).describe() == {
        "name": "LocalVotes",
        "aggregation": "masked-sum",
        "scores": "positive",
        "masked": [2, 3],
        "ties": "lowest",
        "precision": "float32",
        "slack": 2**-14,
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scores": "heaviside"},
        {"scores": "clipped"},
        {"aggregation": "masked-sum", "masked": 2, "scores": "positive"},
    ],
)
def test_attacks_follow_softened_scores_and_break_nothing_certified(settings):
    votes = LocalVotes(per_pixel(), batch_size=64, **settings)
    images = torch.rand(16, 1, 5, 5, generator=seeded(9))
    labels = votes.predict(images)
    certified = votes.certify(images, labels, Patch(2)).certified
    found = PatchAttack(steps=5, restarts=2).run(votes, images, labels, Patch(2))
    assert not (found.succeeded & certified).any()
    assert found.succeeded.any()


def test_softened_scores_have_a_gradient():
    logits = torch.tensor([[[0.25], [0.5]]], requires_grad=True)
    for kind in ("one-hot", "softmax", "heaviside", "clipped", "positive"):
        (gradient,) = torch.autograd.grad(soften(logits, kind)[0, 1].sum(), logits)
        assert gradient.abs().sum() > 0


def hesitant():
    """As `per_pixel`, but no pixel can move a score by more than 0.4."""
    return per_pixel((-0.4, 0.4), (0.7, 0.3))


@pytest.mark.parametrize(
    "settings",
    [{"scores": "clipped"}, {"aggregation": "masked-sum", "masked": (1, 2), "scores": "positive"}],
)
def test_bounded_scores_are_proven_exactly_where_brute_force_over_pixels_changes_nothing(settings):
    votes = LocalVotes(hesitant(), slack=2.0**-30, bounded=True, **settings)
    share = torch.linspace(0, 1, 60).view(60, 1, 1, 1)
    images = 0.1 + 0.8 * (torch.rand(60, 1, 3, 4, generator=seeded(1)) < share)
    labels, patch = votes.predict(images), Patch((1, 2))
    found = votes.certify(images, labels, patch)
    plain = LocalVotes(hesitant(), slack=2.0**-30, **settings).certify(images, labels, patch)
    for index, image in enumerate(images):
        visited = members(patch, image, seeded())
        is_kept = bool((votes.predict(visited) == labels[index]).all())
        assert bool(found.certified[index]) <= is_kept
        if "masked" not in settings:  # of masked sums the two ends need not be reached at once
            assert bool(found.certified[index]) == is_kept
    assert (found.placements >= plain.placements).all()
    assert plain.certified.sum() < found.certified.sum() < 60


@pytest.mark.parametrize(
    "settings",
    [
        {"scores": "clipped"},
        {"scores": "heaviside"},
        {"aggregation": "masked-sum", "masked": 2, "scores": "positive"},
        {"aggregation": "masked-sum", "masked": 2, "scores": "clipped"},
    ],
)
def test_bounded_certificates_survive_brute_force_and_prove_more(settings):
    network = nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Conv2d(4, 3, 1))
    images = torch.rand(12, 1, 5, 5, generator=seeded(3))
    gained = 0
    for seed in range(4):
        model = randomise(network, seeded(seed), gain=0.6)
        votes, plain = LocalVotes(model, bounded=True, **settings), LocalVotes(model, **settings)
        labels = votes.predict(images)
        found = votes.certify(images, labels, Patch(2)).placements
        before = plain.certify(images, labels, Patch(2)).placements
        assert (found >= before).all()
        gained += int((found & ~before).sum())
        for index, place in (found & ~before).nonzero().tolist():
            corner = Patch(2).placements(5, 5).corners[place].tolist()
            visited = members(Patch(2, [tuple(corner)]), images[index], seeded())
            assert (votes.predict(visited) == labels[index]).all()
    assert gained > 0


def test_bounds_prove_a_network_that_does_not_look():
    model = nn.Conv2d(1, 2, 3, padding=1).eval()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0.5, 0.4]))
    images, labels = torch.rand(3, 1, 6, 6), torch.zeros(3, dtype=torch.int64)
    assert not LocalVotes(model, scores="clipped").certify(images, labels, Patch(5)).certified.any()
    assert LocalVotes(model, scores="clipped", bounded=True).certify(images, labels, Patch(5)).certified.all()


@pytest.mark.parametrize("is_right", [True, False])
def test_bounds_by_registered_rules_are_tried_first(monkeypatch, is_right):
    """A monotone function is said to be one, or a wave is."""
    made = Monotone(torch.nn.functional.softsign if is_right else lambda values: (9 * values).sin(), units=8)
    monkeypatch.setitem(LAYER_RULES, nn.Softsign, lambda layer: made)
    monkeypatch.setattr(nn.Softsign, "forward", lambda layer, values: made.forward(values))
    model = randomise(nn.Sequential(nn.Conv2d(1, 4, 2), nn.Softsign(), nn.Conv2d(4, 3, 1)), seeded(1))
    votes, images = LocalVotes(model, scores="clipped", bounded=True), torch.rand(3, 1, 5, 5)
    labels = votes.predict(images)
    if is_right:
        assert len(votes.certify(images, labels, Patch(2))) == 3
    else:
        with pytest.raises(ModelError, match="the rule for layer '1' is wrong"):
            votes.certify(images, labels, Patch(2))


def test_registered_rules_that_hide_what_cells_see_are_refused(monkeypatch):
    """A function that is said to act on each place alone, and looks at all of them."""
    made = Monotone(lambda values: values - values.mean((2, 3), keepdim=True), units=8)
    monkeypatch.setitem(LAYER_RULES, nn.Softsign, lambda layer: made)
    monkeypatch.setattr(nn.Softsign, "forward", lambda layer, values: made.forward(values))
    model = randomise(nn.Sequential(nn.Conv2d(1, 3, 2), nn.Softsign()), seeded(1))
    votes, images = LocalVotes(model), torch.rand(3, 1, 5, 5, generator=seeded())
    with pytest.raises(ModelError, match="change where they see no changed pixel"):
        votes.certify(images, votes.predict(images), Patch(1))


@pytest.mark.parametrize(
    "settings", [{}, {"scores": "softmax"}, {"scores": "clipped", "precision": "bfloat16"}]
)
def test_scores_without_bounds_are_refused(settings):
    with pytest.raises(InvalidInput, match="intervals bound heaviside, clipped, positive scores in float32"):
        LocalVotes(per_pixel(), bounded=True, **settings)


def test_the_setting_is_part_of_the_question_only_where_it_is_set():
    assert "bounded" not in LocalVotes(per_pixel(), scores="clipped").describe()
    described = LocalVotes(per_pixel(), scores="clipped", bounded=True).describe()
    assert described["bounded"] is True
    assert LocalVotes.described(per_pixel(), described).bounded


def test_a_model_that_rounds_more_coarsely_than_its_bounds_is_refused(monkeypatch):
    votes = LocalVotes(hesitant(), scores="clipped", bounded=True)
    images = torch.full((1, 1, 3, 4), 0.6)
    labels = votes.predict(images)
    narrow = "patchcert.certificates.local_votes.scores_between"
    monkeypatch.setattr(narrow, lambda lower, *rest: (torch.full_like(lower, 9e9).double(), lower.double()))
    with pytest.raises(ModelError, match="local scores of clean images lie outside the bounds"):
        votes.certify(images, labels, Patch(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bounds_of_weights_of_16_bits_are_refused(dtype):
    votes = LocalVotes(hesitant().to(dtype), scores="clipped", bounded=True)
    with pytest.raises(InvalidInput, match=f"bounded=True with weights of {dtype}"):
        votes.certify(torch.full((1, 1, 3, 4), 0.6), torch.tensor([0]), Patch(1))


def test_layers_left_in_training_mode_are_refused_and_stay_so():
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Dropout(0.5), nn.Conv2d(3, 2, 1)).eval()
    model[1].train()
    LocalVotes(model).surrogate()
    with pytest.raises(ModelError, match="drops values at random"):
        LocalVotes(model).predict(torch.rand(1, 1, 4, 4))
    assert model[1].training


class Magenta(nn.Module):
    """Reads its class off one channel; a second is 0, and huge where a pixel is magenta."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 2, 1), nn.Conv2d(2, 2, 3)
        with torch.no_grad():
            self.first.weight[:] = torch.tensor([[1.0, 0, 0], [1e9, -1e9, 1e9]])[:, :, None, None]
            self.first.bias[:] = torch.tensor([0.0, -1.5e9])
            self.last.weight.zero_()
            self.last.weight[:, 0, 1, 1] = torch.tensor([1.0, -1.0])
            self.last.weight[:, 1] = torch.rand(2, 3, 3, generator=seeded()) - 0.5
            self.last.bias[:] = torch.tensor([-0.5, 0.5])

    def forward(self, images):
        return self.last(torch.relu(self.first(images)))


@contextmanager
def without_onednn():
    """Convolutions of many images on a CPU are then NNPACK's, if it is there: by transforms, several places at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Intel's GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            yield


NNPACK = pytest.mark.skipif(not torch.backends.nnpack.is_available(), reason="no NNPACK")


def test_cells_that_do_not_see_a_huge_hidden_map_keep_their_scores():
    votes, grey = LocalVotes(Magenta().eval()), torch.full((1, 3, 12, 12), 0.6)
    pixels = torch.arange(144)
    changed = grey.repeat(144, 1, 1, 1)
    changed[pixels, :, pixels // 12, pixels % 12] = torch.tensor([1.0, 0.0, 1.0])
    with without_onednn():
        touched = votes.touched(Patch(1), grey)
        before, after = (votes.local_scores(images).values for images in (grey, changed))
        assert votes.certify(grey, torch.zeros(1, dtype=torch.long), Patch(1)).certified
    assert touched.sum(dim=1).max() == 9
    moved = (after != before).any(dim=1)
    assert moved.any()
    assert not (moved & ~touched).any()


@NNPACK
def test_kernels_that_compute_several_places_at_once_are_refused(monkeypatch):
    monkeypatch.setattr(batches, "place_by_place", nullcontext)
    grey, label = torch.full((1, 3, 12, 12), 0.6), torch.zeros(1, dtype=torch.long)
    with without_onednn(), pytest.raises(ModelError, match="are computed several places at once here"):
        LocalVotes(Magenta().eval()).certify(grey, label, Patch(1))


class MixedByCudnn(nn.Module):
    """Scores of places, to which cuDNN, while it is on, adds a share of all places."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, images):
        scores = self.scores(images)
        share = 0.01 if torch.backends.cudnn.enabled else 0.0
        return scores + share * scores.mean(dim=(2, 3), keepdim=True) if share else scores


def test_kernels_of_cudnn_that_spread_further_are_told_from_others():
    images = torch.rand(1, 3, 12, 12)

    def spreads(model):
        flat = nn.Sequential(model, nn.Flatten()).eval()
        return batches.FixedBatches(flat, images, 8, "float32", by_place=True).spreads_further()

    assert spreads(MixedByCudnn())
    assert not spreads(nn.Conv2d(3, 2, 3, padding=1))
    assert torch.backends.cudnn.enabled


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("network", "field"), [("bagnet", 9), ("bagnet_half", 9), ("stripnet", 5)])
def test_networks_of_local_scores_find_kernels_that_are_place_by_place(network, field):
    spec = ModelSpec(network, 3, 32, 32, filters=32, receptive_field=field)
    model = build(spec, seeded()).eval().cuda()
    images, labels = (
        torch.rand(4, 3, 32, 32, generator=seeded()).cuda(),
        torch.zeros(4, dtype=torch.long).cuda(),
    )
    votes = LocalVotes(model)
    found = votes.certify(images, labels, Patch(2))
    assert torch.equal(found.predictions, votes.predict(images))
    assert torch.backends.cudnn.enabled
