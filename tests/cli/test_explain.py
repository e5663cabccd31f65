import json

import pytest
from PIL import Image

from patchcert.cli.app import run
from patchcert.data import load_dataset

ZOO = "zoo:mnist-5x5-cnn2"


def explain(*arguments):
    return run(["explain", *map(str, arguments), "--device", "cpu"])


def test_an_image_of_the_data_is_explained(capsys, tmp_path):
    page = tmp_path / "why.html"
    assert explain(ZOO, 7, "--data", "mnist-mini", "--out", page) == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert answer["image"] == "test image 7"
    assert answer["verdict"] in ("certified", "not certified")
    assert answer["label"] == int(load_dataset("mnist-mini").test.labels[7])
    assert len(answer["margins"]) == 9
    assert [layer["name"] for layer in answer["layers"]][-1] == "the logits"
    assert shown.err.splitlines()[0] == answer["reasons"][0]
    assert f"the page is {page}" in shown.err
    assert "Bounds, layer by layer" in page.read_text()
    assert all(f"{ZOO}" in command and "--data mnist-mini" in command for command in answer["next"])


def test_next_commands_can_be_read(capsys, answered, tmp_path):
    answer = answered(
        explain(ZOO, 7, "--data", "mnist-mini", "--patch", "8x8", "--out", tmp_path / "why.html")
    )
    assert answer["verdict"] == "not certified"
    assert any("--method masking" in command for command in answer["next"])
    for command in answer["next"]:
        name = command.split()[1]
        assert run([name, "--help"]) == 0
        options = capsys.readouterr().out
        assert all(word in options for word in command.split() if word.startswith("--"))


def test_a_picture_is_explained_for_what_it_is_taken_for_or_said_to_be(tmp_path, answered):
    test = load_dataset("mnist-mini").test
    Image.fromarray(test.images[7, 0].numpy()).save(tmp_path / "digit.png")
    out = ("--out", tmp_path / "why.html")
    found = answered(explain(ZOO, tmp_path / "digit.png", *out))
    assert (found["image"], found["label"]) == ("digit.png", found["prediction"])
    other = answered(explain(ZOO, tmp_path / "digit.png", "--label", (found["label"] + 1) % 10, *out))
    assert other["verdict"] == "wrong"


def test_masks_are_drawn(answered, model_file, tmp_path):
    common = ("--data", "mnist-mini", "--patch", 3, "--method", "masking", "--masks", 3)
    answer = answered(explain(model_file, 0, *common, "--out", tmp_path / "why.html"))
    assert answer["masks"]["weakest"]
    assert not answer["layers"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ZOO, 1000, "--data", "mnist-mini"), "there is no image 1000: mnist-mini has 1000 test images"),
        ((ZOO, "absent.png"), "there is no picture absent.png"),
        ((ZOO, 1, "--data", "mnist-mini", "--label", 3), "--label 3 is for pictures; image 1 has its own"),
        ((ZOO, 1, "--data", "mnist-mini", "--out", "why.png"), "--out why.png is no name of an HTML file"),
        ((ZOO, 1, "--data", "mnist-mini", "--method", "magic"), "--method magic is unknown"),
        ((ZOO, 1, "--data", "mnist-mini", "--method", "masking", "--sparse", 3), "SparsePixels"),
        (
            (ZOO, 1, "--data", "mnist-mini", "--method", "masking", "--refine", "split"),
            "--refine is a setting of",
        ),
    ],
)
def test_mistakes_are_named(refused, arguments, message):
    assert message in refused(explain(*arguments))
