"""Verdicts without margins are those with margins."""

import copy

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from patchcert.certificates import certify
from patchcert.testing.networks import randomise
from patchcert.threats import Patch, shapes
from patchcert.windows.verdicts import block_patch
from strategies import cases


@pytest.mark.parametrize(
    "patch", [Patch(2), Patch((1, 3)), Patch(shapes.diamond(5)), Patch(shapes.diamond(9))], ids=str
)
@pytest.mark.parametrize(("height", "width"), [(9, 7), (8, 8), (12, 9)])
def test_every_placement_lies_in_a_block(patch, height, width):
    merged = block_patch(patch, height, width)
    assert merged is not None
    covers = merged.placements(height, width).masks(merged.stamp)
    for mask in patch.placements(height, width).masks(patch.stamp):
        assert bool((covers & mask).flatten(1).sum(dim=1).eq(mask.sum()).any())
    assert len(covers) < len(patch.placements(height, width))


@pytest.mark.parametrize("patch", [Patch(2, "corners"), Patch(2, [(0, 0), (3, 3)]), Patch((6, 2))], ids=str)
def test_few_or_scattered_placements_have_no_blocks(patch):
    assert block_patch(patch, 8, 8) is None


def confident(seed, gain):
    """A network sure enough that some images are proven by blocks, some by single placements, some not."""
    layers = nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(100, 2)
    model = randomise(nn.Sequential(*layers), torch.Generator().manual_seed(seed), gain)
    with torch.no_grad():
        model[-1].bias.copy_(torch.tensor([gain * 0.6, 0.0]))
    return model


@pytest.mark.parametrize("gain", [0.6, 1.0, 2.0])
@pytest.mark.parametrize("patch", [Patch(2), Patch(shapes.diamond(5)), Patch(3, "corners")], ids=str)
def test_verdicts_are_those_of_the_margins(patch, gain):
    images = torch.rand(40, 1, 10, 9, generator=torch.Generator().manual_seed(0))
    images = images * torch.linspace(0, 1, 40)[:, None, None, None]
    model = confident(1, gain)
    labels = model(images).argmax(dim=1)
    labels[-1] = 1 - labels[-1]
    full = certify(model, images, labels, patch)
    for budget in (2**10, 2**26):
        bare = certify(model, images, labels, patch, verdicts_only=True, memory_budget=budget)
        assert torch.equal(bare.certified, full.certified)
        assert bare.margins is None
        assert bare.worst_placement is None
        assert torch.equal(bare.predictions, full.predictions)


@settings(max_examples=30)
@given(cases(dtype=torch.float64))
def test_verdicts_agree_on_any_network(case):
    full = certify(case.model, case.images, case.labels, case.threat)
    bare = certify(case.model, case.images, case.labels, case.threat, verdicts_only=True)
    clear = full.least_margin.abs() > 1e-9
    assert torch.equal(bare.certified[clear], full.certified[clear])


def test_numbers_too_large_for_the_type_are_not_proven():
    model = confident(1, 0.3)
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken[0].weight.mul_(1e38)
        broken[-1].weight.mul_(1e3)
    images = torch.rand(3, 1, 10, 9, generator=torch.Generator().manual_seed(0))
    labels = broken(images).argmax(dim=1)
    assert not certify(broken, images, labels, Patch(2), verdicts_only=True).certified.any()
    assert not certify(broken, images, labels, Patch(2)).certified.any()


def test_nothing_to_decide_is_fine():
    certificates = certify(
        confident(1, 0.3),
        torch.rand(0, 1, 10, 9),
        torch.zeros(0, dtype=torch.long),
        Patch(2),
        verdicts_only=True,
    )
    assert certificates.certified.shape == (0,)
