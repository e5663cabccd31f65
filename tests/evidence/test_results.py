"""The folder of results: no weights, everything that tells a run apart, and nothing that contradicts something else."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from forged_evidence import forge, restate
from patchcert.errors import RunError
from patchcert.evidence import Evidence, Question, Selection, results
from patchcert.evidence.manifest import Manifest
from patchcert.evidence.results import Circumstances, Result, Results, collect, collect_all, experiment_key
from patchcert.files import sha256
from patchcert.models import load, save
from patchcert.models.trimming import round_to_half
from patchcert.threats import Patch
from patchcert.train.run_folder import Run

MODEL = {"name": "Model"}
ATTACK = {"kind": "PatchAttack", "restarts": 80, "seed": 0}


def attack(side=5, certified_only=False, **described):
    selection = Selection("mnist", drawn=100)
    return Question("attack", Patch(side), selection, MODEL, ATTACK | described, certified_only)


def test_collected_results_hold_no_weights_and_say_where_they_come_from(finished, mlp):
    result = finished.collect(mlp, {Patch(5): (94, 62)}, seconds=55.0)
    (evidence,) = result.evidence
    assert {file.name for file in result.path.iterdir()} == {
        "spec.toml",
        "summary.json",
        "environment.json",
        "metrics.jsonl",
        f"{evidence.question.name}.npz",
    }
    summary = result.summary
    assert (summary["clean_accuracy"], summary["training_seconds"], summary["commit"]) == (0.94, 55.0, "abc")
    assert summary["certified_accuracy"] == {evidence.question.name: 0.62}
    assert len(summary["source_sha256"]) == 64


def test_an_answer_is_found_by_its_question(finished, mlp):
    result = finished.collect(mlp, {Patch(5): (94, 62), Patch(2): (94, 70)})
    asked = Question("certify", Patch(2), Selection("mnist"), {"name": "IntervalBounds", "dtype": "float32"})
    assert result.find(asked).certified == 70
    assert result.find(replace(asked, threat=Patch(3))) is None
    assert result.find(replace(asked, selection=Selection("mnist", limit=100))) is None


def test_certificates_of_a_run_are_about_the_same_images(finished, mlp):
    result = finished.collect(mlp, {Patch(5): (94, 62), Patch(2): (94, 70)})
    file = sorted(result.path.glob("*.npz"))[1]
    forge(file, lambda columns: columns.update(label=np.where(np.arange(100) == 99, 4, 0)))
    with pytest.raises(RunError, match=f"{file.name} is about other images than .*certify-patch-2x2"):
        _ = result.evidence


def test_a_changed_specification_no_longer_has_its_evidence(finished, mlp, tmp_path):
    result = finished.collect(mlp, {Patch(5): (94, 62)})
    text = (result.path / "spec.toml").read_text()
    (result.path / "spec.toml").write_text(text.replace("batch_size = 256", "batch_size = 32"))
    (changed,) = Results(tmp_path / "results").of(
        replace(mlp, optimiser=replace(mlp.optimiser, batch_size=32))
    )
    with pytest.raises(RunError, match="is not evidence of the run that its folder is named after"):
        assert changed.evidence


def test_evidence_of_earlier_weights_is_replaced(finished, mlp):
    finished.collect(mlp, {Patch(5): (94, 62), Patch(2): (94, 80)})
    result = finished.collect(mlp, {Patch(5): (95, 63)}, weights_seed=1)
    assert [each.certified for each in result.evidence] == [63]


def test_evidence_of_different_weights_is_refused(finished, mlp):
    result = finished.collect(mlp, {Patch(5): (94, 62)})
    other = finished.run(mlp, {Patch(2): (94, 62)}, weights_seed=1)
    (file,) = (file for file in (other.path / "evidence").iterdir() if "2x2" in file.name)
    (result.path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(RunError, match="of different weights"):
        assert Result.open(result.path).evidence


def test_runs_are_the_same_experiment_whatever_their_seed_and_schedule(mlp):
    key = experiment_key(mlp)
    assert experiment_key(replace(mlp.scaled(0.1), seed=5)) == key
    assert experiment_key(replace(mlp, optimiser=replace(mlp.optimiser, tf32=True))) == key
    assert experiment_key(replace(mlp, model=replace(mlp.model, name="cnn2"))) != key
    begun = [replace(mlp.model, weights="a.safetensors", weights_sha256=sum) for sum in ("1", "2")]
    one, other = (experiment_key(replace(mlp, model=model)) for model in begun)
    assert one == other != key


def test_a_run_that_was_resumed_elsewhere_names_both_devices(finished, mlp, tmp_path):
    run = finished.run(mlp, {Patch(5): (94, 62)})
    sessions = [{"device": name} for name in ("NVIDIA H200", "NVIDIA H200", "cpu (x86_64)")]
    run.write_environment(run.environment() | {"device": "cpu (x86_64)", "sessions": sessions})
    assert collect(run, tmp_path / "results").summary["device"] == "NVIDIA H200, then cpu (x86_64)"


def test_circumstances_are_those_of_the_training_not_of_what_was_gathered_later(finished, mlp, tmp_path):
    run = finished.run(mlp, {Patch(5): (94, 62)})
    assert Circumstances.read(tmp_path) == Circumstances(1.0, 1)
    Circumstances(jobs=6).write(run.path)
    assert collect(run, tmp_path / "results").summary["jobs"] == 6
    Circumstances(jobs=1).write(run.path)
    assert collect(run, tmp_path / "results").summary["jobs"] == 6


def test_collecting_twice_changes_nothing(finished, mlp, tmp_path, monkeypatch):
    """Not even what code there was, if it has changed meanwhile."""
    run = finished.run(mlp, {Patch(5): (94, 62)})
    first = collect(run, tmp_path / "results")
    before = {file.name: file.read_bytes() for file in first.path.iterdir()}
    monkeypatch.setattr(results, "source_sha256", lambda: "0" * 64)
    collect(run, tmp_path / "results")
    assert {file.name: file.read_bytes() for file in first.path.iterdir()} == before


def test_the_last_epoch_s_loss_is_kept_with_the_results(finished, mlp, tmp_path):
    made = finished.run(mlp, {Patch(5): (90, 60)}, loss=0.25)
    made.append_metrics({"epoch": 3, "loss": 9.0, "seconds": 1.0})
    assert collect(made, tmp_path / "results").training_loss == 0.25
    (made.path / "metrics.jsonl").unlink()
    assert collect(made, tmp_path / "results").training_loss == 0.25
    other = finished.run(mlp, {Patch(5): (90, 60)}, loss=None, weights_seed=1)
    (other.path / "metrics.jsonl").unlink()
    assert collect(other, tmp_path / "results").training_loss is None


def test_runs_trained_by_hand_are_collected(finished, mlp, tmp_path):
    run = finished.run(mlp, {Patch(5): (94, 62)})
    finished.run(replace(mlp, seed=1), {})
    assert collect_all(run.path.parent, tmp_path / "results") == (run.path.name,)
    assert [each.path.name for each in Results(tmp_path / "results").all()] == [run.path.name]


def test_a_certified_image_that_an_attack_broke_is_an_error(finished, mlp, tmp_path, attack_rows):
    run = finished.run(mlp, {Patch(5): (90, 62)})
    finished.write(run, attack(), attack_rows(range(100), withstood=61, correct=90))
    result = collect(run, tmp_path / "results")
    with pytest.raises(RunError, match="image 61 is certified, but .*attack-patch-5x5.* broke it"):
        assert result.evidence


def test_an_attack_behind_a_defense_or_with_another_patch_refutes_nothing(
    finished, mlp, tmp_path, attack_rows
):
    run = finished.run(mlp, {Patch(5): (90, 62)})
    finished.write(run, attack(7), attack_rows(range(100), withstood=0, correct=90))
    defended = replace(attack(), classifier={"name": "Defended", "defense": "D(1)"})
    finished.write(run, defended, attack_rows(range(100), withstood=0, correct=90))
    assert len(collect(run, tmp_path / "results").evidence) == 3


def test_attacks_on_certified_images_count_what_they_broke(finished, mlp, tmp_path, attack_rows):
    run = finished.run(mlp, {Patch(5): (90, 62)})
    finished.write(run, attack(certified_only=True), attack_rows([0, 3, 61], withstood=2))
    result = collect(run, tmp_path / "results")
    (challenged,) = (each for each in result.evidence if each.question.certified_only)
    assert (challenged.total, challenged.withstood) == (3, 2)
    assert result.summary["attacked_accuracy"] == {}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([0, 62], "attacks images that .*certify-.* does not call proven"),
        ([0, 100], "is about other images than .*certify-patch-5x5"),
    ],
)
def test_attacks_on_certified_images_are_on_those_that_evidence_calls_proven(
    finished, mlp, tmp_path, attack_rows, index, message
):
    run = finished.run(mlp, {Patch(5): (90, 62)})
    finished.write(run, attack(certified_only=True), attack_rows(index, withstood=2))
    result = collect(run, tmp_path / "results")
    with pytest.raises(RunError, match=message):
        assert result.evidence


def test_attacks_may_be_on_images_that_only_the_stronger_of_two_proofs_calls_proven(
    finished, mlp, tmp_path, attack_rows
):
    run = finished.run(mlp, {Patch(5): (90, 62)})
    (file,) = (run.path / "evidence").glob("*.npz")
    columns = dict(Evidence.read(file).columns)
    columns["certified"] = columns["index"] < 64
    columns["margin"] = np.where(columns["certified"], 0.5, -0.5)
    refined = {"name": "IntervalBounds", "dtype": "float32", "refine": "linear"}
    finished.write(run, Question("certify", Patch(5), Selection("mnist"), refined), columns)
    finished.write(run, attack(certified_only=True), attack_rows([0, 63], withstood=2))
    assert len(collect(run, tmp_path / "results").evidence) == 3


def test_attacks_on_certified_images_need_certificates_beside_them(finished, mlp, tmp_path, attack_rows):
    run = finished.run(mlp, {})
    finished.write(run, attack(certified_only=True), attack_rows([0], withstood=1))
    with pytest.raises(RunError, match="has no certificates of all test images beside it"):
        assert collect(run, tmp_path / "results").evidence


def test_a_trimmed_model_leaves_the_evidence_of_the_whole_one_alone(finished, mlp, tmp_path, attack_rows):
    whole = finished.collect(mlp, {Patch(5): (90, 62)})
    before = {file.name: file.read_bytes() for file in whole.path.iterdir()}
    run = finished.run(mlp, {Patch(5): (91, 63)}, trimmed=True)
    finished.write(run, attack(certified_only=True), attack_rows([62], withstood=1))
    assert collect_all(run.path.parent, tmp_path / "results") == (f"{whole.path.name}/trimmed",)
    assert {file.name: file.read_bytes() for file in whole.path.iterdir() if file.is_file()} == before
    again = Result.open(whole.path)
    assert [each.certified for each in again.evidence] == [62]
    assert sorted(each.kind for each in again.trimmed) == ["attack", "certify"]


def test_a_model_in_half_precision_leaves_the_evidence_of_the_whole_one_alone(finished, mlp, tmp_path):
    run = finished.run(mlp, {Patch(5): (90, 62)})
    whole = collect(run, tmp_path / "results")
    model, spec = load(run.weights)
    save(round_to_half(model), spec, run.weights, half=True)
    (file,) = run.evidence_folder.iterdir()
    restate(file, lambda _, meta: meta.update(weights_sha256=sha256(run.weights)))
    assert collect_all(run.path.parent, tmp_path / "results") == (f"{whole.path.name}/trimmed",)
    again = Result.open(whole.path)
    assert [each.weights for each in again.evidence] != [sha256(run.weights)]
    assert [each.weights for each in again.trimmed] == [sha256(run.weights)]


def test_a_model_in_half_precision_alone_says_how_it_was_trained_and_of_no_other_weights(
    finished, mlp, tmp_path
):
    run = finished.run(mlp, {Patch(5): (90, 62)})
    model, spec = load(run.weights)
    save(round_to_half(model), spec, run.weights, half=True)
    (file,) = run.evidence_folder.iterdir()
    restate(file, lambda _, meta: meta.update(weights_sha256=sha256(run.weights)))
    (name,) = collect_all(run.path.parent, tmp_path / "results")
    result = Result.open((tmp_path / "results" / name).parent)
    assert result.evidence == ()
    assert [each.certified for each in result.trimmed] == [62]
    assert result.summary["weights_sha256"] == ""
    assert result.training_loss is not None


def test_every_file_of_the_results_says_what_its_name_says():
    root = results.Path(__file__).parents[2] / "results"
    for file in root.rglob("*.npz"):
        assert re.fullmatch(r"(certify|attack)-[a-z0-9-]+-[0-9a-f]{16}", file.stem), file
    for document in root.rglob("tuning-*.json"):
        plain = json.loads(document.read_text(encoding="utf-8"))
        assert plain["columns"] == ["setting", "clean", "weak"]


def test_the_same_rows_are_replaced_only_by_those_that_first_say_what_predictions_take(finished, mlp):
    patch, folder = Patch(5), finished.folder / "results"
    first = finished.collect(mlp, {patch: (90, 60)})
    (file,) = first.path.glob("certify-*.npz")
    Manifest.read(folder).updated(folder).write(folder)
    run = Run.open(finished.folder / "made" / first.path.name)
    (source,) = (run.path / "evidence").glob("*.npz")
    found = Evidence.read(source)
    for seconds in (0.5, 0.7):
        Evidence(found.columns, {**found.meta, "prediction": {"images": 10, "seconds": seconds}}).write(
            source
        )
        collect(run, folder)
        assert Evidence.read(file).prediction_milliseconds == 50.0
        Manifest.read(folder).updated(folder).write(folder)
    (line,) = Manifest.read(folder).superseded
    assert line.why == "measured again: the same rows, with the time of predictions"
    assert (line.right, line.counted) == (90, 60)
