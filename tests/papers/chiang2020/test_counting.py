"""Rows are counted from evidence alone; of several seeds that with the least training loss counts."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from patchcert.evidence.results import Circumstances, collect
from patchcert.papers.chiang2020.counting import count_rows
from patchcert.papers.chiang2020.recipes import Scale, recipe
from patchcert.papers.chiang2020.tables import find_table
from patchcert.threats import Patch, SparsePixels, shapes

ROOT = Path(__file__).parents[3]
DECISION = ROOT / "docs" / "decisions" / "0006-which-seed-counts.md"
DETAIL = find_table("strategy-detail-5x5").chosen(["mnist all mlp"])
MEAN = find_table("training-strategies").chosen(["mnist 5x5 all"])


def with_model(spec, name):
    return replace(spec, model=replace(spec.model, name=name))


@pytest.fixture
def seeded(finished, mlp):
    """Collects a model's runs from {seed: (certified images of 100, training loss)}."""

    def make(runs, model="mlp"):
        for seed, (certified, loss) in runs.items():
            spec = with_model(replace(mlp, seed=seed), model)
            finished.collect(spec, {Patch(5): (90, certified)}, loss=loss, seconds=float(seed))

    return make


def counted(entries, tmp_path, seeds=None, scale=None):
    return count_rows(entries, tmp_path / "results", scale, seeds)[0]


def test_the_least_loss_counts_not_the_best_accuracy(seeded, tmp_path):
    seeded({2019: (70, 0.9), 2020: (60, 0.7), 2021: (65, 0.8)})
    outcome = counted(DETAIL, tmp_path)
    assert (outcome.certified, outcome.seconds) == (60.0, 2020.0)
    assert [run.seed for run in outcome.runs] == [2020]
    assert [run.seed for run in outcome.passed_over] == [2019, 2021]
    assert outcome.spread == pytest.approx(5.0)


def test_a_row_knows_its_first_seeds_alone_and_the_mean_over_all(seeded, tmp_path):
    seeded({2019: (70, 0.9), 2020: (60, 0.7), 2021: (65, 0.6)})
    limited = [counted(DETAIL, tmp_path, limit).certified for limit in (1, 2, 3, None)]
    assert limited == [70.0, 60.0, 65.0, 65.0]
    row = counted(DETAIL, tmp_path)
    assert (row.by_first_seed.certified, row.mean) == (70.0, 65.0)
    gaps = [row.difference_by(rule) for rule in ("loss", "first", "mean")]
    assert gaps == [ours - row.entry.certified for ours in (65.0, 70.0, 65.0)]


@pytest.mark.parametrize(
    "runs",
    [
        {2019: (60, 0.7), 2020: (70, 0.7)},
        {2019: (70, float("nan")), 2020: (60, 0.7)},
    ],
    ids=["of equal losses the first counts", "a loss that is no number is never the least"],
)
def test_ties_and_losses_that_are_no_numbers(seeded, tmp_path, runs):
    seeded(runs)
    assert counted(DETAIL, tmp_path).certified == 60.0


def test_a_single_seed_needs_no_loss(seeded, tmp_path):
    seeded({2020: (60, None)})
    outcome = counted(DETAIL, tmp_path)
    assert (outcome.status, outcome.certified) == ("measured", 60.0)
    assert (outcome.passed_over, outcome.spread) == ((), None)


def test_without_a_loss_of_every_seed_nothing_is_chosen(seeded, tmp_path):
    seeded({2019: (70, None), 2020: (60, 0.7)})
    outcome = counted(DETAIL, tmp_path)
    assert (outcome.status, outcome.certified) == ("partly run", None)
    assert outcome.note == "no training loss of mlp with seed 2019 on record"
    assert counted(DETAIL, tmp_path, seeds=1).certified == 70.0


def test_a_mean_takes_the_best_seed_of_each_model(seeded, tmp_path):
    seeded({2019: (60, 0.5), 2020: (90, 0.6)}, "mlp")
    seeded({2019: (50, None)}, "cnn2")
    seeded({2019: (10, 2.3), 2020: (30, 0.9), 2021: (40, 0.8)}, "cnn4")
    outcome = counted(MEAN, tmp_path)
    assert [(run.model, run.seed) for run in outcome.runs] == [("mlp", 2019), ("cnn2", 2019), ("cnn4", 2021)]
    assert outcome.certified == 50.0
    assert outcome.spread is None


def test_seeds_of_other_models_need_not_be_the_same(seeded, tmp_path):
    for model, seed in (("mlp", 2019), ("cnn2", 2020), ("cnn4", 2021)):
        seeded({seed: (60, 0.5)}, model)
    assert counted(MEAN, tmp_path).certified == 60.0


def row(table, text):
    return find_table(table).chosen([text])


def test_numbers_come_from_rows_not_from_the_summary(finished, mlp, tmp_path):
    result = finished.collect(mlp, {Patch(5): (94, 62)})
    summary = dict(result.summary) | {"clean_accuracy": 1.0, "certified_accuracy": {"x": 1.0}}
    (result.path / "summary.json").write_text(json.dumps(summary))
    outcome = counted(DETAIL, tmp_path)
    assert (outcome.clean, outcome.certified) == (94.0, 62.0)
    assert outcome.difference == pytest.approx(0.03)
    assert (outcome.hardware, outcome.seconds, outcome.scale) == ("NVIDIA H200", 10.0, 1.0)


def test_rows_without_evidence_are_not_run(tmp_path):
    (outcome,) = count_rows(row("strategy-detail-5x5", "mnist all mlp"), tmp_path)
    assert outcome.status == "not run"
    assert (outcome.clean, outcome.certified, outcome.difference, outcome.seconds) == (None,) * 4


def test_runs_that_shared_a_device_say_so(finished, mlp, tmp_path):
    run = finished.run(mlp, {Patch(5): (94, 62)})
    Circumstances(jobs=6).write(run.path)
    collect(run, tmp_path / "results")
    outcome = counted(DETAIL, tmp_path)
    assert outcome.hardware == "NVIDIA H200, 6 runs at once"


def test_a_mean_needs_all_its_models(finished, mlp, tmp_path):
    for name, certified in (("mlp", 62), ("cnn2", 59)):
        finished.collect(with_model(mlp, name), {Patch(5): (90, certified)})
    outcome = counted(MEAN, tmp_path)
    assert (outcome.status, outcome.note) == ("partly run", "2 of 3 runs")
    assert outcome.certified is None
    finished.collect(with_model(mlp, "cnn4"), {Patch(5): (90, 59)})
    outcome = counted(MEAN, tmp_path)
    assert outcome.certified == 60.0


def test_the_worst_variant_of_a_shape_counts(finished, mlp, tmp_path):
    lines = shapes.transfer_shapes(25)["line"]
    counts = dict(zip(map(Patch, lines), [(90, 40), (90, 32)], strict=True))
    finished.collect(with_model(mlp, "cnn4"), counts)
    (outcome,) = count_rows(row("shape-transfer", "mnist line 5x5"), tmp_path / "results")
    assert outcome.certified == 32.0
    assert len(outcome.runs[0].certified) == 2


def test_a_full_schedule_comes_before_a_scaled_one(finished, mlp, tmp_path):
    finished.collect(mlp.scaled(0.1), {Patch(5): (90, 40)}, scale=0.1)
    finished.collect(mlp.scaled(0.5), {Patch(5): (90, 50)}, scale=0.5)
    outcome = counted(DETAIL, tmp_path)
    assert (outcome.scale, outcome.certified) == (0.5, 50.0)
    outcome = counted(DETAIL, tmp_path, scale=Scale(0.1))
    assert (outcome.scale, outcome.certified) == (0.1, 40.0)
    finished.collect(mlp, {Patch(5): (90, 62)})
    outcome = counted(DETAIL, tmp_path)
    assert (outcome.scale, outcome.certified) == (1.0, 62.0)


def test_another_schedule_is_not_the_papers(finished, mlp, tmp_path):
    longer = replace(mlp, schedule=replace(mlp.schedule, epochs=300))
    finished.collect(longer, {Patch(5): (90, 70)})
    outcome = counted(DETAIL, tmp_path)
    assert outcome.status != "measured"


def test_exact_training_comes_before_tf32(finished, mlp, tmp_path):
    rough = replace(mlp.optimiser, tf32=True, windows="bfloat16")
    finished.collect(replace(mlp, optimiser=rough), {Patch(5): (90, 60)})
    outcome = counted(DETAIL, tmp_path)
    assert (outcome.certified, outcome.hardware) == (60.0, "NVIDIA H200, TF32, bfloat16 windows")
    finished.collect(replace(mlp, optimiser=replace(mlp.optimiser, tf32=True)), {Patch(5): (90, 61)})
    outcome = counted(DETAIL, tmp_path)
    assert (outcome.certified, outcome.hardware) == (61.0, "NVIDIA H200, TF32")
    finished.collect(mlp, {Patch(5): (90, 62)})
    outcome = counted(DETAIL, tmp_path)
    assert outcome.certified == 62.0


def test_a_part_of_the_test_images_is_no_result(finished, mlp, tmp_path):
    finished.collect(mlp, {Patch(5): (90, 62)}, limit=100)
    outcome = counted(DETAIL, tmp_path)
    assert outcome.certified is None


def test_quick_looks_are_never_results(finished, tmp_path):
    quick = Scale(quick=True)
    (entry,) = DETAIL
    finished.collect(recipe(entry, quick).specs[0], {Patch(5): (90, 62)}, limit=100)
    assert count_rows([entry], tmp_path / "results")[0].status == "not run"
    assert count_rows([entry], tmp_path / "results", quick)[0].certified == 62.0


def test_sparse_rows_count_only_the_tight_certificate(finished, tmp_path):
    (entry,) = row("sparse-detail", "mnist 4 pixels mlp")
    made = recipe(entry)
    finished.collect(made.specs[0], {SparsePixels(4, "per-pixel"): (97, 85)})
    assert count_rows([entry], tmp_path / "results")[0].certified is None
    finished.collect(made.specs[0], {SparsePixels(4, "per-pixel"): (97, 85), SparsePixels(4): (97, 90)})
    assert count_rows([entry], tmp_path / "results")[0].certified == 90.0


def compared(text):
    (entry,) = row("compare-defenses", text)
    return entry, recipe(entry)


def test_rows_under_attack_need_certificates_and_attacks_of_every_model(finished, tmp_path, attack_rows):
    entry, made = compared("mnist 5x5 ibp")
    for spec, certified in zip(made.specs, (60, 61, 62), strict=True):
        run = finished.run(spec, {Patch(5): (90, certified)})
        collect(run, tmp_path / "results")
        assert count_rows([entry], tmp_path / "results")[0].status != "measured"
        finished.write(run, made.attack, attack_rows(range(80), withstood=certified + 5))
        collect(run, tmp_path / "results")
    (outcome,) = count_rows([entry], tmp_path / "results")
    assert (outcome.clean, outcome.certified, outcome.empirical) == (90.0, 61.0, 100 * 66 / 80)
    assert outcome.certified_of_attacked == 100 * 61 / 80
    assert outcome.difference == pytest.approx(61.0 - 62.0)


def test_a_defended_row_is_counted_behind_its_defense(finished, tmp_path, attack_rows):
    entry, made = compared("cifar 2x2 dw adaptive")
    for spec in made.specs:
        run = finished.run(spec, {Patch(2): (66, 0)})
        finished.write(run, made.attack, attack_rows(range(100), withstood=20, correct=47))
        other = {**made.attack.classifier, "defense": "LocalGradientSmoothing(window=3)"}
        finished.write(run, replace(made.attack, classifier=other), attack_rows(range(100), withstood=90))
        collect(run, tmp_path / "results")
    (outcome,) = count_rows([entry], tmp_path / "results")
    assert (outcome.clean, outcome.empirical, outcome.certified) == (47.0, 20.0, None)
    assert outcome.certified_of_attacked is None
    assert outcome.difference == pytest.approx(20.0 - 20.2)


def test_rows_under_attack_are_about_the_first_seed_unless_more_are_asked_for(
    finished, tmp_path, attack_rows
):
    entry, made = compared("mnist 5x5 ibp")
    for seed, loss in ((2019, 0.9), (2020, 0.5)):
        for spec in made.specs:
            run = finished.run(replace(spec, seed=seed), {Patch(5): (90, seed - 1960)}, loss=loss)
            finished.write(run, made.attack, attack_rows(range(80), withstood=75))
            collect(run, tmp_path / "results")
    counted = [count_rows([entry], tmp_path / "results", None, seeds)[0].certified for seeds in (None, 1, 2)]
    assert counted == [59.0, 59.0, 60.0]


def test_votes_count_against_any_number_of_pixels(finished, tmp_path):
    entries = row("sparse-vs-ablation", "cifar ablation")
    made = recipe(entries[0])
    run = finished.run(made.specs[0].scaled(0.1), {}, scale=0.1)
    votes, right = np.zeros((5, 10), np.int64), np.full(5, 3)
    votes[:, 3] = 10_000
    columns = {
        "index": np.arange(5),
        "label": right,
        "prediction": right,
        "certified": np.ones(5, bool),
        "radius": np.full(5, 9),
        "selected": right,
        "votes": votes,
    }
    finished.write(run, made.proofs[0], columns, image=[3, 32, 32])
    collect(run, tmp_path / "results")
    found = count_rows(entries, tmp_path / "results")
    assert [outcome.certified for outcome in found] == [100.0, 100.0, 0.0]
    assert {outcome.drawn_images for outcome in found} == {1000}
