"""`patchcert compare`, from run folders that the real commands certified to one table and a leaderboard file."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import patchcert as pc
from patchcert.cli.app import run
from patchcert.models import ModelSpec, build, save
from patchcert.train.run_folder import Run
from patchcert.train.spec import DataSettings, ModelSettings, OptimiserSettings, Spec
from patchcert.train.strategies.masked import Masked
from patchcert.train.strategies.votes import Bands, LocalMargins
from patchcert.train.strategy import Strategy

KINDS: dict[str, tuple[ModelSettings, Strategy, list[str]]] = {
    "masked": (ModelSettings("resnet18", normalise=False, filters=2), Masked(), ["--masks", "2"]),
    "bands": (ModelSettings("resnet18_parts", normalise=False, filters=2), Bands(), []),
    "local": (
        ModelSettings("bagnet", normalise=False, filters=4, receptive_field=3),
        LocalMargins(aggregation="masked-sum", scores="positive"),
        [],
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Untrained networks of each kind, of which a few images are certified as their training asks for."""
    folder, made = tmp_path_factory.mktemp("runs"), {}
    for name, (model, strategy, options) in KINDS.items():
        spec = Spec(DataSettings("mnist-mini"), model, pc.Patch(5), strategy)
        settings = ModelSpec(
            model.name, 1, 28, 28, filters=model.filters, receptive_field=model.receptive_field
        )
        opened = Run.create(folder / name, spec)
        save(build(settings, torch.Generator().manual_seed(0)), settings, opened.weights)
        opened.append_metrics({"epoch": 0, "loss": 1.0, "seconds": 90.0})
        assert run(["certify", str(opened.path), "--limit", "4", "--device", "cpu", *options]) == 0
        made[name] = opened.path
    return made


def compared(capsys, *words):
    assert run(["compare", *map(str, words)]) == 0
    return capsys.readouterr()


def test_runs_of_all_kinds_are_rows_of_one_table(runs, capsys):
    said = compared(capsys, *runs.values(), "--format", "json")
    rows = {row["method"]: row for row in json.loads(said.out)["rows"]}
    assert rows.keys() == {"masking, 2x2 masks", "bands of 4 columns", "local votes, masked sum"}
    assert {name: row["cost"]["passes"] for name, row in rows.items()} == {
        "masking, 2x2 masks": 4,
        "bands of 4 columns": 28,
        "local votes, masked sum": 1,
    }
    for row in rows.values():
        assert row["images"] == 4
        assert row["cost"]["milliseconds"] > 0
        assert row["cost"]["multiply_adds"] > 0
        assert row["cost"]["training_seconds"] == 90.0
        assert row["source"]["kind"] == "evidence"
    assert "warning" not in said.err


@pytest.mark.parametrize("output", ["table", "markdown", "html"])
def test_other_formats_show_the_same_rows(runs, capsys, output):
    said = compared(capsys, runs["bands"], runs["local"], "--format", output)
    for words in ("bands of 4", "local votes"):
        assert words in said.out


def test_rows_that_are_written_can_be_compared_again(runs, tmp_path, capsys):
    file = tmp_path / "ours.json"
    said = compared(capsys, runs["bands"], "--published", "--write", file, "--format", "json")
    assert "wrote 1 rows to" in said.err
    (counted,) = json.loads(file.read_text())["rows"]
    assert counted in json.loads(said.out)["rows"]
    said = compared(capsys, runs["local"], file, "--format", "markdown")
    assert "stated, with the sum of its evidence: bands" in said.out
    assert "counted: local" in said.out


def test_data_and_threats_that_differ_are_warned_of(runs, tmp_path, capsys):
    other = json.loads(Path(_written(runs["bands"], tmp_path / "a.json", capsys)).read_text())
    other["rows"][0] |= {"data": "cifar10", "patch": "2x2"}
    other["rows"][0]["evidence"]["sha256"] = "0" * 64
    (tmp_path / "b.json").write_text(json.dumps(other))
    said = compared(capsys, runs["bands"], tmp_path / "b.json")
    assert "warning: the rows have different data" in said.err
    assert "warning: the rows have different threats" in said.err


def _written(folder, file, capsys):
    compared(capsys, folder, "--write", file)
    return file


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN", "--format", "pdf"], "--format pdf is unknown"),
        (["RUN", "--write", "rows.txt"], "--write rows.txt is no name of a leaderboard file"),
        (["nowhere"], "nowhere"),
        (["nowhere.json"], "nowhere.json cannot be read"),
        (["zoo:mnist-5x5-cnn2"], "is a model, not a run folder"),
    ],
)
def test_mistakes_are_named(runs, words, message, refused):
    given = [str(runs["bands"]) if word == "RUN" else word for word in words]
    assert message in refused(run(["compare", *given]))


def test_a_run_without_certificates_is_no_row(tmp_path, refused):
    spec = Spec(DataSettings("mnist-mini"), ModelSettings("mlp"), pc.Patch(5), Bands())
    empty = Run.create(tmp_path / "empty", spec)
    settings = ModelSpec("mlp", 1, 28, 28)
    save(build(settings), settings, empty.weights)
    assert "there are no certificates of test images" in refused(run(["compare", str(empty.path)]))


def test_a_row_is_counted_again_where_its_evidence_is_at_hand(runs, tmp_path, capsys, refused):
    file = _written(runs["bands"], tmp_path / "others.json", capsys)
    (evidence,) = (runs["bands"] / "evidence").glob("*.npz")
    said = compared(capsys, file, evidence, "--format", "markdown")
    assert "counted: bands" in said.out
    assert said.out.count("bands of 4 columns") == 1
    honest = json.loads(file.read_text())
    (row,) = honest["rows"]
    for change, what in (
        ({"patch": "10x10"}, "states patch as 10x10, but its evidence"),
        ({"method": "bands of 3 columns"}, "states method as bands of 3 columns, but its evidence"),
        ({"cost": {**row["cost"], "milliseconds": 1e-6}}, "states milliseconds as 1e-06, but its evidence"),
        ({"cost": {**row["cost"], "passes": 1}}, "states passes as 1, but its evidence"),
    ):
        file.write_text(json.dumps({**honest, "rows": [{**row, **change}]}))
        assert what in refused(run(["compare", str(file), str(evidence)]))


def test_the_best_of_a_kind_says_of_how_many_it_is(runs, tmp_path, capsys):
    other = Run.create(
        tmp_path / "other", replace(Run.open(runs["bands"]).spec, optimiser=OptimiserSettings(batch_size=7))
    )
    other.weights.write_bytes((runs["bands"] / "weights.safetensors").read_bytes())
    other.append_metrics({"epoch": 0, "loss": 1.0, "seconds": 90.0})
    shutil.copytree(runs["bands"] / "evidence", other.evidence_folder)
    said = compared(capsys, runs["bands"], other.path, "--best", "--format", "json")
    (row,) = json.loads(said.out)["rows"]
    assert row["source"]["note"] == "the best of 2 trainings"


def test_evidence_alone_is_a_row_without_a_network(runs, capsys):
    (evidence,) = (runs["local"] / "evidence").glob("*.npz")
    (row,) = json.loads(compared(capsys, evidence, "--format", "json").out)["rows"]
    assert row["method"] == "local votes, masked sum"
    assert "network" not in row
    assert "multiply_adds" not in row["cost"]
