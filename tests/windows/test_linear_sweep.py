"""Linear bounds and attacks at all placements at once equal those of one whole image after the other."""

import pytest
import torch
from torch import Generator, nn

from patchcert.bounds import trace
from patchcert.bounds.linear import best_bound, interval_bound, margin_forms, parallel
from patchcert.errors import UnsupportedLayer
from patchcert.models import Normalize
from patchcert.threats import Patch, shapes
from patchcert.windows.linear_sweep import LinearSweep, hidden_layer


def make(kind, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        before = [Normalize((0.3, 0.4), (0.5, 0.2)), nn.Flatten(), nn.Linear(2 * 49, 20)]
        if kind == "normed":
            norm = nn.BatchNorm1d(20)
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            before.append(norm)
        if kind == "convolution":
            before = [nn.Conv2d(2, 3, 3, 2, 1), nn.Flatten()]
        if kind == "nothing before":
            before = [nn.Flatten(), nn.Linear(2 * 49, 20)]
        bias = kind != "no bias"
        width = 48 if kind == "convolution" else 20
        return nn.Sequential(*before, nn.ReLU(), nn.Linear(width, 5, bias=bias)).double().eval()


def slow_margins(network, images, labels, threat, corner, epsilon):
    """By intervals and by linear bounds with parallel lines, from a whole image with its patch."""
    box = threat.boxes(images, corner[None], epsilon).map(lambda part: part[:, 0])
    intervals = network.intervals(box)
    forms = margin_forms(labels, torch.arange(5).expand(len(images), -1), 5, images.dtype)
    return interval_bound(network, intervals, forms), best_bound(
        network, intervals, forms, slopes=(parallel,)
    )


THREATS = pytest.mark.parametrize(
    ("threat", "epsilon", "budget"),
    [
        (Patch(3), 1.0, 2**26),
        (Patch(shapes.diamond(4)), 0.4, 1),
        (Patch((2, 5), placements="corners"), 0.7, 2**14),
    ],
    ids=["square", "diamond", "corners"],
)
KINDS = pytest.mark.parametrize("kind", ["plain", "normed", "convolution", "no bias", "nothing before"])


def drawn_images():
    images = torch.rand(4, 2, 7, 7, generator=Generator().manual_seed(1), dtype=torch.float64)
    return images, torch.tensor([0, 4, 2, 2])


@KINDS
@THREATS
def test_the_sweep_equals_a_pass_for_each_placement(kind, threat, epsilon, budget):
    network, (images, labels) = trace(make(kind)), drawn_images()
    sweep, corners = LinearSweep.of(network, images, threat, budget), threat.placements(7, 7).corners
    found = sweep.margins(images, labels, epsilon)
    assert found.shape == (4, len(corners), 5)
    for position, corner in enumerate(corners):
        _, wanted = slow_margins(network, images, labels, threat, corner, epsilon)
        torch.testing.assert_close(found[:, position], wanted.detach())
    some = torch.tensor([len(corners) - 1, 0, 0])
    torch.testing.assert_close(sweep.margins(images, labels, epsilon, some), found[:, some])


@KINDS
@THREATS
def test_attacked_margins_are_those_of_a_corner_that_the_gradient_points_at(kind, threat, epsilon, budget):
    model, (images, labels) = make(kind), drawn_images()
    sweep, corners = LinearSweep.of(trace(model), images, threat, budget), threat.placements(7, 7).corners
    found = sweep.attacked(images, labels, epsilon)
    assert found.shape == (4, len(corners), 5)
    for position, corner in enumerate(corners):
        box = threat.boxes(images, corner[None], epsilon).map(lambda part: part[:, 0])
        middle = ((box.lower + box.upper) / 2).requires_grad_()
        nn.functional.cross_entropy(model(middle), labels, reduction="sum").backward()
        moved = middle.detach() + middle.grad.sign() * (box.upper - box.lower) / 2
        logits = model(moved).detach()
        torch.testing.assert_close(found[:, position], logits.gather(1, labels[:, None]) - logits)
    some = torch.tensor([len(corners) - 1, 0, 0])
    torch.testing.assert_close(sweep.attacked(images, labels, epsilon, some), found[:, some])


@KINDS
@THREATS
def test_margins_with_a_gradient_are_those_of_whole_images(kind, threat, epsilon, budget):
    model, (images, labels) = make(kind), drawn_images()
    network, corners = trace(model), threat.placements(7, 7).corners
    chosen = torch.randint(len(corners), (4, 2), generator=Generator().manual_seed(2))
    found = LinearSweep.of(network, images, threat, budget).margins_at(images, labels, chosen, epsilon)
    wanted = torch.zeros_like(found)
    for (image, column), number in zip(
        torch.cartesian_prod(torch.arange(4), torch.arange(2)), chosen.flatten(), strict=True
    ):
        only = slice(int(image), int(image) + 1)
        both = slow_margins(network, images[only], labels[only], threat, corners[number], epsilon)
        wanted[image, column] = torch.maximum(*both)[0]
    torch.testing.assert_close(found, wanted)
    weights = torch.rand(found.shape, generator=Generator().manual_seed(3), dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((margins * weights).sum(), list(model.parameters()), allow_unused=True)
        for margins in (found, wanted)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_patch_that_may_not_move_leaves_the_margins_of_the_image():
    network, (images, labels) = trace(make("plain")), drawn_images()
    logits = network.values(images)[-1]
    wanted = logits.gather(1, labels[:, None]) - logits
    sweep = LinearSweep.of(network, images, Patch(3), 2**20)
    for found in (
        sweep.margins(images, labels, 0.0),
        sweep.attacked(images, labels, 0.0),
        sweep.margins_at(images, labels, torch.tensor([[7]] * 4), 0.0),
    ):
        torch.testing.assert_close(found, wanted.unsqueeze(1).expand_as(found))


def ranks(which):
    """What is ranked by in float64, and in float32, where products are of bfloat16."""
    (images, labels), found = drawn_images(), []
    for dtype in (torch.float64, torch.float32):
        sweep = LinearSweep.of(trace(make("plain").to(dtype)), images.to(dtype), Patch(3), 2**20)
        found.append(getattr(sweep, which)(images.to(dtype), labels, 1.0).double())
    return found


def test_ranks_of_float32_are_off_by_the_rounding_of_bfloat16_alone():
    exact, found = ranks("margins")
    # Both factors of a product have 8 bits, and margins are sums of them: 2^-7 of the largest is more than they lose.
    torch.testing.assert_close(found, exact, rtol=0, atol=exact.abs().max().item() * 2**-7)


def test_attacks_of_float32_end_in_another_corner_only_where_a_gradient_is_small():
    exact, found = ranks("attacked")
    # As above, and the inputs of units are rounded too, twice.
    is_near = (found - exact).abs() <= exact.abs().max() * 2**-6
    assert is_near.double().mean() > 0.95


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(9, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(9, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(9, 3), nn.Tanh(), nn.Linear(3, 2)),
    ],
    ids=["none", "two", "tanh"],
)
def test_other_networks_are_refused(model):
    with pytest.raises(UnsupportedLayer, match="exist for networks of one hidden layer"):
        hidden_layer(trace(model.eval()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_a_gpu_computes_is_the_same_up_to_rounding():
    model, generator = make("plain").float(), Generator().manual_seed(1)
    images, labels = torch.rand(4, 2, 7, 7, generator=generator), torch.tensor([0, 4, 2, 2])
    found = []
    for device in ("cpu", "cuda"):
        network, given = trace(model.to(device)), images.to(device)
        sweep = LinearSweep.of(network, given, Patch(3), 2**14)
        found.append(sweep.margins(given, labels.to(device), torch.tensor(0.7, device=device)).cpu())
    # As above, on both devices.
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=found[0].abs().max().item() * 2**-6)
