import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchcert.progress import Overture


def overture(times: list[float], following: float) -> tuple[Overture, list[float]]:
    shares = list[float]()
    clock = iter(times).__next__
    return Overture(lambda done, total: shares.append(done / total), lambda: following, clock), shares


def test_a_first_stage_is_a_share_of_itself_and_of_what_follows():
    report, shares = overture([0.0, 2.0, 4.0, 10.0], following=90)
    for done in (1, 2, 5):
        report(done, 5)
    assert shares == pytest.approx([2 / 100, 4 / 100, 10 / 100])
    assert report.share == shares[-1]


def test_what_comes_before_the_first_part_is_not_taken_for_the_pace_of_parts():
    report, shares = overture([0.0, 6.0, 8.0, 10.0], following=90)
    for done in (0, 1, 2):
        report(done, 2)
    assert shares == pytest.approx([0.0, 8 / 100, 10 / 100])


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 9)), min_size=1, max_size=50), st.floats(0, 1000))
def test_shares_never_fall_however_fast_parts_are(parts, following):
    times, done = [0.0], [0.0]
    for seconds, amount in parts:
        times.append(times[-1] + seconds)
        done.append(done[-1] + amount)
    report, shares = overture(times, following)
    for amount in done[1:]:
        report(amount, 1000)
    assert shares == sorted(shares)
    assert all(0 <= share <= 1 for share in shares)


def test_nothing_is_divided_by_no_time():
    report, shares = overture([0.0, 0.0], following=0.0)
    report(1, 1)
    assert shares == [0.0]
