"""Channels that no placement moves are left out, and branches are put together: the bounds stay what they are."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from patchcert.bounds import Rounding, precise_arithmetic, trace
from patchcert.certificates import certify, placement_margins
from patchcert.testing.networks import randomise
from patchcert.threats import Patch
from patchcert.windows import rules
from patchcert.windows.dense import dense_margins
from patchcert.windows.passes import Windows, clean_pass, exact_clean_pass
from patchcert.windows.rules import moved_alone, moved_channels
from patchcert.windows.sweep import covering_sweep
from written_models import images as random_images
from written_models import model_of

SHAPE = (3, 9, 9)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def shut_network():
    """Two wide convolutions and a linear layer; seven of eight units of the first two layers are 0 on every image."""
    model = nn.Sequential(
        nn.Conv2d(3, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 64, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 25, 40), nn.ReLU(), nn.Linear(40, 5),
    )  # fmt: skip
    randomise(model, torch.Generator().manual_seed(0), gain=0.7)
    for layer in (model[0], model[2]):
        is_shut = torch.arange(layer.out_channels) % 8 != 0
        layer.bias.data[is_shut] = -10.0 - layer.weight.data[is_shut].abs().sum((1, 2, 3))
    return model.eval()


def batch(count=5):
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 5


def windows(*channels):
    """One window of 2x2 cells whose channels have these values in one cell, and radii twice as large."""
    deviation = torch.zeros(1, 1, 2, 2, len(channels))
    deviation[0, 0, 1, 0] = torch.tensor(channels)
    return Windows(deviation, 2 * deviation.abs())


@pytest.fixture
def seen(monkeypatch):
    """Channels are left out on a CPU too; how many were there and how many stayed, call by call."""
    monkeypatch.setattr(rules, "_may_pay", lambda state: True)
    return counted(monkeypatch)


def counted(monkeypatch):
    counts = []

    def counting(state, weights):
        kept, left = moved_alone(state, weights)
        if kept is not state:
            counts.append((state.deviation.shape[-1], kept.deviation.shape[-1]))
        return kept, left

    monkeypatch.setattr(rules, "moved_alone", counting)
    return counts


def test_margins_are_the_same_without_the_channels_that_nothing_moves(seen, monkeypatch):
    model, (images, labels) = shut_network(), batch()
    fewer = placement_margins(model, images, labels, Patch(3))
    assert set(seen) == {(48, 6), (64, 8)}
    monkeypatch.undo()
    everything = placement_margins(model, images, labels, Patch(3))
    torch.testing.assert_close(fewer, everything, rtol=0, atol=2e-6)


def test_margins_stay_below_the_exact_ones_and_close_to_them(seen):
    model, (images, labels) = shut_network(), batch()
    fewer = placement_margins(model, images, labels, Patch(3)).double()
    assert seen
    exact = placement_margins(model.double(), images.double(), labels, Patch(3), dtype=torch.float64)
    others = torch.arange(5) != labels[:, None, None]
    assert bool((fewer <= exact)[others.expand_as(exact)].all())
    torch.testing.assert_close(fewer, exact, rtol=0, atol=5e-4)


def test_verdicts_are_the_same_on_a_machine_that_leaves_channels_out(seen, monkeypatch):
    model, (images, labels) = shut_network(), batch()
    labels = model(images).argmax(dim=1)
    fewer = certify(model, images, labels, Patch(1))
    assert seen
    monkeypatch.undo()
    assert torch.equal(fewer.certified, certify(model, images, labels, Patch(1)).certified)


def test_a_unit_that_no_placement_opens_has_no_radius(monkeypatch):
    states = []
    monkeypatch.setattr("patchcert.windows.rules.moved_channels", lambda state: states.append(state) and None)
    images, labels = batch(2)
    placement_margins(shut_network(), images, labels, Patch(3))
    wide = [state for state in states if state.radius.shape[-1] == 48]
    radius = wide[-1].radius.flatten(0, -2).amax(dim=0)
    assert (radius != 0).tolist() == [unit % 8 == 0 for unit in range(48)]


@pytest.mark.parametrize(
    ("channels", "moved"),
    [
        ((0.0, 1.0, 0.0, 0.0), [1]),
        ((0.0, 0.0, float("nan"), 0.0), [2]),
        ((0.0, -1e-30, 0.0, 2.0), [1, 3]),
        ((0.0, 0.0, 0.0, 0.0), [0]),
        ((1.0, 1.0, 1.0, 1.0), None),
    ],
)
def test_moved_channels_are_those_that_differ_anywhere(channels, moved, monkeypatch):
    monkeypatch.setattr(rules, "_may_pay", lambda state: True)
    found = moved_channels(windows(*channels))
    assert (None if found is None else found.tolist()) == moved


def test_every_window_counts_unless_the_first_moves_nearly_all(monkeypatch):
    monkeypatch.setattr(rules, "_may_pay", lambda state: True)
    few, other, many = windows(0.0, 1.0, 0.0, 0.0), windows(0.0, 0.0, 0.0, 1.0), windows(1.0, 1.0, 1.0, 1.0)
    assert moved_channels(joined(few, other)).tolist() == [1, 3]
    assert moved_channels(joined(few, many)) is None
    assert moved_channels(joined(many, few)) is None


def joined(first, second):
    return Windows(torch.cat([first.deviation, second.deviation]), torch.cat([first.radius, second.radius]))


def test_on_a_cpu_every_channel_stays():
    assert moved_channels(windows(*[0.0] * 64)) is None


@pytest.mark.gpu
@on_gpu
def test_a_gpu_leaves_channels_out_and_agrees_with_the_cpu(monkeypatch):
    counts = counted(monkeypatch)
    model, (images, labels) = shut_network(), batch()
    expected = placement_margins(model, images, labels, Patch(3))
    found = placement_margins(model.cuda(), images.cuda(), labels.cuda(), Patch(3))
    assert set(counts) == {(48, 6), (64, 8)}
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=5e-6)


def gated(self, x):
    h = self.stem(x).flatten(1)
    return self.head(torch.cat([self.a(h) * torch.sigmoid(self.b(h)), F.gelu(self.a(h))], 1))


def branched(self, x):
    h = F.silu(self.stem(x))
    h = torch.cat([h, self.small(h), F.softplus(self.large(h))], 1)
    return self.head(self.last(h).flatten(1))


def layers():
    maps = {
        "small": nn.Conv2d(3, 2, 1),
        "large": nn.Conv2d(3, 2, 5, padding=2),
        "last": nn.Conv2d(7, 2, 2, stride=2),
    }
    return {
        "gated": (gated, {"a": nn.Linear(108, 5), "b": nn.Linear(108, 5), "head": nn.Linear(10, 3)}),
        "branched": (branched, {**maps, "head": nn.Linear(24, 3)}),
    }


@pytest.mark.parametrize("name", ["gated", "branched"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_joined_and_multiplied_branches_have_the_margins_of_the_dense_path(name, dtype):
    forward, rest = layers()[name]
    model = model_of(forward, stem=nn.Conv2d(2, 3, 3, padding=1), **rest).to(dtype)
    network, audit, threat = trace(model), trace(copy.deepcopy(model).double()), Patch(2)
    batch = random_images(height=6, width=6 if name == "gated" else 8).to(dtype)
    labels, corners = torch.tensor([0, 1, 2]), threat.placements(*batch.shape[2:]).corners
    with torch.no_grad(), precise_arithmetic():
        sweep = covering_sweep(network, batch, threat, 2**24)
        assert sweep is not None
        clean = exact_clean_pass(audit, batch, labels, dtype)
        margins = sweep.margins(clean, labels, rounding=Rounding.outward(dtype)).double()
        exact = dense_margins(audit, batch.double(), labels, threat, corners)
        nearest = sweep.margins(clean_pass(network, batch, labels), labels)
    others = torch.arange(3) != labels[:, None, None]
    assert ((margins <= exact + 1e-12) | ~others).all()
    assert (exact - margins).abs().max() < 1e-3 * exact.abs().max()
    torch.testing.assert_close(nearest.double(), exact, rtol=1e-4, atol=1e-4)
