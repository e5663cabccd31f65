"""Random Ablation from a row to its numbers: trained, interrupted, voted on, and recounted from evidence."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from patchcert.certificates.ablation import certified_radius, is_decided, probability_lower_bound
from patchcert.data import load_dataset
from patchcert.errors import RunError, SpecError
from patchcert.files import sha256
from patchcert.papers.chiang2020 import ablation_voting
from patchcert.papers.chiang2020.ablation_evidence import Rules, VotedRows, vote_columns
from patchcert.papers.chiang2020.ablation_plan import VotePlan
from patchcert.papers.chiang2020.ablation_voting import vote_run
from patchcert.papers.chiang2020.collecting import collect
from patchcert.papers.chiang2020.orders import read_orders, write_orders
from patchcert.papers.chiang2020.outcome import outcomes
from patchcert.papers.chiang2020.pack import pack, unpack
from patchcert.papers.chiang2020.plan import Effort, Task, plan
from patchcert.papers.chiang2020.results import Result
from patchcert.papers.chiang2020.rows import recipe
from patchcert.papers.chiang2020.runner import Runner, StopOrder, Workshop
from patchcert.papers.chiang2020.scales import Scale
from patchcert.papers.chiang2020.tables import find_table
from patchcert.report.reproduction import reproduction_table
from patchcert.train.run_folder import Run
from patchcert.train.spec import read_spec
from patchcert.train.training import Interrupted, StopRequest, Workplace, train_run

CPU = Workplace(torch.device("cpu"))
TINY_SCALE = Scale(quick=True, quick_train=60, quick_test=10)
TINY = (
    "data.name=mnist-mini",
    "data.limit=40",
    "model.hidden=8",
    "strategy.retained=100",
    "optimiser.batch_size=16",
    "schedule.epochs=3",
    "schedule.learning_rate.decay_every=2",
)
VOTES = VotePlan(selection=10, estimation=40, images=7, precision="float32")


def tiny(*changes):
    return read_spec("paper-mnist-ablation", [*TINY, *changes])


def rows(text="mnist ablation"):
    return find_table("sparse-vs-ablation").chosen([text])


@pytest.fixture
def trained(tmp_path):
    return train_run(tiny(), tmp_path / "runs" / "run", CPU)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(ablation_voting, "BLOCK", 3)
    monkeypatch.setattr(ablation_voting, "CPU_BATCH", 50)


class Silent:
    def changed(self, task, state, note):
        self.note = note

    def passed(self, states, running):
        pass


class Stopper:
    """Asks to stop after so many batches, as Ctrl-C would."""

    def __init__(self, after, monkeypatch):
        self.left, self.request = after, StopRequest()
        monkeypatch.setattr("patchcert.train.training.StopRequest", lambda: self.request)

    def on_batch(self, position, batches):
        self.left -= 1
        self.request.is_made = self.left <= 0

    def on_epoch(self, row):
        pass


def test_rows_become_numbers_that_evidence_gives_again_and_more_images_are_added(tmp_path):
    (task,) = plan(rows(), Effort(TINY_SCALE, voted_images=6), None)
    assert task.votes == (VotePlan(20, 100, images=6, precision="float32"),)
    shop, watcher = Workshop(tmp_path / "runs", tmp_path / "results"), Silent()
    assert Runner(shop, watcher, StopOrder()).run([task]) == {task.name: "done"}
    assert "right" in watcher.note
    assert "certified (1 pixel), trained in" in watcher.note
    assert Runner(shop, watcher, StopOrder()).run([task]) == {task.name: "already done"}
    result = Result.open(tmp_path / "results" / task.name)
    (evidence,) = result.votes
    assert evidence.total == evidence.plan.images == 6
    found = outcomes(rows(), tmp_path / "results", TINY_SCALE)
    assert [outcome.status for outcome in found] == ["measured"] * 3
    assert [outcome.clean for outcome in found] == [100 * evidence.correct / 6] * 3
    assert [outcome.certified for outcome in found] == [100 * evidence.certified(k) / 6 for k in (1, 4, 10)]
    assert result.summary["weights_sha256"] == evidence.meta["weights_sha256"]
    log = (tmp_path / "runs" / task.name / "log.txt").read_text()
    assert "votes on 6 of 6 images" in log

    (more,) = plan(rows(), Effort(TINY_SCALE, voted_images=8), None)
    assert more.name == task.name
    states = [Runner(shop, watcher, StopOrder()).run([each]) for each in (more, task)]
    assert states == [{task.name: "done"}, {task.name: "already done"}]
    assert {outcome.drawn_images for outcome in outcomes(rows(), shop.results, TINY_SCALE)} == {8}


@pytest.mark.parametrize("after", [1, 4, 7])
def test_an_interrupted_training_goes_on_to_the_same_weights(after, tmp_path, monkeypatch, trained):
    with pytest.raises(Interrupted):
        train_run(tiny(), tmp_path / "broken", CPU, listener=Stopper(after, monkeypatch))
    monkeypatch.undo()
    resumed = train_run(tiny(), tmp_path / "broken", CPU, resume=True)
    assert [row["epoch"] for row in resumed.metrics()] == [0, 1, 2]
    theirs = resumed.model().state_dict()
    for name, value in trained.model().state_dict().items():
        assert torch.equal(value, theirs[name]), name


def test_an_interrupted_count_goes_on_to_the_same_votes(tmp_path, trained, small_blocks):
    dataset = load_dataset("mnist-mini")
    whole = vote_run(trained, dataset, VOTES, CPU.device)
    columns = {name: values.copy() for name, values in whole.columns.items()}
    whole.path.unlink()

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vote_run(trained, dataset, VOTES, CPU.device, interrupt)
    assert VOTES.name not in trained.evidence_names()
    reached = []
    again = vote_run(trained, dataset, VOTES, CPU.device, lambda done, total: reached.append((done, total)))
    assert reached == [(6, 7), (7, 7)]
    for name, values in columns.items():
        assert np.array_equal(values, again.columns[name]), name
    assert again.meta["seconds"] > 0
    assert not list(trained.path.glob(".votes*"))


def test_unfinished_counts_travel_with_their_run(tmp_path, trained, small_blocks):
    def interrupt(done, total):
        raise KeyboardInterrupt

    dataset = load_dataset("mnist-mini")
    with pytest.raises(KeyboardInterrupt):
        vote_run(trained, dataset, VOTES, CPU.device, interrupt)
    pack(tmp_path / "all.tar", tmp_path / "results", trained.path.parent)
    unpack(tmp_path / "all.tar", tmp_path / "there" / "results", tmp_path / "there")
    reached = []
    there = Run.open(tmp_path / "there" / trained.path.name)
    vote_run(there, dataset, VOTES, CPU.device, lambda done, total: reached.append(done))
    assert reached == [6, 7]


def test_votes_of_other_weights_are_not_gone_on_with(tmp_path, trained, small_blocks):
    dataset = load_dataset("mnist-mini")

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vote_run(trained, dataset, VOTES, CPU.device, interrupt)
    other = train_run(tiny("seed=1"), tmp_path / "other", CPU)
    trained.weights.write_bytes(other.weights.read_bytes())
    reached = []
    vote_run(trained, dataset, VOTES, CPU.device, lambda done, total: reached.append(done))
    assert reached == [3, 6, 7]


def test_evidence_says_all_that_the_numbers_rest_on(trained, small_blocks):
    dataset = load_dataset("mnist-mini")
    found = vote_run(trained, dataset, VOTES, CPU.device)
    index = found.columns["index"]
    assert (found.columns["label"] == dataset.test.labels[index].numpy()).all()
    assert sorted(set(index.tolist())) == index.tolist()
    meta = found.meta
    assert meta["data"]["sha256"] == load_dataset("mnist-mini").checksums
    assert (meta["retained"], meta["pixels"], meta["confidence"]) == (100, 784, 0.95)
    assert meta["settings"] == {"batch_size": 50, "block": 3, "precision": "float32"}
    votes, selected, label = (found.columns[name] for name in ("votes", "selected", "label"))
    for row in range(found.total):
        lower = probability_lower_bound(votes[row, selected[row : row + 1]].astype(int), 40, 0.05)
        radius = int(certified_radius(lower, 784, 100)[0]) if selected[row] == label[row] else -1
        assert found.columns["radius"][row] == radius
        second, first = np.sort(votes[row].astype(int))[-2:]
        decided = bool(is_decided(np.array([first]), np.array([second]), 0.05)[0])
        assert found.columns["prediction"][row] == (votes[row].argmax() if decided else -1)
    assert found.abstained == int((found.columns["prediction"] == -1).sum())


@pytest.mark.parametrize(("column", "value"), [("radius", 11), ("prediction", 3), ("votes", 41)])
def test_rows_that_do_not_follow_from_their_votes_are_refused(trained, small_blocks, column, value):
    found = vote_run(trained, load_dataset("mnist-mini"), VOTES, CPU.device)
    with np.load(found.path) as stored:
        arrays = dict(stored)
    changed = arrays[column][4]
    arrays[column][4] = value if np.ndim(changed) or changed != value else value - 1
    np.savez_compressed(found.path, **arrays)
    with pytest.raises(RunError, match="contradicts itself: prediction and radius of row 4"):
        VotedRows.read(found.path)


def test_an_image_is_voted_on_once(trained, small_blocks):
    found = vote_run(trained, load_dataset("mnist-mini"), VOTES, CPU.device)
    with np.load(found.path) as stored:
        arrays = dict(stored)
    arrays["index"][4] = arrays["index"][3]
    np.savez_compressed(found.path, **arrays)
    with pytest.raises(RunError, match="counts an image twice"):
        VotedRows.read(found.path)


def test_votes_for_another_number_of_retained_pixels_are_refused(trained, small_blocks, tmp_path):
    found = vote_run(trained, load_dataset("mnist-mini"), VOTES, CPU.device)
    name = trained.spec.fingerprint(load_dataset("mnist-mini").checksums)
    result = collect(trained, name, tmp_path / "results")
    meta = dict(found.meta) | {"retained": 99}
    trained.write_evidence(VOTES.name, found.columns, meta)
    (result.path / found.path.name).write_bytes(found.path.read_bytes())
    with pytest.raises(RunError, match=r"contradicts itself|other images than the run was trained on"):
        assert Result.open(result.path).votes


def test_tables_state_scale_and_images(finished, tmp_path):
    (entry, *_) = rows("cifar ablation")
    made = recipe(entry)
    spec = made.specs[0].scaled(0.1)
    assert (spec.schedule.epochs, spec.schedule.rate(19), spec.schedule.rate(20)) == (40, 0.01, 0.001)
    run = finished(spec, {})
    votes, right = np.zeros((5, 10), np.int64), np.full(5, 3)
    votes[:, 3] = 10_000
    rules = Rules(1024, 75, 10_000, 0.05)
    checksums = run.environment()["data"]["checksums"]
    meta = {
        "plan": made.votes.to_dict(),
        "retained": 75,
        "pixels": 1024,
        "weights_sha256": sha256(run.weights),
        "data": {"name": "cifar10", "split": "test", "test_images": 10_000, "sha256": checksums},
    }
    run.write_evidence(made.votes.name, vote_columns(rules, np.arange(5), right, right, votes), meta)
    collect(run, run.path.name, tmp_path / "results", scale=0.1)
    found = outcomes(rows("cifar ablation"), tmp_path / "results", None)
    assert [outcome.certified for outcome in found] == [100.0, 100.0, 0.0]
    table = reproduction_table(find_table("sparse-vs-ablation"), found).to_markdown()
    assert "scaled by 0.1; 5 random test images" in table


def test_plans_survive_being_written_down(tmp_path):
    spec = tiny()
    write_orders(tmp_path, Task("a" * 16, spec, (), votes=(VOTES,)), jobs=1)
    assert read_orders(tmp_path).votes == (VOTES,)
    assert VotePlan.from_dict(json.loads(json.dumps(VOTES.to_dict()))) == VOTES
    assert VOTES.name != replace(VOTES, images=8).name
    assert VOTES.is_answered_by(replace(VOTES, images=8))
    assert VOTES.is_answered_by(replace(VOTES, images=None))
    assert not VOTES.is_answered_by(replace(VOTES, images=6))
    assert not replace(VOTES, images=None).is_answered_by(VOTES)
    assert not VOTES.is_answered_by(replace(VOTES, images=None, estimation=50))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("strategy.retained=0",), "retained is 0; expected at least 1"),
        (("strategy.masks=none",), "strategy.masks is 'none'; expected one of 'image', 'batch'"),
        (("optimiser.momentum=1.0",), "momentum is 1.0; expected at least 0 and below 1"),
        (("select=best-validation", "data.validation=5"), "votes are not counted during training"),
        (("threat.kind=patch", "threat.stamp=5x5"), "'ablated' cannot train against"),
        (("strategy.retained=785",), "785 pixels cannot be retained in images of 28x28"),
        (("schedule.epsilon.ramp_epochs=3",), "has no epsilon, but the schedule has natural or ramp epochs"),
        (("model.name=mlp",), "'mlp' does not take ablated images, encoded in 2 channels"),
    ],
)
def test_wrong_settings_are_refused(changes, message, tmp_path):
    with pytest.raises(SpecError, match=message):
        train_run(tiny(*changes), tmp_path / "run", CPU)


def test_a_run_that_has_not_learnt_to_vote_is_refused(tmp_path):
    spec = read_spec("paper-mnist", ["strategy.kind=natural", "data.name=mnist-mini", "data.limit=20"])
    run = train_run(replace(spec, schedule=replace(spec.schedule, epochs=1)), tmp_path / "run", CPU)
    with pytest.raises(RunError, match="has not learnt to vote: its strategy is 'natural'"):
        vote_run(run, load_dataset("mnist-mini"), VOTES, CPU.device)
