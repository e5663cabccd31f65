"""The geometry of charts."""

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchcert.report.figures import (
    Point,
    Series,
    line_chart,
    nice_axis,
    path,
    percent_axis,
    spread,
    whole_axis,
)


@given(st.floats(-1e4, 1e4), st.floats(1e-3, 1e4))
def test_a_nice_axis_covers_its_range_with_even_round_ticks(low, span):
    axis = nice_axis("x", low, low + span)
    assert axis.low <= low + 1e-6 * span
    assert axis.high >= low + span * (1 - 1e-6)
    assert 2 <= len(axis.ticks) <= 8
    step = axis.ticks[1] - axis.ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(mantissa - nice) for nice in (1, 2, 5, 10)) < 1e-3


def test_an_empty_range_still_gives_an_axis():
    axis = nice_axis("x", 0.0, 0.0)
    assert axis.high > axis.low


@given(st.integers(0, 50), st.integers(0, 5000))
def test_a_whole_axis_has_few_whole_ticks_inside_its_range(low, span):
    axis = whole_axis("epoch", low, low + span)
    assert all(tick == int(tick) and low <= tick <= low + span for tick in axis.ticks)
    assert 1 <= len(axis.ticks) <= 10


def test_ticks_carry_as_many_decimals_as_their_step():
    assert [nice_axis("", 0, 1).show(value) for value in (0.0, 0.2)] == ["0.0", "0.2"]
    assert percent_axis(low=63).show(70.0) == "70%"
    assert percent_axis(low=63).low == 60


def test_higher_values_are_drawn_higher_and_later_ones_further_right():
    chart = line_chart(
        "t", whole_axis("epoch", 0, 2), nice_axis("", 0, 1), [Series("a", (Point(0, 0.0), Point(2, 1.0)))]
    )
    (x0, y0), (x1, y1) = [
        tuple(map(float, place)) for place in re.findall(r"[ML]([\d.]+) ([\d.]+)", chart.lines[0].path)
    ]
    assert (x0, y0) == (chart.left, chart.bottom)
    assert (x1, y1) == (chart.right, chart.top)


def test_a_value_that_is_not_finite_leaves_a_gap():
    assert path([(0, 0), (1, math.nan), (2, 2), (3, 3)]) == "M0.0 0.0 M2.0 2.0 L3.0 3.0"


@given(st.lists(st.floats(0, 200), max_size=8))
def test_labels_keep_their_distance_and_stay_inside(wanted):
    placed = sorted(spread(wanted, 15, 0, 200))
    assert all(b - a >= 15 - 1e-9 for a, b in itertools.pairwise(placed))
    assert all(-1e-9 <= place <= 200 + 1e-9 for place in placed)


def test_intervals_become_whiskers_with_words():
    series = Series("certified", (Point(2, 50.0, 40.0, 60.0),), markers=True)
    mark = line_chart("t", whole_axis("side", 1, 5), percent_axis(), [series]).lines[0].marks[0]
    assert mark.low is not None
    assert mark.high is not None
    assert mark.high < mark.y < mark.low
    assert mark.text == "50.0% (40.0 to 60.0%)"


def test_a_chart_says_in_words_where_its_lines_end():
    series = [Series("clean", (Point(0, 10.0), Point(1, 95.5)))]
    chart = line_chart("Accuracy", whole_axis("epoch", 0, 1), percent_axis(), series)
    assert chart.summary == "Accuracy against epoch: clean ends at 95.5%."


@pytest.mark.parametrize("epochs", [1, 3])
def test_short_trainings_have_an_axis(epochs):
    assert whole_axis("epoch", 0, epochs - 1).high > 0
