"""The seconds of refinement that the documents state, stage by stage, are of proofs that agree with stored evidence."""

import json
from pathlib import Path

import pytest

import patchcert as pc
from patchcert.evidence import Evidence
from scripts import load_script

MEASUREMENTS = Path(__file__).parents[1] / "docs" / "measurements"


@pytest.fixture(scope="module")
def stored():
    return json.loads((MEASUREMENTS / "refinement-stages.json").read_text())["models"]


def test_each_stage_sees_what_the_one_before_has_left():
    chosen = pc.load_dataset("mnist-mini").test.take(60)
    found = load_script("refinement_stages").measure("mnist-5x5-cnn2", chosen.floats(), chosen.labels)
    stages = found["stages"]
    assert list(stages) == ["intervals", "search", "linear", "split"]
    assert stages["intervals"]["images"] == 60 > stages["search"]["images"] > stages["linear"]["images"] > 0
    assert 0 < sum(stage["seconds"] for stage in stages.values()) < found["seconds"]
    assert found["open"] == 0
    assert stages["search"]["images"] >= found["broken"]


def test_the_stored_proofs_are_those_of_the_evidence(stored):
    assert list(stored) == list(load_script("refinement_stages").MODELS)
    for name, found in stored.items():
        evidence = Evidence.read(MEASUREMENTS / f"refined-{name}.npz")
        assert found["images"] == evidence.total == 10_000
        assert (found["certified"], found["open"]) == (evidence.certified, 0)
        looked_at = [stage["images"] for stage in found["stages"].values()]
        assert looked_at == sorted(looked_at, reverse=True)
