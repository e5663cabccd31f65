"""What is written is the network, as ONNX Runtime, the reader and its own weights say."""

import numpy as np
import onnx
import pytest
import torch
from hypothesis import assume, given, settings
from onnx import numpy_helper
from torch import nn

import patchcert as pc
from families import FAMILIES
from patchcert.bounds import Interval, layer_rule, trace
from patchcert.bounds.operations import Monotone
from patchcert.errors import ModelError, UnsupportedLayer
from patchcert.models import load_onnx, save_onnx
from patchcert.models.onnx import runtime
from patchcert.testing.networks import randomise
from strategies import networks, seeds

REFUSED = {"ConvNeXt": "LayerNorm", "ViT": "LayerNorm"}


@given(networks((2, 7, 6), dtype=torch.float32), seeds())
@settings(max_examples=25)
def test_what_is_read_back_has_the_logits_and_the_bounds_of_what_was_written(tmp_path_factory, model, seed):
    path = tmp_path_factory.mktemp("written") / "model.onnx"
    try:
        save_onnx(model, path, (2, 7, 6))
    except UnsupportedLayer as refusal:
        assume("different counts" not in refusal.message and "parts of one size" not in refusal.message)
        raise
    images = torch.rand(2, 2, 7, 6, generator=torch.Generator().manual_seed(seed))
    found = load_onnx(path, check=False)
    with torch.no_grad():
        torch.testing.assert_close(found(images), model(images), rtol=1e-4, atol=1e-4)
        box = Interval((images - 0.2).clamp(min=0), (images + 0.2).clamp(max=1))
        ours, theirs = (trace(each, (2, 7, 6)).bounds(box) for each in (found, model))
        torch.testing.assert_close(ours.lower, theirs.lower, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(ours.upper, theirs.upper, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_written_or_refused_by_name(tmp_path, name):
    torch.manual_seed(0)
    model = randomise(FAMILIES[name](), torch.Generator().manual_seed(1), gain=0.5)
    if name in REFUSED:
        with pytest.raises(UnsupportedLayer, match=REFUSED[name]):
            save_onnx(model, tmp_path / "model.onnx", (3, 32, 32))
        assert not (tmp_path / "model.onnx").exists()
        return
    save_onnx(model, tmp_path / "model.onnx", (3, 32, 32))
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(
        load_onnx(tmp_path / "model.onnx")(images), model(images), rtol=1e-4, atol=1e-5
    )


def test_weights_are_stored_as_they_are(tmp_path):
    model = pc.load("mnist-2x2-cnn2")
    save_onnx(model, tmp_path / "model.onnx", (1, 28, 28))
    stored = {
        each.name: numpy_helper.to_array(each)
        for each in onnx.load(tmp_path / "model.onnx").graph.initializer
    }
    assert stored.keys() == set(model.state_dict())
    for name, weight in model.state_dict().items():
        assert np.array_equal(stored[name], weight.numpy())


ACTIVATIONS = [
    nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.3), nn.Hardtanh(-0.5, 0.25), nn.Hardsigmoid(), nn.ELU(0.5), nn.CELU(0.5),
    nn.SELU(), nn.Sigmoid(), nn.Tanh(), nn.Softsign(), nn.Softplus(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(),
    nn.Hardswish(),
]  # fmt: skip


@pytest.mark.parametrize("layer", ACTIVATIONS, ids=repr)
def test_activations_are_operators_with_their_settings(tmp_path, layer):
    model = nn.Sequential(nn.Conv2d(1, 2, 1), layer, nn.Flatten(), nn.Linear(18, 2)).eval()
    with torch.no_grad():
        model[0].weight.mul_(9)
    save_onnx(model, tmp_path / "model.onnx", (1, 3, 3))
    images = torch.rand(5, 1, 3, 3)
    torch.testing.assert_close(
        load_onnx(tmp_path / "model.onnx")(images), model(images), rtol=1e-5, atol=1e-5
    )


def test_functions_that_are_no_operators_are_refused(tmp_path):
    with pytest.raises(
        UnsupportedLayer, match=r"layer '1' \(Monotone\) cannot be written as ONNX: its function"
    ):
        save_onnx(nn.Sequential(nn.Flatten(), nn.LogSigmoid()), tmp_path / "model.onnx", (1, 2, 2))

    class Own(nn.Module):
        def forward(self, value):
            return value

    layer_rule(Own)(lambda layer: Monotone(layer.forward, 0))
    with pytest.raises(UnsupportedLayer, match="cannot be written as ONNX"):
        save_onnx(nn.Sequential(nn.Flatten(), Own()), tmp_path / "model.onnx", (1, 2, 2))


def test_half_precision_is_refused(tmp_path):
    with pytest.raises(ModelError, match="weights of torch.float16 cannot be written"):
        save_onnx(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).half(), tmp_path / "model.onnx", (1, 2, 2))


def test_a_file_that_the_runtime_reads_otherwise_is_not_written(tmp_path, monkeypatch):
    theirs = runtime.runtime_outputs
    monkeypatch.setattr(runtime, "runtime_outputs", lambda file, images: theirs(file, images) * 1.1)
    with pytest.raises(ModelError, match="gives other outputs in ONNX Runtime"):
        save_onnx(pc.load("mnist-2x2-cnn2"), tmp_path / "model.onnx", (1, 28, 28))
    assert not (tmp_path / "model.onnx").exists()
