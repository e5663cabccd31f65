"""Trials are shown with the settings they try, by what they prove of held-out images."""

import shutil
from dataclasses import replace

import pytest

import patchcert as pc
from forged_evidence import restate
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
        run = finished.run(replace(mlp, seed=number), {pc.Patch(5): found}, weights_seed=number)
        (file,) = run.path.rglob("*.npz")
        restate(file, lambda _, meta: meta["data"].update(split="validation:100"))
        run.path.rename(target)
    return tmp_path


def test_the_best_mean_comes_first_with_its_spread(folder):
    assert trials_table(folder, "few").shown() == [
        ["wide", "`model.hidden=512`, `seed=3`", "2", "82.0", "65.5 ± 6.4"],
        ["base", "as given", "1", "90.0", "60.0"],
    ]


@pytest.mark.parametrize(
    ("change", "noticed"),
    [
        ({"data": {"name": "mnist", "split": "test"}}, "is no proof of held-out images"),
        ({"threat": pc.Patch(4).to_dict()}, "answers another question"),
    ],
)
def test_what_other_images_or_patches_prove_is_not_counted(folder, change, noticed):
    (file,) = (folder / "results" / "few" / "wide" / "seed-2").rglob("*.npz")
    restate(file, lambda _, meta: meta.update(change))
    with pytest.raises(InvalidInput, match=noticed):
        trials_table(folder, "few")


def test_a_seed_that_was_copied_is_not_another_one(folder):
    wide = folder / "results" / "few" / "wide"
    shutil.copytree(wide / "seed-1", wide / "seed-3")
    with pytest.raises(InvalidInput, match="are not all of other weights"):
        trials_table(folder, "few")


def test_trials_without_evidence_are_refused(tmp_path):
    (tmp_path / "few.toml").write_text(TRIALS)
    with pytest.raises(InvalidInput, match="has no evidence of the trials"):
        trials_table(tmp_path, "few")
