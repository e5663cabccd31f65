"""Values lie where the patch lies, and the network on windows gives what the network on whole images gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attacked_models import normal
from patchcert.attacks import PatchAttack, views
from patchcert.attacks.views import ImageView, ImageViews, Slide, WindowViews, patch_views, put
from patchcert.models import Normalize
from patchcert.testing.conformance import seeded
from patchcert.threats import Patch, shapes
from patchcert.threats.patch import stamp_cells

HEIGHT, WIDTH, CHANNELS = 11, 9, 2


def ended(*layers, seed=0, size=(HEIGHT, WIDTH)) -> nn.Sequential:
    """The layers, flattened and with two linear layers after them."""
    front = nn.Sequential(*layers, nn.Flatten()).double().eval()
    features = front(torch.zeros(1, CHANNELS, *size, dtype=torch.float64)).shape[1]
    head = nn.Flatten(), nn.Linear(features, 7), nn.ReLU(), nn.Linear(7, 4)
    return normal(nn.Sequential(*layers, *head).double(), 0.4, seed)


def images_of(count=3, seed=0, size=(HEIGHT, WIDTH)) -> torch.Tensor:
    return torch.rand(count, CHANNELS, *size, generator=seeded(seed), dtype=torch.float64)


def batch_norm(channels, seed=0) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(channels)
    layer.running_mean = torch.randn(channels, generator=seeded(seed))
    layer.running_var = torch.rand(channels, generator=seeded(seed)) + 0.5
    return layer


NETWORKS = {
    "linear": lambda: [],
    "normalised linear": lambda: [Normalize((0.5, 0.3), (0.2, 0.4))],
    "convolution": lambda: [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU()],
    "strided": lambda: [
        Normalize((0.5, 0.3), (0.2, 0.4)),
        nn.Conv2d(2, 3, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, 2, 1),
        nn.ReLU(),
    ],
    "rectified": lambda: [nn.ReLU(), nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.ReLU()],
    "unpadded": lambda: [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, (3, 2), (2, 1)), nn.ReLU()],
    "batch norm": lambda: [
        nn.Conv2d(2, 3, 3, padding=2),
        batch_norm(3),
        nn.ReLU(),
        batch_norm(3, 1),
        nn.Conv2d(3, 2, 3, padding=1),
        nn.ReLU(),
    ],
    "dilated and grouped": lambda: [nn.Conv2d(2, 4, 3, 1, 2, 2, 2), nn.ReLU(), nn.Dropout()],
    "wide": lambda: [
        nn.Conv2d(2, 40, 3, padding=1),
        batch_norm(40),
        nn.ReLU(),
        nn.Conv2d(40, 3, 3, 2, 1),
        batch_norm(3),
        nn.ReLU(),
    ],
}


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


def everywhere(patch) -> tuple[torch.Tensor, torch.Tensor]:
    """Every placement on each of three images."""
    corners = patch.placements(HEIGHT, WIDTH).corners
    return torch.arange(3).repeat_interleave(len(corners)), corners.repeat(3, 1)


@pytest.mark.parametrize("stamp", ["1", "3", "2x5", "diamond:4", "parallelogram:9"])
@pytest.mark.parametrize("name", NETWORKS)
def test_windows_give_the_logits_and_gradients_of_whole_images_at_every_placement(name, stamp):
    model, images, patch = ended(*NETWORKS[name]()), images_of(), Patch(shapes.parse(stamp))
    owner, corners = everywhere(patch)
    views = patch_views(model, images, patch)
    assert isinstance(views, WindowViews)
    values = torch.rand(len(owner), CHANNELS * patch.pixels, generator=seeded(1), dtype=torch.float64)
    results = []
    for view in (views.at(owner, corners), ImageViews(model, images, patch).at(owner, corners)):
        point = values.clone().requires_grad_()
        logits = view.logits(point)
        results.append((logits, torch.autograd.grad(logits.square().sum(), point)[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-9)


@given(st.sampled_from(sorted(NETWORKS)), st.integers(0, 10_000))
def test_some_of_the_climbers_keep_their_logits(name, seed):
    model, images, patch = ended(*NETWORKS[name](), seed=seed), images_of(seed=seed), Patch((2, 3))
    owner, corners = everywhere(patch)
    view = WindowViews(patch_views(model, images, patch).plan, images, patch).at(owner, corners)
    values = torch.rand(view.cells.shape, generator=seeded(seed), dtype=torch.float64)
    index = torch.randperm(len(owner), generator=seeded(seed))[:17]
    torch.testing.assert_close(view.keep(index).logits(values[index]), view.logits(values)[index])
    assert torch.equal(view.keep(index).cells, view.cells[index])


def test_wide_layers_slide_instead_of_becoming_large_matrices():
    views = patch_views(ended(*NETWORKS["wide"]()), images_of(), Patch(3))
    assert [any(isinstance(part, Slide) for part in stage.parts) for stage in views.plan.stages] == [
        False,
        True,
        False,
        False,
    ]


def test_clean_results_that_are_too_large_to_keep_are_computed_batch_by_batch(monkeypatch):
    model, images, patch = ended(*NETWORKS["strided"]()), images_of(), Patch(3)
    owner = torch.tensor([2, 0, 2, 1])
    corners = torch.tensor([[0, 0], [3, 6], [8, 6], [5, 1]])
    kept = patch_views(model, images, patch)
    monkeypatch.setattr(views, "_CACHE", 0)
    anew = patch_views(model, images, patch)
    assert kept.kept is not None
    assert anew.kept is None
    values = torch.rand(4, CHANNELS * 9, generator=seeded(0), dtype=torch.float64)
    torch.testing.assert_close(anew.at(owner, corners).logits(values), kept.at(owner, corners).logits(values))


class Skip(nn.Module):
    def forward(self, images):
        return images + torch.relu(images)


class Branches(nn.Module):
    def forward(self, images):
        return images * 2 if float(images.detach().sum()) > 0 else images


class Counts(nn.Module):
    """Another function at every call, which a traced graph does not show."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        return images * self.calls


class Liar(nn.Module):
    """While it is traced, the identity."""

    def forward(self, images):
        return images if isinstance(images, torch.fx.Proxy) else 1 - images


def hooked():
    layer = nn.Conv2d(2, 3, 3, padding=1)
    layer.register_forward_hook(lambda module, inputs, output: output * 2)
    return layer


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2)],
        lambda: [nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3), nn.ReLU()],
        lambda: [nn.Conv2d(2, 3, 3, padding=1)],
        lambda: [nn.Conv2d(2, 3, 3), nn.Tanh()],
        lambda: [Skip()],
        lambda: [Branches()],
        lambda: [Counts()],
        lambda: [Liar()],
        lambda: [hooked(), nn.ReLU()],
    ],
)
def test_other_networks_go_by_whole_images_and_are_attacked_all_the_same(layers):
    model, images = ended(*layers()), images_of()
    assert isinstance(patch_views(model, images, Patch(2)), ImageViews)
    labels = model(images).argmax(dim=1)
    assert PatchAttack(2, restarts=2).run(model, images, labels, Patch(2)).steps.max() <= 4


def test_an_attack_by_windows_finds_what_one_by_whole_images_finds(monkeypatch):
    model, images, patch = ended(*NETWORKS["strided"](), seed=3), images_of(12), Patch(2)
    labels = model(images).argmax(dim=1)
    attack = PatchAttack(8, 0.1, 4, early_stop=False, batch_size=20)
    swift = attack.run(model, images, labels, patch, seeded(0))
    monkeypatch.setattr("patchcert.attacks.patch.patch_views", ImageViews)
    plain = attack.run(model, images, labels, patch, seeded(0))
    torch.testing.assert_close(swift.adversarial, plain.adversarial)
    torch.testing.assert_close(swift.margins, plain.margins)
    assert torch.equal(swift.placement, plain.placement)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NETWORKS)
def test_windows_on_a_gpu_give_what_whole_images_give(name):
    model, images, patch = ended(*NETWORKS[name]()).float().cuda(), images_of().float().cuda(), Patch(3)
    labels = model(images).argmax(dim=1)
    owner, corners = (each.cuda() for each in everywhere(patch))
    views = patch_views(model, images, patch)
    assert isinstance(views, WindowViews)
    values = torch.rand(len(owner), CHANNELS * 9, generator=seeded(1)).cuda()
    mine = views.at(owner, corners).logits(values)
    theirs = ImageViews(model.double(), images.double(), patch).at(owner, corners).logits(values.double())
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-3)
    model.float()
    result = PatchAttack(5, restarts=3).run(model, images, labels, patch)
    assert patch.contains(images, result.adversarial).all()


@pytest.mark.parametrize("name", ["normalised linear", "strided", "batch norm"])
def test_windows_keep_the_type_of_the_images(name):
    model, images, patch = ended(*NETWORKS[name]()).float(), images_of().float(), Patch(3)
    owner, corners = everywhere(patch)
    views = patch_views(model, images, patch)
    assert isinstance(views, WindowViews)
    values = torch.rand(len(owner), CHANNELS * 9, generator=seeded(1))
    found = views.at(owner, corners).logits(values)
    expected = ImageViews(model, images, patch).at(owner, corners).logits(values)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
