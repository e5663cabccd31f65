"""Real processes: several at once, one that fails, one that goes on, one whose parent is gone."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import patchcert
from patchcert.data import load_dataset
from patchcert.papers.chiang2020.plan import Effort, Task, plan
from patchcert.papers.chiang2020.results import Result
from patchcert.papers.chiang2020.runner import LOG, Runner, StopOrder, Workshop
from patchcert.papers.chiang2020.scales import QUICK_DATA, Scale, parse_scale
from patchcert.papers.chiang2020.tables import find_table
from patchcert.threats import Patch
from patchcert.train.run_folder import Run

TINY = Scale(quick=True, quick_train=60, quick_test=10)


class Quiet:
    def __init__(self):
        self.said = []

    def changed(self, task, state, note):
        self.said.append((task.name, state, note))

    def passed(self, states, running):
        self.running = [job.words for job in running]


class StopAfter(Quiet):
    """Orders a stop once a run has trained so many epochs."""

    def __init__(self, epochs, stop):
        super().__init__()
        self.epochs, self.stop = epochs, stop

    def passed(self, states, running):
        self.stop.is_given = any(job.epochs_done >= self.epochs for job in running)


def tasks(text, scale=TINY, table="strategy-detail-5x5", **effort):
    return plan(find_table(table).chosen([text]), Effort(scale, **effort), None)


def test_rows_share_runs_and_their_threats_are_gathered():
    entries = find_table("shape-transfer").chosen(["mnist line", "mnist square"])
    made = plan(entries, Effort(TINY), None)
    assert [len(task.threats) for task in made] == [3, 3, 3]
    assert all(task.test_images == 10 for task in made)
    assert len({task.name for task in made}) == 3


def test_seeds_and_rounding_are_runs_of_their_own():
    once = {task.name for task in tasks("mnist all mlp")}
    thrice = tasks("mnist all mlp", seeds=3)
    rounded, rougher = (
        {task.name for task in tasks("mnist all mlp", **{how: True})} for how in ("tf32", "bfloat16")
    )
    assert len(thrice) == 3
    assert once < {task.name for task in thrice}
    assert not once & rounded
    assert not rougher & (once | rounded)
    assert [task.label for task in thrice][1] == "mnist-mini mlp all 5x5 square seed 2020"


def test_the_folder_of_a_run_is_named_by_specification_and_data():
    (task,) = tasks("mnist all mlp")
    assert task.name == task.spec.fingerprint(load_dataset(QUICK_DATA).checksums)


def test_one_run_that_fails_does_not_stop_the_others(tmp_path):
    (good,) = tasks("mnist random(1) mlp")
    missing = replace(good.spec, data=replace(good.spec.data, name="cifar10"))
    bad = Task("a" * 16, missing, (Patch(5),), 10)
    watcher = Quiet()
    shop = Workshop(tmp_path / "runs", tmp_path / "results", jobs=2)
    assert Runner(shop, watcher, StopOrder()).run([bad, good]) == {bad.name: "failed", good.name: "done"}
    (note,) = [note for name, state, note in watcher.said if state == "failed"]
    assert "exit code 2" in note
    assert str(tmp_path / "runs" / bad.name / LOG) in note
    result = Result.open(tmp_path / "results" / good.name)
    assert [rows.total for rows in result.rows] == [10]
    log = (tmp_path / "runs" / good.name / LOG).read_text()
    assert '"epoch": 7' in log

    watcher = Quiet()
    (tmp_path / "runs" / good.name / "weights.safetensors").unlink()
    assert Runner(shop, watcher, StopOrder()).run([good]) == {good.name: "already done"}


def test_threats_that_a_run_was_not_trained_against_get_verdicts_without_margins(tmp_path):
    (task,) = tasks("mnist random(1) mlp")
    line = Patch((1, 2))
    shop = Workshop(tmp_path / "runs", tmp_path / "results")
    Runner(shop, Quiet(), StopOrder()).run([replace(task, threats=(Patch(5), line))])
    evidence = {rows.threat: rows.columns for rows in Result.open(tmp_path / "results" / task.name).rows}
    assert np.isfinite(evidence[Patch(5)]["margin"]).all()
    assert np.isnan(evidence[line]["margin"]).all()
    test = load_dataset(QUICK_DATA).test.take(10)
    model = Run.open(tmp_path / "runs" / task.name).model(torch.device("cpu"))
    whole = patchcert.certify(model, test.floats(), test.labels, line)
    assert 0 < whole.certified.sum() < 10
    assert (evidence[line]["verdict"] == whole.certified.numpy()).all()


def test_a_run_out_of_time_goes_on_where_it_stopped(tmp_path):
    (task,) = tasks("mnist random(1) mlp")
    long = replace(task.spec, schedule=replace(task.spec.schedule, epochs=100_000))
    task = replace(task, spec=long, name=long.fingerprint())
    shop, stop = Workshop(tmp_path / "runs", tmp_path / "results"), StopOrder()
    assert Runner(shop, StopAfter(3, stop), stop).run([task]) == {task.name: "interrupted"}
    run, stop = Run.open(tmp_path / "runs" / task.name), StopOrder()
    done = len(run.metrics())
    assert Runner(shop, StopAfter(done + 3, stop), stop).run([task]) == {task.name: "interrupted"}
    sessions = run.environment()["sessions"]
    assert [session["epoch"] for session in sessions] == [0, done]
    assert len(run.metrics()) > done
    assert not (tmp_path / "runs" / task.name / ".stop").exists()
    late = Workshop(tmp_path / "runs", deadline=time.monotonic() - 1)
    assert Runner(late, Quiet(), StopOrder()).run([task]) == {task.name: "waiting"}


def test_a_worker_ends_with_the_process_that_started_it(tmp_path):
    (task,) = tasks("mnist random(1) mlp")
    long = replace(task.spec, schedule=replace(task.spec.schedule, epochs=100_000))
    run = Run.create(tmp_path / "run", long)
    command = [sys.executable, "-m", "patchcert.papers.chiang2020.worker", str(run.path), "--parent", "1"]
    source = str(Path(patchcert.__file__).parents[1])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": source}, capture_output=True, timeout=60)
    assert done.returncode == 130, done.stderr.decode()


def test_scales_by_name():
    assert parse_scale("paper") == Scale()
    assert parse_scale("0.1") == Scale(0.1)
    assert parse_scale("quick").quick
    assert (Scale().words, Scale(0.1).words) == ("full schedule", "schedule scaled by 0.1")


@pytest.mark.parametrize("text", ["fast", "0", "-1", "nan", "inf"])
def test_an_unknown_scale_is_refused(text):
    with pytest.raises(patchcert.errors.InvalidInput, match=f"--scale {text} is neither"):
        parse_scale(text)


def test_a_quick_look_never_uses_the_papers_images():
    for name in ("training-strategies", "large-models", "bound-pooling", "sparse-detail", "shape-transfer"):
        made = plan(find_table(name).chosen([]), Effort(parse_scale("quick")), None)
        assert {task.spec.data.name for task in made} == {QUICK_DATA}
