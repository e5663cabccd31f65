"""What tests of training share: small networks and batches, and real processes.

A server with everything imported forks each process in milliseconds.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Generator, nn

import patchcert
from patchcert.bounds import Interval
from patchcert.models import ModelSpec
from patchcert.train.strategy import Batch, Subject, margin_loss

CLASSES = 4


def seeded(seed=0):
    return Generator().manual_seed(seed)


def _make_model(kind, channels=1, side=8, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "mlp":
            return nn.Sequential(
                nn.Flatten(), nn.Linear(channels * side * side, 12), nn.ReLU(), nn.Linear(12, CLASSES)
            ).eval()
        return nn.Sequential(
            nn.Conv2d(channels, 3, 3, 1, 1),
            nn.ReLU(),
            nn.Conv2d(3, 4, 4, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * (side // 2) ** 2, 10),
            nn.ReLU(),
            nn.Linear(10, CLASSES),
        ).eval()


def _make_batch(count=3, channels=1, side=8, seed=0, dtype=torch.float32):
    generator = seeded(seed)
    images = torch.rand(count, channels, side, side, generator=generator, dtype=dtype)
    return Batch(images, torch.randint(CLASSES, (count,), generator=generator))


def _bind(strategy, model, threat, windows=None):
    return strategy.bind(Subject(model, ModelSpec("mlp", 1, 8, 8, CLASSES), threat, windows=windows))


def _worst_margins(strategy, model, threat, batch, epsilon, windows=None):
    return _bind(strategy, model, threat, windows).worst_case(batch, epsilon, seeded()).margins


def _dense_margins(network, batch, threat, epsilon):
    """Margins (n, p, classes) at every placement, one ordinary differentiable pass for each."""
    corners = threat.placements(*batch.images.shape[2:]).corners
    maps = []
    for corner in corners:
        box = threat.boxes(batch.images, corner[None], epsilon)
        maps.append(network.margins(Interval(box.lower[:, 0], box.upper[:, 0]), batch.labels))
    return torch.stack(maps, dim=1)


def _gradient(model, margins, labels):
    loss = margin_loss(margins, labels, len(labels))
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), torch.cat([part.flatten() for part in parts])


@pytest.fixture(scope="session")
def make_model():
    return _make_model


@pytest.fixture(scope="session")
def make_batch():
    return _make_batch


@pytest.fixture(scope="session")
def bind():
    return _bind


@pytest.fixture(scope="session")
def worst_margins():
    return _worst_margins


@pytest.fixture(scope="session")
def dense_margins():
    return _dense_margins


@pytest.fixture(scope="session")
def gradient():
    return _gradient


SERVER = Path(__file__).with_name("fork_server.py")


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
