"""The loop follows its schedule, learns, and resumes from any batch exactly as if it had never stopped."""

import pytest
import torch
from torch import Generator, nn

from patchcert.data import Split
from patchcert.errors import InvalidInput, RunError
from patchcert.models import ModelSpec
from patchcert.train.checkpoint import Best, load_state, save_state
from patchcert.train.loop import Position
from patchcert.train.schedules import EpsilonSchedule, LearningRateSchedule, Schedule
from patchcert.train.spec import DataSettings, ModelSettings, OptimiserSettings, RunSettings, Spec
from patchcert.train.step import Plan, Trainee
from patchcert.train.strategy import Subject
from small_trainings import STRATEGIES, check_resumes, same_weights, watched

SIDE, CLASSES = 8, 3
SCHEDULE = Schedule(4, EpsilonSchedule(1, 2), LearningRateSchedule(0.01, decay_every=1))
VARIED = DataSettings(flip=True, crop_padding=1)


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


def make(plan):
    """A trainee, and its plan."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(SIDE * SIDE, 6), nn.ReLU(), nn.Linear(6, CLASSES)
        model = nn.Sequential(*layers).eval()
    subject = Subject(model, ModelSpec("mlp", 1, SIDE, SIDE, CLASSES), plan.spec.threat, seed=1)
    return Trainee(model, plan.spec.strategy.bind(subject), plan.spec.optimiser), plan


def test_every_batch_has_the_epsilon_and_rate_of_the_schedule():
    watcher = watched(*make(make_plan()))
    assert make_plan().batches == 3
    wanted = [SCHEDULE.epsilon.for_batch(t, b, 3) for t in range(4) for b in range(3)]
    assert watcher.epsilons == pytest.approx(wanted)
    assert watcher.rates == pytest.approx([SCHEDULE.rate(t) for t in range(4) for _ in range(3)])
    assert watcher.positions == [(t + (b == 2), (b + 1) % 3) for t in range(4) for b in range(3)]
    assert [s.epsilon for s in watcher.summaries] == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("stop", [(0, 2), (1, 0), (2, 1)])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_training_resumes_bit_for_bit_from_any_batch(kind, stop, tmp_path):
    check_resumes(lambda: make(make_plan(kind)), stop, tmp_path / "state")


@pytest.mark.parametrize("kind", STRATEGIES)
def test_every_strategy_lowers_its_loss(kind):
    schedule = Schedule(30, EpsilonSchedule(0, 0), LearningRateSchedule(0.01))
    watcher = watched(*make(make_plan(kind, schedule, DataSettings())))
    assert watcher.losses[-1] < 0.9 * watcher.losses[0]
    assert watcher.summaries[-1].robust_accuracy > 0.5


def test_the_seed_alone_decides_the_weights():
    models = []
    for _ in range(2):
        models.append(watched(*make(make_plan("random"))).trainee.model)
        torch.rand(7)
    assert same_weights(*models)


def test_every_image_is_seen_once_in_every_epoch():
    plan = make_plan()
    assert sorted(plan.order(0).tolist()) == list(range(21))
    assert plan.order(0).tolist() != plan.order(1).tolist()
    assert plan.order(1).tolist() == make_plan().order(1).tolist()


def test_random_draws_differ_between_epochs_and_not_between_runs():
    first, second = (watched(*make(make_plan("random"))).draws for _ in range(2))
    assert first == second
    assert len({first[epoch * 3] for epoch in range(4)}) == 4


def test_a_loss_that_is_no_number_ends_the_training():
    trainee, plan = make(make_plan("natural"))
    with torch.no_grad():
        trainee.model[1].weight[0, 0] = float("nan")
    with pytest.raises(RunError, match="the loss became nan in epoch 0") as caught:
        watched(trainee, plan)
    assert "learning_rate" in caught.value.hint


def test_a_graph_is_refused_where_there_is_no_gpu():
    with pytest.raises(InvalidInput, match="cuda_graph is 'on', but the training runs on cpu"):
        watched(*make(make_plan("all", cuda_graph="on")))


def test_a_state_that_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    natural, guided = (make(make_plan(kind))[0] for kind in ("natural", "guided"))
    save_state(path, natural, Position(1), Best())
    with pytest.raises(RunError, match=r"does not fit the model of its specification: helper\."):
        load_state(path, guided)
    path.write_bytes(b"nonsense")
    with pytest.raises(RunError, match="is not a readable training state"):
        load_state(path, natural)
