"""Trials are shown with the settings they try, by what they prove of held-out images."""

from dataclasses import replace

import pytest

import patchcert as pc
from patchcert.comparison.trials import trials_table
from patchcert.errors import InvalidInput

TRIALS = """
spec = "paper-mnist"
[[trials]]
name = "base"
[[trials]]
name = "wide"
set = ["model.hidden=512", "seed=3"]
[[trials]]
name = "not-done"
"""


@pytest.fixture
def folder(finished, mlp, tmp_path):
    """Trials of one seed and of two, whose runs are made up."""
    (tmp_path / "few.toml").write_text(TRIALS)
    counts = {"base": (90, 60), "wide/seed-1": (80, 70), "wide/seed-2": (84, 61)}
    for number, (name, found) in enumerate(counts.items()):
        target = tmp_path / "results" / "few" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        finished.run(replace(mlp, seed=number), {pc.Patch(5): found}).path.rename(target)
    return tmp_path


def test_the_best_mean_comes_first_with_its_spread(folder):
    assert trials_table(folder, "few").shown() == [
        ["wide", "`model.hidden=512`, `seed=3`", "2", "82.0", "65.5 ± 6.4"],
        ["base", "as given", "1", "90.0", "60.0"],
    ]


def test_trials_without_evidence_are_refused(tmp_path):
    (tmp_path / "few.toml").write_text(TRIALS)
    with pytest.raises(InvalidInput, match="has no evidence of the trials"):
        trials_table(tmp_path, "few")
