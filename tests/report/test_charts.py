"""The geometry of charts: every number lies at its place, and the words say the same."""

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchcert.report.charts import (
    DotGroup,
    Measured,
    Point,
    Series,
    line_chart,
    nice_axis,
    path,
    percent_axis,
    spread,
    training_curves,
    whole_axis,
)

SHARES = st.floats(0, 100, allow_subnormal=False)


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
    assert percent_axis(63).show(70.0) == "70%"
    assert percent_axis(63).low == 60


def test_higher_values_are_drawn_higher_and_later_ones_further_right():
    chart = line_chart(
        "t", whole_axis("epoch", 0, 2), nice_axis("", 0, 1), [Series("a", (Point(0, 0.0), Point(2, 1.0)))]
    )
    (x0, y0), (x1, y1) = [
        tuple(map(float, place))
        for place in re.findall(r"[ML]([\d.]+) ([\d.]+)", chart.path(chart.series[0]))
    ]
    assert (x0, y0) == (chart.x.start, chart.y.start)
    assert (x1, y1) == (chart.x.end, chart.y.end)
    assert x0 < x1
    assert y0 > y1


def test_a_value_that_is_not_finite_leaves_a_gap():
    assert path([(0, 0), (1, math.nan), (2, 2), (3, 3)]) == "M0.0 0.0 M2.0 2.0 L3.0 3.0"


@given(st.lists(st.floats(0, 200), max_size=8))
def test_labels_keep_their_distance_and_stay_inside(wanted):
    placed = sorted(spread(wanted, 15, 0, 200))
    assert all(b - a >= 15 - 1e-9 for a, b in itertools.pairwise(placed))
    assert all(-1e-9 <= place <= 200 + 1e-9 for place in placed)


def test_intervals_become_whiskers_with_words():
    point = Point(2, 50.0, 40.0, 60.0)
    series = Series("certified", (point,), markers=True)
    chart = line_chart("t", whole_axis("side", 1, 5), percent_axis(), [series])
    low, middle, high = (chart.y.place(value) for value in (40.0, 50.0, 60.0))
    assert high < middle < low
    assert chart.text(point) == "50.0% (40.0 to 60.0%)"


def test_a_chart_says_in_words_where_its_lines_end():
    series = [Series("clean", (Point(0, 10.0), Point(1, 95.5)))]
    chart = line_chart("Accuracy", whole_axis("epoch", 0, 1), percent_axis(), series)
    assert chart.summary == "Accuracy against epoch: clean ends at 95.5%."


@pytest.mark.parametrize("epochs", [1, 3])
def test_short_trainings_have_an_axis(epochs):
    assert whole_axis("epoch", 0, epochs - 1).high > 0


def test_a_single_check_is_a_dot():
    (accuracy,) = training_curves([{"epoch": 0}, {"epoch": 1, "clean_accuracy": 0.5}])
    assert [(each.markers, len(each.points)) for each in accuracy.series] == [(True, 1)]


def test_epochs_are_counted_as_in_messages():
    (loss,) = training_curves([{"epoch": epoch, "loss": 1.0} for epoch in range(10)])
    assert [point.x for point in loss.series[0].points] == [*range(1, 11)]
    assert (loss.x.low, loss.x.high) == (1, 10)


@st.composite
def measured_rows(draw):
    rows = []
    for number in range(draw(st.integers(1, 5))):
        low, ours, high = sorted(draw(st.tuples(SHARES, SHARES, SHARES)))
        rows.append(Measured(f"row {number}", draw(SHARES), ours, low, high))
    return rows


@given(measured_rows())
def test_everything_lies_on_the_axis_in_order(rows):
    axis = DotGroup("any", tuple(rows)).axis
    for row in rows:
        paper, low, ours, high = map(axis.place, (row.paper, row.low, row.ours, row.high))
        assert -1e-6 <= low <= ours <= high <= 100 + 1e-6
        assert (row.paper < row.ours) == (paper < ours)
    places = [axis.place(tick) for tick in axis.ticks]
    assert places[0] == 0
    assert places[-1] == pytest.approx(100)
    assert all(before < after for before, after in itertools.pairwise(places))
    values = [float(axis.show(tick).rstrip("%")) for tick in axis.ticks]
    assert 0 <= values[0] < values[-1] <= 100


def test_small_differences_look_small():
    axis = DotGroup("any", (Measured("a", 61.97, 62.07),)).axis
    assert abs(axis.place(62.07) - axis.place(61.97)) <= 1


@pytest.mark.parametrize(
    ("row", "summary"),
    [
        (Measured("a", 61.97, 62.07, 61.1, 63.0), "a: paper 62.0%, ours 62.1% (61.1 to 63.0%)"),
        (Measured("a", None, 50.0), "a: the paper has no number, ours 50.0%"),
        (Measured("a", 50.0, None, note="not run"), "a: paper 50.0%, ours not run"),
        (
            Measured("a", 50.0, 40.0, note="schedule scaled by 0.1"),
            "a: paper 50.0%, ours 40.0%, schedule scaled by 0.1",
        ),
    ],
)
def test_words_say_what_is_drawn(row, summary):
    assert row.summary == summary
