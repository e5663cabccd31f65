"""`patchcert audit`: what it prints, its exit codes, and what it looks at in a checkout."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from patchcert.cli.app import run
from patchcert.cli.audit import Checkout
from patchcert.evidence.audit import audit_results

ROOT = Path(__file__).parents[2]
RUN, TRIALS = "916ad3aa4be7e44e", "masked-mnist-5x5"
CHANGED = "does not have the SHA-256 sum that the manifest lists"


@pytest.fixture
def checkout(tmp_path, answered):
    """A checkout with one run, the measurements of speed, pictures, trials and the paper's numbers, listed."""
    paper = "src/patchcert/papers/chiang2020"
    for name in (f"results/{RUN}", "docs/performance", "docs/pictures", f"trials/results/{TRIALS}"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / paper).mkdir(parents=True)
    for name in (f"{paper}/paper.json", f"{paper}/authors.json", f"trials/{TRIALS}.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    assert answered(run(["audit", str(tmp_path / "results"), "--write"]))["findings"] == []
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
    assert found(checkout, capsys) == {"h200.json": CHANGED}
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


@pytest.mark.parametrize(
    "name", ["docs/pictures/masks.png", "docs/pictures/comparison.svg", f"trials/{TRIALS}.toml"]
)
def test_pictures_and_trials_are_listed_as_they_are(checkout, capsys, name):
    file = checkout / name
    file.write_bytes(file.read_bytes() + b"\n")
    assert found(checkout, capsys) == {file.name: CHANGED}
    more = file.with_stem("more")
    file.rename(more)
    assert found(checkout, capsys).keys() == {file.name, more.name}
    more.rename(file)
    assert run(["audit", str(checkout / "results"), "--write"]) == 0


def test_pictures_and_trials_that_were_not_carried_out_may_go(checkout, capsys):
    new = [checkout / "docs" / "pictures" / "new.png", checkout / "trials" / "new.toml"]
    for file in new:
        file.write_text("anything")
    assert set(found(checkout, capsys).values()) == {"is not listed in the manifest"}
    assert run(["audit", str(checkout / "results"), "--write"]) == 0
    for file in new:
        file.unlink()
    assert run(["audit", str(checkout / "results"), "--write"]) == 0
    proof = next(checkout.glob("trials/results/*/*/evidence/*.npz"))
    proof.unlink()
    assert run(["audit", str(checkout / "results"), "--write"]) == 2
    assert f"{proof.name} is listed, but missing" in capsys.readouterr().err


def test_files_of_trials_that_are_listed_must_still_be_of_their_results(checkout, capsys):
    file = checkout / "trials" / f"{TRIALS}.toml"
    file.write_text(file.read_text().replace("worst_of=24", "worst_of=25"))
    assert run(["audit", str(checkout / "results"), "--write"]) == 1
    assert "was not trained with the settings of the trial worst-of-24" in capsys.readouterr().err


def test_a_drawing_that_is_made_anew_is_listed_as_it_then_is(checkout):
    for name in ("README.md", "docs/results.md"):
        (checkout / name).write_text("")
    made = Checkout(checkout / "results")
    vars(made).update(sources=SimpleNamespace(page="", plot="<svg/>", documents=()))
    made.write()
    assert (checkout / "docs" / "pictures" / "comparison.svg").read_text() == "<svg/>"
    assert audit_results(made.results, made.beside).findings == ()


def test_findings_come_with_what_to_do(checkout, capsys):
    (checkout / "docs" / "pictures" / "new.png").touch()
    assert run(["audit", str(checkout / "results")]) == 1
    assert "hint: put back what was not meant to change; --write" in capsys.readouterr().err


@pytest.mark.slow
def test_the_checkout_is_what_it_says(answered):
    assert answered(run(["audit", str(ROOT / "results")]))["findings"] == []
