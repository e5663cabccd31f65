"""Real processes: several at once, one that fails, one that resumes, one whose parent is gone."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

import patchcert
from patchcert.data import load_dataset
from patchcert.evidence.results import Result
from patchcert.papers.chiang2020.planning import Assignment, Effort, plan
from patchcert.papers.chiang2020.recipes import QUICK_DATA, Scale
from patchcert.papers.chiang2020.runner import LOG, Runner, StopOrder, Workshop
from patchcert.papers.chiang2020.tables import find_table
from patchcert.threats import Patch
from patchcert.train.run_folder import Run

TINY = Scale(quick=True, quick_train=60, quick_test=10)


class Quiet:
    def __init__(self):
        self.said = []

    def changed(self, assignment, state, note):
        self.said.append((assignment.name, state, note))

    def passed(self, states, running):
        self.running = [job.words for job in running]


class StopAfter(Quiet):
    """Orders a stop once a run has trained so many epochs."""

    def __init__(self, epochs, stop):
        super().__init__()
        self.epochs, self.stop = epochs, stop

    def passed(self, states, running):
        self.stop.is_given = any(job.epochs_done >= self.epochs for job in running)


def planned(text, table="strategy-detail-5x5"):
    return plan(find_table(table).chosen([text]), Effort(TINY), None)


def test_one_run_that_fails_does_not_stop_the_others(tmp_path):
    (good,) = planned("mnist random(1) mlp")
    missing = replace(good.spec, data=replace(good.spec.data, name="cifar10"))
    bad = Assignment("a" * 16, "bad", good.questions, missing)
    watcher = Quiet()
    shop = Workshop(tmp_path / "runs", tmp_path / "results", jobs=2)
    assert Runner(shop, watcher, StopOrder()).run([bad, good]) == {bad.name: "failed", good.name: "done"}
    (note,) = [note for name, state, note in watcher.said if state == "failed"]
    assert "exit code 2" in note
    assert str(tmp_path / "runs" / bad.name / LOG) in note
    result = Result.open(tmp_path / "results" / good.name)
    assert [each.total for each in result.evidence] == [10]
    log = (tmp_path / "runs" / good.name / LOG).read_text()
    assert '"epoch": 7' in log

    watcher = Quiet()
    (tmp_path / "runs" / good.name / "weights.safetensors").unlink()
    assert Runner(shop, watcher, StopOrder()).run([good]) == {good.name: "already done"}


def test_other_threats_than_that_of_training_get_verdicts_without_margins(tmp_path):
    (made,) = planned("mnist random(1) mlp")
    (own,), line = made.questions, Patch((1, 2))
    other = replace(own, threat=line, classifier={**own.classifier, "verdicts_only": True})
    shop = Workshop(tmp_path / "runs", tmp_path / "results")
    Runner(shop, Quiet(), StopOrder()).run([replace(made, questions=(own, other))])
    evidence = {each.threat: each.columns for each in Result.open(tmp_path / "results" / made.name).evidence}
    assert ("margin" in evidence[Patch(5)], "margin" in evidence[line]) == (True, False)
    test = load_dataset(QUICK_DATA).test.take(10)
    model = Run.open(tmp_path / "runs" / made.name).model(torch.device("cpu"))
    whole = patchcert.certify(model, test.floats(), test.labels, line)
    assert 0 < whole.certified.sum() < 10
    assert (evidence[line]["certified"] == whole.certified.numpy()).all()


def test_a_run_that_must_be_trained_again_answers_what_the_results_had(tmp_path):
    (made,) = planned("mnist random(1) mlp")
    (own,) = made.questions
    shop = Workshop(tmp_path / "runs", tmp_path / "results")
    Runner(shop, Quiet(), StopOrder()).run([made])
    (tmp_path / "runs" / made.name / "weights.safetensors").unlink()
    again = replace(made, questions=(replace(own, threat=Patch(2)),))
    assert Runner(shop, Quiet(), StopOrder()).run([again]) == {made.name: "done"}
    assert {each.threat for each in Result.open(tmp_path / "results" / made.name).evidence} == {
        Patch(2),
        Patch(5),
    }


def test_a_stopped_run_resumes_where_it_stopped(tmp_path):
    (made,) = planned("mnist random(1) mlp")
    long = replace(made.spec, schedule=replace(made.spec.schedule, epochs=100_000))
    made = replace(made, spec=long, name=long.fingerprint())
    shop, stop = Workshop(tmp_path / "runs", tmp_path / "results"), StopOrder()
    assert Runner(shop, StopAfter(3, stop), stop).run([made]) == {made.name: "interrupted"}
    run, stop = Run.open(tmp_path / "runs" / made.name), StopOrder()
    done = len(run.metrics())
    assert Runner(shop, StopAfter(done + 3, stop), stop).run([made]) == {made.name: "interrupted"}
    sessions = run.environment()["sessions"]
    assert [session["epoch"] for session in sessions] == [0, done]
    assert len(run.metrics()) > done
    assert not (tmp_path / "runs" / made.name / ".stop").exists()


def test_a_worker_ends_with_the_process_that_started_it(tmp_path):
    (made,) = planned("mnist random(1) mlp")
    long = replace(made.spec, schedule=replace(made.spec.schedule, epochs=100_000))
    replace(made, spec=long).write(tmp_path / "run", jobs=1)
    command = [
        sys.executable,
        "-m",
        "patchcert.papers.chiang2020.worker",
        str(tmp_path / "run"),
        "--parent",
        "1",
    ]
    source = str(Path(patchcert.__file__).parents[1])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": source}, capture_output=True, timeout=60)
    assert done.returncode == 130, done.stderr.decode()
