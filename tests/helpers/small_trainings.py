"""What tests of training share: small networks and batches, margins, and an observer that saves the state."""

import torch
from torch import nn

from patchcert.bounds import Interval
from patchcert.models import ModelSpec
from patchcert.testing.conformance import seeded
from patchcert.threats import Patch, SparsePixels
from patchcert.train.checkpoint import Best, load_state, save_state
from patchcert.train.loop import Position, train
from patchcert.train.strategies import (
    AllPlacements,
    GuidedPlacements,
    Natural,
    PooledPlacements,
    RandomPlacements,
    SparseChanges,
)
from patchcert.train.strategy import Batch, Subject, margin_loss

CLASSES = 4
STRATEGIES = {
    "natural": (Natural(), Patch(2)),
    "all": (AllPlacements(), Patch((2, 3))),
    "random": (RandomPlacements(placements=3), Patch(2)),
    "guided": (GuidedPlacements(width=2), Patch(2)),
    "pooled": (PooledPlacements(), Patch(2)),
    "sparse": (SparseChanges(), SparsePixels(2)),
}


def make_model(kind, channels=1, side=8, seed=0):
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


def make_batch(count=3, channels=1, side=8, seed=0, dtype=torch.float32):
    generator = seeded(seed)
    images = torch.rand(count, channels, side, side, generator=generator, dtype=dtype)
    return Batch(images, torch.randint(CLASSES, (count,), generator=generator))


def bind(strategy, model, threat, windows=None):
    return strategy.bind(Subject(model, ModelSpec("mlp", 1, 8, 8, CLASSES), threat, windows=windows))


def worst_margins(strategy, model, threat, batch, epsilon, windows=None):
    return bind(strategy, model, threat, windows).worst_case(batch, epsilon, seeded()).margins


def dense_margins(network, batch, threat, epsilon):
    """Margins (n, p, classes) at every placement, one ordinary differentiable pass for each."""
    corners = threat.placements(*batch.images.shape[2:]).corners
    maps = []
    for corner in corners:
        box = threat.boxes(batch.images, corner[None], epsilon)
        maps.append(network.margins(Interval(box.lower[:, 0], box.upper[:, 0]), batch.labels))
    return torch.stack(maps, dim=1)


def gradient(model, margins, labels):
    loss = margin_loss(margins, labels, len(labels))
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), torch.cat([part.flatten() for part in parts])


def same_weights(one, other):
    """Whether two models, or none, have the same weights and statistics bit for bit."""
    states = [{} if model is None else model.state_dict() for model in (one, other)]
    return states[0].keys() == states[1].keys() and all(
        torch.equal(value, states[1][name]) for name, value in states[0].items()
    )


class Watcher:
    """Remembers what a training went through and, where asked to, saves the state at one (epoch, batch)."""

    def __init__(self, trainee, stop=None, path=None, best=None):
        self.trainee, self.stop, self.path, self.best = trainee, stop, path, best or Best()
        self.positions, self.epsilons, self.rates, self.draws, self.states = [], [], [], [], []
        self.summaries = []

    @property
    def losses(self):
        return [summary.loss for summary in self.summaries]

    def after_batch(self, position):
        self.positions.append((position.epoch, position.batch))
        self.epsilons.append(float(self.trainee.epsilon))
        self.rates.append(float(self.trainee.learning_rate))
        self.draws.append(self.trainee.generator.get_state().numpy().tobytes())
        self.states.append({name: value.clone() for name, value in self.trainee.model.state_dict().items()})
        if (position.epoch, position.batch) == self.stop:
            save_state(self.path, self.trainee, position, self.best)

    def after_epoch(self, summary):
        self.summaries.append(summary)


def watched(trainee, plan, *arguments):
    """A training to its end."""
    watcher = Watcher(trainee, *arguments)
    train(trainee, plan, watcher)
    return watcher


def check_resumes(make, stop, path):
    """A training that `make` begins ends the same, bit for bit, from a state that was saved at (epoch, batch)."""
    best = Best(0.5, 1, {"b": torch.ones(2)})
    straight = watched(*make(), stop, path, best)
    trainee, plan = make()
    position, found = load_state(path, trainee)
    assert position == Position(*stop, position.seconds)
    assert (found.accuracy, found.epoch) == (best.accuracy, best.epoch)
    assert torch.equal(found.weights["b"], best.weights["b"])
    resumed = Watcher(trainee)
    train(trainee, plan, resumed, position)
    one, other = straight.trainee, resumed.trainee
    assert same_weights(one.model, other.model)
    assert same_weights(one.average, other.average)
    assert same_weights(one.objective.helper, other.objective.helper)
    assert resumed.losses == straight.losses[stop[0] :]
