"""Masks of the stated size are hidden inside images, the hardest are found, and training is what a plain loop does."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from patchcert.data import Split
from patchcert.errors import ModelError, SpecError
from patchcert.models import ModelSpec, build
from patchcert.testing.conformance import seeded
from patchcert.threats import Patch
from patchcert.train.checkpoint import load_state
from patchcert.train.loop import train
from patchcert.train.schedules import EpsilonSchedule, LearningRateSchedule, Schedule
from patchcert.train.spec import DataSettings, ModelSettings, OptimiserSettings, RunSettings, Spec
from patchcert.train.step import Plan, Trainee
from patchcert.train.strategies import Masked, Natural, masked
from patchcert.train.strategies.masked import MaskedTraining
from patchcert.train.strategy import Batch, Forward, Subject, WholeModel, derived_seed
from small_trainings import Watcher, check_resumes, watched

SIDE, CLASSES, COUNT, BATCH, EPOCHS = 8, 3, 43, 8, 4
MODEL = ModelSpec("wideresnet", 2, SIDE, SIDE, CLASSES, filters=2, depth=10, mean=(0.4, 0.5), std=(0.2, 0.3))
STRATEGY = Masked(
    size="3x2", clean_share=0.2, single_share=0.3, worst_of=3, worst_from=0.5, fill=(0.25, 0.75)
)
SCHEDULE = Schedule(EPOCHS, EpsilonSchedule(0, 0), LearningRateSchedule(0.2, one_cycle=0.3))
SETTINGS = OptimiserSettings(
    batch_size=BATCH,
    momentum=0.9,
    nesterov=True,
    weight_decay=0.01,
    decay_biases=False,
    label_smoothing=0.1,
    average_decay=0.8,
)
THREAT = Patch(2)


def make_data():
    images = torch.randint(256, (COUNT, 2, SIDE, SIDE), generator=seeded(5), dtype=torch.uint8)
    return Split(images, torch.randint(CLASSES, (COUNT,), generator=seeded(6)))


def make_training(strategy=STRATEGY, layout=torch.contiguous_format):
    model = build(MODEL, seeded()).to(memory_format=layout).train()
    fill = torch.tensor(strategy.fill)[:, None, None]
    return MaskedTraining(strategy, Forward(WholeModel((), model), model, layout, strategy.bfloat16), fill)


def make(strategy=STRATEGY, device="cpu", cuda_graph="auto", layout=torch.contiguous_format, **settings):
    model, optimiser = build(MODEL, seeded()).to(device), replace(SETTINGS, **settings)
    objective = strategy.bind(Subject(model, MODEL, THREAT))
    if layout == torch.channels_last:
        model.to(memory_format=layout)
    run = RunSettings(cuda_graph=cuda_graph)
    spec = Spec(DataSettings(flip=True), ModelSettings(), THREAT, strategy, SCHEDULE, optimiser, run=run)
    return Trainee(model, objective, optimiser), Plan(spec, make_data().to(device))


def slowly_hidden(images, masks, wanted, strategy):
    (tall, wide), hidden = strategy.mask_size, images.clone()
    for image, corners, flags in zip(hidden, masks.tolist(), wanted.tolist(), strict=True):
        for (top, left), flag in zip(corners, flags, strict=True):
            for row in range(top, top + tall) if flag else ():
                for column in range(left, left + wide):
                    for channel in range(len(image)):
                        image[channel, row, column] = strategy.fill[channel % len(strategy.fill)]
    return hidden


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 4), st.integers(0, 4), st.integers(0, 999))
def test_masks_have_the_stated_size_and_lie_inside_the_image(tall, wide, below, beside, seed):
    strategy = Masked(size=f"{tall}x{wide}", fill=(0.5,))
    training, (height, width) = make_training(strategy), (tall + below, wide + beside)
    masks, wanted = training.draw(5, 3, height, width, seeded(seed))
    assert masks.shape == (5, 3, 2, 2)
    assert wanted.all()
    images = torch.ones(5, 1, height, width)
    for pair in masks.unbind(1):
        for one in (0, 1):
            flags = torch.tensor([one == 0, one == 1]).expand(5, 2)
            hidden = training.hide(images, pair, flags)[:, 0] == 0.5
            assert (hidden.flatten(1).sum(1) == tall * wide).all()
            assert (hidden.any(2).sum(1) == tall).all()
            assert (hidden.any(1).sum(1) == wide).all()


def test_masks_are_drawn_evenly_over_all_positions():
    masks, _ = make_training().draw(6000, 2, SIDE, SIDE, seeded())
    rows, columns = SIDE - 3 + 1, SIDE - 2 + 1
    counts = (masks[..., 0] * columns + masks[..., 1]).flatten().bincount(minlength=rows * columns)
    assert len(counts) == rows * columns
    expected = 24_000 / (rows * columns)
    assert ((counts - expected).abs() < 6 * expected**0.5).all()
    assert (masks[:, :, 0] != masks[:, :, 1]).any()


def test_hidden_images_are_those_of_a_loop_over_pixels():
    training = make_training()
    images = torch.rand(9, 2, SIDE, SIDE, generator=seeded())
    masks, wanted = training.draw(9, 1, SIDE, SIDE, seeded(1))
    assert 0 < wanted.sum() < wanted.numel()
    assert torch.equal(
        training.hide(images, masks[:, 0], wanted), slowly_hidden(images, masks[:, 0], wanted, STRATEGY)
    )


@pytest.mark.parametrize(("clean", "single"), [(0.2, 0.3), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_the_stated_shares_have_no_mask_or_one(clean, single):
    training = make_training(replace(STRATEGY, clean_share=clean, single_share=single))
    _, wanted = training.draw(20_000, 1, SIDE, SIDE, seeded())
    found = wanted.sum(dim=1).bincount(minlength=3) / len(wanted)
    assert found.tolist() == pytest.approx([clean, single, 1 - clean - single], abs=0.02)


@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_the_hardest_pair_is_the_one_with_the_largest_loss(at_once, monkeypatch):
    monkeypatch.setitem(masked._PAIRS_AT_ONCE, "cpu", at_once)
    training = make_training()
    model = training.forward.network.model
    images, labels = make_data().floats()[:12], make_data().labels[:12]
    model(images)  # moves the statistics away from 0 and 1
    before = {name: value.clone() for name, value in model.state_dict().items()}
    masks, wanted = training.draw(12, 7, SIDE, SIDE, seeded(1))
    chosen = training.hardest(images, labels, masks, wanted)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    deployed = model.eval()
    for number in range(12):
        one, found = slice(number, number + 1), []
        for pair in masks[number]:
            hidden = slowly_hidden(images[one], pair[None], wanted[one], STRATEGY)
            found.append(F.cross_entropy(deployed(hidden), labels[one]).item())
        assert max(found) - found[masks[number].eq(chosen[number]).all(2).all(1).nonzero()[0, 0]] < 1e-5


def test_the_greedy_search_takes_the_worst_mask_and_then_the_worst_beside_it():
    training = make_training(replace(STRATEGY, search="greedy"))
    images, labels = make_data().floats()[:12], make_data().labels[:12]
    training.forward.network.model(images)
    masks, wanted = training.draw(12, 7, SIDE, SIDE, seeded(1))
    chosen = training.hardest_greedily(images, labels, masks, wanted)
    deployed = training.forward.network.model.eval()

    def loss(number, pair, flags):
        one = slice(number, number + 1)
        hidden = slowly_hidden(images[one], pair[None], flags[None], STRATEGY)
        return F.cross_entropy(deployed(hidden), labels[one]).item()

    for number in range(12):
        first, alone = chosen[number, 0], wanted[number] & torch.tensor([True, False])
        singly = [loss(number, pair, alone) for pair in masks[number, :3]]
        assert loss(number, chosen[number], alone) > max(singly) - 1e-5
        beside = [loss(number, torch.stack([first, pair[1]]), wanted[number]) for pair in masks[number, 3:]]
        assert loss(number, chosen[number], wanted[number]) > max(beside) - 1e-5


def test_worst_pairs_are_trained_on_from_the_stated_epoch():
    objective = STRATEGY.bind(Subject(build(MODEL), MODEL, THREAT))
    assert [objective.at(epoch / 4) is objective for epoch in range(4)] == [True, True, False, False]
    always = replace(STRATEGY, worst_from=0.0).bind(Subject(build(MODEL), MODEL, THREAT))
    assert always.at(0.0) is always.later
    assert replace(STRATEGY, worst_of=1).bind(Subject(build(MODEL), MODEL, THREAT)).later is None


def plain_loop(strategy):
    """The same training as a plain loop: the model, and a list of its states after every step."""
    training, data, states = make_training(strategy), make_data(), []
    model = training.forward.network.model
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors}]
    sgd = torch.optim.SGD(groups, 0.2, momentum=0.9, nesterov=True, foreach=False)
    batches = -(-COUNT // BATCH)
    for epoch in range(EPOCHS):
        draws = seeded(derived_seed(2019, "draws", epoch))
        order = torch.randperm(COUNT, generator=seeded(derived_seed(2019, "order", epoch)))
        for number, rows in enumerate(order.split(BATCH)):
            done = (epoch * batches + number + 1) / (EPOCHS * batches + 1)
            for group in sgd.param_groups:
                group["lr"] = 0.2 * (done / 0.3 if done < 0.3 else (1 - done) / 0.7)
            images, labels = data.floats()[rows], data.labels[rows]
            mirrored = torch.rand(len(rows), generator=draws) < 0.5
            images = torch.stack(
                [image.flip(-1) if flag else image for image, flag in zip(images, mirrored, strict=True)]
            )
            pairs = strategy.worst_of if epoch >= strategy.worst_from * EPOCHS else 1
            masks, wanted = training.draw(len(rows), pairs, SIDE, SIDE, draws)
            hidden = [slowly_hidden(images, pair, wanted, strategy) for pair in masks.unbind(1)]
            model.eval()
            with torch.no_grad():
                losses = [F.cross_entropy(model(each), labels, reduction="none") for each in hidden]
            worst = torch.stack(losses).argmax(0)
            model.train()
            hidden = torch.stack([hidden[choice][place] for place, choice in enumerate(worst)])
            sgd.zero_grad()
            F.cross_entropy(model(hidden), labels, label_smoothing=0.1).backward()
            sgd.step()
            states.append({name: value.clone() for name, value in model.state_dict().items()})
    return states


@pytest.mark.parametrize("strategy", [STRATEGY, replace(STRATEGY, worst_of=1)], ids=["worst", "random"])
def test_training_is_that_of_a_plain_loop(strategy):
    trainee, plan = make(strategy)
    watcher = watched(trainee, plan)
    theirs = plain_loop(strategy)
    assert len(watcher.states) == len(theirs) == EPOCHS * plan.batches
    for number in (0, 5, len(theirs) - 1):
        for name, value in watcher.states[number].items():
            torch.testing.assert_close(value, theirs[number][name], rtol=1e-3, atol=1e-4, msg=name)
    norm = trainee.model.bn
    assert int(norm.num_batches_tracked) == len(theirs)
    assert not torch.allclose(norm.running_var, torch.ones(()))


def test_the_average_is_that_of_all_steps_with_falling_weights():
    trainee, plan = make()
    watcher = watched(trainee, plan)
    count = len(watcher.states)
    weights = torch.tensor([0.8 ** (count - 1 - step) for step in range(count)], dtype=torch.float64)
    for name, value in trainee.average.state_dict().items():
        if value.is_floating_point():
            values = torch.stack([state[name].double() for state in watcher.states])
            wanted = torch.tensordot(weights / weights.sum(), values, 1).to(value.dtype)
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
        else:
            assert value == count


def test_the_deployed_model_is_the_average_at_rest():
    trainee, plan = make()
    watched(trainee, plan)
    with trainee.deployed() as model:
        assert model is trainee.average
        assert not model.training
    assert trainee.model.training
    plain, _ = make(average_decay=None)
    with plain.deployed() as model:
        assert model is plain.model
        assert not any(layer.training for layer in model.modules())
    assert all(layer.training for layer in plain.model.modules())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
@pytest.mark.parametrize("stop", [(0, 2), (1, 0), (2, 0), (3, 5)])
def test_training_resumes_bit_for_bit_from_any_batch(stop, layout, tmp_path):
    check_resumes(lambda: make(layout=layout), stop, tmp_path / "state")
    trainee, _ = make(layout=layout)
    load_state(tmp_path / "state", trainee)
    for parameter in trainee.parameters:
        assert trainee.optimiser.state[parameter]["momentum_buffer"].stride() == parameter.stride()


def test_channels_that_are_laid_out_last_are_trained_alike():
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        trainee, plan = make(layout=layout)
        watched(trainee, plan)
        found.append(trainee.model.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-2, atol=1e-3, msg=name)


def test_bfloat16_rounds_the_network_and_not_the_logits():
    images = make_data().floats()[:5]
    exact, rounded = (
        make_training(replace(STRATEGY, bfloat16=flag)).forward.logits(images) for flag in (False, True)
    )
    assert exact.dtype == rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, rtol=0.1, atol=0.1)


def test_masks_do_not_depend_on_who_shares_the_batch():
    data = make_data()
    batches = [slice(None), slice(2, 5)]
    found = []
    for rows in batches:
        training = make_training()
        batch = Batch(data.floats()[:8], data.labels[:8], rows)
        found.append(training._draw(batch, 2, seeded(3)))
    for whole, part in zip(*found, strict=True):
        assert torch.equal(whole[2:5], part)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "6"}, "size is '6'; expected height x width"),
        ({"size": "0x3"}, "size is '0x3'; expected height x width"),
        ({"clean_share": 0.7, "single_share": 0.4}, "together at most 1"),
        ({"clean_share": -0.1}, "at least 0"),
        ({"clean_share": float("nan")}, "together at most 1"),
        ({"worst_from": 1.5}, "worst_from is 1.5; expected a share of the epochs"),
        ({"fill": ()}, r"fill is \[\]; expected one number"),
        ({"fill": (float("nan"),)}, r"fill is \[nan\]; expected one number"),
        ({"size": "9x2"}, "masks of 9x2 do not fit into images of 8x8"),
        ({"size": "1x2"}, "masks of 1x2 cannot hide a patch of 2x2"),
        ({"fill": (0.1, 0.2, 0.3)}, "fill has 3 values, but images have 2 channels"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        replace(STRATEGY, **changes).bind(Subject(build(MODEL), MODEL, THREAT))


def test_natural_training_moves_batch_norms_and_refuses_dropout():
    trainee, plan = make(Natural(), average_decay=None)
    watched(trainee, plan)
    assert int(trainee.model.bn.num_batches_tracked) == EPOCHS * plan.batches
    assert trainee.model.bn.running_mean.abs().sum() > 0
    dropping = nn.Sequential(
        nn.BatchNorm2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(2 * SIDE**2, CLASSES)
    )
    with pytest.raises(ModelError, match="layer '2' is a Dropout, whose draws"):
        Natural().bind(Subject(dropping, MODEL, THREAT))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_recorded_run_equals_a_plain_one(bfloat16):
    watchers, strategy = [], replace(STRATEGY, worst_of=1, bfloat16=bfloat16)
    for cuda_graph in ("off", "on"):
        watchers.append(watched(*make(strategy, "cuda", cuda_graph)))
    plain, recorded = watchers
    assert recorded.losses == pytest.approx(plain.losses, rel=5e-2 if bfloat16 else 1e-3)
    for part in () if bfloat16 else ("model", "average"):
        theirs = getattr(plain.trainee, part).state_dict()
        for name, value in getattr(recorded.trainee, part).state_dict().items():
            torch.testing.assert_close(value, theirs[name], rtol=2e-2, atol=2e-3, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_run_with_a_later_stage_learns_and_resumes(tmp_path):
    straight = make(replace(STRATEGY, bfloat16=True), "cuda", "on")
    watcher = watched(*straight, (2, 3), tmp_path / "state")
    assert watcher.trainee.model.blocks[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    second, plan = make(replace(STRATEGY, bfloat16=True), "cuda", "on")
    position, _ = load_state(tmp_path / "state", second)
    resumed = Watcher(second)
    train(second, plan, resumed, position)
    assert resumed.losses[-1] == pytest.approx(watcher.losses[-1], rel=0.05)
