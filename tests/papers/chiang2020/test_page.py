"""The page of reproduced tables: paper and ours, intervals, commands; what was not run says so."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from patchcert.errors import InvalidInput
from patchcert.papers.chiang2020.counting import CountedRow, count_rows
from patchcert.papers.chiang2020.page import charts, duration, linked, page_table, write_page
from patchcert.papers.chiang2020.tables import find_table, table_names
from patchcert.papers.chiang2020.view import TableView
from patchcert.report.statistics import clopper_pearson
from rows_of_tables import counted_run

ROOT = Path(__file__).parents[3]
TABLE = find_table("strategy-detail-5x5")
MLP, CNN2, GUIDED = (
    TABLE.chosen([words])[0] for words in ("mnist all mlp", "mnist all cnn2", "mnist guided mlp")
)


MEASURED = CountedRow(MLP, "measured", (counted_run(6207),))
TRIED = (counted_run(4000, loss=0.5), counted_run(4200, 2020, 0.6, tf32=True))
SHORTENED = CountedRow(GUIDED, "measured", TRIED[:1], TRIED[1:], scale=0.1)
ROWS = (MEASURED, SHORTENED, CountedRow(CNN2, "not run"))


@pytest.fixture
def page(tmp_path):
    return write([(TABLE, ROWS)], tmp_path / "page.html", "results")


def view_of(table, rows, source="results", quick=False):
    return page_table(TableView.of(table, rows, quick), source)


def write(tables, path, source="results", quick=False):
    return write_page([TableView.of(table, rows, quick) for table, rows in tables], path, source)


def cells(outcome, **options):
    view = view_of(TABLE, [outcome], **options)
    return dict(zip((name for name, _ in view.columns), view.rows[0].cells, strict=True))


def test_the_page_is_well_formed_and_loads_nothing(page, parse):
    reader = parse(page)
    elsewhere = {address for address in reader.addresses if not address.startswith(("data:", "#"))}
    assert {Path(address).name for address in elsewhere} == {"0007-a-short-ramp-for-cnn4.md"}
    source = page.read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(", source)
    assert "default-src 'none'" in source
    targets = {address[1:] for address in reader.addresses if address.startswith("#")}
    assert targets <= set(re.findall(r'id="([^"]+)"', source))


def test_notes_lead_to_decisions_where_there_is_a_checkout(tmp_path):
    note, page = "By [decision 7](docs/decisions/0007.md).", tmp_path / "pages" / "page.html"
    assert linked(note, tmp_path, page) == [("By ", ""), ("decision 7", ""), (".", "")]
    decision = tmp_path / "docs" / "decisions" / "0007.md"
    decision.parent.mkdir(parents=True)
    decision.touch()
    assert linked(note, tmp_path, page)[1] == ("decision 7", "../docs/decisions/0007.md")


def test_headings_leave_no_level_out_and_figures_have_labels(page, check_outline, tmp_path):
    check_outline(page)
    check_outline(write([(TABLE, ROWS), (find_table("bound-pooling"), ())], tmp_path / "two.html"))


def test_numbers_stand_beside_the_paper_s_with_their_interval(page, parse):
    text = parse(page).text
    low, high = (f"{100 * end:.2f}" for end in clopper_pearson(6207, 10_000))
    ours = f"62.07 {low} to {high} +0.10 55 s NVIDIA H200 paper 7.2 h"
    assert f"93.96 94.01 93.53 to 94.47 61.97 authors' code 61.85 {ours}" in text
    assert "Training strategies by model, 5x5 patches" in text
    assert "Section A.6 of the paper." in text
    assert "6,207 of 10,000 proven against Patch(5x5 square, everywhere)" in text


def test_what_was_not_run_says_so(page, parse):
    text = parse(page).text
    assert "91.88 not run 59.59 not run - -" in text
    assert "2 of 3 rows of tables" in text
    shown = cells(CountedRow(MLP, "partly run", note="2 of 3 runs"))
    assert (shown["Certified"].text, shown["Certified"].small) == ("partly run", ("2 of 3 runs",))


def test_a_shortened_schedule_is_named_and_not_compared(page, parse):
    view = view_of(TABLE, ROWS)
    assert (view.view.measured, view.view.full, view.view.not_below()) == (2, 1, "1 of 1")
    text = parse(page).text
    assert "schedule scaled by 0.1" in text
    assert "ours, shortened schedule" in text
    (chart,) = charts(TableView.of(TABLE, ROWS), ["a", "b", "c"])
    notes = {row.label: row.caveat for group in chart.groups for row in group.rows}
    assert sorted(notes.values()) == ["", "", "schedule scaled by 0.1"]


def test_of_several_seeds_one_counts_and_all_are_behind_the_row():
    shown = cells(SHORTENED)["Certified"]
    low, high = (100 * end for end in clopper_pearson(4000, 10_000))
    assert (shown.text, shown.small) == (
        "40.00",
        (f"{low:.2f} to {high:.2f}", "seeds: 1 of 2, mean 41.00, deviation 1.41"),
    )
    (row,) = view_of(TABLE, [SHORTENED]).rows
    assert [words.rpartition(": ")[0] for _, words in row.runs] == [
        "mlp, seed 2019, 55 s on NVIDIA H200, training loss 0.5000",
        "mlp, seed 2020, 55 s on NVIDIA H200, training loss 0.6000, passed over: another seed has less",
    ]


def test_a_mean_over_models_has_an_interval_of_the_mean():
    table = find_table("training-strategies")
    (entry,) = table.chosen(["mnist 5x5 all"])
    runs = (counted_run(4000), counted_run(4200))
    (row,) = view_of(table, [CountedRow(entry, "measured", runs)]).rows
    ends = [clopper_pearson(count, 10_000, 0.975) for count in (4000, 4200)]
    low, high = (50 * (ends[0][at] + ends[1][at]) for at in (0, 1))
    (cell,) = (cell for cell in row.cells if cell.text == "41.0")
    assert cell.small == (f"{low:.1f} to {high:.1f}",)


def test_commands_run_the_row_as_it_was_run():
    view = view_of(TABLE, ROWS, "my results")
    first, second, third = (shlex.split(row.command) for row in view.rows)
    start = ["patchcert", "reproduce", "strategy-detail-5x5", "--rows"]
    assert first == [*start, "MNIST 5x5 All Patch mlp", "--data-dir", "DATA"]
    effort = ["--scale", "0.1", "--seeds", "2", "--tf32"]
    assert second == [*start, "MNIST 5x5 Guided(10) mlp", *effort, "--data-dir", "DATA"]
    assert TABLE.matching([third[4]]) == (CNN2,)
    assert [row.also for row in view.rows] == [0, 0, 0]
    recount = dict(view.commands)["Recount from evidence, without training"]
    assert shlex.split(recount)[-2:] == ["--from", "my results"]


def test_words_that_other_rows_hold_too_are_counted():
    table = find_table("bound-pooling")
    (entry, *_) = (entry for entry in table.entries if entry.label == "CIFAR-10 2x2 Pool 2 cnn4")
    (row,) = view_of(table, [CountedRow(entry, "not run")]).rows
    assert row.also == len(table.matching([entry.label])) - 1 > 0


def test_a_quick_look_is_labelled(tmp_path, parse):
    quick = replace(MEASURED, scale=1.0)
    path = write([(TABLE, [quick])], tmp_path / "page.html", "results", quick=True)
    text = parse(path).text
    assert "QUICK LOOK, NOT A RESULT" in text
    assert "MNIST (by mnist-mini)" in text
    assert "At or above the paper not measured" in text


def test_every_table_has_a_page_without_a_single_run(tmp_path, parse):
    tables = [find_table(name) for name in table_names()]
    found = [(table, [CountedRow(entry, "not run") for entry in table.entries]) for table in tables]
    reader = parse(write(found, tmp_path / "page.html", "results"))
    rows = sum(len(table.entries) for table in tables)
    assert f"Rows run 0 of {rows}" in reader.text
    assert reader.tags.count("article") == len(tables)
    assert {f"#{table.name}" for table in tables} <= set(reader.addresses)


def test_attacks_have_a_chart_and_columns_of_their_own():
    table = find_table("compare-defenses")
    view = view_of(table, [CountedRow(entry, "not run") for entry in table.entries])
    assert [chart.title for chart in view.charts] == ["Certified accuracy", "Accuracy under attack"]
    assert ("Paper under attack", True) in view.columns
    assert view.charts[0].groups[0].rows[0].label.startswith("MNIST, 2x2: IBP")
    imagenet = find_table("break-imagenet")
    view = view_of(imagenet, [CountedRow(entry, "not run") for entry in imagenet.entries])
    assert "Certified" not in [name for name, _ in view.columns]


def test_hostile_words_stay_text(tmp_path, parse):
    nasty = "</title><script>alert(1)</script>\"'&<b>{{ 7 * 7 }}"
    table = replace(TABLE, title=nasty, caption=nasty, notes=(nasty,))
    entry = replace(MLP, preset=nasty)
    row = CountedRow(entry, "partly run", note=nasty)
    plain = write(
        [
            (
                replace(TABLE, notes=("note",)),
                [CountedRow(replace(MLP, preset="another"), "partly run", note="x")],
            )
        ],
        tmp_path / "a.html",
        "x",
    )
    hostile = write([(table, [row])], tmp_path / "b.html", nasty)
    assert parse(hostile).tags == parse(plain).tags
    assert nasty in parse(hostile).text


def test_the_same_evidence_gives_the_same_page(page, tmp_path):
    again = write([(TABLE, ROWS)], tmp_path / "again.html", "results")
    assert again.read_bytes() == page.read_bytes()


def test_a_page_needs_a_table(tmp_path):
    with pytest.raises(InvalidInput, match="needs at least one table"):
        write([], tmp_path / "page.html", "results")


@pytest.mark.parametrize(
    ("seconds", "words"), [(9.6, "10 s"), (119, "119 s"), (170, "3 min"), (7199, "120 min"), (9000, "2.5 h")]
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_the_table_sorts_filters_and_opens_in_a_browser(page, evaluate):
    answer = evaluate(
        page,
        """
        const section = document.querySelector("[data-results]");
        const rows = () => [...section.querySelectorAll("tbody")].filter(row => !row.hidden);
        const shown = () => rows().map(row => row.id.split("-").at(-1));
        const head = name => [...section.querySelectorAll("th")].find(each => each.textContent === name);
        const start = shown();
        head("Certified").querySelector("button").click();
        const rising = shown();
        head("Certified").querySelector("button").click();
        const falling = shown();
        const sorted = head("Certified").getAttribute("aria-sort");
        head("Model").querySelector("button").click();
        const named = shown();
        const form = section.querySelector("form");
        const set = (name, value) => {
            form.elements[name].value = value;
            form.elements[name].dispatchEvent(new Event("input", { bubbles: true }));
        };
        set("sort", "");
        const again = shown();
        set("status", "measured");
        const measured = shown();
        set("words", "GUIDED mlp");
        const guided = shown();
        const count = section.querySelector("output").textContent;
        const row = rows()[0];
        const isFolded = () => getComputedStyle(row.rows[1]).display === "none";
        const before = isFolded();
        row.querySelector(".fold").click();
        const hidden = ["data", "threat", "status"].filter(name => form.elements[name].parentElement.hidden);
        return {start, rising, falling, sorted, named, again, measured, guided, count, hidden,
                before, after: isFolded(), expanded: row.querySelector(".fold").getAttribute("aria-expanded")};
        """,
    )
    assert answer["start"] == answer["again"] == ["1", "2", "3"]
    assert answer["rising"] == ["2", "1", "3"]
    assert answer["falling"] == ["1", "2", "3"]
    assert answer["sorted"] == "descending"
    assert answer["named"] == ["3", "1", "2"]
    assert answer["measured"] == ["1", "2"]
    assert answer["guided"] == ["2"]
    assert answer["count"] == "1 of 3 rows"
    assert answer["hidden"] == ["data", "threat"]
    assert (answer["before"], answer["after"], answer["expanded"]) == (True, False, "true")


@pytest.mark.parametrize("width", [390, 800, 1200])
def test_nothing_sticks_out_of_the_window(page, evaluate, width):
    size = evaluate(page, "return [document.documentElement.scrollWidth, window.innerWidth];", width)
    assert size[0] <= size[1] == width


@pytest.mark.parametrize("name", ["training-strategies", "shape-transfer", "compare-defenses"])
def test_no_table_is_wider_than_a_desktop_window(name, tmp_path, evaluate):
    table = find_table(name)
    rows = count_rows(table.entries, ROOT / "results")
    page = write([(table, rows)], tmp_path / "page.html", "results")
    script = """
        const frame = document.querySelector(".results .scroll");
        return [frame.scrollWidth, frame.clientWidth];
        """
    needed, there = evaluate(page, script, 1200)
    assert needed <= there


def test_dots_stand_where_their_numbers_are(page, evaluate):
    places = evaluate(
        page,
        """
        const row = document.querySelector(".dots-row:not(.head):not(.axis)");
        const middle = element => { const box = element.getBoundingClientRect(); return box.x + box.width / 2; };
        const ticks = [...row.parentElement.querySelectorAll(".axis text")].map(
            tick => [parseFloat(tick.textContent), middle(tick)]);
        const label = row.querySelector(".ours-text").textContent;
        return {ticks, ours: middle(row.querySelector("circle.ours")), label};
        """,
    )
    (low, start), *_, (high, end) = places["ticks"]
    expected = start + (float(places["label"]) - low) / (high - low) * (end - start)
    assert places["ours"] == pytest.approx(expected, abs=2)
