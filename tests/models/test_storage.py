import pytest
import safetensors.torch
import torch
from torch import nn

from patchcert.errors import ModelError
from patchcert.models import (
    ModelSpec,
    architecture,
    build,
    load,
    load_weights,
    registry,
    round_to_half,
    save,
    state_sha256,
)

SPEC = ModelSpec("cnn2", 3, 8, 8, classes=4, hidden=5, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.2))


def test_what_is_saved_is_what_is_loaded(tmp_path, generator):
    model = build(SPEC, generator)
    save(model, SPEC, tmp_path / "new folder" / "model.safetensors")
    loaded, spec = load(tmp_path / "new folder" / "model.safetensors")
    images = torch.rand(2, 3, 8, 8, generator=generator)
    assert spec == SPEC
    assert torch.equal(loaded(images), model(images))
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert [path.name for path in (tmp_path / "new folder").iterdir()] == ["model.safetensors"]


def test_a_loaded_model_stays_as_it_is_when_its_file_is_overwritten(tmp_path, generator):
    path, images = tmp_path / "model.safetensors", torch.rand(2, 3, 8, 8, generator=generator)
    save(build(SPEC, generator), SPEC, path)
    loaded, _ = load(path)
    before, other = loaded(images), safetensors.torch.load(path.read_bytes())
    changed = safetensors.torch.save({name: value + 1 for name, value in other.items()})
    with path.open("r+b") as file:
        file.seek(-len(changed) // 2, 2)
        file.write(changed[-(len(changed) // 2) :])
    assert torch.equal(loaded(images), before)


def test_double_precision_survives(tmp_path, generator):
    save(build(SPEC, generator).double(), SPEC, tmp_path / "model.safetensors")
    assert load(tmp_path / "model.safetensors")[0].logits.weight.dtype == torch.float64


def test_a_failed_save_leaves_the_old_file(tmp_path, generator):
    path = tmp_path / "model.safetensors"
    save(build(SPEC, generator), SPEC, path)
    before = path.read_bytes()
    with pytest.raises(ModelError, match=r"conv1.weight is missing"):
        save(build(ModelSpec("mlp", 1, 8, 8)), SPEC, path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"there is no model file .*absent.safetensors"):
        load(tmp_path / "absent.safetensors")


def test_a_file_without_description_is_refused_with_the_way_out(tmp_path, generator):
    path = tmp_path / "bare.safetensors"
    safetensors.torch.save_file(build(SPEC, generator).state_dict(), path)
    with pytest.raises(ModelError, match="does not say which model") as caught:
        load(path)
    assert "patchcert.models.save" in caught.value.hint


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 something else", b"\xff" * 100])
def test_a_file_of_another_format_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load(path)


def test_a_file_cut_short_is_refused(tmp_path, generator):
    path = tmp_path / "model.safetensors"
    save(build(SPEC, generator), SPEC, path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("logits.bias"), "logits.bias is missing"),
        (lambda weights: weights.update(more=torch.zeros(1)), "more is not part of it"),
        (
            lambda weights: weights.update({"logits.bias": torch.zeros(9)}),
            r"logits.bias has shape \(9,\) instead of \(4,\)",
        ),
        (
            lambda weights: weights.update({"normalize.mean": torch.zeros(3, 1, 1)}),
            "normalize.mean in .* is not what the description says",
        ),
        (
            lambda weights: weights.update({"logits.bias": torch.zeros(4, dtype=torch.int32)}),
            "logits.bias is of torch.int32 instead of a floating-point type",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, generator, change, message):
    path = tmp_path / "model.safetensors"
    save(build(SPEC, generator), SPEC, path)
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    weights = safetensors.torch.load_file(path)
    change(weights)
    safetensors.torch.save_file(weights, path, metadata=metadata)
    with pytest.raises(ModelError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("not json", "cannot be read"),
        (
            '{"name": "mlp", "channels": 1, "height": 8, "width": 8, "mean": ["x"], "std": [1]}',
            "cannot be read: could not convert",
        ),
        ('{"name": "mlp"}', r"lacks \['channels', 'height', 'width'\]"),
        ('{"name": "mlq", "channels": 1, "height": 8, "width": 8}', "no architecture named 'mlq'"),
    ],
)
def test_a_bad_description_is_refused(tmp_path, description, message):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(1)}, path, metadata={"patchcert.model": description})
    with pytest.raises(ModelError, match=message):
        load(path)


@pytest.fixture
def _bare_architecture(monkeypatch):
    monkeypatch.setattr(registry, "_builders", dict(registry._builders))

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(3 * 8 * 8, 4)

        def forward(self, images):
            return self.l(images.flatten(1))

    architecture("bare")(lambda spec: Bare())


@pytest.mark.usefixtures("_bare_architecture")
@pytest.mark.parametrize("half", [False, True])
def test_the_module_of_an_architecture_is_saved_with_or_without_what_build_puts_around_it(
    tmp_path, generator, half
):
    spec = ModelSpec("bare", 3, 8, 8, classes=4, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.2))
    built, path = build(spec, generator), tmp_path / "model.safetensors"
    built = round_to_half(built) if half else built
    images = torch.rand(2, 3, 8, 8, generator=generator)
    for model in (built, built.network):
        save(model, spec, path, half)
        assert torch.equal(load(path)[0](images), built(images))


def test_any_other_module_is_refused_with_the_way_to_certify_it(tmp_path):
    with pytest.raises(ModelError, match="do not fit the model they are said to be of") as caught:
        save(nn.Linear(2, 2), SPEC, tmp_path / "model.safetensors")
    assert "my_models:factory --weights FILE" in caught.value.hint


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({1: torch.zeros(2)}, "holds no state dict, a mapping of names to tensors"),
        ({"weight": torch.zeros(2, 2, dtype=torch.int8), "bias": torch.zeros(2)}, "weight is of torch.int8"),
    ],
)
def test_what_are_no_weights_is_refused(tmp_path, stored, message):
    torch.save(stored, tmp_path / "weights.pt")
    with pytest.raises(ModelError, match=message):
        load_weights(nn.Linear(2, 2), tmp_path / "weights.pt")


def test_the_sum_of_weights_sees_names_types_and_numbers():
    model = nn.Linear(2, 3)
    sums = [state_sha256(model)]
    with torch.no_grad():
        model.bias[1] += 1
    sums += [state_sha256(model), state_sha256(model.double()), state_sha256(nn.Sequential(model))]
    assert len(set(sums)) == len(sums)
    assert state_sha256(nn.Sequential(model)) == sums[-1]
