"""The files in trials/ can be carried out, and what they have found is ranked as it was."""

import json
from pathlib import Path

import pytest

from patchcert.cli.app import run
from patchcert.comparison.trials import read_trials
from patchcert.train.spec import read_spec

FOLDER = Path(__file__).parents[1] / "trials"
FILES = sorted(FOLDER.glob("*.toml"))
EARLIER = {"local-cifar10-5x5": {"softmax"}}
"""Trained by a recipe that was changed since: no document shows it."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_trial_has_a_specification(file):
    asked = read_trials(file)
    found = set()
    runs = [each for trial in asked.trials for each in asked.runs(trial, Path())]
    for each in runs:
        spec = read_spec(asked.spec, each.changes)
        assert spec.data.validation == asked.held_out
        found.add((spec.fingerprint(), asked.proof_settings(each.trial)))
    assert len(found) == len(runs)


def test_the_stored_trials_of_masked_training_are_ranked_from_their_evidence(capsys):
    stored = FOLDER / "results" / "masked-cifar10-5x5"
    assert run(["choose", str(FOLDER / "masked-cifar10-5x5.toml"), "--out", str(stored), "--rank-only"]) == 0
    ranked = json.loads(capsys.readouterr().out)["trials"]
    names = [row["trial"] for row in ranked]
    assert {"base", "worst-of-16", "worst-early", "no-worst"} <= set(names)
    assert names.index("worst-of-16") < names.index("base") < names.index("no-worst")


@pytest.mark.parametrize("stored", sorted((FOLDER / "results").glob("*")), ids=lambda folder: folder.name)
def test_every_stored_trial_was_trained_with_the_settings_of_its_name(stored, capsys):
    """Those of another specification, or whose proof is not the one asked for, are not ranked."""
    file = FOLDER / f"{stored.name}.toml"
    assert run(["choose", str(file), "--out", str(stored), "--rank-only"]) == 0
    ranked = {row["trial"] for row in json.loads(capsys.readouterr().out)["trials"]}
    earlier = EARLIER.get(stored.name, set()) | set(read_trials(file).earlier)
    assert ranked == {folder.name for folder in stored.iterdir()} - earlier
