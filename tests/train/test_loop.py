"""The loop follows its schedule, learns, and resumes from any batch exactly as if it had never stopped."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Generator, nn

from patchcert.data import Split
from patchcert.errors import InvalidInput, RunError
from patchcert.models import ModelSpec
from patchcert.threats import Patch, SparsePixels
from patchcert.train.checkpoint import Best, load_state, save_state
from patchcert.train.loop import EpochSummary, Position, train
from patchcert.train.schedules import EpsilonSchedule, LearningRateSchedule, Schedule
from patchcert.train.spec import DataSettings, ModelSettings, OptimiserSettings, RunSettings, Spec
from patchcert.train.step import Plan, Trainee
from patchcert.train.strategies import (
    AllPlacements,
    GuidedPlacements,
    Natural,
    PooledPlacements,
    RandomPlacements,
    SparseChanges,
)
from patchcert.train.strategy import Subject

SIDE, CLASSES = 8, 3
SCHEDULE = Schedule(4, EpsilonSchedule(1, 2), LearningRateSchedule(0.01, decay_every=1))
VARIED = DataSettings(flip=True, crop_padding=1)
STRATEGIES = {
    "natural": (Natural(), Patch(2)),
    "all": (AllPlacements(), Patch((2, 3))),
    "random": (RandomPlacements(placements=3), Patch(2)),
    "guided": (GuidedPlacements(width=2), Patch(2)),
    "pooled": (PooledPlacements(), Patch(2)),
    "sparse": (SparseChanges(), SparsePixels(2)),
}


def make_data(count=21):
    generator = Generator().manual_seed(5)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = torch.randint(120, (count, 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, :, int(label) * 2 : int(label) * 2 + 2] += 130
    return Split(images, labels)


def make_plan(kind="all", schedule=SCHEDULE, data=VARIED, cuda_graph="auto"):
    strategy, threat = STRATEGIES[kind]
    optimiser, run = OptimiserSettings(batch_size=8), RunSettings(cuda_graph=cuda_graph)
    spec = Spec(data, ModelSettings(), threat, strategy, schedule, optimiser, seed=3, run=run)
    return Plan(spec, make_data())


def make_trainee(plan):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(SIDE * SIDE, 6), nn.ReLU(), nn.Linear(6, CLASSES)
        model = nn.Sequential(*layers).eval()
    subject = Subject(model, ModelSpec("mlp", 1, SIDE, SIDE, CLASSES), plan.spec.threat, seed=1)
    return Trainee(model, plan.spec.strategy.bind(subject), plan.spec.optimiser)


@dataclass
class Recorder:
    """Remembers everything, and saves the state at one position."""

    trainee: Trainee
    save_at: Position | None = None
    path: object = None
    positions: list[Position] = field(default_factory=list)
    summaries: list[EpochSummary] = field(default_factory=list)
    epsilons: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    draws: list[bytes] = field(default_factory=list)

    def after_batch(self, position):
        self.positions.append(position)
        self.epsilons.append(float(self.trainee.epsilon))
        self.rates.append(float(self.trainee.learning_rate))
        self.draws.append(self.trainee.generator.get_state().numpy().tobytes())
        here = self.save_at is not None and (position.epoch, position.batch) == (
            self.save_at.epoch,
            self.save_at.batch,
        )
        if here:
            save_state(self.path, self.trainee, position, Best(0.5, 1, {"b": torch.ones(2)}))

    def after_epoch(self, summary):
        self.summaries.append(summary)


def weights(trainee):
    return {name: value.clone() for name, value in trainee.model.state_dict().items()}


def test_every_batch_has_the_epsilon_and_rate_of_the_schedule():
    plan = make_plan()
    recorder = Recorder(make_trainee(plan))
    train(recorder.trainee, plan, recorder)
    assert plan.batches == 3
    wanted = [SCHEDULE.epsilon.for_batch(t, b, 3) for t in range(4) for b in range(3)]
    assert recorder.epsilons == pytest.approx(wanted)
    assert recorder.rates == pytest.approx([SCHEDULE.rate(t) for t in range(4) for _ in range(3)])
    ends = [(p.epoch, p.batch) for p in recorder.positions]
    assert ends == [(t + (b == 2), (b + 1) % 3) for t in range(4) for b in range(3)]
    assert [s.epsilon for s in recorder.summaries] == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_training_resumes_bit_for_bit_from_any_batch(kind, tmp_path):
    plan = make_plan(kind)
    straight = Recorder(make_trainee(plan))
    train(straight.trainee, plan, straight)
    for stop in (Position(0, 2), Position(1, 0), Position(2, 1)):
        path = tmp_path / f"{stop.epoch}-{stop.batch}.safetensors"
        plan = make_plan(kind)
        first = Recorder(make_trainee(plan), save_at=stop, path=path)
        train(first.trainee, plan, first)
        plan = make_plan(kind)
        second = Recorder(make_trainee(plan))
        position, best = load_state(path, second.trainee)
        assert (position.epoch, position.batch) == (stop.epoch, stop.batch)
        assert (best.accuracy, best.epoch) == (0.5, 1)
        assert torch.equal(best.weights["b"], torch.ones(2))
        train(second.trainee, plan, second, position)
        for name, value in weights(straight.trainee).items():
            assert torch.equal(value, second.trainee.model.state_dict()[name]), (kind, stop, name)
        if straight.trainee.objective.helper is not None:
            pairs = zip(
                straight.trainee.objective.helper.parameters(),
                second.trainee.objective.helper.parameters(),
                strict=True,
            )
            assert all(torch.equal(a, b) for a, b in pairs)
        assert [s.loss for s in second.summaries] == [s.loss for s in straight.summaries[stop.epoch :]]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_every_strategy_lowers_its_loss(kind):
    schedule = Schedule(30, EpsilonSchedule(0, 0), LearningRateSchedule(0.01))
    plan = make_plan(kind, schedule, DataSettings())
    recorder = Recorder(make_trainee(plan))
    train(recorder.trainee, plan, recorder)
    assert recorder.summaries[-1].loss < 0.9 * recorder.summaries[0].loss
    assert recorder.summaries[-1].robust_accuracy > 0.5


def test_the_seed_alone_decides_the_weights():
    runs = []
    for _ in range(2):
        plan = make_plan("random")
        trainee = make_trainee(plan)
        train(trainee, plan, Recorder(trainee))
        runs.append(weights(trainee))
        torch.rand(7)
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_every_image_is_seen_once_in_every_epoch():
    plan = make_plan()
    assert sorted(plan.order(0).tolist()) == list(range(21))
    assert plan.order(0).tolist() != plan.order(1).tolist()
    assert plan.order(1).tolist() == make_plan().order(1).tolist()


def test_random_draws_differ_between_epochs_and_not_between_runs():
    plan = make_plan("random")
    recorders = [Recorder(make_trainee(plan)) for _ in range(2)]
    for recorder in recorders:
        train(recorder.trainee, plan, recorder)
    first, second = (recorder.draws for recorder in recorders)
    assert first == second
    assert len({first[epoch * plan.batches] for epoch in range(4)}) == 4


def test_a_loss_that_is_no_number_ends_the_training():
    plan = make_plan("natural")
    trainee = make_trainee(plan)
    with torch.no_grad():
        trainee.model[1].weight[0, 0] = float("nan")
    with pytest.raises(RunError, match="the loss became nan in epoch 0") as caught:
        train(trainee, plan, Recorder(trainee))
    assert "learning_rate" in caught.value.hint


def test_a_graph_is_refused_where_there_is_no_gpu():
    plan = make_plan("all", cuda_graph="on")
    trainee = make_trainee(plan)
    with pytest.raises(InvalidInput, match="cuda_graph is 'on', but the training runs on cpu"):
        train(trainee, plan, Recorder(trainee))


def test_a_state_that_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    plan = make_plan("natural")
    save_state(path, make_trainee(plan), Position(1), Best())
    guided = make_trainee(make_plan("guided"))
    with pytest.raises(RunError, match=r"does not fit the model of its specification: helper\."):
        load_state(path, guided)
    path.write_bytes(b"nonsense")
    with pytest.raises(RunError, match="is not a readable training state"):
        load_state(path, make_trainee(plan))
