"""Folders and files that hold something else than a command needs: a message of ours, and exit code 2."""

import numpy as np
import pytest
import torch

from patchcert.cli.app import run
from patchcert.models import ModelSpec, build, save


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with an empty folder, one with a broken specification, and one with evidence of noise."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "garbage", "noise/run"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "garbage" / "spec.toml").write_text("hi")
    noise = np.random.default_rng(0).bytes(300)
    (tmp_path / "noise" / "run" / "x.npz").write_bytes(noise)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("zoo list --zoo nothere", "there is no folder nothere"),
        ("zoo list --zoo empty", "empty holds no models with cards"),
        ("zoo show some --zoo nothere", "there is no folder nothere"),
        ("zoo copy some --zoo empty --out run", "empty holds no models with cards"),
        ("zoo list --zoo garbage", "garbage holds no models with cards"),
        ("zoo add nothere --zoo new", "the run folder nothere is not there"),
        ("certify zoo:nothere/some", "there is no folder nothere"),
        ("certify empty", "the run folder empty holds no run"),
        ("certify garbage", "spec.toml is not valid TOML"),
        ("predict empty", "the run folder empty holds no run"),
        ("attack nothere", "there is no nothere"),
        ("explain empty 3", "the run folder empty holds no run"),
        ("trim empty --out new", "the run folder empty holds no run"),
        ("train garbage --resume", "spec.toml is not valid TOML"),
        ("report nothere", "the run folder nothere is not there"),
        ("report empty", "the run folder empty holds no run"),
        ("report garbage", "spec.toml is not valid TOML"),
        ("report noise", "the run folder noise holds no run"),
        ("reproduce all --from nothere", "there is no folder nothere"),
        ("reproduce all --from empty", "empty holds no results"),
        ("reproduce all --from noise", "noise holds no results"),
        ("audit nothere", "there is no folder nothere"),
        ("audit empty", "empty holds neither evidence nor a manifest"),
        ("audit garbage", "garbage holds neither evidence nor a manifest"),
        ("choose nothere.toml --out new", "there is no nothere.toml"),
        ("data verify mnist --data-dir empty", "the files of mnist are not there"),
    ],
)
def test_a_folder_that_holds_nothing_of_use_is_a_mistake(capsys, place, command, message):
    assert run(command.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert message in " ".join(shown.err.split())


def test_evidence_of_noise_is_a_finding_in_our_words(capsys, place):
    assert run(["audit", "noise"]) == 1
    words = " ".join(capsys.readouterr().err.split())
    assert "x.npz is not a readable evidence file: it is no .npz archive" in words
    assert "pickle" not in words


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("command", ["certify", "attack", "predict", "explain"])
def test_weights_that_are_no_numbers_are_a_mistake(capsys, tmp_path, command, value):
    spec, file = ModelSpec("mlp", 1, 28, 28, hidden=4), tmp_path / "model.safetensors"
    model = build(spec, torch.Generator().manual_seed(0))
    with torch.no_grad():
        next(model.parameters())[0, 0] = value
    save(model, spec, file)
    image = ["3"] if command == "explain" else []
    assert run([command, str(file), *image, "--data", "mnist-mini", "--patch", "2"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "linear1.weight of" in shown.err
    assert "holds NaN or infinities" in shown.err
