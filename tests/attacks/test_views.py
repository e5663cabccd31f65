"""Whatever an attack looks at, only the judge says that an image is broken."""

import pytest
import torch
from torch import Tensor, nn

from patchcert.attacks import AttackedModel, AttackJob, FastCopy, PatchAttack, SparseAttack
from patchcert.attacks.views import ImageView, put, stamp_cells, without_batch_norms
from patchcert.certificates import IntervalBounds
from patchcert.certificates.ablation import RandomAblation
from patchcert.errors import InvalidInput, ModelError
from patchcert.threats import Patch, SparsePixels, shapes


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


def test_values_are_put_where_the_patch_lies_and_nowhere_else():
    patch, corners = Patch(shapes.diamond(4)), torch.tensor([[0, 0], [8, 6]])
    changed_size = (2, 2, 11, 9)
    images = torch.rand(changed_size, generator=seeded(1), dtype=torch.float64)
    cells = stamp_cells(patch, corners, images.shape[1:])
    changed = put(images, cells, torch.full(cells.shape, 2.0, dtype=torch.float64))
    masks = torch.zeros(2, 11, 9, dtype=torch.bool)
    for mask, (top, left) in zip(masks, corners.tolist(), strict=True):
        mask[top : top + 3, left : left + 3] = patch.stamp
    assert torch.equal(changed == 2.0, masks[:, None].expand_as(images))
    assert torch.equal(changed[~masks[:, None].expand_as(images)], images[~masks[:, None].expand_as(images)])
    assert ImageView(nn.Flatten(), images, cells).logits(changed.flatten(1).gather(1, cells)).shape == (
        2,
        198,
    )


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
