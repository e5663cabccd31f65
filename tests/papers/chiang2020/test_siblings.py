"""The models of a row share one setting of a defense: tried first, attacked afterwards, checked when counted."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from patchcert.errors import RunError
from patchcert.files import sha256
from patchcert.papers.chiang2020.outcome import outcomes
from patchcert.papers.chiang2020.pack import pack
from patchcert.papers.chiang2020.plan import Effort, plan
from patchcert.papers.chiang2020.results import Result
from patchcert.papers.chiang2020.rows import recipe
from patchcert.papers.chiang2020.runner import LOG, Runner, StopOrder, Workshop
from patchcert.papers.chiang2020.scales import Scale
from patchcert.papers.chiang2020.siblings import Archive
from patchcert.papers.chiang2020.tables import find_table
from patchcert.papers.chiang2020.trials import Trials
from patchcert.train.run_folder import Run

TINY = Scale(quick=True, quick_train=60, quick_test=10)
ENTRIES = find_table("compare-defenses").chosen(["mnist 2x2 lgs"])
CHECKSUMS = {"file": "0" * 64}


class Quiet:
    def changed(self, task, state, note):
        pass

    def passed(self, states, running):
        pass


def tasks():
    return plan(ENTRIES, Effort(TINY), None)


def first_stage(made):
    return [replace(task, tunes_only=True) for task in made]


def run_all(shop, made):
    return Runner(shop, Quiet(), StopOrder()).run(made)


def setting_of(shop, task, attack):
    rows = Result.open(shop.results / task.name).attack(attack)
    assert rows is not None
    return rows.meta["defense"]


def rewrite(file, change):
    """Change the notes of a file of evidence."""
    with np.load(file) as stored:
        arrays = dict(stored)
    meta = json.loads(str(arrays.pop("meta")))
    change(meta)
    np.savez_compressed(file, **arrays, meta=np.array(json.dumps(meta)))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Two tiny models after the first stage."""
    folder = tmp_path_factory.mktemp("stages")
    shop = Workshop(folder / "runs", folder / "results", jobs=2)
    assert set(run_all(shop, first_stage(tasks())).values()) == {"done"}
    return shop


@pytest.fixture(scope="module")
def second(first, tmp_path_factory):
    """The same after the second."""
    shop = copied(first, tmp_path_factory.mktemp("both"))
    assert set(run_all(shop, tasks()).values()) == {"done"}
    return shop


def copied(shop, folder):
    for name in ("runs", "results"):
        shutil.copytree(getattr(shop, name), folder / name)
    return replace(shop, runs=folder / "runs", results=folder / "results")


def test_runs_of_a_row_know_each_other_and_their_trials():
    mlp, cnn2 = tasks()
    assert mlp.siblings == cnn2.siblings == (mlp.name, cnn2.name)
    assert [attack.adaptive for attack in mlp.attacks] == [False, True]
    assert [attack.sweep_vertices > 0 for attack in mlp.attacks] == [False, True]
    assert mlp.tunings == (mlp.attacks[0].tuning,)
    seeds = plan(ENTRIES, Effort(TINY, seeds=2), None)
    assert [{task.name for task in seeds if task.spec.seed == seed} for seed in (2019, 2020)] == [
        set(next(task.siblings for task in seeds if task.spec.seed == seed)) for seed in (2019, 2020)
    ]


def test_undefended_rows_have_no_trials_and_the_names_that_evidence_has():
    for task in plan(find_table("compare-defenses").chosen(["mnist none", "mnist ibp"]), Effort(TINY), None):
        assert (task.tunings, task.siblings) == ((), ())
    made = recipe(find_table("compare-defenses").chosen(["mnist 2x2 none"])[0])
    assert made is not None
    assert made.attack is not None
    assert made.attack.name == "attack-2x2-plain-f06ba7b3"


def test_the_first_stage_trains_and_tries_but_attacks_no_defense(first):
    for task in tasks():
        result = Result.open(first.results / task.name)
        assert [trials.plan for trials in result.trials] == list(task.tunings)
        assert result.attacks == ()
        assert Run.open(first.runs / task.name).is_finished
    assert set(run_all(first, first_stage(tasks())).values()) == {"already done"}


def test_the_second_stage_attacks_all_models_behind_one_setting(second):
    made = tasks()
    archive = Archive(second.runs, second.results)
    chosen = {archive.choice(task.siblings, attack).setting for task in made for attack in task.attacks}
    assert {setting_of(second, task, attack) for task in made for attack in task.attacks} == chosen
    assert len(chosen) == 1
    assert set(run_all(second, made).values()) == {"already done"}
    logs = [(second.runs / task.name / LOG).read_text() for task in made]
    assert all(log.count("settings tried") == 1 for log in logs)
    assert [row.status for row in outcomes(ENTRIES, second.results, TINY)] == ["measured"] * 2


def test_the_trials_of_a_run_whose_folder_is_gone_are_among_the_results(second, tmp_path):
    shop, (mlp, cnn2) = copied(second, tmp_path), tasks()
    shutil.rmtree(shop.runs / mlp.name)
    for folder in (shop.runs / cnn2.name / "evidence", shop.results / cnn2.name):
        (folder / f"{cnn2.attacks[0].name}.npz").unlink()
    assert run_all(shop, first_stage([mlp, cnn2])) == {
        mlp.name: "already done",
        cnn2.name: "already done",
    }
    assert run_all(shop, [mlp, cnn2]) == {mlp.name: "already done", cnn2.name: "done"}
    assert not (shop.runs / mlp.name).exists()
    assert outcomes(ENTRIES, shop.results, TINY) == outcomes(ENTRIES, second.results, TINY)


def test_without_a_siblings_trials_there_is_no_attack_behind_a_defense(first, tmp_path):
    shop, (mlp, cnn2) = copied(first, tmp_path), tasks()
    shutil.rmtree(shop.runs / mlp.name)
    shutil.rmtree(shop.results / mlp.name)
    assert run_all(shop, [cnn2]) == {cnn2.name: "failed"}
    log = (shop.runs / cnn2.name / LOG).read_text()
    assert f"of every run of its row, but {mlp.name} has none" in log


def test_trials_of_other_weights_are_none(first, tmp_path):
    shop, (mlp, cnn2) = copied(first, tmp_path), tasks()
    archive, tuning = Archive(shop.runs, shop.results), mlp.tunings[0]
    shutil.copy(shop.runs / cnn2.name / "weights.safetensors", shop.runs / mlp.name / "weights.safetensors")
    assert archive.trials(mlp.name, tuning) is None
    (shop.runs / mlp.name / "weights.safetensors").unlink()
    assert archive.trials(mlp.name, tuning) is not None
    assert archive.trials(cnn2.name, tuning) is not None
    (shop.runs / cnn2.name / "evidence" / f"{tuning.name}.npz").unlink()
    assert archive.trials(cnn2.name, tuning) is not None


def test_evidence_of_another_setting_than_the_chosen_one_is_refused_and_made_anew(second, tmp_path):
    shop, (mlp, cnn2) = copied(second, tmp_path), tasks()
    other = "LocalGradientSmoothing(window=8, overlap=0, threshold=0.8, smoothing=5.0)"
    for folder in (shop.runs / mlp.name / "evidence", shop.results / mlp.name):
        rewrite(folder / f"{mlp.attacks[0].name}.npz", lambda meta: meta.update(defense=other))
    with pytest.raises(RunError, match="smoothing=5.0\\), but the trials of all models of the row give"):
        outcomes(ENTRIES, shop.results, TINY)
    assert run_all(shop, [mlp, cnn2]) == {mlp.name: "done", cnn2.name: "already done"}
    assert outcomes(ENTRIES, shop.results, TINY) == outcomes(ENTRIES, second.results, TINY)


def test_evidence_whose_trials_were_taken_away_is_refused(second, tmp_path):
    shop, (mlp, _) = copied(second, tmp_path), tasks()
    (shop.results / mlp.name / f"{mlp.tunings[0].name}.npz").unlink()
    with pytest.raises(RunError, match=f"{mlp.name} lacks the trials tune-2x2-lgs-"):
        outcomes(ENTRIES, shop.results, TINY)


def test_a_run_that_is_yet_to_be_attacked_is_packed_with_its_weights(first, second, tmp_path):
    assert pack(tmp_path / "first.tar", first.results, first.runs).runs == 2
    assert pack(tmp_path / "second.tar", second.results, second.runs).runs == 0


def test_what_must_be_trained_again_is_so_before_settings_are_chosen(first, tmp_path):
    shop, (mlp, cnn2) = copied(first, tmp_path), tasks()
    shutil.rmtree(shop.runs / mlp.name)
    assert run_all(shop, first_stage([mlp, cnn2])) == {mlp.name: "done", cnn2.name: "already done"}
    weights = sha256(shop.runs / mlp.name / "weights.safetensors")
    (trials,) = Result.open(shop.results / mlp.name).trials
    assert trials.meta["weights_sha256"] == weights


def test_trials_that_lack_a_column_are_refused(second, tmp_path):
    shop, (mlp, _) = copied(second, tmp_path), tasks()
    file = shop.results / mlp.name / f"{mlp.tunings[0].name}.npz"
    with np.load(file) as stored:
        arrays = {name: stored[name] for name in stored.files if name != "weak"}
    np.savez_compressed(file, **arrays)
    with pytest.raises(RunError, match="lacks the column 'weak'"):
        Trials.read(file)
