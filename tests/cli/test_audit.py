"""`patchcert audit`: what it prints, its exit codes, and what it looks at in a checkout."""

import json
import shutil
from pathlib import Path

import pytest

from patchcert.cli.app import run

ROOT = Path(__file__).parents[2]
RUN = "916ad3aa4be7e44e"


@pytest.fixture
def checkout(tmp_path, capsys):
    """A checkout with one run, the measurements of speed and the paper's numbers, listed."""
    paper = Path("src/patchcert/papers/chiang2020")
    shutil.copytree(ROOT / "results" / RUN, tmp_path / "results" / RUN)
    shutil.copytree(ROOT / "docs" / "performance", tmp_path / "docs" / "performance")
    (tmp_path / paper).mkdir(parents=True)
    for name in ("paper.json", "authors.json"):
        shutil.copy(ROOT / paper / name, tmp_path / paper)
    assert run(["audit", str(tmp_path / "results"), "--write"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    return tmp_path


def found(checkout, capsys):
    code = run(["audit", str(checkout / "results")])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert code == (1 if findings else 0)
    return {Path(each["path"]).name: each["what"] for each in reversed(findings)}


def test_an_audit_says_how_much_there_is(checkout, answered):
    printed = answered(run(["audit", str(checkout / "results")]))
    assert (printed["files"], printed["without_curve"], printed["without_commit"]) == (4, 1, 1)


def test_an_inflated_measurement_is_noticed_by_its_sum_even_where_its_arithmetic_holds(checkout, capsys):
    """The page may be made anew from it: the sum in the manifest is not that of the page."""
    file = checkout / "docs" / "performance" / "h200.json"
    facts = json.loads(file.read_text())
    case = facts["cases"][0]
    for name in ("dense_step", "step_ratio", "sweep_ratio", "certification_ratio"):
        case[name] *= 2
    file.write_text(json.dumps(facts, indent=2) + "\n")
    assert found(checkout, capsys) == {"h200.json": "does not have the SHA-256 sum that the manifest lists"}
    case["step_ratio"] *= 2
    file.write_text(json.dumps(facts, indent=2) + "\n")
    assert run(["audit", str(checkout / "results"), "--write"]) == 1
    assert "mlp mnist 5x5: step_ratio is" in capsys.readouterr().err


def test_an_edited_paper_is_named(checkout, capsys):
    (file,) = checkout.rglob("paper.json")
    file.write_text(file.read_text().replace("91.5", "90.5", 1))
    assert "not the frozen" in found(checkout, capsys)["paper.json"]


def test_a_missing_run_is_refused_when_the_manifest_is_written(checkout, capsys):
    shutil.rmtree(checkout / "results" / RUN)
    assert run(["audit", str(checkout / "results"), "--write"]) == 2
    assert "is listed, but missing; 4 such entries would be lost" in capsys.readouterr().err


@pytest.mark.slow
def test_the_checkout_is_what_it_says(answered):
    assert answered(run(["audit", str(ROOT / "results")]))["findings"] == []
