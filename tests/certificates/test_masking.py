"""Double masking and detection: sound and as strong as the rule allows for any base model, by brute force."""

import math
from itertools import product

import hypothesis
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import patchcert as pc
from patchcert.certificates import ABSTAINED
from patchcert.certificates.batches import copies_at_once
from patchcert.certificates.masking import DoubleMasking, MaskedDetection
from patchcert.errors import InvalidInput, InvalidThreat, ModelError
from strategies import seeds

WHITE = 1.0


class Lookup(nn.Module):
    """Any function of what is hidden of a black image, and one class wherever a white pixel is seen."""

    def __init__(self, pixels, classes, seed, calm=0.7, alien=1):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        table = torch.randint(classes, (2**pixels,), generator=generator)
        table[torch.rand(2**pixels, generator=generator) < calm] = 0
        self.register_buffer("table", table)
        self.classes, self.alien = classes, alien
        self.eval()

    def forward(self, images):
        flat = images.flatten(1)
        powers = 2 ** torch.arange(flat.shape[1])
        said = self.table[((flat - 0.5).abs() < 0.1).long() @ powers]
        said = torch.where((flat > 0.9).any(dim=1), self.alien, said)
        return nn.functional.one_hot(said, self.classes).float()


def answers_one_by_one(masking, image):
    """What the model says of the image under every two masks, one copy at a time."""
    masks = masking.mask_set(*image.shape[1:]).hidden
    copies = [[torch.where(first | second, 0.5, image) for second in masks] for first in masks]
    return [[int(masking.model(copy[None]).argmax()) for copy in row] for row in copies]


def predicted_one_by_one(masking, image):
    """The rule as it is written down."""
    said = answers_one_by_one(masking, image)
    singles = [row[number] for number, row in enumerate(said)]
    if len(set(singles)) == 1:
        return singles[0]
    frequent = max(sorted(set(singles)), key=singles.count)
    for single, row in zip(singles, said, strict=True):
        if single != frequent and set(row) == {single}:
            return single
    return frequent


def proven_one_by_one(masking, image, label, threat):
    """The condition as it is written down: for every placement whether some covering mask has a row that is right."""
    rows = torch.tensor([set(row) == {label} for row in answers_one_by_one(masking, image)])
    return (masking.mask_set(*image.shape[1:]).covers(threat) & rows).any(dim=1)


def patched(image, threat, values=(0.0, WHITE)):
    """Every way of filling the patch with these values, at every placement, with the placement's number."""
    for place, mask in enumerate(threat.placements(*image.shape[1:]).masks(threat.stamp)):
        for filling in product(values, repeat=int(mask.sum())):
            changed = image.clone()
            changed[:, mask] = torch.tensor(filling)
            yield place, changed


CASES = [
    (pc.Patch(1), (2, 3), (2, 3)),
    (pc.Patch((1, 2)), (2, 4), (2, 2)),
    (pc.Patch((2, 1)), (3, 3), (2, 3)),
    (pc.Patch(1, [(0, 0), (1, 2), (1, 0)]), (2, 3), 2),
    (pc.Patch(pc.shapes.from_text("#.\n.#")), (3, 3), 2),
    (pc.Patches(pc.Patch(1)), (1, 4), (1, 4)),
    (pc.Patches(pc.Patch((1, 2)), 2), (1, 5), (1, 4)),
]


@pytest.mark.parametrize(("threat", "size", "masks"), CASES)
def test_no_patch_changes_what_is_proven_of_any_function(threat, size, masks):
    patch = threat.patch if isinstance(threat, pc.Patches) else threat
    image = torch.zeros(1, *size)
    proven = 0
    for seed in range(60):
        model = Lookup(size[0] * size[1], 3, seed, calm=0.9, alien=seed % 3)
        masking = DoubleMasking(model, threat, masks=masks, with_map=True, batch_size=64)
        found = masking.certify(image[None], torch.tensor([0]), threat)
        members = list(patched(image, patch))
        if patch is not threat:
            members = [(-1, again) for _, changed in members for _, again in patched(changed, patch)]
        said = masking.predict(torch.stack([changed for _, changed in members]))
        assert int(found.predictions) == predicted_one_by_one(masking, image)
        assert not bool(found.certified) or bool((said == 0).all())
        if patch is threat:
            assert torch.equal(found.placements[0], proven_one_by_one(masking, image, 0, threat))
            for (place, _), label in zip(members, said.tolist(), strict=True):
                assert label == 0 or not bool(found.placements[0, place])
        proven += int(found.certified)
    assert proven >= 3


def test_predictions_follow_the_rule():
    threat, image = pc.Patch(1), torch.zeros(1, 2, 3)
    for seed in range(40):
        masking = DoubleMasking(Lookup(6, 3, seed, calm=0.5), threat, masks=(2, 3), batch_size=16)
        members = [changed for _, changed in patched(image, threat)]
        expected = [predicted_one_by_one(masking, changed) for changed in members]
        assert masking.predict(torch.stack(members)).tolist() == expected


def test_an_unproven_placement_can_be_broken_where_one_mask_covers_it():
    threat, image = pc.Patch(1), torch.zeros(1, 2, 3)
    broken = 0
    for seed in range(60):
        for alien in (1, 2):
            masking = DoubleMasking(
                Lookup(6, 3, seed, 0.9, alien), threat, masks=(2, 3), with_map=True, batch_size=64
            )
            found = masking.certify(image[None], torch.tensor([0]), threat)
            corners = threat.placements(2, 3).corners
            white = image.repeat(len(corners), 1, 1, 1)
            for number, (top, left) in enumerate(corners.tolist()):
                white[number, 0, top, left] = WHITE
            said = masking.predict(white)
            is_open = ~found.placements[0]
            broken += int((said[is_open] != 0).sum())
            assert bool((said[~is_open] == 0).all())
            for number in is_open.nonzero().flatten().tolist():
                other = DoubleMasking(Lookup(6, 3, seed, 0.9, 3 - alien), threat, masks=(2, 3), batch_size=64)
                assert said[number] != 0 or int(other.predict(white[number : number + 1])) != 0
    assert broken > 50


def test_without_a_map_the_verdicts_are_the_same():
    threat = pc.Patch((1, 2))
    for seed in range(20):
        images = torch.zeros(3, 1, 2, 4)
        images[1, 0, 0, 0] = WHITE
        model = Lookup(8, 3, seed, calm=0.95, alien=0)
        found = [
            DoubleMasking(model, threat, masks=2, with_map=with_map, batch_size=size).certify(
                images, torch.zeros(3, dtype=torch.long), threat
            )
            for with_map, size in ((True, 64), (False, 64), (False, 5), (False, 1))
        ]
        for other in found[1:]:
            assert torch.equal(found[0].certified, other.certified)
            assert torch.equal(found[0].predictions, other.predictions)


def test_a_smaller_patch_is_proven_more_often_and_a_larger_one_is_refused():
    threat, image = pc.Patch(2), torch.zeros(1, 1, 4, 4)
    more = 0
    for seed in range(60):
        masking = DoubleMasking(Lookup(16, 3, seed, calm=0.97), threat, masks=3, with_map=True, batch_size=64)
        whole = masking.certify(image, torch.tensor([0]), threat)
        corners = masking.certify(image, torch.tensor([0]), pc.Patch(1, "corners"))
        assert bool(corners.certified) or not bool(whole.certified)
        more += int(corners.certified) - int(whole.certified)
    assert more > 0
    assert masking.placement_leads(image[:0], torch.zeros(0, dtype=torch.long), threat).shape == (0, 9)
    with pytest.raises(InvalidThreat, match="at some placement none of them hides"):
        masking.certify(image, torch.tensor([0]), pc.Patch(3))
    with pytest.raises(InvalidThreat, match="masks hide patches"):
        masking.certify(image, torch.tensor([0]), pc.SparsePixels(1))


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_a_patch_that_misleads_raises_an_alert(threshold):
    threat, image = pc.Patch((1, 2)), torch.zeros(1, 2, 4)
    proven = 0
    for seed in range(80):
        model = Lookup(8, 3, seed, calm=0.9, alien=seed % 3)
        detection = MaskedDetection(model, threat, masks=2, threshold=threshold, batch_size=64)
        found = detection.certify(image[None], torch.tensor([0]), threat)
        assert found.guarantee.promise == "detection"
        assert torch.equal(found.predictions, detection.predict(image[None]))
        members = list(patched(image, threat))
        said = detection.predict(torch.stack([changed for _, changed in members])).tolist()
        if bool(found.certified):
            assert set(said) <= {0, ABSTAINED}
        proven += int(found.certified)
    assert 5 < proven < 75


def test_detection_is_what_double_masking_says_of_disagreement():
    threat, image = pc.Patch(1), torch.zeros(1, 1, 2, 3)
    model = Lookup(6, 3, 3, calm=1.0, alien=1)
    masking = DoubleMasking(model, threat, masks=(2, 3), batch_size=16)
    white = image.clone()
    white[0, 0, 0, 1] = WHITE
    assert masking.detect(torch.cat([image, white])).tolist() == [False, True]
    assert masking.predict(torch.cat([image, white])).tolist() == [0, 0]


class Scores(nn.Module):
    """The same logits for everything."""

    def __init__(self, *logits):
        super().__init__()
        self.register_buffer("logits", torch.tensor(logits))
        self.eval()

    def forward(self, images):
        return self.logits.expand(len(images), -1)


@pytest.mark.parametrize(
    "logits", [(1.0, 1.0), (0.0, 0.0), (1.0, 1 - 2**-15), (float("nan"), 0.0), (float("inf"), 0.0)]
)
def test_ties_and_what_is_not_finite_prove_nothing(logits):
    images, labels, threat = torch.zeros(2, 1, 4, 4), torch.tensor([0, 1]), pc.Patch(1)
    for kind in (DoubleMasking, MaskedDetection):
        assert not kind(Scores(*logits), threat, masks=2).certify(images, labels, threat).certified.any()
    clear = DoubleMasking(Scores(1.0, 0.5), threat, masks=2).certify(images, labels, threat)
    assert clear.certified.tolist() == [True, False]


@pytest.mark.parametrize(("largest", "proven"), [(4.0, True), (1000.0, False)])
def test_a_confidence_counts_as_it_is_after_logits_moved_by_the_slack(largest, proven):
    """Two classes at a confidence of 0.9005: of logits of 1,000 a quarter of the slack, each way, makes it 0.898."""
    second = largest - math.log(0.9005 / 0.0995)
    images, labels, threat = torch.zeros(1, 1, 4, 4), torch.tensor([0]), pc.Patch(1)
    for threshold, expected in ((0.9, proven), (0.5, True), (0.0, True)):
        detection = MaskedDetection(Scores(largest, second), threat, masks=2, threshold=threshold)
        assert detection.certify(images, labels, threat).certified.tolist() == [expected]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_plainly_confident_counts_in_every_precision(precision):
    """Logits that are large or many, and thresholds near 1, cost no more than moving the logits does."""
    images, labels, threat = torch.zeros(1, 1, 4, 4), torch.tensor([0]), pc.Patch(1)
    for logits, threshold in (((10.0, 0.0), 0.999), ((300.0, 0.0), 0.99), ((1.0, *[0.9] * 999), 0.0)):
        wanted = {"masks": 2, "precision": precision, "threshold": threshold}
        detection = MaskedDetection(Scores(*logits), threat, **wanted)
        assert detection.certify(images, labels, threat).certified.all()


@hypothesis.settings(deadline=None, max_examples=40)
@given(seed=seeds(), classes=st.integers(2, 40), scale=st.sampled_from((0.1, 3.0, 100.0)))
def test_a_confidence_that_counts_stays_above_the_threshold_and_hardly_another_does(seed, classes, scale):
    """The worst move: what is said falls by half the slack times the largest logit, and all others rise by it."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(classes, generator=generator) * scale
    label, slack = int(logits.argmax()), 2**-6
    move = torch.full((classes,), slack / 2 * float(logits.abs().max()))
    move[label] = -move[label]
    moved = float((logits.double() + move.double()).softmax(dim=0)[label])
    assume(int((logits + 1.01 * move).argmax()) == label and moved < 0.9999)
    images, labels, threat = torch.zeros(1, 1, 4, 4), torch.tensor([label]), pc.Patch(1)
    for threshold, proven in ((moved * (1 + 1e-6), False), (moved * (1 - 4e-5), True)):
        wanted = {"masks": 2, "slack": slack, "threshold": threshold}
        detection = MaskedDetection(Scores(*logits.tolist()), threat, **wanted)
        assert detection.certify(images, labels, threat).certified.tolist() == [proven]


def test_the_lead_and_the_weakest_masks_are_those_of_the_worst_copy():
    class DimsWithHiding(nn.Module):
        def forward(self, images):
            seen = (images == 0).float().flatten(1) @ torch.tensor([4.0, 1.0, 1.0, 1.0])
            return torch.stack([seen, torch.full_like(seen, 1.5)], dim=1)

    threat = pc.Patch(1)
    masking = DoubleMasking(DimsWithHiding().eval(), threat, masks=(1, 4))
    found = masking.certify(torch.zeros(1, 1, 1, 4), torch.tensor([0]), threat)
    assert found.certified.tolist() == [True]
    assert sorted(found.weakest_masks[0].tolist())[0] == 0
    assert found.lead.tolist() == [pytest.approx((2.0 - 1.5) / 2.0)]


def test_what_models_and_settings_may_not_be_is_said():
    threat, images, labels = pc.Patch(1), torch.zeros(2, 1, 4, 4), torch.tensor([0, 0])
    plain = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(InvalidInput, match="training mode"):
        DoubleMasking(plain, threat, masks=2).certify(images, labels, threat)
    plain.eval()
    coupled = nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), plain).eval()
    with pytest.raises(ModelError, match="normalises by the statistics of the batch"):
        DoubleMasking(coupled, threat, masks=2).predict(images)
    for settings, message in (
        ({"masks": 0}, "masks is 0"),
        ({"fill": float("nan")}, "fill is nan"),
        ({"fill": [0.5]}, r"fill is \[0.5\]; expected a number, or a tuple"),
        ({"fill": "grey"}, "fill is 'grey'"),
        ({"slack": "small"}, "slack is 'small'"),
        ({"fill": (0.5, 0.5)}, "fill has 2 values, but images have 1 channels"),
        ({"slack": 0.0}, "slack is 0.0"),
        ({"precision": "float8"}, "precision is 'float8'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 10**12}, "a batch of 1,000,000,000,000 copies of .* does not fit into memory"),
        ({"slack": 1.0}, "slack is 1.0"),
    ):
        with pytest.raises(InvalidInput, match=message):
            DoubleMasking(plain, threat, **{"masks": 2, **settings}).certify(images, labels, threat)
    for threshold in (1.0, "high", None):
        with pytest.raises(InvalidInput, match=f"threshold is {threshold!r}"):
            MaskedDetection(plain, threat, threshold=threshold)
    with pytest.raises(InvalidThreat, match="masks hide patches"):
        DoubleMasking(plain, pc.SparsePixels(1))
    with pytest.raises(ModelError, match="does not take images"):
        DoubleMasking(plain, threat, masks=2).certify(torch.zeros(2, 3, 4, 4), labels, threat)


@pytest.mark.parametrize(
    ("dtype", "slack"), [(torch.float64, 2**-14), (torch.float16, 2**-8), (torch.bfloat16, 2**-6)]
)
def test_weights_of_16_bits_ask_for_the_slack_of_their_type(dtype, slack):
    model, threat = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).to(dtype).eval(), pc.Patch(1)
    assert (
        DoubleMasking(model, threat).needed_lead == DoubleMasking(model, threat).describe()["slack"] == slack
    )
    assert DoubleMasking(model, threat, precision="tf32").needed_lead == max(slack, 2**-8)
    assert DoubleMasking(model, threat, slack=2**-10).needed_lead == 2**-10


class SeesItsCompany(nn.Module):
    def forward(self, images):
        return torch.cat([images.flatten(1)[:, :2], images.mean().expand(len(images), 1)], dim=1)


def test_a_model_that_looks_at_its_batch_is_refused():
    with pytest.raises(ModelError, match="when others are in their batch"):
        DoubleMasking(SeesItsCompany().eval(), pc.Patch(1), masks=2).predict(torch.rand(2, 1, 4, 4))


def test_a_mirrored_model_keeps_the_modes_of_its_layers():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 2)).eval()
    model[1].train()
    with pytest.raises(ModelError, match="drops values at random"):
        DoubleMasking(model, pc.Patch(2), mirrored=True).predict(torch.rand(1, 1, 6, 6))
    assert model[1].training


class SharesARange(nn.Module):
    """Rounds pixels to thirds of the largest in the batch, as dynamic quantisation does to activations."""

    def forward(self, images):
        scale = images.max() / 3
        return ((images / scale).round() * scale).flatten(1)[:, :3]


class IsOverwhelmed(nn.Module):
    """Says nothing finite of a batch that has a bright pixel."""

    def forward(self, images):
        is_bright = bool((images > 0.9).any())
        return images.flatten(1)[:, :3] * (torch.nan if is_bright else 1.0)


@pytest.mark.parametrize("model", [SharesARange(), IsOverwhelmed()])
@pytest.mark.parametrize("kind", [DoubleMasking, MaskedDetection])
def test_what_all_copies_of_one_image_share_is_not_taken_for_the_copy_alone(model, kind):
    """Each half of the batch that is tried has all copies of the image, whose largest pixel is 0.5, the fill."""
    images, labels, threat = torch.rand(1, 1, 4, 4) / 3, torch.tensor([0]), pc.Patch(1)
    with pytest.raises(ModelError, match="when others are in their batch"):
        kind(model.eval(), threat, masks=2).certify(images, labels, threat)


@pytest.mark.parametrize("mode", [False, True])
def test_looking_through_a_mirror_changes_no_layer(mode):
    model = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(16, 3)).train(mode)
    model[1].train(not mode)
    masking = DoubleMasking(model, pc.Patch(1), masks=2, mirrored=True)
    with pytest.raises((InvalidInput, ModelError), match="training mode"):
        masking.predict(torch.rand(1, 1, 4, 4))
    masking.surrogate()
    assert (model.training, model[1].training) == (mode, not mode)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("with_view", [False, True])
def test_an_attack_on_masks_of_16_bits_follows_them_in_16_bits(with_view):
    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16 * 16, 4)

        def forward(self, images):
            maps = self.first(images).relu()
            return self.last(maps.view(len(maps), -1) if with_view else maps.flatten(1))

    torch.manual_seed(0)
    model, threat, images = Viewed().eval().cuda(), pc.Patch(4), torch.rand(4, 3, 16, 16).cuda()
    logits, gradients = [], []
    for precision in ("float32", "float16"):
        surrogate = DoubleMasking(model, threat, masks=3, precision=precision).surrogate()
        points = images.clone().requires_grad_()
        logits.append(surrogate(points))
        gradients.append(torch.autograd.grad(logits[-1][:, 0].sum(), points)[0])
    assert logits[1].dtype == torch.float32
    assert not torch.equal(*logits)
    assert torch.allclose(*logits, atol=2e-2)
    assert nn.functional.cosine_similarity(*(each.flatten() for each in gradients), dim=0) > 0.99


def test_a_mirrored_classifier_is_one_of_the_mean_over_both_images():
    torch.manual_seed(0)
    threat, images = pc.Patch(1), torch.rand(6, 1, 4, 4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()

    class Mean(nn.Module):
        def forward(self, images):
            return (model(images) + model(images.flip(3))) / 2

    labels = torch.zeros(6, dtype=torch.long)
    found = DoubleMasking(model, threat, masks=3, mirrored=True).certify(images, labels, threat)
    expected = DoubleMasking(Mean().eval(), threat, masks=3).certify(images, labels, threat)
    assert torch.equal(found.certified, expected.certified)
    assert torch.equal(found.predictions, expected.predictions)
    assert not torch.equal(
        found.lead, DoubleMasking(model, threat, masks=3).certify(images, labels, threat).lead
    )


class AsksTheMirrorInDoubt(nn.Module):
    """The rule as it is written down, one copy at a time."""

    def __init__(self, model, doubt):
        super().__init__()
        self.model, self.doubt = model, doubt
        self.eval()

    def forward(self, images):
        rows = []
        for image in images:
            own = self.model(image[None])[0]
            best, second = own.topk(2).values
            is_sure = (best - second) / own.abs().max() > self.doubt
            rows.append(own if is_sure else (own + self.model(image[None].flip(3))[0]) / 2)
        return torch.stack(rows)


@pytest.mark.parametrize("kind", [DoubleMasking, MaskedDetection])
def test_the_mirror_image_is_asked_in_doubt(kind):
    torch.manual_seed(0)
    threat, images = pc.Patch(2), torch.rand(40, 1, 5, 5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(25, 3)).eval()
    labels = DoubleMasking(model, threat, masks=3, mirrored=True).predict(images)
    found, expected, always = (
        kind(base, threat, masks=3, batch_size=8, **settings).certify(images, labels, threat)
        for base, settings in (
            (model, {"mirrored": True, "doubt": 0.8}),
            (AsksTheMirrorInDoubt(model, 0.8), {}),
            (model, {"mirrored": True}),
        )
    )
    assert torch.equal(found.predictions, expected.predictions)
    assert torch.equal(found.certified, expected.certified)
    assert torch.allclose(found.lead, expected.lead)
    assert found.certified.any()
    assert not torch.allclose(found.lead, always.lead)


class IsNearlyOdd(nn.Module):
    """Says the opposite of mirror images, but for little, of which its company moves more than a share."""

    def forward(self, images):
        own = images.flatten(1)[:, :3]
        company = images.amax() * torch.tensor([1.0, 0.0, 0.0])
        odd = (images[..., :2] - images[..., 2:]).sum(dim=(1, 2, 3))[:, None] * torch.tensor([1.0, 0.5, 0.0])
        return 2**14 * odd + own + 2**-4 * company


@pytest.mark.parametrize("settings", [{}, {"doubt": 0.5}])
def test_means_of_two_images_are_tried_in_other_company_too(settings):
    images = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [0.4, 0.4, 0, 0]
    )
    model = IsNearlyOdd().eval()
    DoubleMasking(model, pc.Patch(1), masks=2).predict(images)
    with pytest.raises(ModelError, match="when others are in their batch"):
        DoubleMasking(model, pc.Patch(1), masks=2, mirrored=True, **settings).predict(images)


class KnowsLeftFromRight(nn.Module):
    """Says one thing of images that are lighter on the left, and another of the others."""

    def __init__(self, left, right):
        super().__init__()
        self.register_buffer("logits", torch.tensor([right, left]))
        self.eval()

    def forward(self, images):
        width = images.shape[3] // 2
        is_left = images[..., :width].sum(dim=(1, 2, 3)) > images[..., width:].sum(dim=(1, 2, 3))
        return self.logits[is_left.long()]


@pytest.mark.parametrize(
    ("lead", "proven", "predicted"), [(0.52, True, 0), (0.501, False, 0), (0.499, False, 1), (0.48, False, 1)]
)
@pytest.mark.parametrize("kind", [DoubleMasking, MaskedDetection])
def test_near_the_doubt_both_ways_of_asking_have_to_prove(lead, proven, predicted, kind):
    image, labels, threat = torch.zeros(1, 1, 4, 4), torch.tensor([0]), pc.Patch(1)
    image[..., :2] = 1.0
    settings = {"masks": 4, "mirrored": True, "doubt": 0.5, "slack": 2**-7}
    model = KnowsLeftFromRight((1.0, 1.0 - lead), (0.0, 1.0))
    found = kind(model, threat, **settings).certify(image, labels, threat)
    assert found.certified.tolist() == [proven]
    assert found.predictions.tolist() == [predicted]
    agreeing = kind(KnowsLeftFromRight((1.0, 1.0 - lead), (1.0, 0.5)), threat, **settings)
    assert agreeing.certify(image, labels, threat).certified.all()


def test_no_patch_changes_what_is_proven_where_mirrors_are_asked_in_doubt():
    threat, images = pc.Patch((1, 2)), torch.zeros(1, 1, 2, 4)
    members = torch.stack([changed for _, changed in patched(images[0], threat)])
    proven = 0
    for seed in range(60):
        model = Lookup(8, 3, seed, calm=0.9, alien=seed % 3)
        generator = torch.Generator().manual_seed(seed)
        weights = torch.eye(3) + 0.7 * torch.rand(3, 3, generator=generator)
        doubtful = nn.Sequential(model, nn.Linear(3, 3, bias=False)).eval()
        doubtful[1].weight.data.copy_(weights)
        masking = DoubleMasking(doubtful, threat, masks=(2, 2), mirrored=True, doubt=0.6, batch_size=16)
        found = masking.certify(images, torch.tensor([0]), threat)
        expected = DoubleMasking(AsksTheMirrorInDoubt(doubtful, 0.6), threat, masks=(2, 2), batch_size=64)
        assert torch.equal(masking.predict(members), expected.predict(members))
        assert not bool(found.certified) or bool((masking.predict(members) == 0).all())
        proven += int(found.certified)
    assert 3 <= proven < 60


def test_hardly_a_mirror_image_is_asked_of_copies_that_are_sure():
    batches = []
    model = KnowsLeftFromRight((1.0, 0.0), (0.0, 1.0))
    model.register_forward_hook(lambda *_: batches.append(None))
    image, threat = torch.zeros(1, 1, 4, 4), pc.Patch(1)
    image[..., :2] = 1.0
    counts = []
    for doubt in (None, 0.5):
        masking = DoubleMasking(model, threat, masks=4, mirrored=True, doubt=doubt, batch_size=8)
        masking.predict(image)  # which tries both ways of asking
        batches.clear()
        masking.predict(image)
        counts.append(len(batches))
    assert counts[1] <= counts[0] / 2 + 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mirrored": True, "doubt": 0.0}, "doubt is 0.0; expected a share"),
        ({"mirrored": True, "doubt": float("nan")}, "doubt is nan"),
        ({"mirrored": True, "doubt": "much"}, "doubt is 'much'"),
        ({"doubt": 0.5}, "doubt=0.5 without mirrored=True"),
    ],
)
def test_doubts_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(InvalidInput, match=message):
        DoubleMasking(Scores(1.0, 0.0), pc.Patch(1), **settings)


class NormalisesInPlace(nn.Module):
    """As of an image and its mirror image the same memory must not be normalised twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

    def forward(self, images):
        return self.layers(images.sub_(0.5).div_(0.25))


def test_a_mirrored_model_may_change_the_images_it_is_given():
    torch.manual_seed(0)
    model = NormalisesInPlace().eval()
    plain = nn.Sequential(pc.Normalize(0.5, 0.25), model.layers).eval()
    images, labels, threat = torch.rand(6, 1, 4, 4), torch.zeros(6, dtype=torch.long), pc.Patch(1)
    for kind in (DoubleMasking, MaskedDetection):
        found, expected = (
            kind(each, threat, masks=3, mirrored=True).certify(images, labels, threat)
            for each in (model, plain)
        )
        assert torch.allclose(found.lead, expected.lead, atol=1e-5)


@pytest.mark.parametrize("kind", [DoubleMasking, MaskedDetection])
def test_settings_are_given_by_name(kind):
    """`DoubleMasking(model, threat, 6)` would not mean masks=6."""
    with pytest.raises(TypeError, match="positional"):
        kind(Scores(1.0, 0.0), pc.Patch(1), 6)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (AssertionError("Wrong image height! Expected 224 but got 4!"), "Wrong image height! Expected 224"),
        (ValueError("Input image size (4*4) doesn't match model (224*224)."), "doesn't match model"),
        (AssertionError(), "AssertionError"),
        (InvalidInput("images are grey"), "^images are grey"),
    ],
)
def test_models_that_assert_the_size_of_their_images_are_quoted(error, message):
    class Asserts(nn.Module):
        def forward(self, images):
            raise error

    model, images, labels = Asserts().eval(), torch.rand(2, 1, 4, 4), torch.zeros(2, dtype=torch.long)
    for ask in (
        lambda: DoubleMasking(model, pc.Patch(1), masks=2).predict(images),
        lambda: pc.IntervalBounds(model).predict(images),
        lambda: pc.PatchAttack(steps=1, restarts=1).run(model, images, labels, pc.Patch(1)),
    ):
        with pytest.raises((ModelError, InvalidInput), match=message):
            ask()


def test_weights_of_several_types_are_named_where_the_model_does_not_take_the_longest():
    """NumPy makes buffers of float64, which the images of a float32 model are then brought to."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
    model.register_buffer("prior", torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ModelError, match="must have the same dtype") as refusal:
        DoubleMasking(model, pc.Patch(1), masks=2).predict(torch.rand(2, 1, 4, 4))
    assert "are of torch.float32 and torch.float64, and images are given" in refusal.value.hint
    assert DoubleMasking(model.float(), pc.Patch(1), masks=2).predict(torch.rand(2, 1, 4, 4)).shape == (2,)


class SaysWhatComesToMind(nn.Module):
    def forward(self, images):
        return torch.rand(len(images), 3)


def test_a_model_that_draws_lots_is_refused():
    with pytest.raises(ModelError, match="says something else of the same images"):
        DoubleMasking(SaysWhatComesToMind().eval(), pc.Patch(1), masks=2).predict(torch.rand(2, 1, 4, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings(  # the compiler's own, of which the second is about what proofs leave off
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning",
    "ignore:TensorFloat32 tensor cores:UserWarning",
)
def test_a_compiled_model_says_the_same_up_to_rounding():
    spec = pc.models.ModelSpec("resnet18", 3, 16, 16, 4, filters=4)
    model = pc.models.build(spec, torch.Generator().manual_seed(0)).eval().cuda()
    images = torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(1)).cuda()
    plain = DoubleMasking(model, pc.Patch(3), masks=3, mirrored=True, with_map=True)
    labels = plain.predict(images)
    compiled = DoubleMasking(model, pc.Patch(3), masks=3, mirrored=True, with_map=True, compiled=True)
    assert torch.equal(compiled.predict(images), labels)
    found, expected = (each.placement_leads(images, labels, pc.Patch(3)) for each in (compiled, plain))
    proven = expected > plain.needed_lead
    assert proven.any()
    assert (found - expected)[proven].abs().max() < plain.needed_lead
    assert compiled.describe() != plain.describe()


@pytest.mark.parametrize(("images", "size"), [(7, 16), (20, 16), (3, 64)])
def test_hardly_a_row_of_a_batch_is_empty(images, size):
    model, batches = nn.Sequential(nn.Flatten(), nn.Linear(64, 2)).eval(), []
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor([1.0, 0.0]))
    model.register_forward_hook(lambda *_: batches.append(None))
    masking = DoubleMasking(model, pc.Patch(2), masks=4, batch_size=size)
    found = masking.certify(torch.rand(images, 1, 8, 8), torch.zeros(images, dtype=torch.long), pc.Patch(2))
    assert found.certified.all()
    wanted = images * (16 * 15 // 2 + 16)
    assert len(batches) * size < 1.1 * wanted + 10 * size


def test_progress_tells_of_parts_of_images_and_never_goes_back():
    heard = list[tuple[float, int]]()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2)).eval()
    nn.init.zeros_(model[1].weight)
    model[1].bias = nn.Parameter(torch.tensor([1.0, 0.0]))  # every copy is looked at
    masking = DoubleMasking(model, pc.Patch(2), masks=4, batch_size=16)
    masking.certify(
        torch.rand(3, 1, 8, 8), torch.zeros(3).long(), pc.Patch(2), lambda *done: heard.append(done)
    )
    amounts = [done for done, _ in heard]
    assert amounts == sorted(amounts)
    assert amounts[-1] == 3
    assert {total for _, total in heard} == {3}
    # 16 and 120 copies of each image in batches of 16: after one of them that share of an image is done.
    assert amounts[0] == pytest.approx(16 / 136)
    assert len([done for done in amounts if done < 1]) > 5


@pytest.mark.parametrize(
    ("name", "batch_size", "copies"), [("resnet18", None, 16), ("resnet18", 5, 5), ("cnn2", None, 128)]
)
def test_batches_of_large_networks_on_a_cpu_are_small_unless_their_size_is_given(name, batch_size, copies):
    model, images = pc.models.build(pc.ModelSpec(name, 3, 32, 32)).eval(), torch.zeros(2, 3, 32, 32)
    masking = DoubleMasking(model, pc.Patch(5), masks=3, batch_size=batch_size)
    with masking.copies(images) as shown:
        assert shown.size == copies


def test_no_image_chooses_the_size_of_its_batch():
    class Experts(nn.Module):
        """Takes far more work for images that are bright."""

        def __init__(self):
            super().__init__()
            self.quick, self.slow = nn.Linear(16, 2), nn.Linear(16, 2**20)

        def forward(self, images):
            values = images.flatten(1)
            return self.slow(values)[:, :2] if bool((images > 0.9).any()) else self.quick(values)

    model, black = Experts().eval(), torch.zeros(1, 1, 4, 4)
    sizes = [copies_at_once(model, black + shade, 4096, "float32") for shade in (0.0, 1.0)]
    assert sizes == [4096, 4096]
