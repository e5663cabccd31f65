"""The tables of the performance page are those of the stored measurements."""

import json
import re
from pathlib import Path

import pytest

from patchcert.bench.report import contradictions, markdown

DOCS = Path(__file__).parents[1] / "docs"


def test_every_table_is_made_from_its_measurements():
    page = (DOCS / "performance.md").read_text()
    sources = re.findall(r"<!-- table: bench docs/(\S+) -->", page)
    assert sources
    for source in sources:
        table = markdown(json.loads((DOCS / source).read_text()))
        assert f"<!-- table: bench docs/{source} -->\n{table}<!-- end of table -->" in page, (
            "bring it up to date with `patchcert audit results --write`"
        )


@pytest.mark.parametrize("file", sorted((DOCS / "performance").glob("*.json")), ids=lambda file: file.name)
def test_measurements_follow_from_each_other(file):
    assert contradictions(json.loads(file.read_text())) == ()


@pytest.mark.parametrize("name", ["step_ratio", "sweep_ratio", "certification_seconds", "training_step"])
def test_an_inflated_figure_is_noticed(name):
    facts = json.loads((DOCS / "performance" / "h200.json").read_text())
    facts["cases"][0][name] *= 1.5
    found = contradictions(facts)
    assert found
    assert found[0].startswith(f"{facts['cases'][0]['case']}: ")


def test_an_inflated_attack_is_noticed():
    facts = json.loads((DOCS / "performance" / "h200.json").read_text())
    facts["cases"][0]["attack"]["ratio"] = 360.0
    assert "attack.ratio is 360.0" in contradictions(facts)[0]


@pytest.mark.parametrize("name", ["ratio", "seconds"])
def test_inflated_linear_bounds_are_noticed(name):
    facts = json.loads((DOCS / "performance" / "cpu.json").read_text())
    case = next(each for each in facts["cases"] if "linear" in each)
    assert case["case"] == "mlp mnist 5x5"
    case["linear"][name] *= 1.5
    assert f"linear.{name} is {case['linear'][name]}" in contradictions(facts)[0]
