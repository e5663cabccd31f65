"""Evidence is small, checked when it is read, and the only source of the numbers in tables."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchcert.certificates import Certificates
from patchcert.cli.options import parse_threat
from patchcert.errors import RunError
from patchcert.papers.chiang2020 import summaries
from patchcert.papers.chiang2020.attack_plan import AttackPlan
from patchcert.papers.chiang2020.collecting import collect, collect_all
from patchcert.papers.chiang2020.evidence import (
    Rows,
    certificate_columns,
    certify_command,
    evidence_name,
    round_down,
)
from patchcert.papers.chiang2020.orders import write_orders
from patchcert.papers.chiang2020.outcome import outcomes
from patchcert.papers.chiang2020.plan import Task
from patchcert.papers.chiang2020.results import Results, experiment_key
from patchcert.papers.chiang2020.rows import recipe
from patchcert.papers.chiang2020.scales import Scale
from patchcert.papers.chiang2020.tables import find_table
from patchcert.report.reproduction import reproduction_document
from patchcert.threats import Patch, SparsePixels, shapes

RESULTS = Path(__file__).parents[3] / "results"


def row(table, text):
    return find_table(table).chosen([text])


def with_model(spec, name):
    return replace(spec, model=replace(spec.model, name=name))


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=20))
def test_margins_are_rounded_down_only(values):
    exact = np.array(values)
    rounded = round_down(exact)
    assert rounded.dtype == np.float32
    assert (rounded <= exact).all()
    assert (np.nextafter(rounded, np.float32(np.inf)) > exact).all()


def test_all_threats_of_the_tables_have_names_of_their_own():
    recipes = [
        recipe(entry) for name in ("shape-transfer", "sparse-detail") for entry in find_table(name).entries
    ]
    threats = {threat for made in recipes if made for threat in made.threats}
    assert len({evidence_name(threat, None) for threat in threats}) == len(threats)
    assert evidence_name(Patch(5), None) == "certify-patch-5x5-square-everywhere"
    assert evidence_name(Patch(5), 100) == "certify-patch-5x5-square-everywhere-first-100"


def test_evidence_of_ten_thousand_images_is_small(tmp_path, generator):
    count = 10_000
    certificates = Certificates(
        certified=torch.rand(count, generator=generator) < 0.5,
        margins=torch.randn(count, 10, generator=generator),
        worst_placement=torch.randint(0, 28, (count, 2), generator=generator),
        predictions=torch.randint(0, 10, (count,), generator=generator),
        labels=torch.randint(0, 10, (count,), generator=generator),
    )
    np.savez_compressed(tmp_path / "rows.npz", **certificate_columns(certificates))
    assert (tmp_path / "rows.npz").stat().st_size < 100_000


def test_collected_results_hold_no_weights_and_say_where_they_come_from(collected, mlp):
    result = collected(mlp, {Patch(5): (94, 62)}, seconds=55.0)
    names = {file.name for file in result.path.iterdir()}
    assert names == {
        "spec.toml",
        "summary.json",
        "environment.json",
        "certify-patch-5x5-square-everywhere.npz",
    }
    summary = result.summary
    assert (summary["clean_accuracy"], summary["training_seconds"], summary["commit"]) == (0.94, 55.0, "abc")
    assert len(summary["source_sha256"]) == 64


def test_numbers_come_from_rows_not_from_the_summary(collected, mlp, tmp_path):
    result = collected(mlp, {Patch(5): (94, 62)})
    summary = dict(result.summary) | {"clean_accuracy": 1.0, "certified_accuracy": {"x": 1.0}}
    (result.path / "summary.json").write_text(json.dumps(summary))
    (outcome,) = outcomes(row("strategy-detail-5x5", "mnist all mlp"), tmp_path / "results", None)
    assert (outcome.clean, outcome.certified) == (94.0, 62.0)
    assert outcome.difference == pytest.approx(0.03)
    assert (outcome.hardware, outcome.seconds, outcome.scale) == ("NVIDIA H200", 10.0, 1.0)


@pytest.mark.parametrize(
    ("column", "value"), [("prediction", 7), ("margin", -1.0), ("margin", 0.0), ("margin", np.nan)]
)
def test_rows_that_contradict_themselves_are_refused(collected, mlp, column, value):
    result = collected(mlp, {Patch(5): (94, 62)})
    (file,) = result.path.glob("*.npz")
    with np.load(file) as stored:
        arrays = dict(stored)
    arrays[column][3] = value
    np.savez_compressed(file, **arrays)
    with pytest.raises(RunError, match="contradicts itself: image 3 is certified"):
        Rows.read(file)


def test_rows_of_published_test_images_are_all_there(tmp_path):
    """A part of them, the proven ones say, must not pass for all."""
    file = tmp_path / "certify.npz"
    whole = next((RESULTS / "02fe3563fc47b749").glob("certify-*.npz"))
    with np.load(whole) as stored:
        arrays = dict(stored)
    proven = np.flatnonzero(arrays["verdict"])[:50]
    part = {name: array if name == "meta" else array[proven] for name, array in arrays.items()}
    np.savez_compressed(file, **part)
    with pytest.raises(RunError, match="has 50 rows; expected 10000, one for each image"):
        Rows.read(file)


def changed(file, column, place, value):
    with np.load(file) as stored:
        arrays = dict(stored)
    arrays[column][place] = value
    np.savez_compressed(file, **arrays)


def test_certificates_of_a_run_are_about_the_same_images(collected, mlp):
    result = collected(mlp, {Patch(5): (94, 62), Patch(2): (94, 70)})
    file = sorted(result.path.glob("*.npz"))[1]
    changed(file, "label", 99, 4)
    with pytest.raises(RunError, match=f"{file.name} is about other images than certify-patch-2x2"):
        _ = result.rows


@pytest.mark.parametrize(("column", "value"), [("label", 4), ("index", 0), ("index", -1), ("index", 100)])
def test_a_challenge_names_each_certified_image_once_with_its_label(finished, mlp, tmp_path, column, value):
    run = finished(mlp, {Patch(5): (94, 62)})
    challenged(run, [0, 3, 61])
    result = collect(run, run.path.name, tmp_path / "results")
    (file,) = result.path.glob("challenge-*.npz")
    changed(file, column, 1, value)
    if column == "label":
        changed(file, "prediction_after", 1, value)
    with pytest.raises(RunError, match="is about other images than certify-patch-5x5"):
        _ = Results(tmp_path / "results").all()[0].challenges


def test_more_rows_than_the_images_asked_for_are_refused(collected, mlp):
    with pytest.raises(RunError, match="has 100 rows of the first 30 images"):
        _ = collected(mlp, {Patch(5): (94, 62)}, limit=30).rows


def test_a_damaged_file_of_results_is_refused_by_name(collected, mlp):
    result = collected(mlp, {Patch(5): (94, 62)})
    (file,) = result.path.glob("*.npz")
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(RunError, match=r"everywhere.npz is no readable file of evidence"):
        Rows.read(file)


@pytest.mark.parametrize(
    ("meta", "message"), [("{", "does not say how"), ("[]", "in tables"), ("{}", "its data")]
)
def test_results_that_do_not_say_how_they_came_about_are_refused(collected, mlp, meta, message):
    (file,) = collected(mlp, {Patch(5): (94, 62)}).path.glob("*.npz")
    with np.load(file) as stored:
        arrays = dict(stored) | {"meta": np.array(meta)}
    np.savez_compressed(file, **arrays)
    with pytest.raises(RunError, match=message):
        Rows.read(file)


def test_verdicts_without_margins_are_counted_only_where_there_are_none(finished, mlp, tmp_path):
    run = finished(mlp, {Patch(5): (94, 62)})
    name = evidence_name(Patch(5), None)
    columns, meta = run.evidence(name), run.evidence_meta(name) | {"settings": {"verdicts_only": True}}
    run.write_evidence(name, columns, meta)
    with pytest.raises(RunError, match="contradicts itself: image 0 is certified"):
        collect(run, run.path.name, tmp_path / "results")
    run.write_evidence(name, columns | {"margin": np.full(100, np.nan, np.float32)}, meta)
    collect(run, run.path.name, tmp_path / "results")
    (outcome,) = outcomes(row("strategy-detail-5x5", "mnist all mlp"), tmp_path / "results", None)
    assert outcome.certified == 62.0


def test_evidence_without_a_column_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "rows.npz", label=np.zeros(3))
    with pytest.raises(RunError, match="lacks the column 'prediction'"):
        Rows.read(tmp_path / "rows.npz")


def test_a_changed_specification_no_longer_has_its_evidence(collected, mlp, tmp_path):
    result = collected(mlp, {Patch(5): (94, 62)})
    text = (result.path / "spec.toml").read_text()
    (result.path / "spec.toml").write_text(text.replace("batch_size = 256", "batch_size = 32"))
    changed = Results(tmp_path / "results").of(replace(mlp, optimiser=replace(mlp.optimiser, batch_size=32)))
    with pytest.raises(RunError, match="is not evidence of the run that its folder is named after"):
        assert changed[0].rows


def test_evidence_of_earlier_weights_is_replaced(collected, mlp):
    collected(mlp, {Patch(5): (94, 62), Patch(2): (94, 80)})
    result = collected(mlp, {Patch(5): (95, 63)}, weights_seed=1)
    assert [rows.certified for rows in result.rows] == [63]


def test_runs_are_the_same_experiment_whatever_their_seed_and_schedule(mlp):
    key = experiment_key(mlp)
    assert experiment_key(replace(mlp.scaled(0.1), seed=5)) == key
    assert experiment_key(replace(mlp, optimiser=replace(mlp.optimiser, tf32=True))) == key
    assert experiment_key(with_model(mlp, "cnn2")) != key


def test_rows_without_evidence_are_not_run(tmp_path):
    (outcome,) = outcomes(row("strategy-detail-5x5", "mnist all mlp"), tmp_path, None)
    assert outcome.status == "not run"
    assert (outcome.clean, outcome.certified, outcome.difference, outcome.seconds) == (None,) * 4


def test_runs_that_shared_a_device_say_so(finished, mlp, tmp_path):
    run = finished(mlp, {Patch(5): (94, 62)})
    write_orders(run.path, Task(run.path.name, mlp, (Patch(5),)), jobs=6)
    collect(run, run.path.name, tmp_path / "results")
    (outcome,) = outcomes(row("strategy-detail-5x5", "mnist all mlp"), tmp_path / "results", None)
    assert outcome.hardware == "NVIDIA H200, 6 runs at once"
    write_orders(run.path, Task(run.path.name, mlp, (Patch(5),)), jobs=1)
    collect(run, run.path.name, tmp_path / "results")
    (outcome,) = outcomes(row("strategy-detail-5x5", "mnist all mlp"), tmp_path / "results", None)
    assert outcome.hardware == "NVIDIA H200, 6 runs at once", "what was gathered later trained nothing"


def test_a_run_that_went_on_elsewhere_names_both_devices(finished, mlp, tmp_path):
    run = finished(mlp, {Patch(5): (94, 62)})
    sessions = [{"device": name} for name in ("NVIDIA H200", "NVIDIA H200", "cpu (x86_64)")]
    run.write_environment(run.environment() | {"device": "cpu (x86_64)", "sessions": sessions})
    collect(run, run.path.name, tmp_path / "results")
    (outcome,) = outcomes(row("strategy-detail-5x5", "mnist all mlp"), tmp_path / "results", None)
    assert outcome.hardware == "NVIDIA H200, then cpu (x86_64)"


def test_a_mean_needs_all_its_models(collected, mlp, tmp_path):
    entries = row("training-strategies", "mnist 5x5 all")
    for name, certified in (("mlp", 62), ("cnn2", 59)):
        collected(with_model(mlp, name), {Patch(5): (90, certified)})
    (outcome,) = outcomes(entries, tmp_path / "results", None)
    assert (outcome.status, outcome.note) == ("partly run", "2 of 3 runs")
    assert outcome.certified is None
    collected(with_model(mlp, "cnn4"), {Patch(5): (90, 59)})
    (outcome,) = outcomes(entries, tmp_path / "results", None)
    assert outcome.certified == 60.0


def test_the_worst_variant_of_a_shape_counts(collected, mlp, tmp_path):
    lines = shapes.transfer_shapes(25)["line"]
    counts = dict(zip(map(Patch, lines), [(90, 40), (90, 32)], strict=True))
    collected(with_model(mlp, "cnn4"), counts)
    (outcome,) = outcomes(row("shape-transfer", "mnist line 5x5"), tmp_path / "results", None)
    assert outcome.certified == 32.0
    assert len(outcome.runs[0].certified) == 2


def test_a_full_schedule_comes_before_a_scaled_one(collected, mlp, tmp_path):
    entries = row("strategy-detail-5x5", "mnist all mlp")
    collected(mlp.scaled(0.1), {Patch(5): (90, 40)}, scale=0.1)
    collected(mlp.scaled(0.5), {Patch(5): (90, 50)}, scale=0.5)
    (outcome,) = outcomes(entries, tmp_path / "results", None)
    assert (outcome.scale, outcome.certified) == (0.5, 50.0)
    (outcome,) = outcomes(entries, tmp_path / "results", Scale(0.1))
    assert (outcome.scale, outcome.certified) == (0.1, 40.0)
    collected(mlp, {Patch(5): (90, 62)})
    (outcome,) = outcomes(entries, tmp_path / "results", None)
    assert (outcome.scale, outcome.certified) == (1.0, 62.0)


def test_another_schedule_is_not_the_papers(collected, mlp, tmp_path):
    longer = replace(mlp, schedule=replace(mlp.schedule, epochs=300))
    collected(longer, {Patch(5): (90, 70)})
    (outcome,) = outcomes(row("strategy-detail-5x5", "mnist all mlp"), tmp_path / "results", None)
    assert outcome.status != "measured"


def test_exact_training_comes_before_tf32(collected, mlp, tmp_path):
    entries = row("strategy-detail-5x5", "mnist all mlp")
    rough = replace(mlp.optimiser, tf32=True, windows="bfloat16")
    collected(replace(mlp, optimiser=rough), {Patch(5): (90, 60)})
    (outcome,) = outcomes(entries, tmp_path / "results", None)
    assert (outcome.certified, outcome.hardware) == (60.0, "NVIDIA H200, TF32, bfloat16 windows")
    collected(replace(mlp, optimiser=replace(mlp.optimiser, tf32=True)), {Patch(5): (90, 61)})
    (outcome,) = outcomes(entries, tmp_path / "results", None)
    assert (outcome.certified, outcome.hardware) == (61.0, "NVIDIA H200, TF32")
    collected(mlp, {Patch(5): (90, 62)})
    (outcome,) = outcomes(entries, tmp_path / "results", None)
    assert outcome.certified == 62.0


def test_a_part_of_the_test_images_is_no_result(collected, mlp, tmp_path):
    collected(mlp, {Patch(5): (90, 62)}, limit=100)
    (outcome,) = outcomes(row("strategy-detail-5x5", "mnist all mlp"), tmp_path / "results", None)
    assert outcome.certified is None


def test_quick_looks_are_never_results(collected, tmp_path):
    quick = Scale(quick=True)
    (entry,) = row("strategy-detail-5x5", "mnist all mlp")
    made = recipe(entry)
    assert made is not None
    collected(quick.apply(made).specs[0], {Patch(5): (90, 62)}, limit=100)
    assert outcomes([entry], tmp_path / "results", None)[0].status == "not run"
    assert outcomes([entry], tmp_path / "results", quick)[0].certified == 62.0


def test_sparse_rows_count_only_the_tight_certificate(collected, tmp_path):
    (entry,) = row("sparse-detail", "mnist 4 pixels mlp")
    made = recipe(entry)
    assert made is not None
    collected(made.specs[0], {SparsePixels(4, "per-pixel"): (97, 85)})
    assert outcomes([entry], tmp_path / "results", None)[0].certified is None
    collected(made.specs[0], {SparsePixels(4, "per-pixel"): (97, 85), SparsePixels(4): (97, 90)})
    assert outcomes([entry], tmp_path / "results", None)[0].certified == 90.0


def test_runs_trained_by_hand_are_collected(finished, mlp, tmp_path):
    run = finished(mlp, {Patch(5): (94, 62)})
    finished(replace(mlp, seed=1), {})
    assert collect_all(run.path.parent, tmp_path / "results") == (run.path.name,)
    (outcome,) = outcomes(row("strategy-detail-5x5", "mnist all mlp"), tmp_path / "results", None)
    assert outcome.certified == 62.0


def test_collecting_twice_changes_nothing(finished, mlp, tmp_path, monkeypatch):
    """Not even what code there was, if it has changed meanwhile."""
    run = finished(mlp, {Patch(5): (94, 62)})
    first = collect(run, run.path.name, tmp_path / "results")
    before = {file.name: file.read_bytes() for file in first.path.iterdir()}
    monkeypatch.setattr(summaries, "source_sha256", lambda: "0" * 64)
    collect(run, run.path.name, tmp_path / "results")
    assert {file.name: file.read_bytes() for file in first.path.iterdir()} == before


@pytest.mark.parametrize(
    ("threat", "options"),
    [
        (Patch(5), ["--shape", "5x5"]),
        (Patch(shapes.diamond(25)), ["--shape", "diamond:25"]),
        (SparsePixels(4), ["--sparse", "4", "--bound", "tight"]),
    ],
)
def test_the_command_of_a_certificate_names_its_threat_but_no_folder(threat, options):
    words = shlex.split(certify_command("0123", threat, 300))
    assert words == ["patchcert", "certify", "0123", *options, "--limit", "300"]
    given = dict(zip(options[::2], options[1::2], strict=True))
    sparse = int(given["--sparse"]) if "--sparse" in given else None
    assert parse_threat(None, given.get("--shape"), sparse, given.get("--bound"), None, None) == threat


def attacked(run, plan, withstood, correct=90, defense=None, images=100):
    """Evidence of an attack on the first images; the first so many withstand it."""
    index = np.arange(images)
    columns = {
        "index": index,
        "label": np.zeros(images, np.int64),
        "prediction": np.where(index < correct, 0, 1),
        "prediction_after": np.where(index < withstood, 0, 1),
        "succeeded": index >= withstood,
    }
    meta = run.evidence_meta(run.evidence_names()[0]) | {"kind": "attack", "plan": plan.to_dict()}
    run.write_evidence(plan.name, columns, meta | {"defense": defense})


def compared(text):
    (entry,) = row("compare-defenses", text)
    made = recipe(entry)
    assert made is not None
    return entry, made


def test_rows_under_attack_need_certificates_and_attacks_of_every_model(finished, tmp_path):
    entry, made = compared("mnist 5x5 ibp")
    for spec, certified in zip(made.specs, (60, 61, 62), strict=True):
        run = finished(spec, {Patch(5): (90, certified)})
        collect(run, run.path.name, tmp_path / "results")
        assert outcomes([entry], tmp_path / "results", None)[0].status != "measured"
        attacked(run, made.attack, withstood=certified + 5, images=80)
        collect(run, run.path.name, tmp_path / "results")
    (outcome,) = outcomes([entry], tmp_path / "results", None)
    assert (outcome.clean, outcome.certified, outcome.empirical) == (90.0, 61.0, 100 * 66 / 80)
    assert outcome.certified_of_attacked == 100 * 61 / 80
    assert outcome.difference == pytest.approx(61.0 - 62.0)


def test_a_defended_row_is_counted_behind_its_defense(finished, tmp_path):
    entry, made = compared("cifar 2x2 dw adaptive")
    for spec in made.specs:
        run = finished(spec, {Patch(2): (66, 0)})
        attacked(run, made.attack, withstood=20, correct=47, defense="DigitalWatermarking(...)")
        collect(run, run.path.name, tmp_path / "results")
    (outcome,) = outcomes([entry], tmp_path / "results", None)
    assert (outcome.clean, outcome.empirical, outcome.certified) == (47.0, 20.0, None)
    assert outcome.certified_of_attacked is None
    assert outcome.difference == pytest.approx(20.0 - 20.2)


def test_a_certified_image_that_an_attack_broke_is_an_error(finished, mlp, tmp_path):
    run = finished(mlp, {Patch(5): (90, 62)})
    attacked(run, AttackPlan("5x5"), withstood=61)
    result = collect(run, run.path.name, tmp_path / "results")
    with pytest.raises(RunError, match="image 61 is certified, but attack-5x5-plain-.* broke it"):
        assert result.attacks


def test_attacks_without_a_plan_are_not_collected(finished, mlp, tmp_path):
    run = finished(mlp, {Patch(5): (90, 62)})
    run.write_evidence("attack-by-hand", {"label": np.zeros(3)}, {"kind": "attack"})
    result = collect(run, run.path.name, tmp_path / "results")
    assert result.attacks == ()


def challenged(run, index, broken=()):
    """Evidence of an attack on the images of the index, of which some were broken."""
    columns = {
        "index": np.array(index),
        "label": np.zeros(len(index), np.int64),
        "prediction": np.zeros(len(index), np.int64),
        "prediction_after": np.isin(index, broken).astype(np.int64),
        "succeeded": np.isin(index, broken),
        "steps": np.full(len(index), 7),
    }
    meta = run.evidence_meta(run.evidence_names()[0]) | {"kind": "attack", "certified_only": True}
    run.write_evidence("attack-of-the-certified", columns, meta)


def test_challenges_of_proofs_are_collected_and_counted(finished, mlp, tmp_path):
    run = finished(mlp, {Patch(5): (90, 62)})
    challenged(run, [0, 3, 61])
    result = collect(run, run.path.name, tmp_path / "results")
    assert result.attacks == ()
    (challenge,) = result.challenges
    assert (challenge.total, challenge.broken, challenge.steps) == (3, 0, 21)
    assert challenge.path.name == "challenge-of-the-certified.npz"
    page = reproduction_document([], Results(tmp_path / "results").all())
    assert "| MNIST | Patch(5x5 square, everywhere) | all, 100 epochs | mlp | 3 | 21 | 0 |" in page


def test_attacks_that_no_table_asked_for_are_kept_but_count_in_none(finished, mlp, tmp_path):
    run = finished(mlp, {Patch(5): (90, 62)})
    meta = run.evidence_meta(evidence_name(Patch(5), None)) | {"kind": "attack"}
    run.write_evidence("attack-by-hand", {"label": np.zeros(3)}, meta)
    run.write_evidence("notes", {"label": np.zeros(3)}, meta)
    result = collect(run, run.path.name, tmp_path / "results")
    assert {file.name for file in result.path.glob("*.npz")} == {
        "certify-patch-5x5-square-everywhere.npz",
        "unplanned-by-hand.npz",
    }
    assert (result.attacks, result.challenges) == ((), ())


def test_a_trimmed_model_leaves_the_evidence_of_the_whole_one_alone(collected, finished, mlp, tmp_path):
    whole = collected(mlp, {Patch(5): (90, 62)})
    before = {file.name: file.read_bytes() for file in whole.path.iterdir()}
    run = finished(mlp, {Patch(5): (91, 63)}, trimmed=True)
    challenged(run, [62])
    meta = run.evidence_meta(evidence_name(Patch(5), None)) | {"kind": "attack"}
    run.write_evidence("attack-by-hand", {"label": np.zeros(3)}, meta)
    assert collect_all(run.path.parent, tmp_path / "results") == (f"{whole.path.name}/trimmed",)
    assert {file.name: file.read_bytes() for file in whole.path.iterdir() if file.is_file()} == before
    assert {file.name for file in (whole.path / "trimmed").iterdir()} == {
        "certify-patch-5x5-square-everywhere.npz",
        "challenge-of-the-certified.npz",
        "unplanned-by-hand.npz",
    }
    (outcome,) = outcomes(row("strategy-detail-5x5", "mnist all mlp"), tmp_path / "results", None)
    assert outcome.certified == 62.0
    page = reproduction_document([], Results(tmp_path / "results").all())
    assert "| all, 100 epochs | mlp, trimmed | 1 | 7 | 0 |" in page


def test_a_refuted_proof_is_shown(finished, mlp, tmp_path):
    run = finished(mlp, {Patch(5): (90, 62)})
    challenged(run, [0, 3, 61], broken=[3])
    result = collect(run, run.path.name, tmp_path / "results")
    assert result.challenges[0].broken == 1
    assert "| mlp | 3 | 21 | 1 |" in reproduction_document([], [result])


def test_a_challenge_of_images_that_are_not_certified_is_an_error(finished, mlp, tmp_path):
    run = finished(mlp, {Patch(5): (90, 62)})
    challenged(run, [0, 62])
    result = collect(run, run.path.name, tmp_path / "results")
    with pytest.raises(RunError, match="attacks images that certify-.* does not call proven"):
        assert result.challenges


def test_attack_plans_survive_being_written_down():
    plan = AttackPlan("5x5", "lgs", True, settings=4)
    assert AttackPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert plan.threat == Patch(5)
    assert plan.name != replace(plan, seed=1).name
