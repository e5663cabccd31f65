"""`patchcert demo`, from the command line to the page."""

import json
from pathlib import Path

import numpy as np
import pytest

import patchcert as pc
from patchcert.cli.app import run
from patchcert.evidence import Attacking, Evidence, EvidenceFolder


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a quick demo that was interrupted before the attack, and then called again."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attacking, "run", _interrupt)
        assert run(["demo", "--quick", "--out", str(folder)]) == 130
    assert not (folder / "report.html").exists()
    before = (folder / "weights.safetensors").stat().st_mtime_ns
    assert run(["demo", "--quick", "--out", str(folder)]) == 0
    assert (folder / "weights.safetensors").stat().st_mtime_ns == before
    return folder


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def evidence(folder: Path, kind: str) -> list[Evidence]:
    return [each for each in EvidenceFolder(folder / "evidence").all() if each.kind == kind]


def headline(folder: Path) -> Evidence:
    (found,) = [each for each in evidence(folder, "certify") if each.threat == pc.Patch(2)]
    assert found.selection.limit == 200
    return found


def test_called_again_it_says_how_to_start_over_and_counts_the_evidence_that_is_there(finished, capsys):
    before = {file: file.stat().st_mtime_ns for file in (finished / "evidence").iterdir()}
    assert run(["demo", "--quick", "--out", str(finished)]) == 0
    said = capsys.readouterr()
    assert "holds a trained model already; to start over, delete it or name another folder" in said.err
    assert {file: file.stat().st_mtime_ns for file in (finished / "evidence").iterdir()} == before
    result = json.loads(said.out)
    found = headline(finished)
    assert result["certified"]["accuracy"] == found.certified / found.total
    assert result["clean"]["accuracy"] == found.correct / found.total
    (attacked,) = evidence(finished, "attack")
    assert result["empirical"]["accuracy"] == attacked.withstood / attacked.total
    assert result["consistent"] is True
    assert result["page"] == str(finished / "report.html")


def test_the_quick_model_has_learnt_something_that_can_be_proven(finished):
    found = headline(finished)
    assert found.certified / found.total > 0.5


def test_the_commands_on_the_page_measure_the_same_again(finished, answered):
    folder = EvidenceFolder(finished / "evidence")
    files = folder.files()
    for before in folder.all():
        words = before.meta["command"].split()
        assert words[0] == "patchcert"
        assert answered(run(words[1:]))["evidence"] == str(before.path)
        after = Evidence.read(before.path)
        for column in ("label", "prediction", "certified", "succeeded", "worst_top"):
            assert np.array_equal(before.columns.get(column), after.columns.get(column)), (
                before.path,
                column,
            )
    assert folder.files() == files


def test_another_run_in_the_folder_is_left_alone(finished, capsys):
    assert run(["demo", "--out", str(finished)]) == 2
    said = capsys.readouterr().err
    assert "holds a different run" in said
    assert "--out" in said


@pytest.mark.slow
def test_the_full_demo_keeps_its_promise(tmp_path, answered):
    result = answered(run(["demo", "--out", str(tmp_path / "demo")]))
    assert result["certified"]["images"] == 1000
    assert result["certified"]["accuracy"] >= 0.75
    assert result["clean"]["accuracy"] > 0.93
