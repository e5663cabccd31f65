"""`patchcert report`, from run folders to a page and an exit code."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import patchcert as pc
from patchcert.cli.app import run
from patchcert.errors import DataError
from patchcert.evidence import EvidenceFolder, Question
from patchcert.models import ModelSpec, build, save
from patchcert.train.run_folder import Run
from patchcert.train.spec import DataSettings, ModelSettings, Spec
from patchcert.train.strategies import AllPlacements


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


def test_one_page_for_several_runs(certified, tmp_path, capsys):
    page = tmp_path / "both.html"
    assert run(["report", str(certified), str(certified), "--out", str(page), "--maps", "1"]) == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert (result["page"], result["consistent"]) == (str(page), True)
    first, second = result["runs"]
    assert first == second
    assert first["certified"]["images"] == 20
    assert 0 < first["certified"]["right"] == first["clean"]["right"]
    assert first["empirical"] is None
    assert "2 runs compared" in page.read_text(encoding="utf-8")
    assert f"the page is {page.resolve()}" in said.err


def test_evidence_that_contradicts_itself_gives_exit_code_1(certified, tmp_path, capsys):
    folder = shutil.copytree(certified, tmp_path / "forged")
    (proven,) = EvidenceFolder(folder / "evidence").all()
    label = proven.columns["label"]
    columns = {name: proven.columns[name] for name in ("index", "label", "prediction")}
    columns |= {"prediction_after": (label + 1) % 10, "succeeded": np.ones(20, bool)}
    columns |= {name: np.zeros(20, np.int64) for name in ("top", "left", "steps")}
    question = Question("attack", proven.threat, proven.selection, {"name": "Model"}, {"name": "Forged"})
    meta = {**proven.meta, **question.to_dict()}
    replace(proven, columns=columns, meta=meta).write(EvidenceFolder(folder / "evidence").file(question))
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
    assert f"no pictures of {certified}: mnist-mini was not found; give its folder with --data-dir" in said


def test_a_page_is_no_folder(certified, tmp_path, refused):
    assert f"--out {tmp_path} is a folder" in refused(run(["report", str(certified), "--out", str(tmp_path)]))
