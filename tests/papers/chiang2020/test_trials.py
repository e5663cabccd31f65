"""One setting for all models of a row: the rule by itself, on trials that are made up."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchcert.errors import RunError
from patchcert.papers.chiang2020.attack_plan import TuningPlan
from patchcert.papers.chiang2020.trials import Trials, choose

PLAN = TuningPlan("2x2", "lgs", 100)


def trials(counts, undefended=100, total=100, weights="a"):
    """Trials of {setting: (clean, weak)}."""
    clean, weak = zip(*counts.values(), strict=True)
    columns = {"setting": np.array(list(counts)), "clean": np.array(clean), "weak": np.array(weak)}
    meta = {"plan": PLAN.to_dict(), "data": {"images": total}, "undefended_correct": undefended}
    return Trials(Path(f"{weights}.npz"), columns, meta | {"weights_sha256": weights})


def test_the_largest_mean_weak_accuracy_counts_not_that_of_one_model():
    first = trials({"a": (99, 90), "b": (99, 80), "c": (99, 86)}, weights="first")
    second = trials({"a": (99, 70), "b": (99, 85), "c": (99, 83)}, weights="second")
    choice = choose([first, second], 0.02)
    assert choice.setting == "c"
    assert (choice.clean_accuracy, choice.weak_accuracy, choice.undefended_accuracy) == (0.99, 0.845, 1.0)
    assert (choice.is_within_drop, choice.settings, choice.weights) == (True, 3, ("first", "second"))


def test_the_mean_clean_accuracy_is_what_may_drop():
    first, second = trials({"a": (95, 90), "b": (98, 50)}), trials({"a": (99, 90), "b": (98, 50)})
    assert choose([first, second], 0.03).setting == "a"
    assert choose([first, second], 0.02).setting == "b"


def test_a_drop_of_exactly_the_limit_is_allowed():
    assert choose([trials({"a": (98, 90), "b": (99, 80)})] * 3, 0.02).setting == "a"
    assert choose([trials({"a": (48, 40), "b": (64, 20)}, undefended=64)] * 3, 0.16).setting == "a"


def test_ties_are_broken_by_clean_accuracy_then_by_the_order_of_the_grid():
    assert choose([trials({"a": (98, 90), "b": (99, 90)})], 0.02).setting == "b"
    assert choose([trials({"a": (99, 90), "b": (99, 90)})], 0.02).setting == "a"
    crossed = [trials({"a": (99, 90), "b": (99, 80)}), trials({"b": (99, 90), "a": (99, 80)})]
    assert choose(crossed, 0.02).setting == "a"


def test_thirds_that_are_equal_tie():
    """1/3 + 1/3 + 1/3 in floating point depends on the order; here it does not."""
    models = [trials({"a": (3, one), "b": (3, other)}, 3, 3) for one, other in ((1, 2), (1, 0), (0, 0))]
    assert choose(models, 0.02).setting == "a"
    assert choose(models[::-1], 0.02).setting == "a"


def test_where_none_is_allowed_the_cheapest_is_taken_and_said_to_be():
    choice = choose([trials({"a": (60, 59), "b": (70, 10), "c": (70, 20)})], 0.02)
    assert (choice.setting, choice.is_within_drop) == ("c", False)
    assert choose([trials({"a": (98, 59), "b": (70, 90)})], 0.02).is_within_drop


def test_only_settings_that_every_model_tried_count_and_by_their_description():
    first = trials({"guided": (99, 99), "a": (99, 80), "b": (99, 70)})
    second = trials({"b": (99, 70), "a": (99, 80)})
    for models in ([first, second], [second, first]):
        choice = choose(models, 0.02)
        assert (choice.setting, choice.settings) == ("a", 2)
    with pytest.raises(RunError, match="no setting of lgs was tried on every model of the row"):
        choose([first, trials({"other": (99, 99)})], 0.02)


shares = st.tuples(st.integers(0, 20), st.integers(0, 20))


@given(st.lists(st.lists(shares, min_size=4, max_size=4), min_size=1, max_size=3), st.integers(0, 20))
def test_no_allowed_setting_withstands_more(models, undefended):
    made = [
        trials(dict(zip("abcd", counts, strict=True)), undefended=undefended, total=20) for counts in models
    ]
    choice = choose(made, 0.1)
    clean = {name: sum(counts[at][0] for counts in models) for at, name in enumerate("abcd")}
    weak = {name: sum(counts[at][1] for counts in models) for at, name in enumerate("abcd")}
    allowed = [name for name in "abcd" if 10 * clean[name] >= (10 * undefended - 20) * len(models)]
    assert choice.is_within_drop == bool(allowed)
    if allowed:
        assert weak[choice.setting] == max(weak[name] for name in allowed)
        assert choice.setting in allowed
    else:
        assert clean[choice.setting] == max(clean.values())


@pytest.mark.parametrize(
    ("counts", "message"),
    [({"a": (101, 50)}, "counts more images than 100"), ({"a": (50, -1)}, "counts more images than 100")],
)
def test_impossible_counts_are_refused(counts, message):
    with pytest.raises(RunError, match=message):
        trials(counts).check()


def test_a_setting_that_is_there_twice_is_refused():
    made = trials({"a": (99, 50), "b": (99, 50)})
    twice = Trials(made.path, {**made.columns, "setting": np.array(["a", "a"])}, made.meta)
    with pytest.raises(RunError, match="one row for each setting"):
        twice.check()
