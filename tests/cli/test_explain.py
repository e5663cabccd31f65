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


def next_of(answered, tmp_path, *arguments):
    answer = answered(explain(*arguments, "--data", "mnist-mini", "--out", tmp_path / "why.html"))
    return answer["verdict"], [" ".join(command.split()[1:]) for command in answer["next"]]


def test_next_commands_are_about_the_kind_of_proof_that_was_asked_for(answered, tmp_path):
    target, data = "zoo:mnist-2x2-cnn2", "--data mnist-mini"
    masked = (
        "--method",
        "detection",
        "--setting",
        "mirrored=true",
        "--setting",
        "threshold=0.9",
        "--masks",
        "2,3",
    )
    verdict, steps = next_of(answered, tmp_path, target, 1, "--patch", 8, *masked)
    assert verdict == "not certified"
    settings = "--method detection --setting mirrored=true --setting threshold=0.9 --masks"
    assert steps == [
        f"explain {target} 1 --patch 8 {data} {settings} 4,5",
        f"attack {target} --patch 8 {data} {settings} 2,3 --search sweep",
    ]
    verdict, steps = next_of(answered, tmp_path, target, 0, "--method", "masking")
    assert (verdict, steps) == (
        "certified",
        [f"attack {target} {data} --method masking --certified-only --images 100"],
    )
    verdict, steps = next_of(answered, tmp_path, target, 5, "--patches", 2, "--method", "masking")
    assert (verdict, steps) == (
        "not certified",
        [f"attack {target} --patches 2 {data} --method masking"],
    )


def test_more_masks_are_advised_only_where_there_can_be_more(answered, tmp_path):
    few = ("zoo:mnist-2x2-cnn2", 8, "--patch", 14, "--placements", "0,0;7,7;14,14", "--method", "masking")
    for masks, more in ((2, ["4"]), (3, [])):
        verdict, steps = next_of(answered, tmp_path, *few, "--masks", masks)
        assert verdict == "not certified"
        assert [step.split()[-1] for step in steps if step.startswith("explain")] == more


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
