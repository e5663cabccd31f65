"""Training that begins with weights of a file: they are what it starts from, and part of what the run is."""

import json

import pytest
import safetensors.torch
import torch

from patchcert.errors import ModelError, RunError, SpecError
from patchcert.files import sha256
from patchcert.models import build, load, save
from patchcert.train.spec import read_spec
from patchcert.train.training import Workplace, train_run

SHORT = [
    "data.name=mnist-mini", "data.limit=40", "strategy.kind=natural", "model.hidden=8", "optimiser.batch_size=20",
    "schedule.epochs=1", "schedule.epsilon.natural_epochs=1", "schedule.epsilon.ramp_epochs=0", "run.check_every=0",
    "schedule.learning_rate.initial=1e-30",
]  # fmt: skip
"""One epoch of steps too small to change a weight."""


def spec_of(*changes):
    return read_spec("paper-mnist", [*SHORT, *changes])


def begun(folder, *changes):
    return train_run(spec_of(*changes), folder, Workplace(torch.device("cpu")))


@pytest.fixture
def weights(tmp_path):
    """A file of weights, as a run leaves it, of another seed."""
    run = begun(tmp_path / "first", "seed=1")
    return run.weights


def test_training_begins_with_the_weights_of_the_file(weights, tmp_path):
    run = begun(tmp_path / "second", f"model.weights={weights}")
    (first, _), (second, _) = load(weights), load(run.weights)
    for name, value in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], value, rtol=0, atol=1e-20)
    other, _ = load(begun(tmp_path / "third").weights)
    assert not torch.equal(other.state_dict()["linear1.weight"], first.state_dict()["linear1.weight"])


def test_state_dicts_of_torch_and_half_precision_are_read_too(weights, tmp_path):
    model, spec = load(weights)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    torch.save(
        {"state_dict": {f"module.{name}": value for name, value in model.state_dict().items()}},
        tmp_path / "a.pt",
    )
    save(model, spec, tmp_path / "b.safetensors", half=True)
    for name in ("a.pt", "b.safetensors"):
        found, _ = load(begun(tmp_path / name[0], f"model.weights={tmp_path / name}").weights)
        assert found.state_dict()["logits.weight"].dtype == torch.float32
        torch.testing.assert_close(found.state_dict()["logits.weight"], model.state_dict()["logits.weight"])


def test_the_sum_of_the_file_decides_the_run_and_not_its_place(weights, tmp_path):
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(weights.read_bytes())
    here, there = spec_of(f"model.weights={weights}"), spec_of(f"model.weights={copy}")
    assert here.model.weights_sha256 == sha256(weights)
    assert here.fingerprint() == there.fingerprint() != spec_of().fingerprint()
    model, spec = load(weights)
    torch.nn.init.zeros_(model[-1].bias)
    save(model, spec, copy)
    assert spec_of(f"model.weights={copy}").fingerprint() != here.fingerprint()


def test_a_file_that_has_changed_is_refused(weights, tmp_path):
    asked = spec_of(f"model.weights={weights}")
    model, spec = load(weights)
    torch.nn.init.zeros_(model[-1].bias)
    save(model, spec, weights)
    with pytest.raises(RunError, match=f"begins with weights of {asked.model.weights_sha256}"):
        train_run(asked, tmp_path / "run", Workplace(torch.device("cpu")))


def test_a_finished_or_resumed_run_does_without_the_file(weights, tmp_path):
    run = begun(tmp_path / "run", f"model.weights={weights}")
    asked = run.spec
    weights.unlink()
    assert train_run(asked, run.path, Workplace(torch.device("cpu")), resume=True).is_finished
    run.weights.unlink()
    assert run.state.is_file()
    assert train_run(asked, run.path, Workplace(torch.device("cpu")), resume=True).is_finished


def test_weights_of_another_network_are_refused_by_name_and_shape(weights, tmp_path):
    with pytest.raises(ModelError, match=r"linear1.weight has shape \(8, 784\) instead of \(9, 784\)"):
        begun(tmp_path / "run", f"model.weights={weights}", "model.hidden=9")


def test_another_normalisation_is_refused(tmp_path):
    spec = spec_of().model.for_images((1, 28, 28), 10)
    shifted = {"channels": 1, "height": 28, "width": 28, "classes": 10, "mean": [0.5], "std": [0.5]}
    model = build(type(spec).from_dict({**spec.to_dict(), **shifted}), torch.Generator())
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    assert "normalize.mean" in weights
    safetensors.torch.save_file(
        weights, tmp_path / "shifted.safetensors", metadata={"note": json.dumps(shifted)}
    )
    with pytest.raises(ModelError, match="normalize.mean"):
        begun(tmp_path / "run", f"model.weights={tmp_path / 'shifted.safetensors'}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.weights=nowhere.safetensors"], "there is no such file"),
        (["model.weights_sha256=00"], "but no file of weights"),
        (
            [
                "model.weights=x",
                "model.weights_sha256=00",
                "strategy.kind=all",
                "bounds.initialisation=interval",
            ],
            "draws others",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        spec_of(*changes)
