"""Shares cover every batch, and real processes that are killed, interrupted or share a run end as they should."""

import json
import signal
import socket
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from patchcert.errors import InvalidInput, RunError
from patchcert.train.distributed import (
    ALONE,
    World,
    announced_world,
    joined_world,
    local_device,
    lost_processes_named,
)

TINY = (
    "data.name=mnist-mini",
    "model.hidden=8",
    "threat.stamp=9x9",
    "strategy.kind=random",
    "strategy.placements=3",
    "data.flip=true",
    "data.crop_padding=2",
    "schedule.epsilon.ramp_epochs=5",
    "run.check_images=4",
    "run.checkpoint_seconds=0.0",
)
LONG = ("data.limit=120", "optimiser.batch_size=10", "schedule.epochs=40")
SHORT = ("data.limit=90", "optimiser.batch_size=17", "schedule.epochs=4", "run.check_every=2")


@given(st.integers(0, 300), st.integers(1, 9))
def test_shares_cover_every_row_once_and_differ_by_at_most_one(count, size):
    rows = torch.arange(count)
    shares = [rows[World(rank, size).rows(count)] for rank in range(size)]
    assert torch.cat(shares).tolist() == rows.tolist()
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_sums_are_sent_in_the_order_of_their_kinds_and_come_back_in_place(monkeypatch):
    sent = []

    def double(joined):
        sent.append(joined.dtype)
        joined *= 2

    monkeypatch.setattr("torch.distributed.all_reduce", double)
    kinds = [torch.float64, torch.int32, torch.float32, torch.int64, torch.float16, torch.int16, torch.uint8]
    tensors = [torch.ones(2, 3, dtype=kind) for kind in (*kinds, *reversed(kinds))]
    World(0, 2).sum_in_place(tensors)
    assert sent == kinds
    assert all(torch.equal(tensor, torch.full_like(tensor, 2)) for tensor in tensors)


def test_one_process_sends_nothing(monkeypatch):
    monkeypatch.delattr("torch.distributed.all_reduce")
    ALONE.sum_in_place([torch.ones(1)])
    assert ALONE.agree(True, torch.device("cpu"))
    assert not ALONE.agree(False, torch.device("cpu"))


def test_the_world_is_read_from_the_environment(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    with joined_world(torch.device("cpu")) as world:
        assert world == ALONE
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert announced_world() == World(3, 4)
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(InvalidInput, match="RANK='4' and WORLD_SIZE='4' do not describe"):
        announced_world()


def test_a_failed_message_says_what_it_means():
    with (
        pytest.raises(RunError, match=r"no longer answers \(Connection closed\)") as caught,
        lost_processes_named(),
    ):
        raise RuntimeError("Connection closed\nand more")
    assert "--resume" in caught.value.hint


def test_every_process_of_a_machine_takes_its_own_gpu(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert local_device(torch.device("cuda")) == torch.device("cuda", 2)
    assert local_device(torch.device("cuda:1")) == torch.device("cuda", 1)
    assert local_device(torch.device("cpu")) == torch.device("cpu")


def wait_for_rows(folder, rows):
    """Until the run has written the rows of that many epochs."""
    file, deadline = folder / "metrics.jsonl", time.monotonic() + 60
    while time.monotonic() < deadline:
        if file.is_file() and file.read_text().count("\n") >= rows:
            return
        time.sleep(0.002)
    raise AssertionError(f"no {rows} epochs within a minute")


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same_weights(one, other):
    first, second = (load_file(folder / "weights.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_killed_at_any_moment_ends_with_the_same_weights(forks, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert forks.train(straight, (*TINY, *LONG)).finish()[0] == 0
    for rows, pause in ((1, 0.011), (5, 0.037), (11, 0.0)):
        process = forks.train(broken, (*TINY, *LONG), "--resume")
        wait_for_rows(broken, rows)
        time.sleep(pause)
        process.send(signal.SIGKILL)
        assert process.finish()[0] == -signal.SIGKILL
        assert not (broken / "weights.safetensors").exists()
    code, output, errors = forks.train(broken, (*TINY, *LONG), "--resume").finish()
    assert (code, json.loads(output)["epochs"]) == (0, 40), errors
    assert same_weights(straight, broken)
    assert [row["loss"] for row in rows_of(straight)] == [row["loss"] for row in rows_of(broken)]
    assert len(json.loads((broken / "environment.json").read_text())["sessions"]) == 4


def test_ctrl_c_saves_and_says_how_to_resume(forks, tmp_path):
    folder = tmp_path / "run"
    process = forks.train(folder, (*TINY, *LONG))
    wait_for_rows(folder, 2)
    process.send(signal.SIGINT)
    code, output, errors = process.finish()
    assert (code, output) == (130, "")
    assert f"resume with: patchcert train {folder} --resume" in errors
    assert "Traceback" not in errors
    assert (folder / "state.safetensors").is_file()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def rendezvous(rank, port):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }


@pytest.mark.parametrize(
    "changes", [(), ("strategy.kind=guided", "strategy.width=2")], ids=["random", "guided"]
)
def test_two_processes_train_as_one(changes, forks, tmp_path):
    changes = (*TINY, *SHORT, *changes)
    port = free_port()
    pair = [forks.train(tmp_path / "pair", changes, **rendezvous(rank, port)) for rank in (0, 1)]
    results = [process.finish() for process in (*pair, forks.train(tmp_path / "alone", changes))]
    assert [code for code, _, _ in results] == [0, 0, 0], results
    assert results[1][1] == ""
    first, second = (load_file(tmp_path / name / "weights.safetensors") for name in ("alone", "pair"))
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-4, atol=1e-4)  # Adam enlarges rounding
    for one, other in zip(rows_of(tmp_path / "alone"), rows_of(tmp_path / "pair"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other.get("certified_accuracy") == one.get("certified_accuracy")


def test_two_processes_share_a_run_with_batch_norms(forks, tmp_path):
    network = ("model.name=wideresnet", "model.depth=10", "model.filters=2")
    strategy = (
        "strategy.kind=masked",
        "strategy.size=9x9",
        "strategy.worst_of=2",
        "optimiser.average_decay=0.9",
    )
    schedule = ("schedule.epsilon.natural_epochs=0", "schedule.epsilon.ramp_epochs=0")
    changes = [change for change in (*TINY, *SHORT) if change.split(".")[0] not in ("strategy", "model")]
    changes = [*changes, *network, *strategy, *schedule]
    port = free_port()
    pair = [forks.train(tmp_path / "pair", changes, **rendezvous(rank, port)) for rank in (0, 1)]
    results = [process.finish() for process in pair]
    assert [code for code, _, _ in results] == [0, 0], results
    weights, state = (load_file(tmp_path / "pair" / f"{name}.safetensors") for name in ("weights", "state"))
    for name, value in weights.items():
        assert torch.equal(value, state[f"average.{name}"])
        assert value.isfinite().all()
    assert int(weights["bn.num_batches_tracked"]) == 4 * 6
    assert rows_of(tmp_path / "pair")[-1]["loss"] < 3


SHARED_ACCURACIES = """
import json
import torch
from patchcert.data import load_dataset
from patchcert.models import ModelSpec, build
from patchcert.threats import Patch
from patchcert.train.distributed import joined_world, shared_accuracies

test = load_dataset("mnist-mini").test.take(IMAGES)
model = build(ModelSpec("mlp", 1, 28, 28, 10, hidden=6), torch.Generator().manual_seed(0))
images, labels = test.floats(), model(test.floats()).argmax(1)
labels[0] = (labels[0] + 1) % 10
with joined_world(torch.device("cpu")) as world:
    found = shared_accuracies(model, images, labels, Patch((1, 2)), world)
print(found.clean_accuracy, found.certified_accuracy)
"""


@pytest.mark.parametrize(("images", "clean"), [(7, 6 / 7), (1, 0.0)])
def test_shared_accuracies_are_those_of_one_process(images, clean, forks):
    code, port = SHARED_ACCURACIES.replace("IMAGES", str(images)), free_port()
    places = [rendezvous(0, port), rendezvous(1, port), {}]
    results = [process.finish() for process in [forks.start(place, code=code) for place in places]]
    assert [code for code, _, _ in results] == [0, 0, 0], results
    first, second, alone = (tuple(map(float, output.split())) for _, output, _ in results)
    assert first == second == alone
    assert alone[0] == clean
    assert (alone[1] > 0) == (images > 1)


def test_a_lost_process_ends_the_run_with_a_message_and_a_folder_to_resume(forks, tmp_path):
    folder, port = tmp_path / "run", free_port()
    pair = [forks.train(folder, (*TINY, *LONG), **rendezvous(rank, port)) for rank in (0, 1)]
    wait_for_rows(folder, 2)
    pair[1].send(signal.SIGKILL)
    assert pair[1].finish()[0] == -signal.SIGKILL
    code, _, errors = pair[0].finish()
    assert code == 2
    assert "another process of this run has ended or no longer answers" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    code, output, errors = forks.train(folder, (*TINY, *LONG), "--resume").finish()
    assert (code, json.loads(output)["epochs"]) == (0, 40), errors


def test_a_refused_folder_ends_all_processes(forks, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    port = free_port()
    pair = [forks.train(tmp_path, (*TINY, *SHORT), **rendezvous(rank, port)) for rank in (0, 1)]
    (main, _, message), (other, _, echo) = [process.finish() for process in pair]
    assert (main, other) == (2, 2)
    assert "is not empty and holds no run" in message
    assert "see the message of process 0" in echo
