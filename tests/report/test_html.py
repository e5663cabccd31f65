"""The page: well formed, self-contained, with the numbers that the evidence gives."""

import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from patchcert.errors import InvalidInput
from patchcert.report.charts import training_curves
from patchcert.report.html import write_page
from patchcert.report.statistics import Proportion
from patchcert.report.summary import RunSummary
from patchcert.report.tables import percent
from patchcert.threats import Patch, SparsePixels


@pytest.fixture
def read(tmp_path, parse):
    def write_and_read(*runs: RunSummary):
        return parse(write_page(runs, tmp_path / "page.html").path)

    return write_and_read


def test_the_page_is_well_formed_and_loads_nothing(read, run, tmp_path):
    reader = read(run)
    assert reader.addresses
    assert all(address.startswith(("data:", "#")) for address in reader.addresses)
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://", source)
    assert "default-src 'none'" in source
    assert not re.search(r"@import|url\((?!\$\{sprite)", source)


def test_headline_numbers_are_counted_from_the_rows(read, run):
    rows, attack = run.certificates[0], run.attacks[0]
    text = read(run).text
    for proportion in (
        Proportion.of(rows.prediction == rows.label),
        Proportion.of(rows.certified),
        Proportion.of(~attack.succeeded),
    ):
        low, high = proportion.interval
        assert percent(proportion.value) in text
        assert f"95% interval {100 * low:.1f} to {percent(high)}" in text
        assert f"{proportion.successes} of {proportion.total} images" in text
    assert (
        "For 28 of 40 test images (70.0%) it is proven that no 2x2 square patch, wherever it is placed,"
        in text
    )


def test_the_bars_use_only_images_that_were_both_certified_and_attacked(read, run):
    bracket = run.bracket
    assert bracket is not None
    assert (bracket.clean, bracket.empirical, bracket.certified) == (
        Proportion(18, 20),
        Proportion(14, 20),
        Proportion(14, 20),
    )
    assert "counted here on the 20 images" in read(run).text


def test_nothing_measured_is_said_and_never_shown_as_zero(read):
    text = read(RunSummary("empty")).text
    assert text.count("not measured") >= 4
    assert "0.0%" not in text
    assert "Certified accuracy: not measured." in text


def test_a_contradiction_is_shown_in_red_and_flagged(run, contradictory_run, read, tmp_path):
    assert write_page([run], tmp_path / "fine.html").consistent
    assert not write_page([run, contradictory_run], tmp_path / "bad.html").consistent
    text = read(run, contradictory_run).text
    assert "Evidence contradicts itself" in text
    assert "image 4: certified, but the attack changed the prediction" in text
    assert 'role="alert"' in (tmp_path / "bad.html").read_text(encoding="utf-8")
    assert 'role="alert"' not in (tmp_path / "fine.html").read_text(encoding="utf-8")


def test_hostile_names_stay_text(read, run):
    nasty = "</title><script>alert(1)</script>\"'&<b>{{ 7 * 7 }}"
    texts = {"name": nasty, "model": nasty, "dataset": nasty, "spec_text": nasty}
    hostile = replace(run, **texts, classes=(nasty,) * 10, environment={nasty: nasty, "device": nasty})
    reader, harmless = read(hostile), read(run)
    assert reader.tags == harmless.tags
    assert nasty in reader.text
    assert "49" not in reader.text.split("Specification")[-1]


def test_every_image_is_in_the_data_of_the_table(run, tmp_path):
    path = write_page([run], tmp_path / "page.html").path
    source = path.read_text(encoding="utf-8")
    data = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', source, re.S)[0])
    rows = run.certificates[0]
    assert data["index"] == rows.index.tolist()
    assert data["margin"] == rows.margin.tolist()
    verdicts = [data["verdicts"][number] for number in data["verdict"]]
    assert (verdicts.count("certified"), verdicts.count("wrong")) == (28, 4)
    outcomes = [data["outcomes"][number] for number in data["outcome"]]
    assert Counter(outcomes) == {"withstood": 14, "broken": 4, "wrong already": 2, "not attacked": 20}
    assert 'setAttribute("aria-sort"' in source
    assert 'name="verdict"' in source


def test_margins_that_are_not_finite_are_valid_json(run, tmp_path):
    rows = run.certificates[0]
    margin = rows.margin.copy()
    margin[:2] = np.nan, -np.inf
    broken = replace(run, certificates=(replace(rows, margin=margin),))
    source = write_page([broken], tmp_path / "page.html").path.read_text(encoding="utf-8")
    text = re.findall(r'<script type="application/json">(.*?)</script>', source, re.S)[0]
    data = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert data["margin"][:3] == [None, None, 3.25]
    assert source.count("<td>not finite</td>") == 2


def test_maps_attacks_and_what_is_needed_to_check_again_are_on_the_page(read, run):
    text = read(run).text
    assert "not certified -0.75 image 29, label class 9; weakest at row 3, column 7" in text
    assert (
        "before: class 0 after: class 1 the patch image 30, label class 0; patch at row 3, column 7" in text
    )
    assert "patchcert certify runs/known --patch 2" in text
    assert "versions.torch 9.9.9" in text
    assert "ab" * 32 in text
    assert "Training loss" in text
    assert "20 images attacked: 2 wrong already, 4 broken, 14 not broken." in text


def test_broken_images_that_were_not_kept_are_said_to_be_kept_by_an_option(read, run):
    assert "--save-images" not in read(run).text
    text = read(replace(run, attacked=())).text
    assert "14 not broken. Pictures are kept by `patchcert attack` with --save-images." in text


def test_a_single_check_is_a_dot():
    (accuracy,) = training_curves([{"epoch": 0}, {"epoch": 1, "clean_accuracy": 0.5}])
    assert [len(line.marks) for line in accuracy.lines] == [1]


def test_patch_sizes_are_compared_once_two_were_certified(read, run):
    assert "Certified accuracy against patch size" not in read(run).text
    rows = run.certificates[0]
    larger = replace(rows, threat=Patch(3), certified=rows.index < 10)
    reader = read(replace(run, certificates=(larger, rows)))
    assert "Certified accuracy against patch size" in reader.text
    assert "For 28 of 40 test images" in reader.text


def test_a_sparse_threat_has_words_and_no_placement(read, run):
    rows = run.certificates[0]
    nowhere = np.full_like(rows.top, -1)
    sparse = replace(rows, threat=SparsePixels(4), top=nowhere, left=nowhere)
    text = read(replace(run, threat=SparsePixels(4), certificates=(sparse,), attacks=())).text
    assert "no change of 4 pixels, wherever they lie," in text
    assert "3, 7" not in text.split("Every image")[1].split("Check it again")[0]


def test_several_runs_stand_side_by_side(read, run):
    reader = read(run, replace(run, name="second run", attacks=()))
    assert "2 runs compared" in reader.text
    comparison = reader.text.split("Comparison")[1].split("second run For")[0]
    assert comparison.count("70.0%") >= 2
    assert "not measured" in comparison
    assert {"#run-0", "#run-1"} <= set(reader.addresses)


def test_the_same_evidence_gives_the_same_page(run, tmp_path):
    first = write_page([run], tmp_path / "a.html").path.read_bytes()
    assert write_page([run], tmp_path / "b.html").path.read_bytes() == first


def test_a_report_needs_a_run(tmp_path):
    with pytest.raises(InvalidInput, match="needs at least one run"):
        write_page([], tmp_path / "page.html")
