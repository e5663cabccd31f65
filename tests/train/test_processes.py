"""Real processes: killed and resumed, interrupted, two that share a run, and one that loses its partner."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import patchcert

SERVER = Path(__file__).with_name("forks.py")
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


class Forks:
    """Talks to the process that forks; each command becomes a real process that can be killed."""

    def __init__(self, folder):
        self.folder = folder
        source = str(Path(patchcert.__file__).parents[1])
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        environment |= {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        pipe = subprocess.PIPE
        command = [sys.executable, str(SERVER)]
        self.server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.started = 0
        assert self.answer() == "ready"

    def answer(self):
        assert self.server.stdout is not None
        return self.server.stdout.readline().strip()

    def ask(self, order):
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        return int(self.answer())

    def start(self, environment, **what):
        self.started += 1
        output, errors = (self.folder / f"{self.started}.{kind}" for kind in ("out", "err"))
        order = {"environment": environment, "output": str(output), "errors": str(errors)} | what
        return Process(self, self.ask(order), output, errors)

    def train(self, out, changes, *options, **environment):
        settings = [part for change in changes for part in ("--set", change)]
        arguments = ["train", "paper-mnist", "--out", str(out), *settings, *options]
        return self.start(environment, arguments=arguments)


@dataclass
class Process:
    forks: Forks
    pid: int
    output: Path
    errors: Path

    def send(self, number):
        os.kill(self.pid, number)

    def finish(self):
        """The exit code, what was written to stdout, and what to stderr."""
        code = self.forks.ask({"wait": self.pid})
        return code, self.output.read_text(), self.errors.read_text()


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    found = Forks(tmp_path_factory.mktemp("forks"))
    yield found
    found.server.stdin.close()
    found.server.stdout.close()
    assert found.server.wait(timeout=30) == 0


def wait_for_rows(folder, rows):
    """Until the run has written so many epochs."""
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


def test_ctrl_c_saves_and_says_how_to_go_on(forks, tmp_path):
    folder = tmp_path / "run"
    process = forks.train(folder, (*TINY, *LONG))
    wait_for_rows(folder, 2)
    process.send(signal.SIGINT)
    code, output, errors = process.finish()
    assert (code, output) == (130, "")
    assert f"go on with: patchcert train {folder} --resume" in errors
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


SHARED_CERTIFICATES = """
import torch
from safetensors.torch import save_file
from patchcert.data import load_dataset
from patchcert.train.distributed import certify_sharded
from patchcert.models import ModelSpec, build
from patchcert.threats import Patch
from patchcert.train.distributed import joined_world

test = load_dataset("mnist-mini").test.take(IMAGES)
model = build(ModelSpec("mlp", 1, 28, 28, 10, hidden=6), torch.Generator().manual_seed(0))
with joined_world(torch.device("cpu")) as world:
    found = certify_sharded(model, test.floats(), model(test.floats()).argmax(1), Patch((1, 2)), world)
columns = {key: getattr(found, key).contiguous() for key in found.__slots__}
save_file(columns, f"FOLDER/{world.size}{world.rank}")
"""


@pytest.mark.parametrize("images", [7, 1])
def test_shared_certificates_are_those_of_one_process(images, forks, tmp_path):
    code = SHARED_CERTIFICATES.replace("IMAGES", str(images)).replace("FOLDER", str(tmp_path))
    port = free_port()
    places = [rendezvous(0, port), rendezvous(1, port), {}]
    running = [forks.start(place, code=code) for place in places]
    results = [process.finish() for process in running]
    assert [code for code, _, _ in results] == [0, 0, 0], results
    alone, first, second = (load_file(tmp_path / name) for name in ("10", "20", "21"))
    for shared in (first, second):
        assert shared.keys() == alone.keys()
        for name in ("certified", "predictions", "labels", "worst_placement"):
            assert torch.equal(shared[name], alone[name]), name
        torch.testing.assert_close(shared["margins"], alone["margins"], rtol=1e-5, atol=1e-6)
    assert alone["certified"].any()


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
