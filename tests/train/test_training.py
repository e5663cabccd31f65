"""A specification becomes a finished run: weights, metrics, environment, and no look at test images."""

import signal
from dataclasses import replace

import pytest
import torch
from PIL import Image

from patchcert.data import load_dataset
from patchcert.errors import DataError, RunError, SpecError
from patchcert.models import build
from patchcert.train.run_folder import Run
from patchcert.train.spec import DataSettings, ModelSettings, read_spec
from patchcert.train.strategy import Subject
from patchcert.train.training import (
    Interrupted,
    StopRequest,
    Workplace,
    stop_on_interrupt,
    summarise,
    train_run,
)
from small_trainings import same_weights

CPU = Workplace(torch.device("cpu"))
TINY = (
    "data.name=mnist-mini",
    "data.limit=48",
    "model.hidden=8",
    "threat.stamp=20x20",
    "optimiser.batch_size=16",
    "schedule.epochs=4",
    "schedule.epsilon.natural_epochs=1",
    "schedule.epsilon.ramp_epochs=2",
    "run.check_every=2",
    "run.check_images=5",
)


MASKED = (
    "data.name=mnist-mini",
    "model.name=wideresnet",
    "model.depth=10",
    "model.filters=4",
    "strategy.bfloat16=false",
    "strategy.worst_of=2",
)
ABLATED = (
    "data.name=mnist-mini",
    "data.limit=40",
    "model.hidden=8",
    "strategy.retained=100",
    "optimiser.batch_size=16",
    "schedule.epochs=3",
    "schedule.learning_rate.decay_every=2",
)


def tiny(*changes):
    return read_spec("paper-mnist", [*TINY, *changes])


class Watcher:
    """Hears everything, and does nothing."""

    def __init__(self):
        self.pace, self.batches = None, 0

    def on_start(self, pace):
        self.pace = pace

    def on_stop(self):
        pass

    def on_batch(self, position, batches):
        self.batches += 1
        self.pace.note(position)

    def on_epoch(self, row):
        pass


class Stopper(Watcher):
    """Asks to stop after a number of batches, as Ctrl-C would."""

    def __init__(self, after, monkeypatch):
        super().__init__()
        self.after, self.request = after, StopRequest()
        monkeypatch.setattr("patchcert.train.training.StopRequest", lambda: self.request)

    def on_batch(self, position, batches):
        super().on_batch(position, batches)
        self.request.is_made = self.batches >= self.after


def test_whoever_watches_knows_how_long_it_takes_and_changes_nothing(tmp_path):
    watcher = Watcher()
    watched = train_run(tiny(), tmp_path / "watched", CPU, listener=watcher)
    assert set(watcher.pace.tried) == {True, False}
    assert all(0 < seconds < 5 for seconds in watcher.pace.tried.values())
    assert (watcher.batches, watcher.pace.remaining) == (12, 0)
    assert same_weights(watched.model(), train_run(tiny(), tmp_path / "alone", CPU).model())


@pytest.fixture
def interrupts_raise():
    """What Python does with an interrupt in the foreground; a process in the background is started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts_raise")
def test_a_first_interrupt_is_answered_at_once_and_a_second_one_interrupts():
    answers = []
    with stop_on_interrupt(lambda: answers.append("yes")) as stop:
        signal.raise_signal(signal.SIGINT)
        assert (stop.is_made, answers) == (True, ["yes"])
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_run_leaves_everything_the_next_commands_need(tmp_path):
    run = train_run(tiny(), tmp_path / "run", CPU)
    assert Run.open(tmp_path / "run").spec == tiny()
    rows = run.metrics()
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert ["certified_accuracy" in row for row in rows] == [False, True, False, True]
    assert rows[3]["checked_on"] == "train"
    facts = run.environment()
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["data"]["checksums"] == load_dataset("mnist-mini").checksums
    assert len(facts["sessions"]) == 1
    assert run.model()(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    summary = summarise(run)
    assert summary["epochs"] == 4
    assert summary["fingerprint"] == tiny().fingerprint()
    assert train_run(tiny(), tmp_path / "run", CPU, resume=True).metrics() == rows


INTERRUPTED = {
    "random": tiny("strategy.kind=random", "strategy.placements=3", "data.flip=true", "data.crop_padding=2"),
    "masked": read_spec(
        "masked-mnist-5x5", [*MASKED, "data.limit=40", "optimiser.batch_size=16", "schedule.epochs=3"]
    ),
    "ablated": read_spec("paper-mnist-ablation", ABLATED),
}


def rows_of(run):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in run.metrics()]


@pytest.mark.parametrize("after", [1, 4, 7])
@pytest.mark.parametrize("kind", INTERRUPTED)
def test_an_interrupted_run_saves_and_resumes_to_the_same_weights(kind, after, tmp_path, monkeypatch):
    spec = INTERRUPTED[kind]
    straight = train_run(spec, tmp_path / "straight", CPU)
    with pytest.raises(Interrupted, match=r"resume with: patchcert train .*broken --resume"):
        train_run(spec, tmp_path / "broken", CPU, listener=Stopper(after, monkeypatch))
    monkeypatch.undo()
    Run.open(tmp_path / "broken").append_metrics({"epoch": after // 3, "loss": "of an epoch after the state"})
    with pytest.raises(RunError, match="holds this run, unfinished"):
        train_run(spec, tmp_path / "broken", CPU)
    resumed = train_run(spec, tmp_path / "broken", CPU, resume=True)
    assert same_weights(straight.model(), resumed.model())
    assert rows_of(resumed) == rows_of(straight)
    assert len(resumed.environment()["sessions"]) == 2


def test_the_best_epoch_is_chosen_on_held_out_images_only(tmp_path):
    spec = tiny("select=best-validation", "data.validation=40", "schedule.epochs=6", "data.limit=200")
    run = train_run(spec, tmp_path / "run", CPU)
    full = [row for row in run.metrics() if row["epoch"] >= 3]
    assert all(row["checked_on"] == "validation" and row["checked_images"] == 40 for row in full)
    best = max(full, key=lambda row: row["certified_accuracy"])
    _, held_out = spec.data.split(load_dataset("mnist-mini"))
    correct = (run.model()(held_out.floats()).argmax(1) == held_out.labels).double().mean()
    assert float(correct) == pytest.approx(best["clean_accuracy"])


def test_the_best_weights_survive_an_interruption(tmp_path, monkeypatch):
    spec = tiny("select=best-validation", "data.validation=40", "schedule.epochs=7")
    straight = train_run(spec, tmp_path / "straight", CPU)
    scores = {row["epoch"]: row.get("certified_accuracy") for row in straight.metrics()}
    best = max((3, 4, 5, 6), key=lambda epoch: scores[epoch])
    assert best < 6, "choose another seed: the last epoch must not be the best"
    with pytest.raises(Interrupted):
        train_run(spec, tmp_path / "broken", CPU, listener=Stopper(3 * (best + 1) + 1, monkeypatch))
    monkeypatch.undo()
    resumed = train_run(spec, tmp_path / "broken", CPU, resume=True)
    assert same_weights(straight.model(), resumed.model())


def test_the_seed_decides_the_weights_and_the_run_settings_do_not(tmp_path):
    same = [
        train_run(tiny(c), tmp_path / c, CPU) for c in ("run.check_every=0", "run.checkpoint_seconds=0.0")
    ]
    other = train_run(tiny("seed=1"), tmp_path / "other", CPU)
    assert same_weights(*(run.model() for run in same))
    assert not same_weights(other.model(), same[0].model())


def test_other_data_files_are_refused_on_resume(tmp_path):
    run = train_run(tiny("schedule.epochs=1"), tmp_path, CPU)
    facts = run.environment()
    run.weights.unlink()
    run.write_environment(facts | {"data": {"name": "mnist-mini", "checksums": {"a": "b"}}})
    with pytest.raises(RunError, match="was begun with other files of mnist-mini"):
        train_run(tiny("schedule.epochs=1"), tmp_path, CPU, resume=True)


@pytest.fixture
def photos(tmp_path):
    """The name of a folder with twelve training and four test images, dark ones and light ones, of 20 x 30 pixels."""
    for split, count in (("train", 6), ("test", 2)):
        for name, value in (("dark", 50), ("light", 200)):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (30, 20), (value, number, 0)).save(folder / f"{number}.png")
    return f"folder:{tmp_path / 'photos'}"


def on_folder(name, *changes):
    return tiny(f"data.name={name}", "data.size=12x16", "threat.stamp=4x4", "schedule.epochs=1", *changes)


def test_a_model_of_a_folder_has_the_chosen_size_and_the_measured_normalisation(photos, tmp_path):
    run = train_run(on_folder(photos), tmp_path / "run", CPU)
    model = run.model_spec()
    assert (model.channels, model.height, model.width, model.classes) == (3, 12, 16, 2)
    assert model.mean[0] == pytest.approx(125 / 255, abs=1e-4)
    assert model.std[0] == pytest.approx(75 / 255, abs=1e-4)
    assert (
        not train_run(on_folder(photos, "model.normalise=false"), tmp_path / "plain", CPU).model_spec().mean
    )


def test_another_file_of_a_folder_is_refused_on_resume(photos, tmp_path):
    run = train_run(on_folder(photos), tmp_path / "run", CPU)
    assert sorted(run.environment()["data"]["checksums"]) == ["test", "train"]
    run.weights.unlink()
    Image.new("RGB", (30, 20)).save(tmp_path / "photos" / "train" / "dark" / "0.png")
    with pytest.raises(RunError, match="was begun with other files of folder:"):
        train_run(on_folder(photos), tmp_path / "run", CPU, resume=True)


def test_a_folder_of_test_images_alone_is_refused_before_anything_is_written(photos, tmp_path):
    with pytest.raises(DataError, match="has no training images: all 4 are test images") as caught:
        train_run(on_folder(f"{photos}/test"), tmp_path / "run", CPU)
    assert "below train/" in caught.value.hint
    assert not (tmp_path / "run").exists()


def test_training_never_sees_test_or_held_out_images():
    dataset = load_dataset("mnist-mini")
    train_images, held_out = DataSettings(validation=100).split(dataset)
    assert held_out is not None
    assert len(train_images) == len(dataset.train) - 100
    assert torch.equal(held_out.images, dataset.train.images[-100:])
    assert DataSettings(limit=7).split(dataset)[1] is None
    assert len(DataSettings(limit=7).split(dataset)[0]) == 7


def test_the_helper_network_follows_the_images_unless_it_is_given():
    dataset = load_dataset("mnist-mini")
    for change, wanted in ((), 39_040), (("strategy.width=3",), None):
        spec = tiny("strategy.kind=guided", *change)
        model_spec = spec.model.for_data(dataset)
        helper = spec.strategy.bind(Subject(build(model_spec), model_spec, spec.threat)).helper
        count = sum(parameter.numel() for parameter in helper.parameters())
        assert count == wanted if wanted else count < 39_040


def window_losses(place, folder, *changes):
    """The losses of a run in full precision and of the same with windows in bfloat16."""
    for change in ("seed=2019", "optimiser.windows=bfloat16"):
        spec = tiny(*changes, "schedule.epochs=2", "schedule.epsilon.natural_epochs=0", change)
        yield [row["loss"] for row in train_run(spec, folder / change, place).metrics()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["all", "random", "guided"])
def test_windows_on_a_gpu_have_the_precision_that_the_optimiser_asks_for(kind, tmp_path):
    exact, rounded = window_losses(Workplace(torch.device("cuda")), tmp_path, f"strategy.kind={kind}")
    assert exact != rounded
    assert exact == pytest.approx(rounded, rel=0.01)


@pytest.mark.parametrize("stamp", ["6x6", "20x20"])
@pytest.mark.parametrize("kind", ["all", "random", "guided"])
def test_windows_on_a_cpu_stay_in_float32(kind, stamp, tmp_path):
    exact, rounded = window_losses(CPU, tmp_path, f"strategy.kind={kind}", f"threat.stamp={stamp}")
    assert exact == rounded


@pytest.mark.parametrize(
    "changes",
    [
        ("strategy.kind=natural",),
        ("strategy.kind=guided", "strategy.width=2"),
        ("strategy.kind=pooled", "strategy.blocks=[4]", "model.name=cnn2", "data.limit=8"),
        ("threat.kind=sparse", "threat.pixels=2", "strategy.kind=sparse", "strategy.bound=per-pixel"),
    ],
    ids=lambda changes: changes[0],
)
def test_every_strategy_can_be_asked_for_by_name(changes, tmp_path):
    run = train_run(tiny(*changes), tmp_path / "run", CPU)
    assert run.is_finished
    assert "certified_accuracy" in run.metrics()[-1]


def test_a_threat_that_does_not_fit_the_strategy_is_refused():
    with pytest.raises(SpecError, match="the strategy 'sparse' cannot train against"):
        replace(tiny(), strategy=read_spec("paper-mnist-sparse").strategy)


def test_training_behind_masks_learns(tmp_path):
    changes = (
        "data.limit=1500",
        "data.crop_padding=0",
        "optimiser.batch_size=20",
        "optimiser.average_decay=0.95",
        "schedule.epochs=3",
        "schedule.learning_rate.initial=0.1",
    )
    run = train_run(read_spec("masked-mnist-5x5", [*MASKED, *changes]), tmp_path / "run", CPU)
    losses = [row["loss"] for row in run.metrics()]
    assert losses[-1] < losses[0]
    test = load_dataset("mnist-mini").test.take(400)
    images, model = test.floats(), run.model()
    images[:, :, 3:9, 3:9] = images[:, :, 15:21, 10:16] = 0.5
    with torch.no_grad():
        assert (model(images).argmax(1) == test.labels).float().mean() > 0.7


def test_natural_training_with_batch_norms_is_checked_as_it_is_deployed(tmp_path):
    spec = tiny("strategy.kind=natural", "run.check_images=20", "threat.stamp=27x27")
    settings = ModelSettings("wideresnet", depth=10, filters=2)
    run = train_run(replace(spec, model=settings), tmp_path / "run", CPU)
    model, images = run.model(), load_dataset("mnist-mini").train.take(20)
    assert int(model.bn.num_batches_tracked) == 12
    assert float(model.bn.running_mean.abs().sum()) > 0
    correct = (model(images.floats()).argmax(1) == images.labels).double().mean()
    assert run.metrics()[-1]["clean_accuracy"] == pytest.approx(float(correct))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("data.limit=33", "optimiser.batch_size=16"), "the last batch of an epoch has 1 for 1 process"),
        (("strategy.size=4x4",), "masks of 4x4 cannot hide a patch of 5x5"),
        (("threat.kind=sparse", "threat.pixels=3"), "'masked' cannot train against"),
        (("schedule.epsilon.natural_epochs=1",), "'masked' has no epsilon"),
        (("select=best-validation", "data.validation=50"), "nothing is certified while 'masked' trains"),
    ],
)
def test_settings_that_cannot_train_behind_masks_are_refused(changes, message, tmp_path):
    with pytest.raises(SpecError, match=message):
        train_run(read_spec("masked-mnist-5x5", [*MASKED, *changes]), tmp_path / "run", CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("strategy.retained=0",), "retained is 0; expected at least 1"),
        (("strategy.masks=none",), "strategy.masks is 'none'; expected one of 'image', 'batch'"),
        (("optimiser.momentum=1.0",), "momentum is 1.0; expected at least 0 and below 1"),
        (("threat.kind=patch", "threat.stamp=5x5"), "'ablated' cannot train against"),
        (("strategy.retained=785",), "785 pixels cannot be retained in images of 28x28"),
        (("model.name=mlp",), "'mlp' does not take ablated images, encoded in 2 channels"),
    ],
)
def test_settings_that_cannot_train_on_ablated_images_are_refused(changes, message, tmp_path):
    with pytest.raises(SpecError, match=message):
        train_run(read_spec("paper-mnist-ablation", [*ABLATED, *changes]), tmp_path / "run", CPU)
