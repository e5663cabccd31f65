"""What the framework promises of every attack. Whatever it looks at, only the judge says that an image is broken."""

import dataclasses
import json
import math
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attacked_models import PixelModel
from patchcert.attacks import (
    AdaptiveAttack,
    Attack,
    AttackedModel,
    AttackJob,
    AttackLeftThreat,
    AttackSeries,
    AttackWithin,
    FastCopy,
    Findings,
    PatchAttack,
    SparseAttack,
    TransferAttack,
)
from patchcert.attacks.base import without_batch_norms
from patchcert.certificates import IntervalBounds, certify, placement_margins
from patchcert.certificates.ablation import RandomAblation
from patchcert.certificates.classifier import Classifier, Promise
from patchcert.errors import InvalidInput, ModelError
from patchcert.models import Normalize
from patchcert.testing import check_attack
from patchcert.testing.conformance import seeded
from patchcert.threats import Patch, SparsePixels


@pytest.mark.parametrize(
    "attack",
    [
        PatchAttack(steps=30, restarts=12),
        PatchAttack(steps=30, restarts=2, loss="margin", search="sweep"),
        PatchAttack(steps=30, restarts=2, loss="margin", search="certificate"),
        PatchAttack(steps=25, restarts=10, early_stop=False, batch_size=50),
        AttackSeries((PatchAttack(steps=0, restarts=1), PatchAttack(steps=30, restarts=12))),
    ],
    ids=["random", "sweep", "certificate", "exhaustive", "series"],
)
def test_patch_attacks_keep_every_promise(attack):
    check_attack(attack)


def test_sparse_attack_keeps_every_promise():
    check_attack(SparseAttack(steps=20, restarts=3), sparse=True)


@dataclasses.dataclass(frozen=True)
class Cheat(Attack):
    """Claims to have changed what it may not."""

    value: float
    batch_size: int = 8

    def propose(self, target, job):
        found = Findings.unchanged(job.images)
        return dataclasses.replace(found, images=torch.full_like(job.images, self.value))

    def exhaustive(self):
        return self


@pytest.mark.parametrize("value", [1.0, 1.5, -0.5, math.nan])
def test_the_framework_refuses_images_outside_the_threat(value):
    images, labels = torch.zeros(3, 1, 4, 4), torch.zeros(3, dtype=torch.long)
    with pytest.raises(AttackLeftThreat, match=r"left its threat Patch.* on 3 of 3 images, first on image 0"):
        Cheat(value).run(PixelModel(0, 0), images, labels, Patch(1))


def test_the_framework_decides_success_by_itself():
    images, labels = torch.zeros(3, 1, 4, 4), torch.zeros(3, dtype=torch.long)
    result = Cheat(0.0).run(PixelModel(0, 0), images, labels, Patch(1))
    assert not result.succeeded.any()
    assert Cheat(1.0).run(PixelModel(0, 0), images, labels, Patch(4)).succeeded.all()


class NanAfterChange(nn.Module):
    def forward(self, images):
        value = images.sum(dim=(1, 2, 3))
        return torch.stack([1 + 0 * value, torch.where(value > 0, math.nan, 0 * value)], dim=1)


class Two(nn.Module):
    def forward(self, images):
        return images.flatten(1), images


class Halving(nn.Module):
    def forward(self, images):
        return images.mul_(0.5).flatten(1)[:, :2]


def attack_briefly(model, images, labels):
    return PatchAttack(2, 0.1, 1).run(model, images, labels, Patch(1))


LINEAR = nn.Sequential(nn.Flatten(), nn.Linear(9, 2))
OWN_STATISTICS = nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), nn.Flatten(), nn.Linear(9, 2))
BLACK, GREY, ZEROS = torch.zeros(2, 1, 3, 3), torch.full((2, 1, 3, 3), 0.5), torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("model", "images", "message"),
    [
        (NanAfterChange(), BLACK, "the model gave NaN or infinite logits"),
        (NanAfterChange(), GREY, "the model gave NaN or infinite logits"),
        (nn.Sequential(nn.Dropout(), *LINEAR), GREY, r"layer '0' \(Dropout\) drops values at random"),
        (
            nn.Sequential(nn.BatchNorm2d(1), *LINEAR),
            GREY,
            r"layer '0' \(BatchNorm2d\) normalises by the stat",
        ),
        (OWN_STATISTICS.eval(), GREY, r"layer '0' \(BatchNorm2d\) normalises by the statistics of the batch"),
        (Two(), GREY, "the model must return one tensor of logits, got tuple"),
        (nn.Flatten(0), GREY, r"must return logits \(1, classes\), got \(9,\)"),
        (nn.AvgPool2d(3), GREY, r"must return logits \(1, classes\), got \(1, 1, 1, 1\)"),
        (nn.Sequential(nn.Flatten(), nn.Linear(9, 1)), GREY, "the model gives 1 logit for each image"),
        (Halving(), GREY, "changes the images it is given in place"),
        (nn.Conv2d(1, 2, 3), torch.zeros(2, 3, 3, 3), r"the model does not take images of \(3, 3, 3\)"),
    ],
)
def test_models_that_cannot_be_judged_are_refused(model, images, message):
    with pytest.raises(ModelError, match=message):
        attack_briefly(model, images, ZEROS)
    assert (GREY == 0.5).all()


@pytest.mark.parametrize(
    ("images", "labels", "message", "hint"),
    [
        (torch.zeros(2, 3, 3), ZEROS, r"floats \(n, channels, height, width\)", ""),
        (BLACK.byte(), ZEROS, "got torch.uint8", ""),
        (BLACK + 1.5, ZEROS, r"must lie in \[0, 1\], got values", ""),
        (BLACK * math.nan, ZEROS, "got values from nan", ""),
        (BLACK, torch.zeros(3, dtype=torch.long), r"labels must be a long tensor \(2,\), got", ""),
        (BLACK, torch.zeros(2), "got torch.float32", ""),
        (BLACK, [0, 1], "labels must be a dense torch.Tensor, got list", ""),
        (BLACK, np.zeros(2, np.int64), "labels must be a dense torch.Tensor, got ndarray", ""),
        (BLACK.numpy(), ZEROS, "images must be a dense torch.Tensor, got ndarray", ""),
        (
            BLACK,
            torch.tensor([0, 2]),
            r"labels must lie in 0..1, got 0 to 2",
            "the model has 2 classes, fewer",
        ),
        (BLACK, torch.tensor([-1, 0]), r"labels must lie in 0..1, got -1 to 0", "count classes from 0"),
        (
            BLACK.double(),
            ZEROS,
            "model of torch.float32 does not take images of torch.float64",
            "convert the images with .to(torch.float32)",
        ),
    ],
)
def test_images_and_labels_that_do_not_fit_are_refused(images, labels, message, hint):
    with pytest.raises(InvalidInput, match=message) as caught:
        attack_briefly(LINEAR, images, labels)
    assert hint in caught.value.hint


def test_a_function_is_no_model():
    with pytest.raises(InvalidInput, match=r"the model must be a torch\.nn\.Module, got function"):
        attack_briefly(lambda images: images, BLACK, ZEROS)


@pytest.mark.parametrize(("model_channels", "image_channels"), [(3, 1), (3, 2), (2, 3)])
def test_channels_unknown_to_the_normalisation_are_refused_as_by_certify(model_channels, image_channels):
    normalise = Normalize((0.5,) * model_channels, (0.2,) * model_channels)
    model = nn.Sequential(normalise, nn.Conv2d(model_channels, 2, 3), nn.Flatten())
    message = f"Normalize has the statistics of {model_channels} channels, got images of shape"
    for look in (PatchAttack(1, 0.1, 1).run, certify):
        with pytest.raises(ModelError, match=message):
            look(model, torch.zeros(2, image_channels, 3, 3), ZEROS, Patch(1))


def test_columns_have_one_row_per_image():
    images, labels = torch.zeros(3, 1, 4, 4), torch.tensor([0, 0, 1])
    result = PatchAttack(1, 1.0, 16).run(PixelModel(2, 1), images, labels, Patch(1))
    columns = result.columns(torch.tensor([7, 8, 9]))
    assert {name: column.tolist() for name, column in columns.items() if name not in ("margin", "steps")} == {
        "index": [7, 8, 9],
        "label": [0, 0, 1],
        "prediction": [0, 0, 0],
        "prediction_after": [1, 1, 0],
        "succeeded": [True, True, True],
        "top": [2, 2, -1],
        "left": [1, 1, -1],
    }
    assert np.array_equal(columns["margin"], result.margins.numpy())
    assert np.array_equal(columns["steps"], result.steps.numpy())


def test_a_description_has_the_settings_of_every_attack_within():
    inner = PatchAttack(3, search="certificate", placement_margins=placement_margins)
    series = AttackSeries((AttackWithin(PatchAttack(4), Patch(2)), SparseAttack(5)))
    described = [AdaptiveAttack(inner).describe(), TransferAttack(series).describe()]
    assert json.loads(json.dumps(described)) == described
    adaptive, transfer = described
    assert adaptive["kind"] == "AdaptiveAttack"
    assert adaptive["attack"]["placement_margins"] == "placement_margins"
    within, sparse = transfer["attack"]["attacks"]
    assert within["threat"] == str(Patch(2))
    assert within["attack"] == PatchAttack(4).describe()
    assert sparse == {
        "kind": "SparseAttack",
        "steps": 5,
        "step_size": 0.1,
        "restarts": 20,
        "loss": "margin",
        "selections": 10,
        "batch_size": 1024,
        "early_stop": True,
    }
    unset = {"placement_margins", "sweep_placements"}
    assert set(PatchAttack().describe()) == {"kind", *vars(PatchAttack())} - unset


class Residual(nn.Module):
    """Two convolutions with batch norms, one of which is read twice, and one before a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.conv2, self.bn2, self.relu2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.bn3, self.fc = nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        first = self.relu1(self.bn1(self.conv1(images)))
        second = self.conv2(first)
        joined = self.relu2(self.bn2(second) + second)
        return self.fc(self.bn3(joined).mean(dim=(2, 3)))


def residual() -> Residual:
    model, generator = Residual(), seeded(0)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                drawn = torch.randn(value.shape, generator=generator) * 0.4
                value.copy_(drawn.abs() + 0.5 if "running_var" in name else drawn)
    return model.eval()


def images(count: int = 6) -> Tensor:
    return torch.rand(count, 3, 12, 12, generator=seeded(1))


def gradient(model: nn.Module, point: Tensor) -> Tensor:
    point = point.clone().requires_grad_()
    return torch.autograd.grad(model(point)[:, 0].sum(), point)[0]


def test_a_fast_copy_has_the_logits_and_gradients_of_its_network():
    model, copy = residual(), FastCopy(residual())
    assert not copy.reduced
    torch.testing.assert_close(copy(images()), model(images()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient(copy, images()), gradient(model, images()), rtol=1e-4, atol=1e-5)


def test_only_norms_that_alone_follow_a_convolution_are_folded():
    names = dict(without_batch_norms(residual()).named_modules())
    assert "bn1" not in names
    assert {"bn2", "bn3"} <= set(names)
    model = residual()
    before = model.conv1.weight.clone()
    FastCopy(model)
    assert torch.equal(model.conv1.weight, before)


def test_a_reduced_fast_copy_rounds_but_takes_and_gives_float32():
    model, copy = residual(), FastCopy(residual(), reduced=True)
    logits = copy(images())
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, model(images()))
    torch.testing.assert_close(logits, model(images()), rtol=0.05, atol=0.05)
    assert gradient(copy, images()).dtype == torch.float32


class Brightness(nn.Module):
    """Wrong from a mean brightness of 0.5 on; a biased one already from a smaller one."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(bias))

    def forward(self, images: Tensor) -> Tensor:
        mean = images.flatten(1).mean(dim=1)
        return torch.stack([torch.full_like(mean, 0.5), mean + self.bias], dim=1)


def dark_job(patch: Patch) -> AttackJob:
    return AttackJob(torch.zeros(5, 1, 8, 8), torch.zeros(5, dtype=torch.long), patch, seeded(0))


def test_a_success_by_the_surrogate_alone_does_not_end_the_ascent():
    patch, model, hasty = Patch(7), Brightness().eval(), Brightness(0.2).eval()
    attack = PatchAttack(steps=40, restarts=1, step_size=0.05, check_every=5, batch_size=8)
    believed = attack.propose(AttackedModel.of(hasty), dark_job(patch))
    assert (model(believed.images).argmax(dim=1) == 0).all()
    confirmed = attack.propose(AttackedModel(hasty, model), dark_job(patch))
    assert (model(confirmed.images).argmax(dim=1) == 1).all()
    assert (confirmed.steps > believed.steps).all()
    assert (confirmed.steps < 40).all()


def test_what_is_never_confirmed_is_attacked_to_the_end():
    patch, model, liar = Patch(4), Brightness().eval(), Brightness(0.5).eval()
    attack = PatchAttack(steps=12, restarts=3, check_every=5, batch_size=8)
    found = attack.propose(AttackedModel(liar, model), dark_job(patch))
    assert (found.steps == 36).all()
    assert (model(found.images).argmax(dim=1) == 0).all()


def test_an_exhaustive_attack_goes_on_to_the_largest_margin():
    attack = PatchAttack(steps=40, restarts=1, check_every=5, batch_size=8).exhaustive()
    found = attack.propose(AttackedModel(Brightness().eval(), Brightness().eval()), dark_job(Patch(7)))
    assert (found.steps == 40).all()
    assert found.images.flatten(1).mean(dim=1).min() > 0.7


@pytest.mark.parametrize("at_once", [1, 4, 6, 100, None])
def test_a_judge_sees_no_more_images_at_once_than_it_may(at_once):
    sizes, model = [], residual()
    model.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    labels = torch.zeros(6, dtype=torch.long)
    verdict = AttackedModel(model, model, at_once).evaluate(images(), labels)
    assert max(sizes) == min(at_once or 6, 6)
    assert sum(sizes) == 6
    assert torch.equal(verdict.predictions, residual()(images()).argmax(dim=1))


class Stubborn:
    """Says 1 only from a brightness on that its surrogate knows nothing of, and abstains above another."""

    def __init__(self, model: nn.Module, bound: float = 0.7) -> None:
        self.model, self.bound = model, bound

    def predict(self, images: Tensor) -> Tensor:
        mean = images.flatten(1).mean(dim=1)
        return torch.where(mean > 0.95, -1, (mean > self.bound).long())

    def certify(self, images, labels, threat):
        raise AssertionError("an attack asks for no proof")


class WithSurrogate(Stubborn):
    """Offers another module to differentiate than the one it is made of."""

    def surrogate(self) -> nn.Module:
        return Brightness().eval()


@pytest.mark.parametrize("classifier", [Stubborn(Brightness().eval()), WithSurrogate(nn.Flatten())])
@pytest.mark.parametrize("search", ["random", "sweep"])
def test_a_classifier_is_judged_by_its_predictions(classifier, search):
    attack = PatchAttack(steps=40, restarts=1, check_every=5, batch_size=8, search=search)
    job = dark_job(Patch(7))
    result = attack.run(classifier, job.images, job.labels, job.threat)
    assert result.succeeded.all()
    assert torch.equal(result.predictions, classifier.predict(result.adversarial))
    assert (result.adversarial.flatten(1).mean(dim=1) > 0.7).all()
    assert (result.margins > 0).all()
    withstood = attack.run(classifier, job.images, job.labels, Patch(6))
    assert not withstood.succeeded.any()
    assert (withstood.margins <= 0).all()


def test_an_abstention_is_no_right_answer():
    job = dark_job(Patch(8))
    result = PatchAttack(steps=60, restarts=1, early_stop=False).run(
        Stubborn(Brightness().eval(), 0.99), job.images, job.labels, job.threat
    )
    assert result.succeeded.all()
    assert (result.predictions == -1).all()


class Watchful(Classifier):
    """Raises an alert from a mean brightness of 0.5 on, and is fooled only from one of 0.9 on."""

    promise: ClassVar[Promise] = "detection"

    def __init__(self) -> None:
        self.model = Brightness().eval()

    def predict(self, images, progress=None):
        mean = images.flatten(1).mean(dim=1)
        return torch.where(mean > 0.9, 1, torch.where(mean > 0.5, -1, 0))

    def certify(self, images, labels, threat, progress=None):
        raise AssertionError("an attack asks for no proof")


@pytest.mark.parametrize("series", [False, True])
def test_an_alert_that_suffices_does_not_end_the_search(series):
    attack = PatchAttack(steps=40, restarts=1, step_size=0.05, check_every=2, batch_size=8)
    job = dark_job(Patch(8))
    chosen = AttackSeries((replace(attack, steps=6), attack)) if series else attack
    result = chosen.run(Watchful(), job.images, job.labels, job.threat)
    assert (result.predictions == 1).all()
    assert (result.margins > 0).all()


def test_a_sparse_attack_on_a_classifier_is_judged_by_its_predictions():
    job = dark_job(Patch(1))
    attack, classifier = SparseAttack(steps=10, restarts=2), Stubborn(Brightness().eval())
    assert attack.run(classifier, job.images, job.labels, SparsePixels(46)).succeeded.all()
    assert not attack.run(classifier, job.images, job.labels, SparsePixels(44)).succeeded.any()


def test_a_module_with_predictions_of_its_own_is_judged_by_its_logits():
    class Both(Brightness):
        def predict(self, images: Tensor) -> Tensor:
            raise AssertionError("the logits decide")

    job = dark_job(Patch(7))
    assert (
        PatchAttack(steps=40, restarts=1)
        .run(Both().eval(), job.images, job.labels, job.threat)
        .succeeded.all()
    )


def test_classifiers_that_cannot_be_followed_are_refused():
    job = dark_job(Patch(1))
    with pytest.raises(
        InvalidInput, match="Stubborn has no differentiable module that an attack could follow"
    ):
        PatchAttack().run(Stubborn("weights"), job.images, job.labels, job.threat)

    class Scores(Stubborn):
        def predict(self, images: Tensor) -> Tensor:
            return images.flatten(1)

    with pytest.raises(
        ModelError, match=r"Scores.predict must give one class per image \(5,\), got torch.float32"
    ):
        PatchAttack().run(Scores(Brightness().eval()), job.images, job.labels, job.threat)


def test_a_classifier_with_a_proof_is_attacked_as_its_model_is():
    model, job = Brightness().eval(), dark_job(Patch(7))
    attack = PatchAttack(steps=40, restarts=1, check_every=5, batch_size=8)
    by_logits = attack.run(model, job.images, job.labels, job.threat, seeded(0))
    by_predictions = attack.run(IntervalBounds(model), job.images, job.labels, job.threat, seeded(0))
    assert by_predictions.succeeded.all()
    assert torch.equal(by_predictions.adversarial, by_logits.adversarial)
    assert torch.equal(by_predictions.predictions, by_logits.predictions)


def test_a_classifier_that_votes_is_judged_by_its_votes():
    class Votes(nn.Module):
        """Says 1 where the retained pixels, coded by their value and its complement, are bright on average."""

        def forward(self, ablated: Tensor) -> Tensor:
            bright, dark = ablated.sum(dim=(2, 3)).unbind(dim=1)
            return torch.stack([dark, bright], dim=1)

    job = dark_job(Patch(7))
    classifier = RandomAblation(Votes().eval(), retained=9, selection_samples=60, estimation_samples=60)
    assert (classifier.predict(job.images) == 0).all()
    result = PatchAttack(steps=20, restarts=1).run(classifier, job.images, job.labels, job.threat, seeded(0))
    assert result.succeeded.all()
    assert (classifier.predict(result.adversarial) != 0).all()
