"""Paper and ours side by side: what is there is shown, what is missing says so."""

from dataclasses import replace

import pytest
from patchcert.papers.chiang2020.counts import Count, Outcome, RunOutcome
from patchcert.report.reproduction import reproduction_document, reproduction_json, reproduction_table

from patchcert.papers.chiang2020.tables import find_table
from patchcert.threats import Patch
from patchcert.train.spec import read_spec

TABLE = find_table("strategy-detail-5x5")
(ENTRY,) = TABLE.chosen(["mnist all mlp"])


def run_outcome(certified, seed=2019, loss=None):
    spec = replace(read_spec("paper-mnist"), seed=seed)
    counts = ((Patch(5), Count(certified, 10_000)),)
    return RunOutcome("f" * 16, spec, Count(9401, 10_000), counts, 55.4, "NVIDIA H200", training_loss=loss)


def cells(outcome, **options):
    table = reproduction_table(TABLE, [outcome], **options)
    return dict(zip((column.name for column in table.columns), table.shown()[0], strict=True))


def test_a_measured_row_has_both_numbers_and_their_difference():
    shown = cells(Outcome(ENTRY, "measured", (run_outcome(6207),)))
    assert (shown["paper certified"], shown["certified"], shown["difference"]) == ("61.97", "62.07", "+0.10")
    assert (shown["paper clean"], shown["clean"]) == ("93.96", "94.01")
    assert (shown["seeds"], shown["training seconds"], shown["paper hours"]) == ("1", "55", "7.2")
    assert (shown["hardware"], shown["schedule"]) == ("NVIDIA H200", "full")


def test_a_scaled_schedule_is_named():
    outcome = Outcome(ENTRY, "measured", (run_outcome(6207),), scale=0.1)
    assert cells(outcome)["schedule"] == "scaled by 0.1"


def test_a_quick_look_is_labelled_in_every_row_and_in_the_title():
    outcome = Outcome(ENTRY, "measured", (run_outcome(6207),))
    shown = cells(outcome, quick=True)
    assert (shown["schedule"], shown["data"]) == ("quick", "MNIST (by mnist-mini)")
    assert "NOT A RESULT" in reproduction_table(TABLE, [outcome], quick=True).title


def test_one_of_several_seeds_counts_and_they_have_a_spread():
    passed_over = (run_outcome(6400, 2020, 0.9),)
    outcome = Outcome(ENTRY, "measured", (run_outcome(6200, 2019, 0.8),), passed_over)
    shown = cells(outcome)
    assert (shown["certified"], shown["spread over seeds"], shown["seeds"]) == ("62.00", "1.41", "1 of 2")
    table = reproduction_table(TABLE, [outcome])
    assert "1 of 2" in table.to_csv()
    assert "1 of 2" in table.to_latex()


def test_attacks_with_several_seeds_all_count():
    runs = tuple(
        RunOutcome("f", None, Count(7, 10), (), 9.0, "cpu", attacked=Count(count, 10), network="resnet50")
        for count in (2, 4)
    )
    table = find_table("break-imagenet")
    outcome = Outcome(table.entries[0], "measured", runs)
    assert (outcome.empirical, outcome.seconds) == (pytest.approx(30.0), None)
    columns = [column.name for column in reproduction_table(table, [outcome]).columns]
    assert reproduction_table(table, [outcome]).shown()[0][columns.index("seeds")] == "2"


def test_attacked_images_have_a_certified_share_of_their_own():
    attack = {"attacked": Count(70, 100), "certified_of_attacked": Count(58, 100)}
    outcome = Outcome(ENTRY, "measured", (replace(run_outcome(6207), **attack),))
    shown = cells(outcome)
    assert (shown["certified"], shown["certified of those attacked"]) == ("62.07", "58.00")
    (row,) = reproduction_json(TABLE, [outcome])["rows"]
    assert (row["certified_of_attacked"], row["runs"][0]["certified_of_attacked"]) == (58.0, 58)
    assert "certified of those attacked" not in cells(Outcome(ENTRY, "measured", (run_outcome(6207),)))


def test_what_was_not_run_says_so():
    shown = cells(Outcome(ENTRY, "partly run", note="2 of 3 runs"))
    assert shown["certified"] == "partly run (2 of 3 runs)"
    assert (shown["clean"], shown["difference"], shown["schedule"]) == ("-", "-", "-")


@pytest.mark.parametrize("name", ["compare-defenses", "break-imagenet"])
def test_tables_of_attacks_have_their_column(name):
    table = find_table(name)
    made = reproduction_table(table, [Outcome(entry, "not run") for entry in table.entries])
    assert "paper under attack" in [column.name for column in made.columns]


def test_the_page_has_every_table_and_counts_what_was_run():
    outcome = Outcome(ENTRY, "measured", (run_outcome(6207),))
    page = reproduction_document([(TABLE, [outcome, Outcome(ENTRY, "not run")])])
    assert "| strategy-detail-5x5 | 2 | 1 | 1 | 1 of 1 | 1 of 1 | +0.10 | +0.10 | +0.10 |" in page
    assert "## Training strategies by model, 5x5 patches" in page
    assert page.count("| MNIST | 5x5 | All Patch | mlp |") == 2


def test_the_overview_compares_rows_with_the_full_schedule_only():
    below, above = (Outcome(ENTRY, "measured", (run_outcome(count),)) for count in (6097, 6397))
    shortened = Outcome(ENTRY, "measured", (run_outcome(9000),), scale=0.5)
    page = reproduction_document([(TABLE, [below, above, shortened])])
    assert "| strategy-detail-5x5 | 3 | 3 | 2 | 1 of 2 | 1 of 2 | -1.00 | +0.50 | +2.00 |" in page
    page = reproduction_document([(TABLE, [shortened])])
    assert "| strategy-detail-5x5 | 1 | 1 | 0 | - | - | - | - | - |" in page


def test_json_holds_the_counts_of_every_run():
    plain = reproduction_json(TABLE, [Outcome(ENTRY, "measured", (run_outcome(6207),))])
    (row,) = plain["rows"]
    assert row["runs"][0]["certified"] == [{"threat": Patch(5).to_dict(), "certified": 6207}]
    assert row["paper"]["certified"] == 61.97
