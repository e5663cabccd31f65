"""The table, the plot and the page show the rows, and what must not be compared."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from patchcert.comparison.leaderboard import Cost, Counted, Row, Seeds, Source, published_rows
from patchcert.comparison.view import as_json, headlines, in_order, page, panels, plot, table, warnings

OURS = Row(
    data="cifar10",
    images=10_000,
    patch="5x5",
    pixels="native",
    method="bands of 4 columns",
    promise="recovery",
    outside_data="none",
    certified=50.0,
    clean=80.0,
    source=Source(kind="evidence", title="run", note="the best of 2 trainings"),
    cost=Cost(passes=32, multiply_adds=1e9),
    evidence=Counted(sha256="a" * 64, weights_sha256="b" * 64, correct=8000, certified=5000),
    recounted=True,
)


def cells(rows):
    shown = table(rows)
    names = [column.name for column in shown.columns]
    return [dict(zip(names, row, strict=True)) for row in shown.shown()]


def test_rows_stand_by_data_then_patch_then_certified_images():
    small, better = replace(OURS, patch="2x2"), replace(OURS, certified=60.0)
    digits, wide = replace(OURS, data="mnist"), replace(OURS, patch="10x10")
    assert in_order([digits, wide, OURS, better, small]) == (small, better, OURS, wide, digits)


def test_detection_has_a_column_of_its_own():
    (recovery,) = cells([OURS])
    assert recovery["certified"] == "50.00"
    assert "detected" not in recovery  # no row has it
    alert = replace(OURS, promise="detection", certified=70.0)
    assert [(row["certified"], row["detected"]) for row in cells([alert, OURS])] == [
        ("50.00", "-"),
        ("-", "70.00"),
    ]


def test_only_rows_that_were_counted_here_are_called_counted():
    stated = replace(OURS, recounted=False)
    told = replace(stated, evidence=None, source=Source(kind="unconfirmed", title="Somebody"))
    assert [row["from"] for row in cells([OURS, stated, told])] == [
        "counted: run; the best of 2 trainings",
        "stated, with the sum of its evidence: run; the best of 2 trainings",
        "stated, not confirmed: Somebody",
    ]


def test_rows_of_some_images_places_or_confidence_say_so():
    row = replace(OURS, images=500, placements="corners", confidence=0.95)
    (shown,) = cells([row])
    assert shown["data"] == "cifar10, 500 images"
    assert shown["patch"] == "5x5, corners"
    assert shown["method"] == "bands of 4 columns, confidence 0.95"


def test_headlines_are_the_best_of_each_family_and_all_that_others_state():
    seeds = Seeds(count=3, mean=49.0, counted=2019, spread=0.5)
    best = replace(OURS, method="masking, 7x7 masks, bfloat16", network="resnet18, 64 filters", seeds=seeds)
    worse = replace(best, method="masking, 6x6 masks", certified=40.0)
    stated = replace(OURS, evidence=None, certified=30.0, source=Source(kind="unconfirmed", title="Somebody"))
    left_out = (
        replace(OURS, images=400),
        replace(OURS, outside_data="ImageNet"),
        replace(OURS, pixels="upscaled"),
        replace(OURS, placements="corners"),
        replace(OURS, promise="detection"),
        replace(OURS, patch="4x4"),
    )
    assert headlines([worse, best, stated, *left_out], ["5x5"]).shown() == [
        ["cifar10", "5x5", "masking, 7x7 masks", "resnet18", "80.00", "50.00", "3: 49.00 ± 0.50", "-"],
        ["cifar10", "5x5", "bands of 4 columns", "-", "80.00", "30.00", "-", "Somebody (not confirmed)"],
    ]


def test_what_rows_differ_in_is_said():
    assert list(warnings([OURS, replace(OURS, certified=1.0)])) == []
    (threats,) = warnings([OURS, replace(OURS, pixels="upscaled")])
    assert threats.startswith("the rows have different threats, and must not be compared across them")
    others = (
        replace(OURS, data="mnist"),
        replace(OURS, promise="detection"),
        replace(OURS, images=100),
        replace(OURS, outside_data="ImageNet"),
    )
    assert len(list(warnings([OURS, *others]))) == 4


def test_the_plot_joins_what_no_cheaper_row_equals():
    cheap = replace(OURS, method="cheap", certified=30.0, cost=Cost(multiply_adds=1e8))
    worse = replace(OURS, method="worse", certified=20.0, cost=Cost(multiply_adds=1e10))
    (panel,) = panels([worse, OURS, cheap])
    (line,) = panel.lines
    assert [point.label for point in line.points] == ["cheap", "bands of 4 columns", "worse"]
    assert line.path.count("M") == 1
    assert line.path.count("L") == 1
    first, second, _ = line.points
    assert first.x < second.x
    assert first.y > second.y  # more certified is higher up


def test_the_plot_has_a_line_for_each_patch_and_the_best_that_others_state():
    rows = (OURS, replace(OURS, patch="2x2", certified=70.0), *published_rows())
    (panel,) = panels(rows)
    assert [line.label for line in panel.lines] == ["2x2", "5x5"]
    assert "Metzen and Yatsura, ICLR 2021, 5x5: 60.0%" in [line.published_title for line in panel.lines]
    drawing = ElementTree.fromstring(plot(rows))
    assert len(drawing.findall(".//{*}circle")) == 2
    assert "70.00% certified" in drawing.attrib["aria-label"]


def test_points_name_the_network_where_two_share_a_method():
    rows = [replace(OURS, network="resnet50, 64 filters"), replace(OURS, network="vit", certified=40.0)]
    (panel,) = panels([*rows, replace(OURS, method="another", network="vit")])
    assert [point.label for line in panel.lines for point in line.points] == [
        "bands of 4 columns, resnet50",
        "another",
        "bands of 4 columns, vit",
    ]


def test_panels_stand_two_by_two():
    made = panels([replace(OURS, data=name) for name in ("cifar10", "imagenet", "mnist")])
    assert [(panel.left, panel.top) for panel in made] == [(0, 0), (580, 0), (0, 360)]
    drawing = ElementTree.fromstring(
        plot([replace(OURS, data=name) for name in ("cifar10", "imagenet", "mnist")])
    )
    assert drawing.attrib["viewBox"] == "0 0 1160.0 720.0"
    assert all(float(circle.attrib["cy"]) < 720 for circle in drawing.findall(".//{*}circle"))


def test_rows_whose_cost_or_threat_is_another_are_not_drawn():
    for row in (
        replace(OURS, cost=Cost()),
        replace(OURS, promise="detection"),
        replace(OURS, pixels="upscaled"),
        replace(OURS, placements="corners"),
    ):
        assert panels([row]) == ()


def test_squares_are_drawn_and_rectangles_where_there_are_none():
    tall, wide = replace(OURS, patch="8x3"), replace(OURS, patch="3x8")
    assert [line.label for line in panels([tall, OURS, wide])[0].lines] == [OURS.patch]
    assert len(panels([tall, wide])[0].lines) == 2


def test_the_page_has_all_cells_and_escapes_them(parse, tmp_path):
    odd = replace(OURS, method="<b>odd</b>", source=Source(kind="published", title="x", link="https://e.org"))
    (tmp_path / "page.html").write_text(page([odd, OURS]))
    read = parse(tmp_path / "page.html")
    assert "<b>odd</b>" in read.text
    assert "https://e.org" in read.addresses
    assert "svg" in read.tags


def test_json_has_the_keys_of_leaderboard_files():
    plain = json.loads(as_json([OURS, replace(OURS, data="mnist")]))
    assert plain["rows"][0] == OURS.to_dict()
    assert len(plain["warnings"]) == 1


def test_several_seeds_are_averaged_and_the_one_that_counts_is_named():
    one, several = Seeds(count=1, mean=50.0), Seeds(count=3, mean=49.0, counted=2020, spread=1.25)
    found = [cells([replace(OURS, seeds=seeds)])[0]["seeds: mean ± deviation"] for seeds in (one, several)]
    assert found == ["1", "3: 49.00 ± 1.25; 2020 counts"]
