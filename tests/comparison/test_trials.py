"""Trials are shown with the settings they try, by what they prove of held-out images."""

import shutil

import pytest

import patchcert as pc
from forged_evidence import restate
from patchcert.comparison.trials import audit_trials, trials_table
from patchcert.errors import InvalidInput
from patchcert.train.spec import read_spec

TRIALS = """
spec = "paper-mnist"
held_out = 100
images = 50
set = ["schedule.epochs=9"]
[[trials]]
name = "base"
[[trials]]
name = "wide"
set = ["model.hidden=512", "optimiser.batch_size=64"]
[[trials]]
name = "not-done"
"""


@pytest.fixture
def folder(finished, tmp_path):
    """Trials of one seed and of two, whose runs are made up."""
    (tmp_path / "few.toml").write_text(TRIALS)
    counts = {"base": (90, 60), "wide/seed-1": (80, 70), "wide/seed-2": (84, 61)}
    common = ("schedule.epochs=9", "data.validation=100")
    for number, (name, found) in enumerate(counts.items()):
        wide = ("model.hidden=512", "optimiser.batch_size=64") if name.startswith("wide") else ()
        spec = read_spec("paper-mnist", (*common, *wide, f"seed={number}"))
        target = tmp_path / "results" / "few" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        run = finished.run(spec, {pc.Patch(5): found}, weights_seed=number)
        (file,) = run.path.rglob("*.npz")
        restate(file, lambda _, meta: meta["data"].update(split="validation:100"))
        run.path.rename(target)
    return tmp_path


def test_the_best_mean_comes_first_with_its_spread(folder):
    assert trials_table(folder, "few").shown() == [
        ["wide", "`model.hidden=512`, `optimiser.batch_size=64`", "2", "82.0", "65.5 ± 6.4"],
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


@pytest.mark.parametrize(
    ("before", "after"),
    [("hidden=512", "hidden=256"), ("held_out = 100", "held_out = 50"), ("epochs=9", "epochs=90")],
)
def test_a_trial_was_trained_with_the_settings_that_are_shown_beside_it(folder, before, after):
    (folder / "few.toml").write_text(TRIALS.replace(before, after))
    with pytest.raises(InvalidInput, match="was not trained with the settings of the trial"):
        trials_table(folder, "few")


def test_no_seed_of_a_trial_is_left_out(folder):
    (folder / "few.toml").write_text(TRIALS.replace("held_out", "seeds = [0]\nheld_out"))
    with pytest.raises(InvalidInput, match=r"the trial wide has the seeds \[1, 2\]; expected \[0\]"):
        trials_table(folder, "few")


def test_no_trial_that_was_carried_out_is_left_out(folder):
    left_out = TRIALS.replace('name = "base"', 'name = "basis"')
    (folder / "few.toml").write_text(left_out)
    with pytest.raises(InvalidInput, match="base has results of no trial that is named"):
        trials_table(folder, "few")
    (folder / "few.toml").write_text(f'earlier = ["base"]{left_out}')
    assert [row[0] for row in trials_table(folder, "few").shown()] == ["wide"]


@pytest.mark.parametrize(
    ("text", "noticed"),
    [
        (TRIALS.replace("hidden=512", "hidden=256"), "was not trained with the settings of the trial wide"),
        ('settings = ["refine=split"]' + TRIALS, "is no proof with the settings refine=split"),
        (TRIALS.replace("base", "basis"), "has results of no trial that is named"),
        ("spec = 'paper-mnist'", "trials is missing"),
        ("spec = ", "Invalid value"),
        (None, "No such file"),
    ],
)
def test_files_of_trials_are_audited_whether_or_not_a_document_shows_them(folder, text, noticed):
    (folder / "new.toml").write_text(TRIALS)
    assert list(audit_trials(folder)) == []
    file = folder / "few.toml"
    file.unlink() if text is None else file.write_text(text)
    (finding,) = audit_trials(folder)
    assert finding.path == file
    assert noticed in finding.what


def test_all_trials_of_a_table_are_of_the_same_images(folder):
    (file,) = (folder / "results" / "few" / "base").rglob("*.npz")
    restate(file, lambda _, meta: meta["data"].update(split="validation:101"))
    with pytest.raises(InvalidInput, match="not all of the same images and threat"):
        trials_table(folder, "few")


def test_trials_without_evidence_are_refused(tmp_path):
    (tmp_path / "few.toml").write_text(TRIALS)
    with pytest.raises(InvalidInput, match="has no evidence of the trials"):
        trials_table(tmp_path, "few")
