"""The page: well formed, self-contained, with the numbers that the evidence gives and no larger claims."""

import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from patchcert.data import Split
from patchcert.errors import InvalidInput
from patchcert.evidence import Selection
from patchcert.report.page import boxes, class_name, describe_threat, lead_sentence, margin_text, write_report
from patchcert.report.pictures import MaskedImage, masked_images, masks_of
from patchcert.report.statistics import Proportion
from patchcert.report.summary import ModelSummary
from patchcert.report.tables import percent
from patchcert.threats import Patch, Patches, SparsePixels, shapes
from patchcert.threats.masks import masks_covering


@pytest.fixture
def read(tmp_path, parse):
    def write_and_read(*runs: ModelSummary):
        return parse(write_report(runs, tmp_path / "page.html"))

    return write_and_read


def table_data(source):
    """What the script of a page is given, which must be JSON."""
    text = re.findall(r'<script type="application/json">(.*?)</script>', source, re.S)[0]
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_the_page_is_well_formed_and_loads_nothing(read, run, tmp_path):
    reader = read(run)
    assert reader.addresses
    assert all(address.startswith(("data:", "#")) for address in reader.addresses)
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://", source)
    assert "default-src 'none'" in source
    assert not re.search(r"@import|url\((?!\$\{sprite)", source)


def test_headline_numbers_are_counted_from_the_rows(read, run):
    rows, attack = run.certificates[0].columns, run.attacks[0].columns
    text = read(run).text
    for proportion in (
        Proportion.of(rows["prediction"] == rows["label"]),
        Proportion.of(rows["certified"]),
        Proportion.of(~attack["succeeded"]),
    ):
        assert percent(proportion.value) in text
        assert f"{proportion.successes} of {proportion.total}" in text
    assert (
        "For 28 of 40 test images (70.0%) it is proven that no 2x2 square patch, wherever it is placed,"
        in text
    )


def test_cards_count_the_same_images(read, run):
    text = read(run).text
    assert re.findall(r"(\d+) of (\d+) images right|(\d+) of (\d+) images proven", text) == [
        ("18", "20", "", ""),
        ("14", "20", "", ""),
        ("", "", "14", "20"),
    ]
    low, high = Proportion(14, 20).interval
    assert f"Certified accuracy 70.0% 95% interval {100 * low:.1f} to {percent(high)}" in text
    assert "counted on the same 20 images, those that were both certified and attacked" in text
    bars = text.split("On all images")[1].split("Where the proof")[0]
    assert "Clean 90.0% 36 of 40 Empirical 70.0% 14 of 20 Certified 70.0% 28 of 40" in bars


def test_accuracies_on_all_images_are_shown_only_if_there_are_more_of_them(read, run, changed):
    assert "On all images" not in read(replace(run, attacks=())).text
    attack = run.attacks[0]
    elsewhere = changed(attack, index=attack.columns["index"] + 1000)
    text = read(replace(run, attacks=(elsewhere,))).text
    assert "Counted on the 40 images that were certified; none of them was attacked." in text
    assert "Empirical accuracy not measured" in text
    assert "Empirical 70.0% 14 of 20" in text.split("On all images")[1]


def test_nothing_measured_is_said_and_never_shown_as_zero(read):
    text = read(ModelSummary("empty")).text
    assert text.count("not measured") >= 4
    assert "0.0%" not in text
    assert "Certified accuracy: not measured." in text


def test_a_contradiction_is_shown_in_red_and_flagged(run, contradictory_run, read, tmp_path):
    assert not run.contradictions
    assert contradictory_run.contradictions
    text = read(run, contradictory_run).text
    assert "Evidence contradicts itself" in text
    assert "image 4: certified, but the attack changed the prediction" in text
    assert 'role="alert"' in (tmp_path / "page.html").read_text(encoding="utf-8")
    read(run)
    assert 'role="alert"' not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_hostile_names_stay_text(read, run):
    nasty = "</title><script>alert(1)</script>\"'&<b>{{ 7 * 7 }}"
    texts = {"name": nasty, "model": nasty, "dataset": nasty, "spec_text": nasty}
    hostile = replace(run, **texts, classes=(nasty,) * 10, environment={nasty: nasty, "device": nasty})
    reader, harmless = read(hostile), read(run)
    assert reader.tags == harmless.tags
    assert nasty in reader.text
    assert "49" not in reader.text.split("Specification")[-1]


def test_every_image_is_in_the_data_of_the_table(run, tmp_path):
    path = write_report([run], tmp_path / "page.html")
    source = path.read_text(encoding="utf-8")
    data = table_data(source)
    rows = run.certificates[0].columns
    assert data["index"] == rows["index"].tolist()
    assert data["margin"] == rows["margin"].tolist()
    verdicts = [data["verdicts"][number] for number in data["verdict"]]
    assert (verdicts.count("certified"), verdicts.count("wrong")) == (28, 4)
    outcomes = [data["outcomes"][number] for number in data["outcome"]]
    assert Counter(outcomes) == {"withstood": 14, "broken": 4, "wrong already": 2, "not attacked": 20}
    assert 'setAttribute("aria-sort"' in source
    assert 'name="verdict"' in source


def test_margins_that_are_not_finite_are_valid_json(run, tmp_path, changed):
    rows = run.certificates[0]
    margin = rows.columns["margin"].copy()
    margin[:2] = np.nan, -np.inf
    broken = replace(run, certificates=(changed(rows, margin=margin),))
    source = write_report([broken], tmp_path / "page.html").read_text(encoding="utf-8")
    data = table_data(source)
    assert data["margin"][:3] == [None, None, 3.25]
    assert source.count("<td>not finite</td>") == 2


def test_maps_attacks_and_what_is_needed_to_check_again_are_on_the_page(read, run):
    text = read(run).text
    assert "not certified \N{MINUS SIGN}0.75 image 29, label class 9; weakest at row 3, column 7" in text
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


def test_attacks_on_something_else_are_said_to_be_there(read, run, masked_run):
    words = "Accuracy under attack: not measured. The attacks at hand are on other data or another classifier"
    assert words in read(replace(masked_run, attacks=run.attacks)).text
    assert words not in read(run).text


def test_patch_sizes_are_compared_once_two_were_certified(read, run, asked, changed):
    assert "Certified accuracy against patch size" not in read(run).text
    rows = run.certificates[0]
    larger = asked(changed(rows, certified=rows.columns["index"] < 10), threat=Patch(3))
    reader = read(replace(run, certificates=(larger, rows)))
    assert "Certified accuracy against patch size" in reader.text
    assert "For 28 of 40 test images" in reader.text
    audit = asked(larger, classifier={**larger.meta["classifier"], "dtype": "float64"})
    assert "against patch size" not in read(replace(run, certificates=(audit, rows))).text


def test_a_sparse_threat_has_words_and_no_placement(read, run, asked, changed):
    rows = run.certificates[0]
    nowhere = np.full_like(rows.columns["worst_top"], -1)
    sparse = asked(changed(rows, worst_top=nowhere, worst_left=nowhere), threat=SparsePixels(4))
    text = read(replace(run, threat=SparsePixels(4), certificates=(sparse,), attacks=())).text
    assert "no change of 4 pixels, wherever they lie," in text
    assert "3, 7" not in text.split("Every image")[1].split("Check it again")[0]


@pytest.mark.parametrize(
    ("placements", "where"), [("everywhere", "wherever they are placed"), ("corners", "placed corners")]
)
def test_several_patches_have_words_and_no_placement(read, run, asked, changed, placements, where):
    threat, rows = Patches(Patch(5, placements), 2), run.certificates[0]
    nowhere = np.full_like(rows.columns["worst_top"], -1)
    two = asked(changed(rows, worst_top=nowhere, worst_left=nowhere), threat=threat)
    text = read(replace(run, threat=threat, certificates=(two,), attacks=(), maps=())).text
    assert f"no 2 5x5 square patches at once, {where}," in text
    assert f"2 5x5 square patches at once, {placements}" in text


def test_whatever_the_certificates_have_is_shown(read, run, voted_run):
    intervals = read(run).text
    assert "Least margin Weakest at Attack" in intervals
    assert "Classifier IntervalBounds, dtype float32 Guarantee recovery, deterministic" in intervals
    text = read(voted_run).text
    assert "Classifier RandomAblation, retained 45, error rate 0.05" in text
    assert "Guarantee recovery, with 0.95 confidence for each image" in text
    assert (
        "it is proven, with 0.95 confidence for each, that no change of 4 pixels, wherever they lie," in text
    )
    assert "Verdict Radius in pixels Votes Attack" in text
    assert "0 class 0 class 0 certified 6 991 not attacked" in text
    assert "Certificate maps: not measured." in text


def test_a_proof_by_masks_shows_the_weakest_ones(read, masked_run):
    copy = MaskedImage(29, masked_run.thumbnails[29], 9, 9, False, masked_run.thumbnails[0], -0.5, (0, 4))
    text = read(replace(masked_run, masked=(copy,))).text
    assert "it must exceed 6.1e-05" in text
    assert "not certified \N{MINUS SIGN}0.50 image 29, label class 9; behind masks 0 and 4" in text
    assert "Verdict Least lead Weakest masks Attack" in text
    assert "0 class 0 class 0 certified +0.25 2 not attacked" in text


def test_a_proof_by_masks_shows_its_masks(run, masked_run, tmp_path, parse):
    images = Split(torch.from_numpy(run.thumbnails), torch.zeros(40, dtype=torch.long))
    rows = masked_run.certificates[0]
    shown = replace(masked_run, masks=masks_of(rows, images), masked=masked_images(images, rows, 4))
    page = write_report([shown], tmp_path / "page.html")
    source = page.read_text(encoding="utf-8")
    assert "The 9 masks: wherever the patch lies" in parse(page).text
    assert re.findall(r'aria-label="mask (\d+)"', source) == [str(number) for number in range(9)]
    data = table_data(source)
    assert data["masks"][28:31] == ["2", "0, 4", "2"]
    assert [data["boxes"][number] for number in (0, 4)] == [[0, 0, 5, 5], [4, 4, 5, 5]]


def test_masks_that_are_no_rectangles_have_no_boxes():
    assert boxes(masks_covering(Patch(shapes.diamond(5)), 12, 12, masks=3)) == []
    assert boxes(None) == []


def test_a_classifier_that_abstains_is_not_called_wrong(voted_run, tmp_path):
    source = write_report([voted_run], tmp_path / "page.html").read_text(encoding="utf-8")
    data = table_data(source)
    verdicts = [data["verdicts"][number] for number in data["verdict"]]
    assert Counter(verdicts) == {"certified": 28, "not certified": 8, "abstained": 4}


def test_only_verdicts_need_no_margins(read, run, changed):
    bare = changed(run.certificates[0], margin=None, worst_top=None, worst_left=None)
    text = read(replace(run, certificates=(bare,))).text
    assert "Verdict Attack" in text
    assert "0 class 0 class 0 certified withstood" in text


def test_a_proof_of_detection_does_not_claim_recovery(run):
    rows = run.certificates[0]
    guarantee = {"promise": "detection", "confidence": 1.0}
    detecting = replace(rows, meta={**rows.meta, "guarantee": guarantee})
    assert "can change the prediction without an alert," in lead_sentence(
        replace(run, certificates=(detecting,))
    )


def test_several_runs_stand_side_by_side(read, run):
    reader = read(run, replace(run, name="second run", attacks=()))
    assert "2 models compared" in reader.text
    comparison = reader.text.split("Comparison")[1].split("second run For")[0]
    assert comparison.count("70.0%") >= 2
    assert "not measured" in comparison
    assert {"#model-0", "#model-1"} <= set(reader.addresses)


def test_runs_that_answer_different_questions_are_compared_with_a_warning(read, run, asked, changed):
    same = replace(run, name="second run")
    assert "not about the same question" not in read(run, same).text
    rows = run.certificates[0]
    fewer = changed(rows, **{name: column[:30] for name, column in rows.columns.items()})
    for other, words in (
        ({"certificates": (asked(rows, threat=Patch(3)),)}, "the threat"),
        ({"certificates": (asked(rows, selection=Selection("another")),)}, "the data"),
        ({"certificates": (fewer,)}, "the images"),
    ):
        text = read(run, replace(same, **other, attacks=())).text
        assert f"They differ in {words}: a larger number" in text
    assert "not about the same question" not in read(run, replace(same, certificates=(), attacks=())).text
    elsewhere = asked(fewer, threat=Patch(3), selection=Selection("another"))
    assert (
        "in the threat, the data and the images:"
        in read(run, replace(same, certificates=(elsewhere,), attacks=())).text
    )


def test_headings_leave_no_level_out_and_figures_have_labels(
    check_outline, run, masked_run, voted_run, tmp_path
):
    for runs in ([run], [masked_run], [run, masked_run, voted_run]):
        check_outline(write_report(runs, tmp_path / "page.html"))


def test_the_page_leads_back_to_its_top(read, run):
    assert read(run, run).addresses.count("#top") == 2


def test_the_same_evidence_gives_the_same_page(run, tmp_path):
    first = write_report([run], tmp_path / "a.html").read_bytes()
    assert write_report([run], tmp_path / "b.html").read_bytes() == first


def test_a_report_needs_a_run(tmp_path):
    with pytest.raises(InvalidInput, match="needs at least one model"):
        write_report([], tmp_path / "page.html")


@pytest.mark.parametrize(
    ("threat", "words"),
    [
        (Patch(5), "one 5x5 square patch, everywhere"),
        (Patch(5, placements="corners"), "one 5x5 square patch, corners"),
        (SparsePixels(1), "any 1 pixel"),
        (SparsePixels(4), "any 4 pixels"),
    ],
)
def test_threats_in_words(threat, words):
    assert describe_threat(threat) == words


def test_a_proof_for_some_placements_is_not_called_a_proof_for_all(run, asked):
    rows = asked(run.certificates[0], threat=Patch(2, placements=[(0, 0)]))
    sentence = lead_sentence(replace(run, certificates=(rows,)))
    assert "wherever" not in sentence
    assert "placed at (0, 0)," in sentence


@pytest.mark.parametrize(
    ("margin", "text"),
    [
        (1.234, "+1.23"),
        (-0.5, "\u22120.50"),
        (0.0031, "+0.0031"),
        (-1e-7, "\u22121e\u221207"),
        (float("nan"), "not finite"),
    ],
)
def test_narrow_margins_are_not_shown_as_ties(margin, text):
    assert margin_text(margin) == text


def test_labels_without_a_name_are_numbers():
    assert [class_name(("cat",), label) for label in (0, 1, -1)] == ["cat", "1", "abstained"]
