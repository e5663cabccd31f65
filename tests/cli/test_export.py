"""`patchcert export`, and ONNX files as what commands work on."""

import csv
import json
import warnings

import pytest
import torch
from PIL import Image

import patchcert as pc
from attention_models import ClassTokenTransformer, by_products
from patchcert.cli.app import run
from patchcert.files import sha256
from patchcert.models import save_onnx

MINI = ("--data", "mnist-mini")


def answer(capsys, *arguments):
    assert run([*map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def file(tmp_path):
    save_onnx(pc.load("mnist-2x2-cnn2"), tmp_path / "cnn2.onnx", (1, 28, 28))
    return tmp_path / "cnn2.onnx"


def test_an_exported_model_is_certified_like_the_model(capsys, tmp_path):
    path = tmp_path / "cnn2.onnx"
    assert answer(capsys, "export", "zoo:mnist-2x2-cnn2", "--onnx", path) == {"onnx": str(path)}
    arguments = (*MINI, "--limit", "30", "--patch", "2", "--device", "cpu")
    ours, theirs = (answer(capsys, "certify", each, *arguments) for each in (path, "zoo:mnist-2x2-cnn2"))
    assert (ours["correct"], ours["certified"]) == (theirs["correct"], theirs["certified"])
    assert 0 < ours["certified"] < 30
    assert ours["weights_sha256"] == sha256(path)


def test_every_command_takes_onnx_files(capsys, file):
    images = pc.load_dataset("mnist-mini").test.take(5)
    expected = pc.load("mnist-2x2-cnn2")(images.floats()).argmax(dim=1)
    found = answer(capsys, "predict", file, *MINI, "--limit", "5", "--patch", "2", "--device", "cpu")
    assert list(found["predictions"].values()) == expected.tolist()
    attack = ("attack", file, *MINI, "--patch", "2", "--images", "3", "--steps", "1", "--restarts", "1")
    assert answer(capsys, *attack, "--device", "cpu")["images"] == 3


def test_normalisation_is_part_of_what_is_certified(capsys, file):
    arguments = (file, *MINI, "--limit", "3", "--patch", "2", "--device", "cpu")
    plain = answer(capsys, "certify", *arguments)
    sums = {
        answer(capsys, "certify", *arguments, "--normalise", each)["weights_sha256"]
        for each in ("0/1", "0/2")
    }
    assert len({plain["weights_sha256"], *sums}) == 3


def test_properties_are_written_with_their_model(capsys, tmp_path):
    folder = tmp_path / "properties"
    found = answer(
        capsys, "export", "zoo:mnist-1-pixel-mlp", "--vnnlib", folder, *MINI, "--patch", "5", "--limit", "2",
        "--placements", "0,0;11,12",
    )  # fmt: skip
    assert found["properties"] == found["proven"] + found["open"] == 4
    assert {path.name for path in folder.glob("*.vnnlib")} == {
        f"image{image}-{place}.vnnlib" for image in (0, 1) for place in ("top0-left0", "top11-left12")
    }
    rows = list(csv.DictReader((folder / "claims.csv").read_text().splitlines()))
    assert sum(row["claim"] == "proven" for row in rows) == found["proven"]
    assert (folder / "model.onnx").is_file()


def test_only_some_claims_are_written_and_the_model_elsewhere(capsys, tmp_path):
    arguments = ["export", "zoo:mnist-1-pixel-mlp", *MINI, "--patch", "5", "--placements", "0,0;11,12"]
    counts = {}
    for kind in ("open", "proven"):
        folder = tmp_path / kind
        found = answer(
            capsys, *arguments, "--vnnlib", folder, "--only", kind, "--onnx", tmp_path / "net.onnx"
        )
        counts[kind] = found[kind]
        assert found["properties"] == found[kind] == len(list(folder.glob("*.vnnlib")))
        lines = (folder / "instances.csv").read_text().splitlines()
        assert all(line.startswith("../net.onnx,image0-") for line in lines)
    assert sum(counts.values()) == 2


def test_a_softmax_is_left_out_and_that_is_said(capsys, tmp_path):
    from onnx import helper, load, save

    save_onnx(pc.load("mnist-2x2-cnn2"), tmp_path / "model.onnx", (1, 28, 28))
    model = load(tmp_path / "model.onnx")
    model.graph.node.append(helper.make_node("Softmax", ["logits"], ["shares"], axis=1))
    model.graph.output[0].name = "shares"
    save(model, tmp_path / "model.onnx")
    certify = ["certify", str(tmp_path / "model.onnx"), *MINI, "--limit", "2", "--patch", "2"]
    assert run([*certify, "--device", "cpu"]) == 0
    assert "the Softmax at the end of" in capsys.readouterr().err


@pytest.fixture
def transformer(tmp_path):
    torch.manual_seed(0)
    model = ClassTokenTransformer(by_products, channels=1, size=28, patch=7).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (torch.rand(1, 1, 28, 28),), tmp_path / "vit.onnx", dynamo=False)
    return tmp_path / "vit.onnx"


def test_a_transformer_is_certified_behind_masks(capsys, transformer):
    masks = ("--method", "masking", "--masks", "3", "--patch", "4", "--device", "cpu")
    found = answer(capsys, "certify", transformer, *MINI, *masks, "--limit", "3")
    assert found["images"] == 3
    assert found["certified"] <= found["correct"]
    assert answer(capsys, "predict", transformer, *MINI, *masks, "--limit", "2")["predictions"]
    attack = ("attack", transformer, *MINI, *masks, "--images", "1", "--steps", "1", "--restarts", "1")
    assert answer(capsys, *attack)["images"] == 1


WITHOUT_BOUNDS = {
    "certify": ["certify", "vit.onnx", *MINI, "--patch", "4", "--limit", "3"],
    "refine": ["certify", "vit.onnx", *MINI, "--patch", "4", "--limit", "3", "--refine", "linear"],
    "local votes": ["certify", "vit.onnx", *MINI, "--patch", "4", "--limit", "3", "--method", "local-votes"],
    "explain": ["explain", "vit.onnx", "0", *MINI, "--patch", "4"],
    "export": ["export", "vit.onnx", "--onnx", "copy.onnx"],
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_BOUNDS)
def test_what_needs_bounds_refuses_a_transformer_by_its_operator(refused, transformer, name, monkeypatch):
    monkeypatch.chdir(transformer.parent)
    message = refused(run(WITHOUT_BOUNDS[name]))
    assert "operator Concat at '/Concat_1': constants are among its inputs" in message


MISTAKES = {
    "nothing": (["export", "zoo:mnist-2x2-mlp"], "nothing is asked for"),
    "a kind": (["export", "zoo:mnist-2x2-mlp", "--vnnlib", "out", "--only", "all"], "--only all is unknown"),
    "sparse": (["export", "zoo:mnist-1-pixel-mlp", "--vnnlib", "out", *MINI], "properties are about patches"),
    "no file": (["certify", "nowhere.onnx", *MINI, "--patch", "2"], "there is no file nowhere.onnx"),
    "garbage": (["certify", "garbage.onnx", *MINI, "--patch", "2"], "garbage.onnx is not a readable ONNX file"),
    "weights": (["certify", "cnn2.onnx", "--weights", "own.pt", *MINI], "a model of your own, but cnn2.onnx"),
    "no data": (["certify", "cnn2.onnx", "--patch", "2"], "cnn2.onnx does not say which images it is for"),
    "no threat": (["certify", "cnn2.onnx", *MINI], "no threat is given"),
    "other images": (["certify", "small.onnx", *MINI, "--patch", "2"], "is for 1x4x4 images, but those of"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(refused, file, name, monkeypatch):
    monkeypatch.chdir(file.parent)
    (file.parent / "garbage.onnx").write_bytes(b"nothing of the kind")
    small = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 10))
    save_onnx(small, file.parent / "small.onnx", (1, 4, 4))
    arguments, message = MISTAKES[name]
    assert message in refused(run(arguments))


def test_pictures_and_folders_come_at_the_size_of_an_onnx_file(capsys, file, tmp_path):
    digits = pc.load_dataset("mnist-mini").test
    place = tmp_path / "photos" / "seven"
    place.mkdir(parents=True)
    Image.fromarray(digits.images[0, 0].numpy()).save(place / "digit.png")
    expected = int(pc.load("mnist-2x2-cnn2")(digits.take(1).floats()).argmax())
    of_picture = answer(capsys, "predict", file, place / "digit.png", "--patch", "2", "--device", "cpu")
    of_folder = answer(
        capsys, "predict", file, "--data", f"folder:{tmp_path / 'photos'}", "--patch", "2", "--device", "cpu"
    )
    assert [list(found["predictions"].values()) for found in (of_picture, of_folder)] == [[expected]] * 2
