"""Batch norms in training on bounds: whose statistics they take, and that clean values and bounds see the same ones."""

import pytest
import torch
from torch import Generator, nn

from patchcert.bounds import Interval
from patchcert.data import Split
from patchcert.errors import ModelError
from patchcert.models import ModelSpec, build
from patchcert.threats import Patch, SparsePixels
from patchcert.train.batch_norms import NormedNetwork, trainable_network
from patchcert.train.recipe import BoundSettings
from patchcert.train.schedules import EpsilonSchedule, LearningRateSchedule, Schedule
from patchcert.train.spec import DataSettings, ModelSettings, OptimiserSettings, Spec
from patchcert.train.step import Plan, Trainee, TrainingStep
from patchcert.train.strategies import (
    AllPlacements,
    GuidedPlacements,
    PooledPlacements,
    RandomPlacements,
    SparseChanges,
    Weakest,
)
from patchcert.train.strategy import Subject
from small_trainings import check_resumes, dense_margins, make_batch, watched

SIDE, CLASSES = 10, 4
MODEL = ModelSpec("cnn2_bn", 1, SIDE, SIDE, CLASSES, hidden=12, filters=3)
PATCH = Patch(3)
STRATEGIES = {
    "all": AllPlacements(),
    "random": RandomPlacements(placements=3),
    "guided": GuidedPlacements(width=2),
    "pooled": PooledPlacements(blocks=(2,)),
    "linear": Weakest(placements="image", candidates=2),
    "mixture": Weakest(mixture=0.5, attack_steps=2),
    "sparse": SparseChanges(),
}


def images(count=12, seed=0):
    return torch.rand(count, 1, SIDE, SIDE, generator=Generator().manual_seed(seed))


def make(strategy, bounds=None):
    generator = Generator().manual_seed(0)
    threat = SparsePixels(1) if isinstance(strategy, SparseChanges) else PATCH
    data = Split((images(22) * 255).byte(), torch.randint(CLASSES, (22,), generator=generator))
    settings = OptimiserSettings(batch_size=8, average_decay=0.8)
    schedule = Schedule(3, EpsilonSchedule(1, 1), LearningRateSchedule(1e-2))
    given = bounds or BoundSettings(statistics="clean" if threat != PATCH else "both")
    spec = Spec(DataSettings(), ModelSettings(), threat, strategy, schedule, settings, seed=3, bounds=given)
    model = build(MODEL, generator)
    trainee = Trainee(model, strategy.bind(Subject(model, MODEL, threat, seed=3)), settings)
    return trainee, Plan(spec, data)


def test_statistics_of_clean_images_are_those_of_pytorch():
    model, theirs = (build(MODEL, Generator().manual_seed(0)) for _ in range(2))
    network = trainable_network(model, MODEL)
    assert isinstance(network, NormedNetwork)
    for seed in range(2):
        network.observe(images(seed=seed), None, both=False)
        wanted = theirs.train()(images(seed=seed))
        torch.testing.assert_close(network.values(images(seed=seed))[-1], wanted, rtol=1e-4, atol=1e-5)
    for (name, mine), other in zip(model.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, other, msg=name)
    assert not model.training


def test_statistics_of_both_count_the_ends_of_bounds_as_much_as_clean_values():
    layer = nn.BatchNorm2d(1)
    network = trainable_network(
        nn.Sequential(layer, nn.Flatten(), nn.Linear(4, 2)).eval(), ModelSpec("m", 1, 2, 2)
    )
    clean = torch.tensor([[[[0.0, 1.0], [1.0, 0.0]]]])
    box = Interval(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 2.0))
    boxes = network.observe(clean, box, both=True)
    # The mean is that of 1/2, 0 and 2 with weights 2, 1, 1, and the mean square that of 1/2, 0 and 4.
    mean, square = 0.75, (2 * 0.5 + 0 + 4) / 4
    wanted = (clean - mean) / (square - mean**2 + layer.eps) ** 0.5
    torch.testing.assert_close(network.values(clean)[1], wanted)
    torch.testing.assert_close(boxes[1].upper, (box.upper - mean) / (square - mean**2 + layer.eps) ** 0.5)
    assert float(layer.running_mean) == pytest.approx(0.1 * mean)
    assert float(layer.running_var) == pytest.approx(0.9 + 0.1 * (square - mean**2) * 4 / 3)
    assert len(boxes) == 4


@pytest.mark.parametrize("kind", STRATEGIES)
def test_every_strategy_on_bounds_moves_batch_norms_once_a_step(kind):
    trainee, plan = make(STRATEGIES[kind])
    trainee.epsilon.fill_(0.5)
    trainee.learning_rate.fill_(0.01)
    gain = trainee.model.bn1.weight.clone()
    TrainingStep(trainee, plan)(torch.arange(8))
    for name in ("bn1", "bn2", "bn3"):
        layer = trainee.model.get_submodule(name)
        assert int(layer.num_batches_tracked) == 1
        assert float(layer.running_mean.abs().sum()) > 0
    assert not torch.equal(trainee.model.bn1.weight, gain)


def test_margins_are_those_of_the_network_that_normalises_by_the_batch():
    trainee, plan = make(AllPlacements())
    batch = make_batch(6, side=SIDE)
    step = TrainingStep(trainee, plan)
    assert step.observation is not None
    step.observation(batch, 0.7, Generator().manual_seed(0))
    found = trainee.objective.worst_case(batch, 0.7, Generator()).margins
    wanted = dense_margins(trainee.objective.network, batch, PATCH, 0.7).amin(dim=1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_network_trained_with_statistics_of_bounds_is_deployed_with_running_ones():
    trainee = watched(*make(AllPlacements())).trainee
    assert trainee.average is not None
    for model in (trainee.model, trainee.average):
        assert int(model.bn1.num_batches_tracked) == 9
        deployed = trainable_network(model, MODEL).values(images())[-1]
        torch.testing.assert_close(deployed, model.eval()(images()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stop", [(0, 2), (1, 1), (2, 2)])
def test_training_resumes_bit_for_bit_with_averages_statistics_and_attacks(stop, tmp_path):
    bounds = BoundSettings(tightness=0.5, relu_balance=0.5)
    check_resumes(lambda: make(STRATEGIES["mixture"], bounds), stop, tmp_path / "state")


def test_the_placements_observed_do_not_depend_on_who_shares_the_batch(monkeypatch):
    trainee, plan = make(AllPlacements())
    seen = []
    network = trainee.objective.network
    monkeypatch.setattr(type(network), "observe", lambda self, images, box, both: seen.append(box) or [])
    step = TrainingStep(trainee, plan)
    batch = make_batch(6, side=SIDE)
    for rows in (slice(None), slice(2, 5)):
        step.observation(type(batch)(batch.images, batch.labels, rows), 1.0, Generator().manual_seed(1))
    whole, part = seen
    assert torch.equal(whole.lower[2:5], part.lower)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.unused = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.logits = nn.Linear(4, 2)

    def forward(self, images):
        return self.logits(self.norm(torch.relu(self.norm(images.flatten(1)))))


def test_a_batch_norm_of_two_places_is_refused_by_name():
    with pytest.raises(ModelError, match="layer 'norm' is a BatchNorm1d that a forward pass uses 2 times"):
        trainable_network(Twice().eval(), ModelSpec("m", 1, 2, 2))
