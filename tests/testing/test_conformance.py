import subprocess
import sys

import pytest

from patchcert.testing.conformance import ConformanceError, require, run_checks


def two_is_two(subject):
    """Numbers are themselves."""
    require(subject == 2, f"got {subject}")


def two_is_even(subject):
    """Even numbers leave no rest."""
    require(subject % 2 == 0, f"the rest is {subject % 2}\nwhich is odd")


def test_a_report_lists_every_check():
    report = run_checks("number", 2, [two_is_two, two_is_even])
    assert report.names == ("two_is_two", "two_is_even")
    assert str(report) == "number: 2 of 2 checks hold\n  holds  two_is_two\n  holds  two_is_even"


def test_all_failures_are_told_at_once():
    with pytest.raises(ConformanceError) as caught:
        run_checks("number", 3, [two_is_two, two_is_even])
    lines = str(caught.value).splitlines()
    assert lines[0] == "number: 0 of 2 checks hold"
    assert [line.strip() for line in lines[1:]] == [
        "FAILS  two_is_two",
        "got 3",
        "FAILS  two_is_even",
        "the rest is 1",
        "which is odd",
    ]


def test_a_conformance_error_is_an_assertion():
    assert issubclass(ConformanceError, AssertionError)


def test_the_suites_need_no_test_framework():
    code = "import sys, patchcert.testing; assert not {'pytest', 'hypothesis'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
