"""Dot charts: every number lies on the axis at its place, and the words say the same."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchcert.report.dots import Measured, dot_group

SHARES = st.floats(0, 100, allow_subnormal=False)


@st.composite
def measured_rows(draw):
    rows = []
    for number in range(draw(st.integers(1, 5))):
        low, ours, high = sorted(draw(st.tuples(SHARES, SHARES, SHARES)))
        rows.append(Measured(f"row {number}", draw(SHARES), ours, low, high))
    return rows


@given(measured_rows())
def test_everything_lies_on_the_axis_in_order(rows):
    group = dot_group("any", rows)
    for row, drawn in zip(rows, group.rows, strict=True):
        assert drawn.paper is not None
        assert -1e-6 <= drawn.low <= drawn.ours <= drawn.high <= 100 + 1e-6
        assert (row.paper < row.ours) == (drawn.paper < drawn.ours)
    places = [tick.at for tick in group.ticks]
    assert places[0] == 0
    assert places[-1] == pytest.approx(100)
    assert all(before < after for before, after in pairwise(places))
    values = [float(tick.text.rstrip("%")) for tick in group.ticks]
    assert 0 <= values[0] < values[-1] <= 100


def test_places_are_those_of_the_ticks():
    group = dot_group(
        "any", [Measured("a", 20.0, 40.0, 39.0, 41.0), Measured("b", 60.0, None, note="not run")]
    )
    places = {tick.text: tick.at for tick in group.ticks}
    assert group.rows[0].paper == pytest.approx(places["20%"])
    assert group.rows[0].ours == pytest.approx(places["40%"])
    assert group.rows[1].paper == pytest.approx(places["60%"])


def test_small_differences_look_small():
    group = dot_group("any", [Measured("a", 61.97, 62.07)])
    assert abs(group.rows[0].ours - group.rows[0].paper) <= 1


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
    assert dot_group("any", [row]).rows[0].summary == summary
