"""`patchcert zoo`, and zoo:NAME where other commands take a model, from a really trained run on."""

import json
import shutil

import pytest

from patchcert.cli.app import run
from patchcert.evidence import EvidenceFolder
from patchcert.files import sha256
from patchcert.train.run_folder import Run
from patchcert.train.spec import read_spec
from patchcert.zoo import Zoo

NAME = "mnist-mini-2x2-mlp"
SPEC = """
[data]
name = "mnist-mini"
limit = 600

[model]
name = "mlp"
hidden = 16

[threat]
kind = "patch"
stamp = "2x2"

[strategy]
kind = "all"

[schedule]
epochs = 3
epsilon = { natural_epochs = 1, ramp_epochs = 1 }
learning_rate = { initial = 0.005 }

[run]
check_every = 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run folder, trained, certified and attacked by the commands."""
    place = tmp_path_factory.mktemp("trained")
    (place / "spec.toml").write_text(SPEC)
    made = place / "run"
    for arguments in (
        ["train", place / "spec.toml", "--out", made],
        ["certify", made],
        ["attack", made, "--images", 20, "--restarts", 1, "--steps", 3],
    ):
        words = [*map(str, arguments), "--device", "cpu"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["patchcert", *words])
            assert run(words) == 0
    return made


@pytest.fixture
def zoo(folder, tmp_path, monkeypatch):
    """The package's zoo, for as long as a test runs, with one model."""
    made = Zoo(tmp_path / "zoo")
    monkeypatch.setattr("patchcert.zoo.shipped", lambda: made)
    assert run(["zoo", "add", str(folder)]) == 0
    return made


def test_added_models_are_listed_and_shown(capsys, zoo, folder, answered):
    (added,) = answered(0)["runs"]
    assert (added["name"], added["status"]) == (NAME, "added")
    assert run(["zoo", "list"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(NAME)]
    assert f"{100 * added['certified_accuracy']:.1f}" in row
    listed = answered(run(["zoo", "list", "--json"]))
    assert [row["name"] for row in listed["models"]] == [NAME]
    assert listed["bytes"] == zoo.size()
    shown = answered(run(["zoo", "show", NAME]))
    found = EvidenceFolder(folder / "evidence").all()
    assert [shown["proof"]["certified"]] == [each.certified for each in found if each.kind == "certify"]
    assert shown["proof"]["classifier"] == {"name": "IntervalBounds", "dtype": "float32"}
    low, high = shown["proof"]["certified_interval"]
    assert low < shown["proof"]["certified_accuracy"] == added["certified_accuracy"] < high
    (attack,) = shown["attacks"]
    assert attack["images"] == 20
    assert attack["command"] == f"patchcert attack zoo:{NAME} --images 20 --restarts 1 --steps 3"
    assert shown["commands"]["certify"] == f"patchcert certify zoo:{NAME}"


def test_the_specification_is_printed_for_train(capsys, zoo, folder, tmp_path):
    capsys.readouterr()
    assert run(["zoo", "spec", NAME]) == 0
    (tmp_path / "printed.toml").write_text(capsys.readouterr().out)
    assert read_spec(tmp_path / "printed.toml") == Run.open(folder).spec


@pytest.mark.parametrize("options", [[], ["--limit", "150"]])
def test_certifying_recomputes_the_card(capsys, zoo, options):
    capsys.readouterr()
    assert run(["certify", f"zoo:{NAME}", "--device", "cpu", *options]) == 0
    shown = capsys.readouterr()
    assert f"matches the card of {NAME}, image by image" in shown.err
    summary = json.loads(shown.out)
    assert summary["card"] == {"name": NAME, "compared": True, "matches": True, "differences": []}
    assert summary["evidence"] is None


def test_models_of_a_folder_of_ones_own_are_checked_like_those_of_the_package(capsys, folder, tmp_path):
    assert run(["zoo", "add", str(folder), "--zoo", str(tmp_path / "mine")]) == 0
    assert run(["certify", f"zoo:{tmp_path}/mine/{NAME}", "--limit", "20", "--device", "cpu"]) == 0
    assert f"matches the card of {NAME}, image by image" in capsys.readouterr().err
    assert run(["certify", f"zoo:{tmp_path}/other/{NAME}", "--limit", "20", "--device", "cpu"]) == 2


def test_a_card_that_says_otherwise_gives_exit_code_1(capsys, zoo):
    file = zoo.folder / f"{NAME}.json"
    plain = json.loads(file.read_text())
    proof = plain["proof"]
    plain["proof"] = proof | {"certified": proof["right"], "certified_images": proof["right_images"]}
    file.write_text(json.dumps(plain))
    capsys.readouterr()
    assert run(["certify", f"zoo:{NAME}", "--device", "cpu"]) == 1
    shown = capsys.readouterr()
    assert f"differs from the card of {NAME}: {proof['certified']} of 1,000 images are certified" in shown.err
    assert json.loads(shown.out)["card"]["matches"] is False


def test_a_trimmed_run_is_smaller_and_can_be_certified(capsys, folder, tmp_path, answered, refused):
    out = tmp_path / "trimmed"
    capsys.readouterr()
    shown = answered(run(["trim", str(folder), "--out", str(out), "--half", "--device", "cpu"]))
    (width,) = shown["widths"]
    assert shown["parameters"] == width * (28 * 28 + 1) + 10 * (width + 1) <= shown["parameters_before"]
    assert shown["weights_sha256"] == sha256(out / "weights.safetensors")
    assert shown["bytes"] < 0.6 * (folder / "weights.safetensors").stat().st_size
    assert answered(run(["certify", str(out), "--limit", "20", "--device", "cpu"]))["images"] == 20
    assert f"{out} is not empty" in refused(run(["trim", str(folder), "--out", str(out), "--device", "cpu"]))


def test_a_whole_model_can_be_rounded_to_half_precision(capsys, folder, tmp_path, answered):
    out = tmp_path / "half"
    capsys.readouterr()
    assert run(["trim", str(folder), "--out", str(out), "--keep-units"]) == 2
    assert "--keep-units leaves nothing to do" in capsys.readouterr().err
    shown = answered(run(["trim", str(folder), "--out", str(out), "--half", "--keep-units"]))
    assert shown["parameters"] == shown["parameters_before"]
    assert shown["bytes"] < 0.6 * (folder / "weights.safetensors").stat().st_size
    assert run(["certify", str(out), "--limit", "20", "--device", "cpu"]) == 0


def test_another_threat_is_proven_but_not_compared(capsys, zoo):
    capsys.readouterr()
    assert run(["certify", f"zoo:{NAME}", "--patch", "1", "--limit", "5", "--device", "cpu"]) == 0
    assert "not compared with the card" in capsys.readouterr().err


def test_attacks_know_the_threat_and_data_of_the_card(capsys, zoo, answered):
    capsys.readouterr()
    options = ["--limit", "5", "--restarts", "1", "--steps", "2", "--device", "cpu"]
    summary = answered(run(["attack", f"zoo:{NAME}", *options]))
    assert summary["threat"] == zoo.card(NAME).threat.to_dict()
    assert summary["data"]["name"] == "mnist-mini"
    assert summary["weights_sha256"] == zoo.card(NAME).weights_sha256


def test_a_copied_model_can_be_certified_and_reported(refused, zoo, tmp_path):
    copied = str(tmp_path / "copied")
    assert f"patchcert zoo copy {NAME}" in refused(run(["report", f"zoo:{NAME}"]))
    assert run(["zoo", "copy", NAME, "--out", copied]) == 0
    assert run(["certify", copied, "--limit", "30", "--device", "cpu"]) == 0
    assert run(["report", copied, "--maps", "1"]) == 0


def test_a_model_with_fewer_certified_images_is_kept_out(capsys, zoo, folder, tmp_path, answered):
    worse = Run.open(shutil.copytree(folder, tmp_path / "worse"))
    shutil.rmtree(worse.path / "evidence")
    content = bytearray(worse.weights.read_bytes())
    content[-400:] = bytes(400)
    worse.weights.write_bytes(content)
    assert run(["certify", str(worse.path), "--device", "cpu"]) == 0
    capsys.readouterr()
    (kept,) = answered(run(["zoo", "add", str(worse.path)]))["runs"]
    assert kept["status"] == "kept"
    assert run(["zoo", "add", str(worse.path), "--replace"]) == 0
    assert zoo.card(NAME).weights_sha256 == sha256(worse.weights)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zoo", "show", "mnist-9x9-mlp"], "there is no model named 'mnist-9x9-mlp' in the zoo; known: "),
        (["certify", "zoo:mnist-9x9-mlp"], "there is no model named 'mnist-9x9-mlp' in the zoo"),
        (["attack", "zoo:mnist-9x9-mlp"], "there is no model named 'mnist-9x9-mlp' in the zoo"),
    ],
)
def test_mistakes_get_one_message_and_exit_code_2(capsys, arguments, message):
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
