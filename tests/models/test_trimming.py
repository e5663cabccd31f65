"""A trimmed network computes what the whole one does wherever that was looked at, and is certified by itself."""

import pytest
import torch
from torch import nn

import patchcert as pc
from patchcert.errors import ModelError
from patchcert.models import ModelSpec, architecture, build, load, round_to_half, save, trim
from patchcert.models.trimming import find_open

SPECS = [
    ModelSpec("mlp", 1, 6, 7, classes=4, hidden=12),
    ModelSpec("cnn2", 3, 12, 8, classes=4, hidden=9, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.2)),
    ModelSpec("cnn4", 1, 12, 12, classes=3, hidden=10),
    ModelSpec("cnn5w", 3, 6, 6, classes=3, hidden=20),
]


def shut_some(model: nn.Sequential) -> nn.Sequential:
    """Every third channel or unit of each layer before a ReLU gets a bias that keeps it shut."""
    with torch.no_grad():
        for name, layer in model.named_children():
            if isinstance(layer, nn.Conv2d | nn.Linear) and name != "logits":
                layer.bias[::3] = -100.0
    return model


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_outputs_stay_and_what_is_shut_goes(spec, generator):
    model = shut_some(build(spec, generator))
    images = torch.rand(20, spec.channels, spec.height, spec.width, generator=generator)
    trimmed, narrow = trim(model, spec, images, batch=7)
    opened = find_open(model, images)
    assert narrow.widths == tuple(int(channels.sum()) for channels in opened.values())
    assert all(not channels[::3].any() for channels in opened.values())
    assert narrow.hidden is None
    assert not trimmed.training
    torch.testing.assert_close(trimmed(images), model(images))
    before, after = (sum(each.numel() for each in net.parameters()) for net in (model, trimmed))
    assert after < before


def test_nothing_open_on_any_image_is_left_out(generator):
    """One image alone opens one unit: it is kept, whichever batch the image is in."""
    spec = ModelSpec("mlp", 1, 2, 2, classes=2, hidden=3)
    model = build(spec, generator)
    with torch.no_grad():
        model.linear1.weight[:] = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0]])
        model.linear1.bias[:] = torch.tensor([0.0, -0.5, -0.5])
    images = torch.zeros(9, 1, 2, 2)
    images[:, 0, 0, 0] = 1
    images[6, 0, 0, 1] = 1
    trimmed, narrow = trim(model, spec, images, batch=2)
    assert narrow.widths == (2,)
    assert torch.equal(trimmed.linear1.weight, model.linear1.weight[:2])
    assert torch.equal(trimmed.logits.weight, model.logits.weight[:, :2])


@pytest.mark.parametrize("spec", SPECS[:3], ids=lambda spec: spec.name)
def test_bounds_only_grow_tighter_on_the_images_shown(spec, generator):
    """There a unit that is gone lay between 0 and its upper bound: all it could do was lower a margin."""
    model = shut_some(build(spec, generator))
    images = torch.rand(12, spec.channels, spec.height, spec.width, generator=generator)
    labels = model(images).argmax(1)
    trimmed, _ = trim(model, spec, images)
    whole, part = (pc.certify(net, images, labels, pc.Patch(2)) for net in (model, trimmed))
    assert (part.margins >= whole.margins - 1e-4).all()
    assert (part.certified | ~whole.certified).all()


def test_a_model_of_half_precision_is_stored_in_half_the_bytes(tmp_path, generator):
    spec = SPECS[3]
    images = torch.rand(20, 3, 6, 6, generator=generator)
    trimmed, narrow = trim(shut_some(build(spec, generator)), spec, images)
    rounded = round_to_half(trimmed)
    save(trimmed, narrow, tmp_path / "float.safetensors")
    save(rounded, narrow, tmp_path / "half.safetensors", half=True)
    loaded, read = load(tmp_path / "half.safetensors")
    assert read == narrow
    assert {value.dtype for value in loaded.state_dict().values()} == {torch.float32}
    assert torch.equal(loaded(images), rounded(images))
    assert not torch.equal(rounded.linear1.weight, trimmed.linear1.weight)
    torch.testing.assert_close(rounded.linear1.weight, trimmed.linear1.weight, rtol=2**-11, atol=2**-25)
    halves, whole = ((tmp_path / f"{name}.safetensors").stat().st_size for name in ("half", "float"))
    assert halves < 0.51 * whole
    with pytest.raises(ModelError, match="conv1.weight holds numbers that half precision cannot"):
        save(trimmed, narrow, tmp_path / "lossy.safetensors", half=True)


def test_numbers_too_large_for_half_precision_are_refused(generator):
    model = build(SPECS[0], generator)
    with torch.no_grad():
        model.logits.bias[1] = 1e5
    with pytest.raises(ModelError, match=r"logits\.bias holds numbers that are too large"):
        round_to_half(model)


def test_a_channel_that_is_not_a_number_stays(generator):
    model = build(SPECS[0], generator)
    with torch.no_grad():
        model.linear1.bias[3] = torch.nan
    assert find_open(model, torch.rand(2, 1, 6, 7))["linear1"][3]


def test_without_images_nothing_is_trimmed(generator):
    with pytest.raises(ModelError, match="cannot be trimmed without images"):
        trim(build(SPECS[0], generator), SPECS[0], torch.zeros(0, 1, 6, 7))


def test_a_layer_that_never_opens_is_named(generator):
    model = build(SPECS[0], generator)
    with torch.no_grad():
        model.linear1.bias[:] = -100
    with pytest.raises(ModelError, match="nothing of linear1 opens on any of 4 images"):
        trim(model, SPECS[0], torch.rand(4, 1, 6, 7))


@architecture("stiff network of a test")
def _stiff(spec: ModelSpec) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(spec.channels * spec.height * spec.width, 8), nn.ReLU())


@architecture("smooth network of a test")
def _smooth(spec: ModelSpec) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(spec.height, 8), nn.Sigmoid(), nn.Linear(8, spec.classes))


def test_what_cannot_be_trimmed_is_refused_by_name(generator):
    smooth = ModelSpec("smooth network of a test", 1, 4, 1)
    with pytest.raises(ModelError, match=r"the layer 2 \(Sigmoid\) cannot be trimmed"):
        trim(build(smooth, generator), smooth, torch.rand(2, 1, 4, 1))
    stiff = ModelSpec("stiff network of a test", 1, 4, 1)
    model = build(stiff, generator)
    with torch.no_grad():
        model[1].bias[:] = torch.tensor([-100.0, 100, 100, 100, 100, 100, 100, 100])
    with pytest.raises(ModelError, match=r"stiff network of a test' cannot be built with the widths \(7,\)"):
        trim(model, stiff, torch.rand(2, 1, 4, 1))
    grouped = nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.ReLU())
    with pytest.raises(ModelError, match=r"the layer 0 \(Conv2d\) cannot be trimmed"):
        trim(grouped, stiff, torch.rand(2, 4, 4, 4))
    bare = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(ModelError, match=r"the layer 1 \(Linear\) is followed by Linear"):
        trim(bare, stiff, torch.rand(2, 1, 4, 1))
    with pytest.raises(ModelError, match=r"'mlp' cannot be built with the widths \(7,\)"):
        trim(model, ModelSpec("mlp", 1, 4, 1), torch.rand(2, 1, 4, 1))
