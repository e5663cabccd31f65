"""Exact intervals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from patchcert.errors import InvalidInput
from patchcert.report.statistics import Proportion, clopper_pearson, count, mean_interval


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (81, 263, 0.2527, 0.3676),  # the four examples of Newcombe (1998), exact method
        (15, 148, 0.0578, 0.1617),
        (0, 20, 0.0, 0.1684),
        (1, 29, 0.0009, 0.1776),
        (10, 10, 0.025 ** (1 / 10), 1.0),
    ],
)
def test_known_clopper_pearson_intervals(successes, total, low, high):
    assert clopper_pearson(successes, total) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 400), st.floats(0.0, 1.0))
def test_the_interval_ends_where_the_tails_reach_a_fortieth(total, share):
    successes = round(share * total)
    low, high = clopper_pearson(successes, total)
    assert 0 <= low <= successes / total <= high <= 1
    if successes > 0:
        assert binom.sf(successes - 1, total, low) == pytest.approx(0.025, rel=1e-5)
    if successes < total:
        assert binom.cdf(successes, total, high) == pytest.approx(0.025, rel=1e-5)


@pytest.mark.parametrize(("successes", "total"), [(0, 0), (3, 2), (-1, 5)])
def test_impossible_counts_are_refused(successes, total):
    with pytest.raises(InvalidInput, match=f"got {successes} of {total}"):
        clopper_pearson(successes, total)


def test_a_confidence_outside_its_range_is_refused():
    with pytest.raises(InvalidInput, match=r"strictly between 0 and 1, got 1\.0"):
        clopper_pearson(1, 2, confidence=1.0)


def test_nothing_measured_is_no_proportion():
    with pytest.raises(InvalidInput, match="got 0 of 0"):
        Proportion.of(np.array([], dtype=bool))


def test_a_proportion_counts_true_entries():
    proportion = Proportion.of(np.array([True, False, True, True]))
    assert (proportion.successes, proportion.total, proportion.value) == (3, 4, 0.75)
    plain = proportion.to_dict()
    assert (plain["accuracy"], plain["right"], plain["images"]) == (0.75, 3, 4)
    assert tuple(plain["interval"]) == proportion.interval


def test_the_interval_of_one_proportion_is_its_own():
    assert mean_interval([Proportion(81, 263)]) == clopper_pearson(81, 263)


def test_the_interval_of_a_mean_holds_when_runs_share_their_images():
    """Wholly dependent proportions are the worst case; the risk, counted exactly, stays below a twentieth."""
    total, truth = 50, 0.3
    missed = 0.0
    for successes in range(total + 1):
        low, high = mean_interval([Proportion(successes, total)] * 3)
        missed += binom.pmf(successes, total, truth) * (not low <= truth <= high)
    assert missed <= 0.05
    low, high = mean_interval([Proportion(10, 50), Proportion(40, 50)])
    assert low < 0.5 < high


def test_a_mean_of_nothing_is_refused():
    with pytest.raises(InvalidInput, match="a mean needs at least one proportion"):
        mean_interval([])


@pytest.mark.parametrize(("name", "broken"), [("MaskedDetection", 0), ("DoubleMasking", 4)])
def test_an_alert_breaks_no_proof_of_detection(run, asked, changed, name, broken):
    attack = asked(run.attacks[0], classifier={"name": name})
    hit = attack.columns["succeeded"]
    alerts = changed(attack, prediction_after=np.where(hit, -1, attack.columns["prediction_after"]))
    assert count(alerts)["broken"] == broken
