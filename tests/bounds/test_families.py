"""Which families of classifiers have bounds, and how: the page on models of one's own says the same."""

import re
from pathlib import Path

import pytest
import torch

import patchcert as pc
from families import FAMILIES
from patchcert.bounds import Interval, Rounding, trace
from patchcert.errors import UnsupportedLayer
from patchcert.testing.networks import randomise
from patchcert.windows.sweep import covering_sweep

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "your-own-model.md").read_text()
REFUSED = {
    "ConvNeXt": r"layer '1.norm' \(LayerNorm\): no bound is known",
    "ViT": r"layer 'norm' \(LayerNorm\): no bound is known",
}
BY_WINDOWS = ("AlexNet", "VGG", "ResNet", "ResNeXt", "DenseNet", "GoogLeNet", "MobileNetV2")


def made(name):
    torch.manual_seed(0)
    return randomise(FAMILIES[name](), torch.Generator().manual_seed(1), gain=0.5)


def images():
    return torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REFUSED])
def test_it_is_certified(name):
    model, batch, threat = made(name), images(), pc.Patch(3, [(0, 0), (11, 20)])
    with torch.no_grad():
        labels = model(batch).argmax(dim=1)
        found = pc.certify(model, batch, labels, threat)
        assert found.margins.isfinite().all()
        network = trace(model, batch.shape[1:])
        assert (covering_sweep(network, batch, threat, 2**28) is not None) == (name in BY_WINDOWS)
        box = threat.boxes(batch, threat.placements(32, 32).corners).flatten(0, 1)
        bounds = network.bounds(box, rounding=Rounding.outward(torch.float32))
        for seed in range(3):
            mix = torch.rand(box.shape, generator=torch.Generator().manual_seed(seed))
            logits = model(torch.lerp(box.lower, box.upper, mix if seed else mix.round()))
            assert ((bounds.lower <= logits + 1e-4) & (logits <= bounds.upper + 1e-4)).all()
        point = network.bounds(Interval.point(batch))
        torch.testing.assert_close(point.lower, model(batch), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_the_layer_that_has_no_bound(name):
    batch = images()
    with pytest.raises(UnsupportedLayer, match=REFUSED[name]) as caught:
        pc.certify(made(name), batch, torch.tensor([0, 1]), pc.Patch(3))
    assert "--method masking" in caught.value.hint


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_can_be_proven_by_masks(name):
    model, batch, threat = made(name), images()[:1], pc.Patch(3)
    labels = model(batch).argmax(dim=1)
    found = pc.certify(pc.DoubleMasking(model, threat, masks=2), batch, labels, threat)
    assert len(found) == 1


def test_the_page_has_the_same_table():
    rows = re.findall(r"^\| ([\w-]+) \|[^|]*\| (windows|one by one|refused)[^|]*\|", PAGE, re.M)
    kinds = {
        name: "windows" if name in BY_WINDOWS else "refused" if name in REFUSED else "one by one"
        for name in FAMILIES
    }
    assert dict(rows) == kinds
