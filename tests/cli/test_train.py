"""`patchcert train`: JSON on stdout, talk on stderr, and one clear message for every mistake."""

import itertools
import json
import sys

import pytest

from patchcert.cli.app import run
from patchcert.cli.train import TrainingView, training_view
from patchcert.train.loop import Position
from patchcert.train.pace import TrainingPace
from patchcert.train.run_folder import Run
from patchcert.train.schedules import EpsilonSchedule, Schedule

TINY = (
    "data.name=mnist-mini",
    "data.limit=32",
    "model.hidden=4",
    "threat.stamp=20x20",
    "optimiser.batch_size=16",
    "run.check_images=3",
)


def train(*arguments, changes=TINY):
    settings = [part for change in changes for part in ("--set", change)]
    return run(["train", *map(str, arguments), *settings, "--device", "cpu"])


def test_a_preset_trains_into_a_folder_named_after_it(capsys, tmp_path, monkeypatch, answered):
    monkeypatch.chdir(tmp_path)
    assert train("paper-mnist", "--scale", 0.03, "--threads", 1) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert summary["epochs"] == 3
    assert summary["run"].startswith("runs/paper-mnist-")
    assert "epoch 3/3  eps 1.00  loss" in captured.err
    last = captured.err.splitlines()[-1]
    assert last.startswith("trained for 3 epochs in ")
    assert last.endswith(f"; next: patchcert certify {summary['run']}")
    assert Run.open(summary["run"]).spec.schedule.epochs == 3
    assert answered(run(["train", summary["run"], "--resume", "--device", "cpu"])) == summary


def test_a_file_is_read_where_there_is_one(answered, tmp_path):
    spec = tmp_path / "mine.toml"
    spec.write_text(
        "[data]\nname = 'mnist-mini'\n[model]\nname = 'mlp'\n[threat]\nstamp = 20\n"
        "[strategy]\nkind = 'all'\n[schedule]\nepochs = 1\n"
    )
    assert answered(train(spec, "--out", tmp_path / "run"))["epochs"] == 1


@pytest.mark.parametrize(
    ("arguments", "changes", "message", "hint"),
    [
        (["paper-mnits"], TINY, "paper-mnits is neither a file nor a preset", "did you mean 'paper-mnist"),
        (
            ["paper-mnist"],
            ("model.nam=x",),
            "--set model.nam=x: model.nam is not a known key",
            "did you mean 'name'?",
        ),
        (["paper-mnist"], (*TINY, "model.name=resnet"), "no architecture named 'resnet'", "architecture"),
        (["paper-mnist"], ("data.name=nist",), "nist", ""),
        (["paper-mnist", "--scale", "0"], TINY, "the scale is 0.0; expected a number above 0", "0.1"),
    ],
)
def test_mistakes_give_one_message_a_hint_and_exit_code_2(
    arguments, changes, message, hint, capsys, tmp_path
):
    assert train(*arguments, "--out", tmp_path / "run", changes=changes) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert hint in captured.err
    assert "Traceback" not in captured.err


def test_a_schedule_that_ends_before_epsilon_is_1_is_pointed_out(capsys, tmp_path):
    assert train("paper-mnist", "--out", tmp_path / "short", changes=(*TINY, "schedule.epochs=2")) == 0
    assert (
        "epsilon grows to 0.02 of 1 in 2 epochs; --scale shortens the ramp with the rest"
        in capsys.readouterr().err
    )
    assert train("paper-mnist", "--scale", 0.03, "--out", tmp_path / "scaled") == 0
    assert "epsilon grows to" not in capsys.readouterr().err


def test_going_on_where_nothing_is_says_so(capsys, tmp_path):
    changes = (*TINY, "schedule.epochs=1")
    assert train("paper-mnist", "--out", tmp_path / "new", "--resume", changes=changes) == 0
    assert f"there is no {tmp_path / 'new'} to resume; starting a new run" in capsys.readouterr().err


def test_a_threat_that_does_not_fit_leaves_no_folder(capsys, tmp_path):
    assert train("paper-mnist", "--out", tmp_path / "run", changes=(*TINY, "threat.stamp=40x40")) == 2
    assert "the patch of 40x40 does not fit into images of 28x28" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_no_text_is_no_specification(capsys, tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"\xff\xfe\x00")
    assert train(tmp_path / "weights.safetensors") == 2
    assert "weights.safetensors is not a text file, so it is not a specification" in capsys.readouterr().err


def test_an_unfinished_folder_asks_for_resume(capsys, tmp_path, refused):
    assert train("paper-mnist", "--scale", 0.01, "--out", tmp_path / "run") == 0
    (tmp_path / "run" / "weights.safetensors").unlink()
    capsys.readouterr()
    assert "hint: add --resume" in refused(train("paper-mnist", "--scale", 0.01, "--out", tmp_path / "run"))
    assert train("paper-mnist", "--scale", 0.01, "--out", tmp_path / "run", "--resume") == 0


def test_tensorboard_is_asked_for_only_where_wanted(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert train("paper-mnist", "--tensorboard", "--out", tmp_path / "run") == 2
    assert "pip install 'patchcert[tensorboard]'" in capsys.readouterr().err


def test_tensorboard_gets_every_number():
    points = []

    class Writer:
        def add_scalar(self, tag, scalar_value, global_step):
            points.append((tag, scalar_value, global_step))

    view = TrainingView(5, writer=Writer())
    view.on_batch(Position(0, 1), 5)
    view.on_epoch({"epoch": 3, "loss": 0.5, "checked_on": "train"})
    assert points == [("loss", 0.5, 3)]


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with training_view(2) as view:
        view.on_epoch({"epoch": 0, "loss": 0.25, "epsilon": 0.5, "clean_accuracy": 0.9})
        view.on_batch(Position(1, 0), 3)
    assert "epoch 2/2  eps 0.50  loss 0.250  clean 90.0%" in capsys.readouterr().err


def test_a_log_says_how_long_it_takes_and_where_training_stands(capfd):
    view = TrainingView(10)
    assert view.line() == "preparing"
    view.on_start(TrainingPace(Schedule(10, EpsilonSchedule(1, 2)), 5, Position(), {True: 1.0, False: 20.0}))
    assert capfd.readouterr().err == "training is expected to take about 15 min\n"
    view.on_epoch({"epoch": 0, "loss": 0.25, "epsilon": 0.0})
    view.on_batch(Position(1, 0), 5)
    assert view.line() == "epoch 2/10, 10.0% after 1 s  eps 0.00  loss 0.250  about 15 min to go"
    view.on_stop()
    assert "stopping after this batch" in capfd.readouterr().err


def test_a_time_left_that_runs_out_while_it_is_said_is_no_mistake(capfd):
    ticks = itertools.count()  # a second passes whenever the clock is read
    schedule, tried = Schedule(2, EpsilonSchedule(0, 0)), {False: 0.75}
    pace = TrainingPace(schedule, 1, Position(), tried, clock=lambda: float(next(ticks)))
    TrainingView(2).on_start(pace)
    assert pace.remaining is None
    assert capfd.readouterr().err == ""


def test_figures_keep_the_last_check():
    view = TrainingView(2)
    view.on_epoch({"epsilon": 0.1, "loss": 1.0, "certified_accuracy": 0.5})
    view.on_epoch({"epsilon": 0.2, "loss": 0.9})
    assert view.figures == "  eps 0.20  loss 0.900  certified 50.0%"
