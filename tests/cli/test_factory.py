"""Models of one's own on the command line: made by a function, with weights from a file that runs no code."""

import json
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

import patchcert as pc
from patchcert.cli.app import run
from patchcert.data import load_dataset
from patchcert.models import state_sha256

SOURCE = """
import torch
from torch import nn


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 7, stride=7)
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        return self.head(torch.relu(self.convolution(images)).flatten(1))


def small():
    torch.manual_seed(3)
    return Small()


def parallel():
    return nn.DataParallel(Small())


def compiled():
    return torch.compile(Small(), backend="eager")


def sized(width):
    return Small()


def nothing():
    return "a model"


def broken():
    raise ValueError("no such width")


number, ready = 3, Small()
"""
ARGUMENTS = ("--data", "mnist-mini", "--limit", "6", "--patch", "2", "--device", "cpu")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The model of a module in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_models.py").write_text(SOURCE)
    sys.modules.pop("own_models", None)
    names = {}
    exec(SOURCE, names)
    torch.manual_seed(0)
    yield names["Small"]().eval()
    sys.modules.pop("own_models", None)


def certified(answered, *arguments):
    return answered(run(["certify", *map(str, arguments), *ARGUMENTS]))


@pytest.mark.parametrize(
    "target",
    [
        "own_models:small",
        "own_models:Small",
        "own_models:ready",
        "own_models:parallel",
        "own_models:compiled",
        "./own_models.py:small",
    ],
)
@pytest.mark.parametrize("kind", ["safetensors", "pt", "checkpoint", "parallel"])
def test_what_is_certified_is_the_model_with_its_weights_and_normalisation(answered, own, target, kind):
    weights = own.state_dict()
    match kind:
        case "safetensors":
            safetensors.torch.save_file(weights, "own.safetensors")
        case "pt":
            torch.save(weights, "own.pt")
        case "checkpoint":
            torch.save({"epoch": 3, "state_dict": weights}, "own.checkpoint")
        case "parallel":
            torch.save(nn.DataParallel(own).state_dict(), "own.parallel")
    summary = certified(answered, target, "--weights", f"own.{kind}", "--normalise", "0.13/0.31")
    model, images = nn.Sequential(pc.Normalize(0.13, 0.31), own), load_dataset("mnist-mini").test.take(6)
    expected = pc.certify(model, images.floats(), images.labels, pc.Patch(2))
    assert summary["correct"] == int((expected.predictions == images.labels).sum())
    assert summary["certified"] == int(expected.certified.sum())
    assert summary["weights_sha256"] == state_sha256(model)


def test_every_command_takes_it(own, answered):
    torch.save(own.state_dict(), "own.pt")
    images = load_dataset("mnist-mini").test.take(6)
    expected = own(images.floats()).argmax(dim=1)
    found = answered(run(["predict", "own_models:small", "--weights", "own.pt", *ARGUMENTS]))
    assert list(found["predictions"].values()) == expected.tolist()
    attack = ["attack", "own_models:small", "--weights", "own.pt", "--steps", "1", "--restarts", "1"]
    assert answered(run([*attack, *ARGUMENTS]))["correct"] == int((expected == images.labels).sum())


def test_without_weights_it_is_taken_as_it_is_made(capsys, own):
    assert run(["certify", "own_models:small", *ARGUMENTS]) == 0
    printed = capsys.readouterr()
    assert "no --weights are given: own_models:small is taken as it is made" in printed.err
    torch.manual_seed(3)
    assert json.loads(printed.out)["weights_sha256"] == state_sha256(type(own)())


def test_double_precision_is_kept_and_attacked(capsys, own, answered):
    torch.save(own.double().state_dict(), "own.pt")
    summary = certified(answered, "own_models:small", "--weights", "own.pt")
    assert summary["classifier"]["dtype"] == "float64"
    attack = ["attack", "own_models:small", "--weights", "own.pt", "--steps", "1", "--restarts", "1"]
    assert run([*attack, *ARGUMENTS]) == 0
    assert run(["certify", "own_models:small", "--weights", "own.pt", "--dtype", "float32", *ARGUMENTS]) == 2
    assert "on the command line --dtype float64" in capsys.readouterr().err


class Dangerous:
    def __reduce__(self):
        return (open, ("stolen", "w"))


def test_code_in_a_file_of_weights_is_never_run(capsys, own, tmp_path):
    torch.save({"weights": Dangerous()}, "own.pt")
    assert run(["certify", "own_models:small", "--weights", "own.pt", *ARGUMENTS]) == 2
    assert "own.pt cannot be read as plain weights" in capsys.readouterr().err
    assert not (tmp_path / "stolen").exists()


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["head.weight", "convolution.bias"])
def test_weights_that_are_not_finite_are_an_error(capsys, own, number, name):
    weights = own.state_dict()
    weights[name].view(-1)[1] = number
    torch.save(weights, "own.pt")
    assert run(["certify", "own_models:small", "--weights", "own.pt", *ARGUMENTS]) == 2
    assert f"{name} of own_models:small with own.pt holds NaN or infinities" in capsys.readouterr().err


MISTAKES = {
    "no module": (["nowhere:small"], "nowhere:small: No module named 'nowhere'"),
    "no file": (["./nowhere.py:small"], "nowhere.py:small: there is no nowhere.py"),
    "no such name": (["own_models:smal"], "did you mean 'small'?"),
    "arguments": (["own_models:sized"], "own_models:sized (function) cannot be called without"),
    "a number": (["own_models:number"], "own_models:number (int) cannot be called without arguments"),
    "something else": (["own_models:nothing"], "own_models:nothing returned str; expected a torch.nn.Module"),
    "an error": (["own_models:broken"], "own_models:broken raised ValueError: no such width"),
    "no weights": (["own_models:small", "--weights", "no.pt"], "there is no file of weights no.pt"),
    "other weights": (
        ["own_models:small", "--weights", "other.pt"],
        "other.pt do not fit the model Small: weight is not part of it; convolution.weight is missing",
    ),
    "no state dict": (["own_models:small", "--weights", "list.pt"], "list.pt holds no state dict"),
    "no normalisation": (["own_models:small", "--normalise", "0.1"], "--normalise 0.1 is not MEAN/STD"),
    "words": (["own_models:small", "--normalise", "a/b"], "--normalise a/b is not MEAN/STD"),
    "weights of the zoo": (
        ["zoo:mnist-2x2-mlp", "--weights", "own.pt"],
        "--weights is for a model of your own, but zoo:mnist-2x2-mlp comes with its own",
    ),
    "a bare file of weights": (["other.pt"], "my_models:resnet --weights other.pt"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(refused, own, name):
    arguments, message = MISTAKES[name]
    torch.save({"weight": torch.zeros(2)}, "other.pt")
    torch.save([1, 2], "list.pt")
    assert message in refused(run(["certify", *arguments, *ARGUMENTS]))


def test_weights_are_those_of_one_model(capsys, own):
    assert run(["attack", "own_models:small", "zoo:mnist-2x2-mlp", "--weights", "own.pt", *ARGUMENTS]) == 2
    assert "--weights own.pt is for one target, not for 2" in capsys.readouterr().err
