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
from patchcert.windows.sweep import covering_sweep
from strategies import networks, seeds
from written_models import model_of

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


def test_a_layer_that_is_called_again_has_nodes_and_constants_of_its_own(tmp_path):
    """A scale of three dimensions and one of two, a flattening to other sizes: their constants differ."""

    def forward(self, x):
        first, second = self.act(self.flat(x)), self.act(self.flat(self.conv(x)))
        scaled = torch.cat([self.norm(first).flatten(1), self.norm(self.conv(x).mean((2, 3)))], 1)
        return self.head(scaled) + second.flatten(1)[:, :3]

    layers = {"conv": nn.Conv2d(2, 2, 3), "flat": nn.Flatten(2), "act": nn.ReLU(), "norm": nn.BatchNorm1d(2)}
    model = model_of(forward, **layers, head=nn.Linear(26, 3)).float()
    path, images = tmp_path / "again.onnx", torch.rand(3, 2, 4, 3)
    save_onnx(model, path, (2, 4, 3))
    torch.testing.assert_close(load_onnx(path)(images), model(images), rtol=1e-4, atol=1e-4)


def test_a_kernel_that_begins_in_the_padding_is_refused(tmp_path):
    model = nn.Sequential(
        nn.MaxPool2d(1, 3, ceil_mode=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)
    )
    with pytest.raises(UnsupportedLayer, match="ceil_mode a kernel would begin in the padding"):
        save_onnx(model.eval(), tmp_path / "ceil.onnx", (2, 5, 5))


def test_half_precision_is_refused(tmp_path):
    with pytest.raises(ModelError, match="weights of torch.float16 cannot be written"):
        save_onnx(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).half(), tmp_path / "model.onnx", (1, 2, 2))


def test_a_file_that_the_runtime_reads_otherwise_is_not_written(tmp_path, monkeypatch):
    theirs = runtime.runtime_outputs
    monkeypatch.setattr(runtime, "runtime_outputs", lambda file, images: theirs(file, images) * 1.1)
    with pytest.raises(ModelError, match="gives other outputs in ONNX Runtime"):
        save_onnx(pc.load("mnist-2x2-cnn2"), tmp_path / "model.onnx", (1, 28, 28))
    assert not (tmp_path / "model.onnx").exists()


def test_a_normalised_model_is_bounded_by_windows_when_it_is_read_back(tmp_path):
    model = nn.Sequential(
        pc.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)), nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4)
    )
    model.extend([nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)])
    model = randomise(model, torch.Generator().manual_seed(0))
    save_onnx(model, tmp_path / "model.onnx", (3, 9, 9))
    found, images, threat = load_onnx(tmp_path / "model.onnx"), torch.rand(2, 3, 9, 9), pc.Patch(2)
    labels = model(images).argmax(dim=1)
    assert covering_sweep(trace(found, (3, 9, 9)), images, threat, 2**28) is not None
    ours, theirs = (pc.certify(each, images, labels, threat).margins for each in (found, model))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
