"""The schedule tables of the paper's runs hold value by value; scaling keeps the proportions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchcert.errors import InvalidInput
from patchcert.train.schedules import EpsilonSchedule, LearningRateSchedule, Schedule

MNIST_PATCH = Schedule(100, EpsilonSchedule(1, 60), LearningRateSchedule(5e-4))
CIFAR_PATCH = Schedule(200, EpsilonSchedule(10, 120), LearningRateSchedule(1e-3))
MNIST_SPARSE = Schedule(100, EpsilonSchedule(1, 10), LearningRateSchedule(5e-4))

PAPER = [
    # schedule, zeros S, grid K, natural epochs, growing epochs, first full one, epochs where the rate halves
    (MNIST_PATCH, 1, 61, [0], range(1, 61), 61, [72, 82, 92]),
    (CIFAR_PATCH, 10, 121, list(range(10)), range(10, 130), 130, [141, 151, 161, 171, 181, 191]),
    (MNIST_SPARSE, 1, 11, [0], range(1, 11), 11, [22, 32, 42, 52, 62, 72, 82, 92]),
]


def list_of_the_paper(zeros: int, grid: int) -> list[float]:
    return [0.0] * zeros + [step / (grid - 1) for step in range(grid)]


@pytest.mark.parametrize(("schedule", "zeros", "grid", "natural", "growing", "full", "halvings"), PAPER)
def test_the_paper_tables_hold_in_every_epoch(schedule, zeros, grid, natural, growing, full, halvings):
    values, batches = list_of_the_paper(zeros, grid), 235
    epsilon = schedule.epsilon
    assert [t for t in range(schedule.epochs) if epsilon.phase(t) == "natural"] == natural
    assert [t for t in range(schedule.epochs) if 0 <= epsilon.for_batch(t, 0, 9) < epsilon.end(t)] == list(
        growing
    )
    assert epsilon.full_from == full
    assert [t for t in range(schedule.epochs) if epsilon.phase(t) == "growing"] == list(growing)
    assert [t for t in range(schedule.epochs) if epsilon.phase(t) == "full"] == list(
        range(full, schedule.epochs)
    )
    for epoch in range(schedule.epochs):
        start = values[epoch] if epoch < len(values) else 1.0
        end = values[min(epoch + 1, len(values) - 1)] if epoch < len(values) else 1.0
        assert epsilon.for_batch(epoch, 0, batches) == pytest.approx(start, abs=1e-12)
        assert epsilon.for_batch(epoch, batches - 1, batches) == pytest.approx(end, abs=1e-12)
        middle = start + (end - start) * 100 / (batches - 1)
        assert epsilon.for_batch(epoch, 100, batches) == pytest.approx(middle, abs=1e-12)
    rates = [schedule.rate(t) for t in range(schedule.epochs)]
    assert [t for t in range(1, schedule.epochs) if rates[t] != rates[t - 1]] == halvings
    assert all(rates[t] == rates[t - 1] / 2 for t in halvings)
    assert rates[0] == schedule.learning_rate.initial


def test_mnist_grows_by_a_sixtieth_in_each_epoch():
    assert MNIST_PATCH.epsilon.for_batch(2, 0, 9) == pytest.approx(1 / 60)
    assert MNIST_PATCH.epsilon.for_batch(31, 0, 9) == pytest.approx(0.5)
    assert CIFAR_PATCH.epsilon.for_batch(70, 0, 9) == pytest.approx(0.5)


def test_scaling_shrinks_every_part_and_drops_none():
    assert MNIST_PATCH.scaled(0.1) == Schedule(
        10, EpsilonSchedule(1, 6), LearningRateSchedule(5e-4, decay_every=1)
    )
    assert CIFAR_PATCH.scaled(0.1) == Schedule(
        20, EpsilonSchedule(1, 12), LearningRateSchedule(1e-3, decay_every=1)
    )
    none = Schedule(100, EpsilonSchedule(0, 0)).scaled(0.01)
    assert (none.epochs, none.epsilon.natural_epochs, none.epsilon.ramp_epochs) == (1, 0, 0)
    assert MNIST_PATCH.scaled(1.0) == MNIST_PATCH


def test_without_a_ramp_epsilon_jumps_to_one():
    schedule = EpsilonSchedule(natural_epochs=2, ramp_epochs=0)
    assert [schedule.for_batch(t, 0, 9) for t in range(4)] == [0.0, 0.0, 1.0, 1.0]
    assert [schedule.end(t) for t in range(4)] == [0.0, 0.0, 1.0, 1.0]
    assert [schedule.phase(t) for t in range(3)] == ["natural", "natural", "full"]
    assert EpsilonSchedule(0, 0).for_batch(0, 0, 5) == 1.0


def test_one_batch_per_epoch_ends_at_the_epochs_end():
    assert EpsilonSchedule(0, 4).for_batch(0, 0, 1) == 0.25


@given(st.integers(0, 5), st.integers(0, 20), st.integers(1, 9), st.sampled_from(["linear", "smooth"]))
def test_epsilon_never_falls_and_stays_between_zero_and_one(natural, ramp, batches, shape):
    schedule = EpsilonSchedule(natural, ramp, shape)
    values = [schedule.for_batch(t, b, batches) for t in range(natural + ramp + 3) for b in range(batches)]
    assert values == sorted(values)
    assert all(0 <= value <= 1 for value in values)
    assert values[-1] == 1


def test_a_smooth_ramp_starts_slowly_and_meets_the_line_half_way():
    smooth, line = EpsilonSchedule(0, 10, "smooth"), EpsilonSchedule(0, 10)
    assert smooth.for_batch(1, 0, 9) < line.for_batch(1, 0, 9) / 3
    assert smooth.for_batch(5, 0, 9) == pytest.approx(line.for_batch(5, 0, 9))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EpsilonSchedule(-1), "natural_epochs is -1; expected at least 0"),
        (lambda: LearningRateSchedule(0.0), "learning rate is 0.0; expected a number above 0"),
        (lambda: LearningRateSchedule(decay_every=0), "decay_every is 0; expected at least 1"),
        (lambda: Schedule(0), "epochs is 0; expected at least 1"),
        (lambda: Schedule().scaled(0), "the scale is 0; expected a number above 0"),
        (lambda: Schedule().scaled(math.inf), "the scale is inf; expected a number above 0, 1000 at most"),
    ],
)
def test_impossible_schedules_are_refused_by_name(make, message):
    with pytest.raises(InvalidInput, match=message):
        make()


def test_one_cycle_rises_evenly_to_its_height_and_falls_evenly():
    schedule = Schedule(3, EpsilonSchedule(0, 0), LearningRateSchedule(0.6, one_cycle=0.3))
    rates = [schedule.rate(epoch, batch, 3) for epoch in range(3) for batch in range(3)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, *(0.6 * left / 7 for left in range(6, 0, -1))])
    longer = schedule.scaled(2.0)
    assert longer.learning_rate == schedule.learning_rate
    assert longer.rate(5, 2, 3) == pytest.approx(0.6 / 19 / 0.7)


@given(st.integers(1, 50), st.integers(1, 50), st.floats(0.01, 0.99))
def test_every_batch_of_one_cycle_has_a_rate_above_0_and_at_most_the_highest(epochs, batches, top):
    schedule = Schedule(epochs, learning_rate=LearningRateSchedule(2.0, one_cycle=top))
    rates = [schedule.rate(epoch, batch, batches) for epoch in range(epochs) for batch in range(batches)]
    assert all(0 < rate <= 2 for rate in rates)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, float("nan")])
def test_a_height_outside_of_the_cycle_is_refused(share):
    with pytest.raises(InvalidInput, match="one_cycle is .*; expected a share above 0 and below 1"):
        LearningRateSchedule(one_cycle=share)


@pytest.mark.parametrize("decay", [{"decay_factor": 0.1}, {"decay_every": 3}, {"decay_from": 0}])
def test_one_cycle_does_not_go_with_decays(decay):
    with pytest.raises(InvalidInput, match="one_cycle is set, but so are decays"):
        LearningRateSchedule(0.1, one_cycle=0.3, **decay)
