import pytest

from patchcert.train.loop import Position
from patchcert.train.pace import TrainingPace
from patchcert.train.schedules import EpsilonSchedule, Schedule

SCHEDULE = Schedule(10, EpsilonSchedule(natural_epochs=2, ramp_epochs=3))


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


def test_natural_batches_and_those_with_bounds_are_counted_apart():
    clock = Clock()
    pace = TrainingPace(SCHEDULE, 5, Position(), {True: 1.0, False: 20.0}, clock)
    assert pace.remaining == pytest.approx(10 * 1 + 40 * 20)
    clock.now += 4
    pace.note(Position(0, 2))  # two seconds each, more than was tried
    assert pace.remaining == pytest.approx(8 * 2 + 40 * 20)
    clock.now += 16
    pace.note(Position(2, 0))
    assert pace.remaining == pytest.approx(40 * 20)
    clock.now += 10
    pace.note(Position(2, 1))
    assert pace.remaining == pytest.approx(39 * 10)
    clock.now += 5
    assert pace.remaining == pytest.approx(39 * 10 - 5)
    assert pace.elapsed == 35
    assert pace.share == 11 / 50


def test_nothing_is_said_of_batches_of_which_nothing_is_known():
    clock = Clock()
    pace = TrainingPace(SCHEDULE, 5, Position(), {}, clock)
    assert pace.remaining is None
    clock.now += 10
    pace.note(Position(2, 0))
    assert pace.remaining is None
    clock.now += 1
    pace.note(Position(2, 1))
    assert pace.remaining == pytest.approx(39)


def test_a_resumed_training_counts_from_where_it_is():
    clock = Clock()
    pace = TrainingPace(SCHEDULE, 5, Position(9, 3), {False: 2.0}, clock)
    assert pace.remaining == pytest.approx(4)
    clock.now += 100
    assert pace.remaining is None  # longer than all that was left: nothing is known of it any more
    pace.note(Position(10))
    assert (pace.remaining, pace.share) == (0, 1)
