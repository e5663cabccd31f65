"""Every run is planned once, however many rows share it; processes run, fail, resume, and end with their parent."""

import subprocess
from dataclasses import replace
from threading import Event

import pytest
import torch

import patchcert
from other_processes import environment
from patchcert.data import load_dataset
from patchcert.evidence.results import Circumstances, Result
from patchcert.papers.chiang2020.recipes import QUICK_DATA, Scale, parse_scale
from patchcert.papers.chiang2020.runner import (
    LOG,
    WORKER,
    Assignment,
    Effort,
    Runner,
    Workshop,
    plan,
    read_questions,
)
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
        if any(job.epochs_done >= self.epochs for job in running):
            self.stop.set()


@pytest.fixture
def shop(tmp_path):
    return Workshop(tmp_path / "runs", tmp_path / "results")


def planned(text, table="strategy-detail-5x5", **effort):
    return plan(find_table(table).chosen([text]), Effort(TINY, **effort), None)


def test_one_run_that_fails_does_not_stop_the_others(tmp_path, shop):
    (good,) = planned("mnist random(1) mlp")
    missing = replace(good.spec, data=replace(good.spec.data, name="cifar10"))
    bad = Assignment("a" * 16, "bad", good.questions, missing)
    watcher = Quiet()
    assert Runner(replace(shop, jobs=2), watcher, Event()).run([bad, good]) == {
        bad.name: "failed",
        good.name: "done",
    }
    (note,) = [note for name, state, note in watcher.said if state == "failed"]
    assert "exit code 2" in note
    assert str(tmp_path / "runs" / bad.name / LOG) in note
    result = Result.open(tmp_path / "results" / good.name)
    assert [each.total for each in result.evidence] == [10]
    log = (tmp_path / "runs" / good.name / LOG).read_text()
    assert '"epoch": 7' in log

    watcher = Quiet()
    (tmp_path / "runs" / good.name / "weights.safetensors").unlink()
    assert Runner(shop, watcher, Event()).run([good]) == {good.name: "already done"}


def test_other_threats_than_that_of_training_get_verdicts_without_margins(tmp_path, shop):
    (made,) = planned("mnist random(1) mlp")
    (own,), line = made.questions, Patch((1, 2))
    other = replace(own, threat=line, classifier={**own.classifier, "verdicts_only": True})
    Runner(shop, Quiet(), Event()).run([replace(made, questions=(own, other))])
    evidence = {each.threat: each.columns for each in Result.open(tmp_path / "results" / made.name).evidence}
    assert ("margin" in evidence[Patch(5)], "margin" in evidence[line]) == (True, False)
    test = load_dataset(QUICK_DATA).test.take(10)
    model = Run.open(tmp_path / "runs" / made.name).model(torch.device("cpu"))
    whole = patchcert.certify(model, test.floats(), test.labels, line)
    assert 0 < whole.certified.sum() < 10
    assert (evidence[line]["certified"] == whole.certified.numpy()).all()


def test_a_run_that_must_be_trained_again_answers_what_the_results_had(tmp_path, shop):
    (made,) = planned("mnist random(1) mlp")
    (own,) = made.questions
    Runner(shop, Quiet(), Event()).run([made])
    (tmp_path / "runs" / made.name / "weights.safetensors").unlink()
    again = replace(made, questions=(replace(own, threat=Patch(2)),))
    assert Runner(shop, Quiet(), Event()).run([again]) == {made.name: "done"}
    assert {each.threat for each in Result.open(tmp_path / "results" / made.name).evidence} == {
        Patch(2),
        Patch(5),
    }


def test_a_stopped_run_resumes_where_it_stopped(tmp_path, shop):
    (made,) = planned("mnist random(1) mlp")
    long = replace(made.spec, schedule=replace(made.spec.schedule, epochs=100_000))
    made = replace(made, spec=long, name=long.fingerprint())
    stop = Event()
    assert Runner(shop, StopAfter(3, stop), stop).run([made]) == {made.name: "interrupted"}
    run, stop = Run.open(tmp_path / "runs" / made.name), Event()
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
    command = [*WORKER, str(tmp_path / "run"), "--parent", "1"]
    done = subprocess.run(command, env=environment(), capture_output=True, timeout=60)
    assert done.returncode == 130, done.stderr.decode()


def test_rows_share_runs_and_their_questions_are_gathered():
    entries = find_table("shape-transfer").chosen(["mnist line", "mnist square"])
    made = plan(entries, Effort(TINY), None)
    assert [len(each.questions) for each in made] == [3, 3, 3]
    assert {question.selection.limit for each in made for question in each.questions} == {10}
    assert len({each.name for each in made}) == 3


def test_votes_for_all_rows_are_one_question():
    (made,) = planned("mnist ablation", "sparse-vs-ablation")
    (question,) = made.questions
    assert (question.selection.drawn, question.classifier["estimation_samples"]) == (10, 100)


def test_seeds_and_rounding_are_runs_of_their_own():
    once = {each.name for each in planned("mnist all mlp")}
    thrice = planned("mnist all mlp", seeds=3)
    rounded, rougher = (
        {each.name for each in planned("mnist all mlp", **{how: True})} for how in ("tf32", "bfloat16")
    )
    assert len(thrice) == 3
    assert once < {each.name for each in thrice}
    assert not once & rounded
    assert not rougher & (once | rounded)
    assert [each.label for each in thrice][1] == "mnist-mini mlp all 5x5 square seed 2020"


def test_the_folder_of_a_run_is_named_by_specification_and_data():
    (made,) = planned("mnist all mlp")
    assert made.name == made.spec.fingerprint(load_dataset(QUICK_DATA).checksums)


def test_an_assignment_is_read_as_it_was_written(tmp_path):
    entries = find_table("compare-defenses").chosen(["mnist 2x2"])
    for made in plan(entries, Effort(TINY), None):
        replace(made, scale=0.5).write(tmp_path / made.name, jobs=3)
        assert read_questions(tmp_path / made.name) == ("", made.questions)
        assert Circumstances.read(tmp_path / made.name) == Circumstances(0.5, 3)
        assert Run.open(tmp_path / made.name).spec == made.spec


def test_a_quick_look_never_uses_the_papers_images():
    for name in ("training-strategies", "large-models", "bound-pooling", "sparse-detail", "shape-transfer"):
        made = plan(find_table(name).chosen([]), Effort(parse_scale("quick")), None)
        assert {each.spec.data.name for each in made} == {QUICK_DATA}
