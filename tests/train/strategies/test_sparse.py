"""Bounds over sparse changes, and training on ablated images: masks, batch norms, and resuming from any batch."""

import pytest
import torch
from torch import Generator, nn

from patchcert.bounds import trace
from patchcert.bounds.sparse import sparse_margins
from patchcert.data import Split
from patchcert.models import ModelSpec
from patchcert.threats import SparsePixels
from patchcert.train.schedules import EpsilonSchedule, LearningRateSchedule, Schedule
from patchcert.train.spec import DataSettings, ModelSettings, OptimiserSettings, RunSettings, Spec
from patchcert.train.step import Plan, Trainee, TrainingStep
from patchcert.train.strategies import Ablated, SparseChanges
from patchcert.train.strategy import Batch, Subject
from small_trainings import check_resumes, gradient, make_batch, make_model, watched, worst_margins

SIDE, CLASSES = 6, 3
SCHEDULE = Schedule(4, EpsilonSchedule(0, 0), LearningRateSchedule(0.05, 0.1, 2, decay_from=0))
SETTINGS = OptimiserSettings(batch_size=8, momentum=0.9, weight_decay=1e-3)
THREAT = SparsePixels(1)


def make_data(device="cpu"):
    generator = Generator().manual_seed(5)
    images = torch.randint(256, (45, 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    return Split(images, torch.randint(CLASSES, (45,), generator=generator)).to(device)


def bind(strategy, model):
    return strategy.bind(Subject(model, ModelSpec("cnn", 1, SIDE, SIDE, CLASSES), THREAT))


def make(strategy=None, device="cpu", cuda_graph="auto", flip=True):
    strategy = strategy or Ablated(retained=9)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        convolution = nn.Conv2d(2, 4, 3, 1, 1, bias=False)
        layers = convolution, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * SIDE**2, CLASSES)
        model = nn.Sequential(*layers).to(device).eval()
    data, run = DataSettings(flip=flip), RunSettings(cuda_graph=cuda_graph)
    spec = Spec(data, ModelSettings(), THREAT, strategy, SCHEDULE, SETTINGS, seed=3, run=run)
    return Trainee(model, bind(strategy, model), SETTINGS), Plan(spec, make_data(device))


@pytest.mark.parametrize("bound", ["tight", "per-pixel", "per-value"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_sparse_training_uses_the_bound_it_is_given(kind, bound):
    model, batch = make_model(kind, 2), make_batch(3, 2)
    wanted = sparse_margins(trace(model), batch.images, batch.labels, 3, bound, 0.4)
    for strategy, threat in (
        (SparseChanges(bound=bound), SparsePixels(3)),
        (SparseChanges(), SparsePixels(3, bound)),
    ):
        margins = worst_margins(strategy, model, threat, batch, torch.tensor(0.4))
        torch.testing.assert_close(margins, wanted)
        assert gradient(model, margins, batch.labels)[1].abs().sum() > 0


class Spy(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen = None

    def forward(self, encoded):
        self.seen = encoded
        return encoded.sum(dim=(2, 3))[:, :1].expand(-1, CLASSES) * self.weight


@pytest.mark.parametrize(("masks", "different"), [("image", True), ("batch", False)])
def test_each_image_or_the_whole_batch_has_a_mask(masks, different):
    spy = Spy()
    batch = Batch(torch.full((8, 1, SIDE, SIDE), 0.25), torch.zeros(8, dtype=torch.long))
    bind(Ablated(retained=9, masks=masks), spy).worst_case(batch, 1.0, Generator().manual_seed(0))
    assert spy.seen.shape == (8, 2, SIDE, SIDE)
    retained = spy.seen.sum(dim=1)
    assert ((retained == 1).flatten(1).sum(dim=1) == 9).all()
    assert ((retained == 0) | (retained == 1)).all()
    assert bool((retained != retained[:1]).any()) == different


def test_the_masks_of_an_image_do_not_depend_on_who_shares_the_batch():
    images, labels = torch.rand(8, 1, SIDE, SIDE), torch.zeros(8, dtype=torch.long)
    whole, part = Spy(), Spy()
    for spy, rows in ((whole, slice(None)), (part, slice(2, 5))):
        objective = bind(Ablated(retained=9), spy)
        objective.worst_case(Batch(images, labels, rows), 1.0, Generator().manual_seed(0))
    assert torch.equal(whole.seen[2:5], part.seen)


def test_steps_are_those_of_gradient_descent_with_momentum():
    trainee, plan = make(flip=False)
    theirs, _ = make()
    sgd = torch.optim.SGD(theirs.model.parameters(), 0.1, 0.9, weight_decay=1e-3)
    step = TrainingStep(trainee, plan)
    trainee.learning_rate.fill_(0.1)
    draws = Generator().set_state(trainee.generator.get_state())
    for start in (0, 8):
        rows = torch.arange(start, start + 8)
        step(rows)
        batch = Batch(plan.data[rows].floats(), plan.data.labels[rows])
        margins = theirs.objective.worst_case(batch, 1.0, draws).margins
        sgd.zero_grad()
        nn.functional.cross_entropy(-margins, batch.labels).backward()
        sgd.step()
    for mine, other in zip(trainee.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_training_follows_its_rates_and_moves_the_batch_norms():
    watcher = watched(*make())
    norm = watcher.trainee.model[1]
    assert watcher.rates == pytest.approx([0.05] * 12 + [0.005] * 12)
    assert watcher.losses[-1] < watcher.losses[0]
    assert int(norm.num_batches_tracked) == 24
    assert float(norm.running_mean.abs().sum()) > 0


@pytest.mark.parametrize("stop", [(0, 2), (1, 0), (2, 5)])
def test_training_resumes_bit_for_bit_from_any_batch(stop, tmp_path):
    check_resumes(make, stop, tmp_path / "state")


def test_bfloat16_rounds_the_network_and_not_the_loss():
    trainee, _ = make()
    batch = Batch(torch.rand(8, 1, SIDE, SIDE), torch.zeros(8, dtype=torch.long))
    found = [
        bind(Ablated(retained=9, bfloat16=rounded), trainee.model).worst_case(
            batch, 1.0, Generator().manual_seed(0)
        )
        for rounded in (False, True)
    ]
    exact, rounded = (each.margins for each in found)
    assert rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, rtol=0.05, atol=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_recorded_run_equals_a_plain_one(bfloat16):
    found = []
    for cuda_graph in ("off", "on"):
        watcher = watched(*make(Ablated(retained=9, bfloat16=bfloat16), "cuda", cuda_graph))
        found.append(watcher.trainee.model.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-2, atol=1e-2 if bfloat16 else 1e-4)
