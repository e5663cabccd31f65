import re
import time

import pytest

from patchcert.cli import output
from patchcert.cli.output import Pace, Talk, detail, duration, progress_bar, regular_lines, say, talk, talking


def test_work_that_is_soon_done_is_one_line_without_a_terminal(capsys):
    with progress_bar("counting", "sheep") as report:
        for done in range(1, 4):
            report(done, 3)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"counting: 3 sheep in \d+\.\d s\n", shown.err)


def test_without_a_terminal_long_work_has_regular_lines_even_where_nothing_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(output, "NEXT_LINE", 0.0)
    with regular_lines(lambda: "still there", first=0.02, every=0.05):
        time.sleep(0.3)
    assert 3 <= capsys.readouterr().err.count("still there\n") <= 7
    monkeypatch.setattr(output.regular_lines.__wrapped__, "__defaults__", (0.02, 0.05))
    with progress_bar("counting", "sheep") as report:
        report(0, 10)
        time.sleep(0.04)
        report(2, 10)
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "counting: 0 of 10 sheep after 1 s"
    assert lines[1] == "counting: 2 of 10 sheep after 1 s, about 1 s to go"


def test_on_a_terminal_a_bar_is_drawn(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("counting", "sheep") as report:
        report(1, 0)
        report(3, 3)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "3/3" in shown.err


def test_the_time_that_is_left_follows_from_what_was_done_since_the_first_report():
    now = [100.0]
    pace = Pace(lambda: now[0])
    assert pace.remaining is None
    now[0] = 103.0
    pace.note(5000, 10000)
    assert pace.remaining is None  # what was kept of earlier work says nothing of its speed
    now[0] = 113.0
    pace.note(6000, 10000)
    assert pace.remaining == pytest.approx(40)
    now[0] = 118.0
    assert pace.remaining == pytest.approx(35)
    assert str(pace) == "about 35 s to go"
    now[0] = 1000.0
    assert pace.remaining is None  # more has passed than was left
    pace.note(10000, 10000)
    assert pace.remaining == 0


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 s"), (89, "89 s"), (100, "2 min"), (5340, "89 min"), (7860, "2 h 11 min")]
)
def test_durations_are_in_the_units_that_people_use(seconds, words):
    assert duration(seconds) == words


def test_how_much_is_said(capsys):
    for amount, expected in ((Talk.QUIET, ""), (Talk.USUAL, "usual\n"), (Talk.VERBOSE, "usual\nmore\n")):
        with talking():
            talk(amount)
            say("usual")
            detail("more")
            with progress_bar("counting") as report:
                report(1, 1)
        shown = capsys.readouterr().err
        assert shown.startswith(expected)
        assert ("counting" in shown) == (amount != Talk.QUIET)
