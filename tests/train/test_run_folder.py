"""Run folders say what they hold, refuse what does not belong, and keep evidence as plain arrays."""

import pytest

from patchcert.errors import RunError
from patchcert.train.run_folder import Run, exclusive, prepare_run
from patchcert.train.spec import read_spec

SPEC = read_spec("paper-mnist")


def test_a_created_run_opens_with_the_same_spec(tmp_path):
    Run.create(tmp_path / "a" / "b", SPEC)
    run = Run.open(tmp_path / "a" / "b")
    assert run.spec == SPEC
    assert not run.is_finished
    assert run.metrics() == []
    assert run.environment() == {}


def test_folders_without_a_run_are_named(tmp_path):
    with pytest.raises(RunError, match=r"the run folder .*nowhere is not there"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"the run folder .* holds no run"):
        Run.open(tmp_path)
    with pytest.raises(RunError, match="has not finished training") as caught:
        Run.create(tmp_path / "a", SPEC).model()
    assert "--resume" in caught.value.hint


def test_a_run_without_a_state_gives_way_to_another(tmp_path):
    misspelt = read_spec("paper-mnist", ["model.name=cnn3"])
    refused = prepare_run(tmp_path, misspelt, resume=False)
    refused.write_environment({"data": {"checksums": {"other": "sum"}}})
    run = prepare_run(tmp_path, SPEC, resume=False)
    assert Run.open(tmp_path).spec == run.spec == SPEC
    assert run.environment() == {}
    run.append_metrics({"epoch": 0})
    with pytest.raises(RunError, match="holds a different run: model.name is 'mlp' there and 'cnn3' here"):
        prepare_run(tmp_path, misspelt, resume=False)


def test_a_new_folder_is_made_and_an_unfinished_one_asks_for_resume(tmp_path):
    folder = tmp_path / "run"
    assert prepare_run(folder, SPEC, resume=False).spec == SPEC
    prepare_run(folder, SPEC, resume=False).append_metrics({"epoch": 0})
    with pytest.raises(RunError, match="holds this run, unfinished") as caught:
        prepare_run(folder, SPEC, resume=False)
    assert caught.value.hint == "add --resume to continue it"
    assert prepare_run(folder, SPEC, resume=True).path == folder


def test_a_different_run_is_refused_by_the_first_difference(tmp_path):
    prepare_run(tmp_path, SPEC, resume=False)
    for change, message in [
        ("seed=1", "seed is 2019 there and 1 here"),
        ("threat.stamp=2x2", "threat.stamp is '5x5' there and '2x2' here"),
        ("model.hidden=7", "model.hidden is None there and 7 here"),
    ]:
        with pytest.raises(RunError, match=f"holds a different run: {message}"):
            prepare_run(tmp_path, read_spec("paper-mnist", [change]), resume=True)
    prepare_run(tmp_path, read_spec("paper-mnist", ["run.check_every=1"]), resume=True)


def test_a_finished_run_is_refused_unless_resumed(tmp_path):
    run = prepare_run(tmp_path, SPEC, resume=False)
    run.weights.write_bytes(b"")
    with pytest.raises(RunError, match="already holds this run, finished"):
        prepare_run(tmp_path, SPEC, resume=False)
    assert prepare_run(tmp_path, SPEC, resume=True).is_finished


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunError, match="is not empty and holds no run"):
        prepare_run(tmp_path, SPEC, resume=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_leftovers_of_a_kill_do_not_stand_in_the_way(tmp_path):
    (tmp_path / ".spec.toml.abc.part").write_text("half")
    prepare_run(tmp_path, SPEC, resume=False)
    assert not list(tmp_path.glob(".*.part"))


def test_two_trainings_in_one_folder_are_refused(tmp_path):
    with (
        exclusive(tmp_path),
        pytest.raises(RunError, match="another process is training in"),
        exclusive(tmp_path),
    ):
        pass
    with exclusive(tmp_path):
        pass


def test_metrics_are_truncated_to_the_epoch_and_a_torn_line_is_dropped(tmp_path):
    run = Run.create(tmp_path, SPEC)
    for epoch in range(4):
        run.append_metrics({"epoch": epoch, "seconds": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"epoch": 4, "sec')
    assert run.training_seconds == 2.0
    run.truncate_metrics(2)
    assert [row["epoch"] for row in run.metrics()] == [0, 1]
    run.append_metrics({"epoch": 2, "seconds": 1.0})
    assert [row["epoch"] for row in run.metrics()] == [0, 1, 2]


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_damaged_environment_is_named(tmp_path, text):
    (tmp_path / "environment.json").write_text(text)
    with pytest.raises(RunError, match=r"environment\.json is damaged: it is no JSON"):
        Run(tmp_path, read_spec("paper-mnist")).environment()
