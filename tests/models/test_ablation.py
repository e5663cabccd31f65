"""The base networks of Random Ablation have their published sizes and say what they are for."""

import pytest
import torch

import patchcert as pc
from patchcert.errors import ModelError, UnsupportedLayer
from patchcert.models import ModelSpec, build, load, save


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        (ModelSpec("cnn2_ablation", 1, 28, 28), 3_320_922),
        (ModelSpec("resnet18_ablation", 3, 32, 32), 11_175_690),
    ],
)
def test_networks_have_the_published_sizes(spec, parameters):
    model = build(spec, torch.Generator().manual_seed(0))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model(torch.rand(2, 2 * spec.channels, spec.height, spec.width)).shape == (2, 10)


def test_a_network_survives_being_saved(tmp_path):
    spec = ModelSpec("cnn2_ablation", 1, 8, 8, classes=3, hidden=4)
    model = build(spec, torch.Generator().manual_seed(0))
    save(model, spec, tmp_path / "model.safetensors")
    again, _ = load(tmp_path / "model.safetensors")
    encoded = torch.rand(2, 2, 8, 8)
    assert torch.equal(model(encoded), again(encoded))


def test_images_as_they_are_have_neither_logits_nor_bounds():
    model = build(ModelSpec("cnn2_ablation", 1, 8, 8, hidden=4), torch.Generator().manual_seed(0))
    images = torch.rand(2, 1, 8, 8)
    with pytest.raises(ModelError, match="takes ablated images, encoded in 2 channels, got 1 channels"):
        model(images)
    with pytest.raises(
        UnsupportedLayer, match=r"layer 'ablated' \(AblatedImages\): its network votes"
    ) as caught:
        pc.certify(model, images, torch.tensor([0, 1]), pc.Patch(2))
    assert "RandomAblation" in caught.value.hint
