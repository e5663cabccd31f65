"""A twin is quick and nearly right; only the model itself says that an image is broken."""

import pytest
import torch
from torch import Tensor, nn

from patchcert.attacks import PatchAttack
from patchcert.attacks.base import Task
from patchcert.attacks.twin import InParts, Twin, TwinAttack, without_batch_norms
from patchcert.errors import InvalidInput
from patchcert.threats import Patch, SparsePixels


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


def test_a_twin_has_the_logits_and_gradients_of_its_network():
    model, twin = residual(), Twin(residual())
    assert twin.dtype == "float32"
    torch.testing.assert_close(twin(images()), model(images()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient(twin, images()), gradient(model, images()), rtol=1e-4, atol=1e-5)


def test_only_norms_that_alone_follow_a_convolution_are_folded():
    names = dict(without_batch_norms(residual()).named_modules())
    assert "bn1" not in names
    assert {"bn2", "bn3"} <= set(names)
    model = residual()
    before = model.conv1.weight.clone()
    Twin(model)
    assert torch.equal(model.conv1.weight, before)


def test_a_reduced_twin_rounds_but_takes_and_gives_float32():
    model, twin = residual(), Twin(residual(), reduced=True)
    logits = twin(images())
    assert (twin.dtype, logits.dtype) == ("bfloat16", torch.float32)
    assert not torch.equal(logits, model(images()))
    torch.testing.assert_close(logits, model(images()), rtol=0.05, atol=0.05)
    assert gradient(twin, images()).dtype == torch.float32


class Brightness(nn.Module):
    """Wrong from a mean brightness of 0.5 on; a biased one already from a smaller one."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(bias))

    def forward(self, images: Tensor) -> Tensor:
        mean = images.flatten(1).mean(dim=1)
        return torch.stack([torch.full_like(mean, 0.5), mean + self.bias], dim=1)


def dark_task(patch: Patch) -> Task:
    return Task(torch.zeros(5, 1, 8, 8), torch.zeros(5, dtype=torch.long), patch, seeded(0))


def test_a_success_of_the_twin_alone_does_not_end_the_ascent():
    patch, model, hasty = Patch(7), Brightness().eval(), Brightness(0.2).eval()
    attack = PatchAttack(steps=40, restarts=1, step_size=0.05, check_every=5, batch_size=8)
    believed = attack.propose(hasty, dark_task(patch))
    assert (model(believed.images).argmax(dim=1) == 0).all()
    confirmed = TwinAttack(attack, hasty).propose(model, dark_task(patch))
    assert (model(confirmed.images).argmax(dim=1) == 1).all()
    assert (confirmed.steps > believed.steps).all()
    assert (confirmed.steps < 40).all()


def test_what_is_never_confirmed_is_attacked_to_the_end():
    patch, model, liar = Patch(4), Brightness().eval(), Brightness(0.5).eval()
    attack = PatchAttack(steps=12, restarts=3, check_every=5, batch_size=8)
    found = TwinAttack(attack, liar).propose(model, dark_task(patch))
    assert (found.steps == 36).all()
    result = TwinAttack(attack, liar).run(model, *_images_and_labels(), patch)
    assert not result.succeeded.any()


def _images_and_labels():
    task = dark_task(Patch(4))
    return task.images, task.labels


def test_an_exhaustive_twin_goes_on_to_the_largest_margin():
    attack = PatchAttack(steps=40, restarts=1, check_every=5, batch_size=8)
    found = (
        TwinAttack(attack, Brightness().eval()).exhaustive().propose(Brightness().eval(), dark_task(Patch(7)))
    )
    assert (found.steps == 40).all()
    assert found.images.flatten(1).mean(dim=1).min() > 0.7


@pytest.mark.parametrize(
    ("attack", "threat"), [(PatchAttack(), SparsePixels(2)), (PatchAttack(search="sweep"), Patch(2))]
)
def test_other_searches_and_threats_are_refused(attack, threat):
    images, labels = _images_and_labels()
    with pytest.raises(InvalidInput, match="a twin climbs at random placements of a Patch"):
        TwinAttack(attack, Brightness()).run(Brightness().eval(), images, labels, threat)


@pytest.mark.parametrize("at_once", [1, 4, 6, 100])
def test_parts_make_the_whole(at_once):
    model = residual()
    torch.testing.assert_close(InParts(model, at_once)(images()), model(images()))
