"""`patchcert report`, from run folders to a page and an exit code."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import patchcert as pc
from patchcert.cli.app import run
from patchcert.errors import DataError
from patchcert.evidence import Evidence, EvidenceFolder, Question
from patchcert.models import ModelSpec, build, save
from patchcert.train.run_folder import Run
from patchcert.train.spec import DataSettings, ModelSettings, Spec
from patchcert.train.strategies import AllPlacements

SOURCE = """
import torch
from torch import nn


def small(bias=7):
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.zero_()
        model[1].bias[bias] = 1.0
    return model


def other():
    return small(bias=1)
"""
THREAT = ("--patch", "2", "--device", "cpu")


@pytest.fixture(scope="module")
def certified(tmp_path_factory) -> Path:
    """The folder of a run with an untrained model, of which a few images are certified."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    spec = Spec(DataSettings("mnist-mini"), ModelSettings("mlp", hidden=6), pc.Patch(1), AllPlacements())
    model_spec = ModelSpec("mlp", channels=1, height=28, width=28, hidden=6)
    model = build(model_spec, torch.Generator().manual_seed(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model[-1].bias[7] = 1.0
    save(model, model_spec, Run.create(folder, spec).weights)
    assert run(["certify", str(folder), "--limit", "20", "--device", "cpu"]) == 0
    return folder


def forged(proven: Evidence) -> Evidence:
    """An attack that claims to have broken every image."""
    count, label = proven.total, proven.columns["label"]
    columns = {name: proven.columns[name] for name in ("index", "label", "prediction")}
    columns |= {"prediction_after": (label + 1) % 10, "succeeded": np.ones(count, bool)}
    columns |= {name: np.zeros(count, np.int64) for name in ("top", "left", "steps")}
    question = Question("attack", proven.threat, proven.selection, {"name": "Model"}, {"name": "Forged"})
    return replace(
        proven, columns=columns, meta={**proven.meta, **question.to_dict(), "data": proven.meta["data"]}
    )


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """A working folder with a user's models, which say the same of every image."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "reported_models.py").write_text(SOURCE)
    yield tmp_path
    sys.modules.pop("reported_models", None)


@pytest.fixture
def certify(own, capsys):
    """Leaves evidence of a user's model on the first images."""

    def prove(out: str, *options: str, factory: str = "small", data: str = "mnist-mini") -> str:
        given = ["--data", data, "--limit", "20", *THREAT, "--out", out, *options]
        assert run(["certify", f"reported_models:{factory}", *given]) == 0
        capsys.readouterr()
        return out

    return prove


@pytest.fixture
def changed_data():
    """Writes evidence as if it were about other data."""

    def write(proof: str, out: str, **data: object) -> None:
        rows = Evidence.read(Path(proof))
        replace(rows, meta={**rows.meta, "data": {**rows.meta["data"], **data}}).write(Path(out))

    return write


@pytest.fixture
def reported(parse, answered):
    """The JSON and the text of a page about what is named."""

    def read(*sources: str):
        found = answered(run(["report", *sources]))
        return found, parse(Path(found["page"])).text

    return read


def test_one_page_for_several_runs(certified, tmp_path, capsys):
    page = tmp_path / "both.html"
    assert run(["report", str(certified), str(certified), "--out", str(page), "--maps", "1"]) == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert (result["page"], result["consistent"]) == (str(page), True)
    first, second = result["models"]
    assert first == second
    assert first["certified"]["images"] == 20
    assert 0 < first["certified"]["right"] == first["clean"]["right"]
    assert first["empirical"] is None
    assert "2 models compared" in page.read_text(encoding="utf-8")
    assert f"the page is {page.resolve()}" in said.err


def test_evidence_that_contradicts_itself_gives_exit_code_1(certified, tmp_path, capsys):
    folder = shutil.copytree(certified, tmp_path / "forged")
    evidence = EvidenceFolder(folder / "evidence")
    (proven,) = evidence.all()
    attack = forged(proven)
    attack.write(evidence.file(attack.question))
    assert run(["report", str(folder), "--maps", "0"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["consistent"] is False
    assert "the evidence contradicts itself" in said.err
    assert f"see the red box at the top of {folder / 'report.html'}" in said.err


def test_missing_images_are_named(certified, tmp_path, capsys, monkeypatch):
    def absent(*given):
        raise DataError("there are no files")

    monkeypatch.setattr("patchcert.report.summary.load_dataset", absent)
    assert run(["report", str(certified), "--out", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().err
    assert f"no pictures of {certified.name}: there are no files" in said


def test_a_page_is_no_folder(certified, tmp_path, refused):
    assert f"--out {tmp_path} is a folder" in refused(run(["report", str(certified), "--out", str(tmp_path)]))


def test_evidence_of_a_model_of_one_s_own_has_a_page(certify, reported):
    found, text = reported(certify("proof.npz"))
    (model,) = found["models"]
    assert (found["page"], model["sources"]) == ("report.html", ["proof.npz"])
    right = model["certified"]["right"]
    assert 0 < right == model["clean"]["right"]
    assert f"For {right} of 20 test images" in text
    assert "Data mnist-mini Classifier IntervalBounds, dtype float32" in text
    assert "is outlined where the proof is weakest" in text
    assert "weakest at row" in text
    assert "proof.npz.device cpu" in text
    assert Evidence.read(Path("proof.npz")).weights in text
    for word in ("Certificate maps", "Training", "Specification"):
        assert word not in text


def test_evidence_of_a_proof_by_masks_shows_the_masks(certify, reported):
    _, text = reported(certify("masked.npz", "--method", "masking", "--masks", "3"))
    assert "Classifier DoubleMasking" in text
    assert "The 9 masks: wherever the patch lies" in text
    assert "; behind mask" in text
    assert "Where the proof is weakest" not in text


def test_a_proof_and_an_attack_on_the_same_weights_are_about_one_model(certify, reported, capsys):
    proof = certify("proof.npz")
    attack = ["--images", "20", "--steps", "1", "--restarts", "1", *THREAT, "--out", "attack.npz"]
    assert run(["attack", "reported_models:small", "--data", "mnist-mini", *attack]) == 0
    capsys.readouterr()
    found, text = reported(proof, "attack.npz", proof)
    (model,) = found["models"]
    assert model["sources"] == ["proof.npz", "attack.npz"]
    assert model["empirical"]["images"] == 20
    assert "Checked image by image on 20 attacked images" in text
    assert "attack.npz.device cpu" in text


def test_an_attack_alone_is_shown_without_claims_of_proof(certify, reported):
    proof = Evidence.read(Path(certify("proof.npz")))
    forged(proof).write(Path("attack.npz"))
    found, text = reported("attack.npz")
    assert found["models"][0]["certified"] is None
    assert "Certified accuracy: not measured." in text
    assert "Classifier Model Guarantee not stated" in text
    assert "none that is certified was broken" not in text


def test_an_attack_in_another_file_refutes_a_proof(certify, capsys):
    proof = Evidence.read(Path(certify("proof.npz")))
    forged(proof).write(Path("attack.npz"))
    assert run(["report", "proof.npz", "attack.npz", "--out", "page.html"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["consistent"] is False
    assert "the evidence contradicts itself" in said.err
    assert "certified, but the attack changed the prediction" in Path("page.html").read_text(encoding="utf-8")


def test_an_attack_on_other_weights_refutes_nothing(certify, answered):
    other = Evidence.read(Path(certify("other.npz", factory="other")))
    forged(other).write(Path("attack.npz"))
    assert answered(run(["report", certify("proof.npz"), "attack.npz"]))["consistent"]


def test_evidence_of_two_models_has_two_sections(certify, reported):
    found, text = reported(certify("proof.npz"), certify("other.npz", factory="other"))
    assert [model["sources"] for model in found["models"]] == [["proof.npz"], ["other.npz"]]
    assert "2 models compared" in text
    assert text.count("Check it again") == 2


def test_the_proof_that_is_named_first_leads(certify, reported):
    intervals, masked = certify("proof.npz"), certify("masked.npz", "--method", "masking", "--masks", "3")
    for sources, kind in (((intervals, masked), "IntervalBounds"), ((masked, intervals), "DoubleMasking")):
        assert f"Classifier {kind}" in reported(*sources)[1]


def test_evidence_of_a_run_s_weights_is_about_the_run(certified, tmp_path, capsys, certify, reported):
    folder = shutil.copytree(certified, tmp_path / "run")
    assert run(["certify", str(folder), "--limit", "10", "--patch", "2", "--out", "larger.npz"]) == 0
    capsys.readouterr()
    found, text = reported(certify("proof.npz"), "larger.npz", str(folder))
    assert [model["sources"] for model in found["models"]] == [[str(folder), "larger.npz"], ["proof.npz"]]
    assert "Certified accuracy against patch size" in text
    assert Evidence.read(Path("larger.npz")).meta["command"] in text


def test_evidence_that_a_run_keeps_counts_once_where_it_is_named_too(certified, tmp_path, answered):
    folder = shutil.copytree(certified, tmp_path / "run")
    (kept,) = EvidenceFolder(folder / "evidence").files()
    page = tmp_path / "page.html"
    (model,) = answered(run(["report", str(folder), str(kept), "--out", str(page)]))["models"]
    assert model["certified"]["images"] == 20
    assert page.read_text(encoding="utf-8").count('<pre class="command">') == 1


def test_a_page_about_a_single_file_lies_beside_it(certify, answered):
    certify("proof.npz")
    Path("proofs").mkdir()
    moved = Path("proof.npz").rename("proofs/proof.npz")
    assert answered(run(["report", str(moved)]))["page"] == str(Path("proofs/report.html"))
    certify("proof.npz", factory="other")
    assert answered(run(["report", "proof.npz", str(moved)]))["page"] == "report.html"


def test_files_that_are_no_evidence_are_refused(own, refused):
    np.savez("arrays.npz", values=np.zeros(3))
    Path("model.pt").write_bytes(b"weights")
    assert "there is no nothere.npz hint: write it first" in refused(run(["report", "nothere.npz"]))
    said = refused(run(["report", "arrays.npz"]))
    assert "arrays.npz is no evidence: it has no `meta` that says what it is of" in said
    said = refused(run(["report", "model.pt"]))
    assert "model.pt is no evidence; expected a run folder, or a file whose name ends in .npz" in said


def test_evidence_on_other_data_of_the_same_weights_is_refused(certify, refused, changed_data):
    changed_data(certify("proof.npz"), "elsewhere.npz", name="folder:elsewhere")
    said = refused(run(["report", "proof.npz", "elsewhere.npz"]))
    assert (
        "elsewhere.npz is about images of folder:elsewhere, but proof.npz, of the same weights, about mnist-mini"
        in said
    )
    assert not Path("report.html").exists()


def test_evidence_on_other_files_of_the_data_is_refused(certify, refused, changed_data):
    changed_data(certify("proof.npz"), "elsewhere.npz", sha256={"images": "0" * 64})
    said = refused(run(["report", "proof.npz", "elsewhere.npz"]))
    assert "are about mnist-mini in files of different SHA-256 sums" in said


def test_evidence_on_training_images_is_refused(certify, refused):
    said = refused(run(["report", certify("proof.npz", "--split", "train")]))
    assert "proof.npz is about train images of mnist-mini; expected test images" in said


def test_data_that_are_not_at_hand_are_named_and_the_numbers_are_there(certify, changed_data, capsys):
    changed_data(certify("proof.npz"), "elsewhere.npz", name="folder:elsewhere")
    assert run(["report", "elsewhere.npz"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "no pictures of elsewhere.npz: there is no image folder elsewhere hint:" in said
    assert "20 test images" in Path("report.html").read_text(encoding="utf-8")
