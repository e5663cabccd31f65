"""`patchcert demo` and `patchcert report`, from the command line to the page."""

import json
from pathlib import Path

import numpy as np
import pytest

from patchcert.cli import demo_steps
from patchcert.cli.app import run
from patchcert.errors import DataError
from patchcert.train.run_folder import Run


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a quick demo that was interrupted before the attack, and then called again."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_steps.Measurements, "attack", _interrupt)
        assert run(["demo", "--quick", "--out", str(folder)]) == 130
    assert not (folder / "report.html").exists()
    before = (folder / "weights.safetensors").stat().st_mtime_ns
    assert run(["demo", "--quick", "--out", str(folder)]) == 0
    assert (folder / "weights.safetensors").stat().st_mtime_ns == before
    return folder


def _interrupt(measurements: demo_steps.Measurements) -> None:
    raise KeyboardInterrupt


def test_called_again_it_says_how_to_start_anew_and_measures_nothing_twice(finished, capsys):
    before = {file: file.stat().st_mtime_ns for file in (finished / "evidence").iterdir()}
    assert run(["demo", "--quick", "--out", str(finished)]) == 0
    said = capsys.readouterr()
    assert "holds a trained model already; to start anew, delete it or name another folder" in said.err
    assert {file: file.stat().st_mtime_ns for file in (finished / "evidence").iterdir()} == before


def test_the_numbers_are_those_of_the_evidence(finished, capsys):
    assert run(["demo", "--quick", "--out", str(finished)]) == 0
    result = json.loads(capsys.readouterr().out)
    opened = Run.open(finished)
    rows = opened.evidence("certify-patch-2x2-square-everywhere-first-200")
    assert result["certified"]["accuracy"] == rows["verdict"].mean()
    assert result["clean"]["accuracy"] == (rows["prediction"] == rows["label"]).mean()
    (attack,) = [name for name in opened.evidence_names() if name.startswith("attack")]
    attacked = opened.evidence(attack)
    assert result["empirical"]["accuracy"] == (~attacked["succeeded"]).mean()
    assert result["consistent"] is True
    assert result["page"] == str(finished / "report.html")


def test_the_quick_model_has_learnt_something_that_can_be_proven(finished):
    rows = Run.open(finished).evidence("certify-patch-2x2-square-everywhere-first-200")
    assert rows["verdict"].mean() > 0.5
    assert not (rows["verdict"] & (rows["prediction"] != rows["label"])).any()


def test_the_commands_on_the_page_measure_the_same_again(finished, capsys):
    opened = Run.open(finished)
    names = opened.evidence_names()
    for name in names:
        words = opened.evidence_meta(name)["command"].split()
        before = opened.evidence(name)
        assert words[0] == "patchcert"
        assert run(words[1:]) == 0
        assert json.loads(capsys.readouterr().out)["evidence"] == str(finished / "evidence" / f"{name}.npz")
        after = opened.evidence(name)
        for column in ("label", "prediction", "verdict", "succeeded", "worst_top"):
            assert np.array_equal(before.get(column), after.get(column)), (name, column)
    assert opened.evidence_names() == names


def test_another_run_in_the_folder_is_left_alone(finished, capsys):
    assert run(["demo", "--out", str(finished)]) == 2
    said = capsys.readouterr().err
    assert "holds a different run" in said
    assert "--out" in said


def test_report_writes_one_page_for_several_runs(finished, tmp_path, capsys):
    page = tmp_path / "both.html"
    assert run(["report", str(finished), str(finished), "--out", str(page), "--maps", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["page"] == str(page)
    assert len(result["runs"]) == 2
    assert "2 runs compared" in page.read_text(encoding="utf-8")


def test_report_fails_loudly_when_the_evidence_contradicts_itself(finished, tmp_path, capsys):
    opened = Run.open(finished)
    (name,) = [name for name in opened.evidence_names() if name.startswith("attack")]
    rows = opened.evidence(name)
    meta = json.loads(str(rows.pop("meta")))
    forged = {**rows, "succeeded": np.ones_like(rows["succeeded"])}
    opened.write_evidence("attack-forged", forged, meta)
    try:
        assert run(["report", str(finished), "--out", str(tmp_path / "page.html"), "--maps", "0"]) == 1
    finally:
        (finished / "evidence" / "attack-forged.npz").unlink()
    said = capsys.readouterr()
    assert json.loads(said.out)["consistent"] is False
    assert "the evidence contradicts itself" in said.err


def test_report_says_why_it_has_no_pictures(finished, tmp_path, capsys, monkeypatch):
    def absent(*given):
        raise DataError("there are no files")

    monkeypatch.setattr("patchcert.report.summary.load_dataset", absent)
    assert run(["report", str(finished), "--out", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().err
    assert f"no pictures of {finished}: mnist-mini was not found; give its folder with --data-dir" in said


def test_report_of_what_is_no_run_is_a_mistake(tmp_path, capsys):
    assert run(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.slow
def test_the_full_demo_keeps_its_promise(tmp_path, capsys):
    assert run(["demo", "--out", str(tmp_path / "demo")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["certified"]["images"] == 1000
    assert result["certified"]["accuracy"] >= 0.75
    assert result["clean"]["accuracy"] > 0.93
