"""Linear bounds of all placements at once equal those of one whole image after the other."""

import pytest
import torch
from torch import Generator, nn

from patchcert.bounds import trace
from patchcert.bounds.linear import SLOPES, best_bound, margin_forms
from patchcert.errors import UnsupportedLayer
from patchcert.models import Normalize
from patchcert.threats import Patch, shapes
from patchcert.windows.linear_sweep import LinearSweep, covered_numbers, hidden_layer


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
        bias = kind != "no bias"
        width = 48 if kind == "convolution" else 20
        return nn.Sequential(*before, nn.ReLU(), nn.Linear(width, 5, bias=bias)).double().eval()


@pytest.mark.parametrize("slope", SLOPES, ids=lambda slope: slope.__name__)
@pytest.mark.parametrize("kind", ["plain", "normed", "convolution", "no bias"])
@pytest.mark.parametrize(
    ("threat", "epsilon", "budget"),
    [
        (Patch(3), 1.0, 2**26),
        (Patch(shapes.diamond(4)), 0.4, 1),
        (Patch((2, 5), placements="corners"), 0.7, 2**14),
    ],
    ids=["square", "diamond", "corners"],
)
def test_the_sweep_equals_a_pass_for_each_placement(kind, slope, threat, epsilon, budget):
    network, generator = trace(make(kind)), Generator().manual_seed(1)
    images = torch.rand(4, 2, 7, 7, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 4, 2, 2])
    found = LinearSweep.of(network, images, threat, budget).margins(images, labels, epsilon, slope)
    corners = threat.placements(7, 7).corners
    assert found.shape == (4, len(corners), 5)
    for position, corner in enumerate(corners):
        box = threat.boxes(images, corner[None], epsilon).map(lambda part: part[:, 0])
        forms = margin_forms(labels, torch.arange(5).expand(4, -1), 5, torch.float64)
        wanted = best_bound(network, network.intervals(box), forms, slopes=(slope,))
        torch.testing.assert_close(found[:, position], wanted.detach())


def test_numbers_under_a_stamp_are_counted_over_channels():
    stamp = Patch(torch.tensor([[True, False], [True, True]]), placements=[(1, 2)])
    numbers = covered_numbers(stamp, torch.zeros(1, 2, 4, 5))
    marked = torch.zeros(2 * 20).index_fill(0, numbers[0], 1).reshape(2, 4, 5)
    mask = torch.zeros(4, 5)
    mask[1:3, 2:4] = stamp.stamp.float()
    assert torch.equal(marked, mask.expand(2, -1, -1))


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
@pytest.mark.parametrize("slope", SLOPES, ids=lambda slope: slope.__name__)
def test_what_a_gpu_computes_is_the_same_up_to_the_rounding_of_lines(slope):
    model, generator = make("plain").float(), Generator().manual_seed(1)
    images, labels = torch.rand(4, 2, 7, 7, generator=generator), torch.tensor([0, 4, 2, 2])
    found = []
    for device in ("cpu", "cuda"):
        network, given = trace(model.to(device)), images.to(device)
        sweep = LinearSweep.of(network, given, Patch(3), 2**14)
        found.append(sweep.margins(given, labels.to(device), torch.tensor(0.7, device=device), slope).cpu())
    # 8 bits of a line, of which margins are sums: 2^-8 of the largest is more than all roundings move.
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=found[0].abs().max().item() * 2**-8)
