"""`patchcert bench` measures, and shows what it measured earlier."""

import json
from pathlib import Path

import pytest

from patchcert.bench import Case, MaskedCase, VotesCase
from patchcert.bench.report import contradictions
from patchcert.cli.app import run

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def tiny_cases(monkeypatch):
    cases = (Case("mlp", "tiny", 2, 1, 8), Case("cnn2", "tiny", 3, 3, 8))
    monkeypatch.setattr("patchcert.bench.CASES", cases)
    monkeypatch.setattr("patchcert.bench.MASKED_CASES", (MaskedCase("resnet18", 8, 2, 3),))
    monkeypatch.setattr("patchcert.bench.VOTES_CASES", (VotesCase("stripnet", 3, 30, "sum", "softmax"),))


def test_measurements_are_json_that_can_be_shown_again(tiny_cases, tmp_path, capsys, answered):
    facts = answered(run(["bench", "--device", "cpu", "--batch", "2", "--spend", "0", "--json"]))
    assert [case["case"] for case in facts["cases"]] == ["mlp tiny 2x2", "cnn2 tiny 3x3"]
    for case in facts["cases"]:
        assert case["step_ratio"] == pytest.approx(case["dense_step"] / case["training_step"])
        assert 0 < case["floor_float32"] < case["sweep_float32"]
        rates = case["attack"]
        assert (rates["images"], rates["restarts"], rates["steps"]) == (2, 8, 5)
        assert rates["ratio"] == pytest.approx(rates["batched"] / rates["plain"])
    stored = tmp_path / "bench.json"
    stored.write_text(json.dumps(facts))
    assert run(["bench", "--from", str(stored), "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert "| mlp tiny 2x2 |" in shown
    assert f"{facts['cases'][1]['step_ratio']:.1f}x" in shown
    assert f"{facts['cases'][1]['attack']['ratio']:.1f}x | 2 x 8 x 5 |" in shown
    assert run(["bench", "--from", str(stored)]) == 0
    assert "cnn2 tiny 3x3" in capsys.readouterr().out


def test_measurements_from_before_attacks_were_measured_are_shown_without_them(tmp_path, capsys):
    facts = json.loads((DOCS / "performance" / "cpu.json").read_text())
    stored = tmp_path / "bench.json"
    del facts["cases"][0]["attack"]
    stored.write_text(json.dumps(facts))
    assert run(["bench", "--from", str(stored), "--markdown"]) == 0
    assert f"| {facts['cases'][0]['case']} | - | - | - | - |" in capsys.readouterr().out
    for case in facts["cases"][1:]:
        del case["attack"]
    stored.write_text(json.dumps(facts))
    assert run(["bench", "--from", str(stored), "--markdown"]) == 0
    assert "Attack" not in capsys.readouterr().out


def test_the_patch_can_have_another_size(tiny_cases, answered):
    options = ["--device", "cpu", "--batch", "2", "--spend", "0", "--json"]
    (case,) = answered(run(["bench", "--patch", "4", "--only", "mlp", *options]))["cases"]
    assert (case["case"], case["placements"]) == ("mlp tiny 4x4", 25)


def test_a_case_that_does_not_exist_is_answered_with_those_that_do(tiny_cases, refused):
    assert "no case holds 'vgg'" in refused(run(["bench", "--only", "vgg"]))


def test_a_file_without_measurements_is_refused(tmp_path, refused):
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert "holds no measurements" in refused(run(["bench", "--from", str(other)]))


def test_local_votes_are_measured_in_their_pass_and_in_their_sums(tiny_cases, tmp_path, capsys, answered):
    options = ["--device", "cpu", "--batch", "2", "--spend", "0", "--json"]
    facts = answered(run(["bench", "--only", "softmax", *options]))
    (case,) = facts["votes"]
    assert (case["case"], case["images"], case["placements"]) == ("stripnet 30x30, softmax, sum", 2, 9)
    assert 0 < case["sum_seconds"] < case["certify_seconds"]
    assert case["sums"] == case["sum_seconds"] * 10_000 / 2
    assert not contradictions(facts)
    assert contradictions({**facts, "votes": [{**case, "sums": 1e-9}]})
    stored = tmp_path / "votes.json"
    stored.write_text(json.dumps(facts))
    assert run(["bench", "--from", str(stored), "--markdown"]) == 0
    assert "| stripnet 30x30, softmax, sum | 8 | 2 | 9 |" in capsys.readouterr().out


def test_masked_passes_are_measured_beside_those_of_the_bare_network(tiny_cases, tmp_path, capsys, answered):
    facts = answered(run(["bench", "--device", "cpu", "--spend", "0", "--only", "masks", "--json"]))
    (case,) = facts["masked"]
    assert (case["case"], case["passes"], case["precision"]) == (
        "resnet18 8px 2x2, 3 x 3 masks",
        45,
        "float32",
    )
    assert case["ratio"] == case["masked"] / case["bare"]
    # Both are measured: how they compare hangs on what else the machine does.
    reached = case["masked"] * case["gigaflops"] / (1000 * facts["float32_teraflops"])
    assert case["fraction_of_floor"] == pytest.approx(reached)
    stored = tmp_path / "bench.json"
    stored.write_text(json.dumps(facts))
    assert run(["bench", "--from", str(stored), "--markdown"]) == 0
    assert "| resnet18 8px 2x2, 3 x 3 masks | 8 | float32 |" in capsys.readouterr().out
    assert not contradictions(facts)
    case["ratio"] *= 1.1
    assert contradictions(facts)
