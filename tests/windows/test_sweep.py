"""The fast engine is the slow one: every placement by itself, in float64, nothing shared and nothing clever."""

import copy
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from patchcert.bounds import NEAREST, Rounding, trace
from patchcert.certificates import certify, placement_margins
from patchcert.models import Normalize
from patchcert.testing.conformance import seeded
from patchcert.testing.networks import ResidualBlock, randomise
from patchcert.threats import Patch, shapes
from patchcert.windows import passes
from patchcert.windows.dense import reference_margins
from patchcert.windows.passes import clean_pass
from patchcert.windows.sweep import covering_sweep
from strategies import FunctionalHead, cases, seeds, threats
from sweeps import swept
from written_models import model_of

BUDGET = 2**22


def strided():
    return [
        nn.Conv2d(2, 3, (3, 2), (2, 1), (1, 0)),
        nn.ReLU(),
        nn.Conv2d(3, 4, (1, 3), (1, 3), (0, 2)),
        nn.ReLU(),
    ]


def block(channels, outputs, stride):
    branch = nn.Sequential(
        nn.Conv2d(channels, 3, 3, stride, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, outputs, 3, 1, 1)
    )
    return ResidualBlock(branch, nn.Conv2d(channels, outputs, 1, stride, bias=False))


class MeanHead(nn.Module):
    """Logits of the mean over height and width, as forward passes write it."""

    def __init__(self, channels, classes):
        super().__init__()
        self.output = nn.Linear(channels, classes)

    def forward(self, maps):
        return self.output(maps.mean(dim=(-2, -1)))


COVERED = {
    "linear": [nn.Flatten(), nn.Linear(126, 3)],
    "two hidden layers": [
        nn.Flatten(),
        nn.Linear(126, 20),
        nn.ReLU(),
        nn.Linear(20, 9),
        nn.BatchNorm1d(9),
        nn.Tanh(),
        nn.Linear(9, 3),
    ],
    "odd strides and kernels": [*strided(), nn.Flatten(), nn.LazyLinear(3)],
    "normalised, with a functional head": [
        Normalize([0.4, 0.5], [0.2, 0.3]),
        nn.Conv2d(2, 4, 4, 2, 1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        FunctionalHead(4 * 4 * 3, 6, 3),
    ],
    "max pools": [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.MaxPool2d(3, 2, 1),
        nn.ReLU(),
        nn.MaxPool2d((1, 2), (2, 1), dilation=(1, 2)),
        nn.Flatten(),
        nn.LazyLinear(3),
    ],
    "average pools": [
        nn.AvgPool2d(2, (1, 2), 1),
        nn.Conv2d(2, 3, 2),
        nn.LeakyReLU(0.1),
        nn.AvgPool2d((3, 1), 1),
        nn.Flatten(),
        nn.LazyLinear(3),
    ],
    "adaptive pools": [
        nn.Conv2d(2, 4, 2, padding=(0, 1)),
        nn.ELU(),
        nn.AdaptiveAvgPool2d((4, 8)),
        nn.Sigmoid(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ],
    "a mean over height and width": [
        nn.Conv2d(2, 4, 2, padding=(0, 1)),
        nn.ReLU(),
        MeanHead(4, 3),
    ],
    "skip connections": [
        block(2, 4, 1),
        nn.ReLU(),
        block(4, 4, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ],
    "a skip past the normalisation": [
        ResidualBlock(
            nn.Sequential(Normalize([0.4, 0.5], [0.2, 0.3]), nn.Conv2d(2, 2, 3, padding=1)), nn.Identity()
        ),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(3),
    ],
    "dilation and groups": [
        nn.Conv2d(2, 4, 3, 1, 2, (2, 1), groups=2),
        nn.Hardtanh(-0.2, 0.7),
        nn.Conv2d(4, 4, (2, 3), 2, 1, groups=4),
        nn.ReLU6(),
        nn.Flatten(),
        nn.LazyLinear(3),
    ],
    "wide convolutions": [
        nn.Conv2d(2, 80, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(80, 24, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(3),
    ],
}
SHAPE = (2, 9, 7)


def built(name, seed=0):
    model = copy.deepcopy(nn.Sequential(*COVERED[name]))
    model(torch.rand(2, *SHAPE))
    return randomise(model, seeded(seed))


def batch(seed=1, count=2, dtype=torch.float32):
    images = torch.rand(count, *SHAPE, generator=seeded(seed)).to(dtype)
    return images, torch.arange(count) % 3


def slow(model, images, labels, patch, epsilon=1.0):
    """The reference in float64."""
    network = trace(copy.deepcopy(model).double())
    with torch.no_grad():
        return reference_margins(network, images.double(), labels, patch, epsilon)


def test_a_mean_has_the_margins_of_a_global_pooling_to_the_last_bit():
    model, (images, labels) = built("a mean over height and width"), batch()
    twin = nn.Sequential(model[0], model[1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), model[2].output)
    for dtype in (torch.float32, torch.float64):
        margins = [placement_margins(one, images, labels, Patch(2), dtype=dtype) for one in (model, twin)]
        assert torch.equal(*margins)


def distance(margins, reference):
    """The largest difference, relative to the largest margin; margins may be small because terms cancel."""
    return float((margins.double() - reference).abs().max() / reference.abs().max().clamp(min=0.1))


PATCHES = [Patch(2), Patch((3, 1), "corners"), Patch(shapes.diamond(5), [(0, 0), (6, 4), (3, 1)])]


@pytest.mark.parametrize("patch", PATCHES, ids=str)
@pytest.mark.parametrize("name", COVERED)
def test_windows_give_the_margins_of_the_reference(name, patch):
    model, (images, labels) = built(name), batch()
    reference = slow(model, images, labels, patch)
    assert distance(swept(model, images, labels, patch), reference) < 1e-5
    double = copy.deepcopy(model).double()
    assert distance(swept(double, images.double(), labels, patch), reference) < 1e-12


@pytest.mark.parametrize("patch", PATCHES, ids=str)
@pytest.mark.parametrize("name", COVERED)
def test_proven_margins_are_just_below_those_of_the_reference(name, patch):
    model, (images, labels) = built(name), batch()
    reference = slow(model, images, labels, patch)
    for dtype, tolerance in ((torch.float32, 3e-4), (torch.float64, 1e-9)):
        margins = placement_margins(model, images, labels, patch, dtype=dtype)
        assert margins.dtype == dtype
        assert distance(margins, reference) < tolerance
        assert (margins.double() <= reference + 1e-12 * reference.abs().max()).all()
        assert (margins.gather(2, labels[:, None, None].expand(-1, margins.shape[1], 1)) == 0).all()


@settings(max_examples=60)
@given(cases(dtype=torch.float64))
def test_proven_margins_follow_the_reference_on_any_network(case):
    reference = slow(case.model, case.images, case.labels, case.threat)
    exact = placement_margins(case.model, case.images, case.labels, case.threat)
    assert distance(exact, reference) < 1e-9
    single, images = copy.deepcopy(case.model).float(), case.images.float()
    rounded = placement_margins(single, images, case.labels, case.threat)
    assert distance(rounded, slow(single, images, case.labels, case.threat)) < 1e-3
    network = trace(single)
    if covering_sweep(network, images, case.threat, BUDGET) is not None:
        assert distance(swept(single, images, case.labels, case.threat), reference) < 1e-5


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, torch.tensor(0.7)], ids=str)
@pytest.mark.parametrize("name", ["odd strides and kernels", "max pools", "skip connections"])
def test_smaller_boxes_are_swept_alike(name, epsilon):
    model, (images, labels) = built(name).double(), batch(dtype=torch.float64)
    reference = slow(model, images, labels, Patch(2), epsilon)
    assert distance(swept(model, images, labels, Patch(2), epsilon), reference) < 1e-12


STAMPS = {
    name: stamp
    for pixels in (4, 9)
    for kind, stamps in shapes.transfer_shapes(pixels).items()
    for name, stamp in ((f"{kind} {pixels} {index}", stamp) for index, stamp in enumerate(stamps))
    if stamp.shape[0] <= SHAPE[1] and stamp.shape[1] <= SHAPE[2]
}


@pytest.mark.parametrize("name", STAMPS)
def test_every_shape_is_swept_as_it_is(name):
    model, (images, labels), patch = built("odd strides and kernels"), batch(), Patch(STAMPS[name])
    assert distance(swept(model, images, labels, patch), slow(model, images, labels, patch)) < 1e-5


@given(threats(*SHAPE[1:]), st.sampled_from(["max pools", "dilation and groups"]))
def test_every_kind_of_placement_is_swept(patch, name):
    model, (images, labels) = built(name), batch()
    reference = slow(model, images, labels, patch)
    assert reference.shape[1] == len(patch.placements(*SHAPE[1:]))
    assert distance(placement_margins(model, images, labels, patch), reference) < 1e-4


@pytest.mark.parametrize("name", COVERED)
def test_memory_changes_nothing(name):
    """With little memory a few placements and images are swept at a time, with much all at once."""
    model, (images, labels), patch = built(name), batch(count=3), Patch(2)
    whole = placement_margins(model, images, labels, patch, memory_budget=2**30)
    verdicts = certify(model, images, labels, patch, memory_budget=2**30)
    assert torch.equal(verdicts.margins, whole.amin(dim=1))
    for budget in (1, 2**14, 2**18):
        parts = placement_margins(model, images, labels, patch, memory_budget=budget)
        assert torch.equal(parts, whole)
        certificates = certify(model, images, labels, patch, memory_budget=budget)
        assert torch.equal(certificates.certified, verdicts.certified)
        assert torch.equal(certificates.margins, parts.amin(dim=1))


@pytest.mark.parametrize("name", ["linear", "odd strides and kernels", "skip connections"])
def test_the_worst_placement_is_where_the_least_margin_is(name):
    model, (images, labels), patch = built(name), batch(count=3), Patch(2)
    network = trace(model)
    sweep = covering_sweep(network, images, patch, BUDGET)
    clean = clean_pass(network, images, labels)
    with torch.no_grad():
        worst, margins = sweep.margins(clean, labels).argmin(dim=1), sweep.margins(clean, labels)
    least = margins.gather(1, worst[:, None]).squeeze(1)
    assert torch.equal(least, margins.amin(dim=1))
    certificates = certify(model, images, labels, patch)
    corners = patch.placements(*SHAPE[1:]).corners
    proven = placement_margins(model, images, labels, patch)
    others = proven.scatter(2, labels[:, None, None].expand(-1, proven.shape[1], 1), torch.inf).amin(dim=2)
    assert torch.equal(certificates.worst_placement, corners[others.argmin(dim=1)])
    assert torch.equal(certificates.least_margin, others.amin(dim=1))


@settings(max_examples=10)
@given(seeds(), st.sampled_from(sorted(COVERED)))
def test_a_larger_threat_has_no_larger_margins(seed, name):
    model, (images, labels) = built(name, seed % 5), batch(seed)
    small = certify(model, images, labels, Patch((2, 1)), dtype=torch.float64).margins
    large = certify(model, images, labels, Patch(2), dtype=torch.float64).margins
    allowed = Patch((2, 1), [(0, 0), (4, 3), (7, 6)])
    few = certify(model, images, labels, allowed, dtype=torch.float64).margins
    assert (large <= small + 1e-12).all()
    assert (small <= few + 1e-12).all()


def joins_no_channels(model, images):
    return model.head(torch.cat([images, images[:, 2:]], dim=1).flatten(1))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(40, 3)),
            "a max pooling with ceil_mode",
        ),
        (model_of(joins_no_channels, head=nn.Linear(126, 3)).float(), "a result has no values"),
    ],
    ids=["a pool that rounds up", "a part without channels"],
)
def test_the_dense_way_takes_over_and_says_so(model, reason, caplog):
    images, labels = batch()
    model = model.eval()
    with caplog.at_level(logging.DEBUG, "patchcert"):
        margins = placement_margins(model, images, labels, Patch(2))
    assert f"the dense path takes over: {reason}" in caplog.text
    assert distance(margins, slow(model, images, labels, Patch(2))) < 1e-4
    for budget in (1, 2**16):
        parts = placement_margins(model, images, labels, Patch(2), memory_budget=budget)
        assert torch.equal(parts, margins)


@pytest.mark.parametrize("name", COVERED)
def test_the_fast_way_is_taken_without_a_word(name, caplog):
    with caplog.at_level(logging.DEBUG, "patchcert"):
        certify(built(name), *batch(), Patch(2))
    assert not caplog.records


def test_outward_rounding_lowers_every_margin():
    model, (images, labels) = built("two hidden layers"), batch()
    nearest = swept(model, images, labels, Patch(2))
    outward = swept(model, images, labels, Patch(2), rounding=Rounding.outward(torch.float32))
    others = nearest.scatter(2, labels[:, None, None].expand(-1, nearest.shape[1], 1), torch.inf) != torch.inf
    assert (outward[others] < nearest[others]).all()


@pytest.mark.parametrize("rounding", [NEAREST, Rounding.outward(torch.float32)], ids=["nearest", "outward"])
@pytest.mark.parametrize("name", ["two hidden layers", "normalised, with a functional head"])
def test_large_windows_take_their_weights_row_by_row_to_the_same_margins(name, rounding, monkeypatch):
    model, (images, labels) = built(name), batch()
    gathered = swept(model, images, labels, Patch((2, 3)), rounding=rounding)
    monkeypatch.setattr(passes, "_LARGE_WINDOW", 1)
    by_rows = swept(model, images, labels, Patch((2, 3)), rounding=rounding)
    assert not torch.equal(gathered, by_rows)
    assert distance(by_rows, gathered) < 2e-6
