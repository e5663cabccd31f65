"""Paper and ours side by side: what is there is shown, what is missing says so."""

from dataclasses import replace

import pytest

from patchcert.evidence import Question, Selection
from patchcert.evidence.manifest import Superseded
from patchcert.evidence.results import Results, collect, collect_all
from patchcert.papers.chiang2020.counting import CountedRow, CountedRun, count_rows
from patchcert.papers.chiang2020.tables import find_table
from patchcert.papers.chiang2020.view import TableView, compared_table, document
from patchcert.report.statistics import Proportion
from patchcert.threats import Patch
from rows_of_tables import counted_run

TABLE = find_table("strategy-detail-5x5")
(ENTRY,) = TABLE.chosen(["mnist all mlp"])
MEASURED = CountedRow(ENTRY, "measured", (counted_run(6207),))


def cells(outcome, **options):
    table = TableView.of(TABLE, [outcome], **options).to_table()
    return dict(zip((column.name for column in table.columns), table.shown()[0], strict=True))


def test_a_measured_row_has_both_numbers_and_their_difference():
    shown = cells(MEASURED)
    assert (shown["paper certified"], shown["certified"], shown["difference"]) == ("61.97", "62.07", "+0.10")
    assert (shown["paper clean"], shown["clean"]) == ("93.96", "94.01")
    assert (shown["seeds"], shown["training seconds"], shown["paper hours"]) == ("1", "55", "7.2")
    assert (shown["hardware"], shown["schedule"]) == ("NVIDIA H200", "full")


def test_a_scaled_schedule_is_named():
    assert cells(replace(MEASURED, scale=0.1))["schedule"] == "scaled by 0.1"


def test_a_quick_look_is_labelled_in_every_row_and_in_the_title():
    shown = cells(MEASURED, quick=True)
    assert (shown["schedule"], shown["data"]) == ("quick", "MNIST (by mnist-mini)")
    assert "NOT A RESULT" in TableView.of(TABLE, [MEASURED], quick=True).to_table().title


def test_one_of_several_seeds_counts_and_they_have_a_spread():
    passed_over = (counted_run(6400, 2020, 0.9),)
    outcome = CountedRow(ENTRY, "measured", (counted_run(6200, 2019, 0.8),), passed_over)
    shown = cells(outcome)
    assert (shown["certified"], shown["spread over seeds"], shown["seeds"]) == ("62.00", "1.41", "1 of 2")
    table = TableView.of(TABLE, [outcome]).to_table()
    assert "1 of 2" in table.to_csv()
    assert "1 of 2" in table.to_latex()


def test_attacks_with_several_seeds_all_count():
    runs = tuple(
        CountedRun(
            "f", None, Proportion(7, 10), (), 9.0, "cpu", attacked=Proportion(count, 10), network="resnet50"
        )
        for count in (2, 4)
    )
    table = find_table("break-imagenet")
    outcome = CountedRow(table.entries[0], "measured", runs)
    assert (outcome.empirical, outcome.seconds) == (pytest.approx(30.0), None)
    columns = [column.name for column in TableView.of(table, [outcome]).to_table().columns]
    assert TableView.of(table, [outcome]).to_table().shown()[0][columns.index("seeds")] == "2"


def test_attacked_images_have_a_certified_share_of_their_own():
    attack = {"attacked": Proportion(70, 100), "certified_of_attacked": Proportion(58, 100)}
    outcome = CountedRow(ENTRY, "measured", (replace(counted_run(6207), **attack),))
    shown = cells(outcome)
    assert (shown["certified"], shown["certified of those attacked"]) == ("62.07", "58.00")
    (row,) = TableView.of(TABLE, [outcome]).to_json()["rows"]
    assert (row["certified_of_attacked"], row["runs"][0]["certified_of_attacked"]) == (58.0, 58)
    assert "certified of those attacked" not in cells(MEASURED)


def test_what_was_not_run_says_so():
    shown = cells(CountedRow(ENTRY, "partly run", note="2 of 3 runs"))
    assert shown["certified"] == "partly run (2 of 3 runs)"
    assert (shown["clean"], shown["difference"], shown["schedule"]) == ("-", "-", "-")


@pytest.mark.parametrize("name", ["compare-defenses", "break-imagenet"])
def test_tables_of_attacks_have_their_column(name):
    table = find_table(name)
    made = TableView.of(table, [CountedRow(entry, "not run") for entry in table.entries]).to_table()
    assert "paper under attack" in [column.name for column in made.columns]


def test_the_page_has_every_table_and_counts_what_was_run():
    page = document([TableView.of(TABLE, [MEASURED, CountedRow(ENTRY, "not run")])])
    assert f"| strategy-detail-5x5 | 2 | 1 | 1 | 0 |{' 1 of 1 |' * 3}{' +0.10 |' * 5}" in page
    assert "three seeds" not in page
    assert "## Training strategies by model, 5x5 patches" in page
    assert page.count("| MNIST | 5x5 | All Patch | mlp |") == 2


def test_the_overview_compares_rows_with_the_full_schedule_only():
    below, above = (CountedRow(ENTRY, "measured", (counted_run(count),)) for count in (6097, 6397))
    shortened = CountedRow(ENTRY, "measured", (counted_run(9000),), scale=0.5)
    page = document([TableView.of(TABLE, [below, above, shortened])])
    assert f"| strategy-detail-5x5 | 3 | 3 | 2 | 0 |{' 1 of 2 |' * 3}{' +0.50 |' * 3} -1.00 | +2.00 |" in page
    page = document([TableView.of(TABLE, [shortened])])
    assert f"| strategy-detail-5x5 | 1 | 1 | 0 | 0 |{' - |' * 8}" in page


def test_a_changed_schedule_is_not_called_full():
    (changed,) = TABLE.chosen(["mnist random(5) cnn4"])
    row = CountedRow(changed, "measured", (counted_run(4407),))
    assert row.schedule == "changed schedule (decision 7)"
    view = TableView.of(TABLE, [row])
    assert (view.full, view.changed, len(view.gaps())) == (0, 1, 1)
    average, *_ = find_table("training-strategies").chosen(["mnist 2x2 random(5)"])
    assert replace(row, entry=average).schedule == "changed schedule (decision 7 for cnn4)"
    (wide,) = find_table("large-models").chosen(["2x2 all cnn5w"])
    assert replace(row, entry=wide, scale=0.5).schedule == "scaled by 0.5; changed schedule (decision 8)"
    shorter, longer = find_table("ours").entries
    assert replace(row, entry=shorter).schedule == "full"
    assert replace(row, entry=longer).schedule == "changed schedule (longer than the paper's)"


def test_what_the_authors_repository_states_stands_beside_the_paper():
    large = find_table("large-models")
    (guided,) = large.chosen(["2x2 guided(20)"])
    table = TableView.of(large, [CountedRow(guided, "measured", (counted_run(5020),))]).to_table()
    shown = dict(zip((column.name for column in table.columns), table.shown()[0], strict=True))
    assert (shown["paper certified"], shown["authors' code certified"]) == ("51.9", "53.02")
    sparse = find_table("sparse-detail")
    stated = [CountedRow(entry, "not run").stated_by_authors for entry in sparse.entries]
    assert sorted(value for value in stated if value is not None) == [28.21, 32.7, 75.6, 90.7]


def test_rows_with_three_seeds_are_compared_in_three_ways():
    (entry,) = TABLE.chosen(['cifar "all patch" mlp'])
    passed_over = (counted_run(1800, 2019, 0.9), counted_run(1950, 2021, 0.95))
    row = CountedRow(entry, "measured", (counted_run(1900, 2020, 0.8),), passed_over)
    (least, first, mean) = compared_table([TableView.of(TABLE, [row])]).rows
    paper = entry.certified
    assert [each[3] for each in (least, first, mean)] == pytest.approx(
        [19 - paper, 18 - paper, 56.5 / 3 - paper]
    )
    assert "mean over seeds" in [column.name for column in TableView.of(TABLE, [row]).to_table().columns]


def test_what_was_superseded_is_listed_with_why():
    sums = {"run": "f" * 16, "weights_sha256": "0" * 64, "sha256": "1" * 64}
    counts = {"seed": 2019, "training_loss": 0.5, "images": 100, "right": 90, "counted": 60}
    line = Superseded(training="mnist, mlp", evidence_of="certify Patch", why="a reason", **sums, **counts)
    page = document([TableView.of(TABLE, [])], (), [line])
    assert "| mnist, mlp | 2019 | certify Patch | 100 | 90 | 60 | a reason |" in page


def test_json_holds_the_counts_of_every_run():
    (row,) = TableView.of(TABLE, [MEASURED]).to_json()["rows"]
    assert row["runs"][0]["certified"] == [{"threat": Patch(5).to_dict(), "certified": 6207}]
    assert row["paper"]["certified"] == 61.97


def challenged(finished, run, attack_rows, index, withstood):
    """An attack on certified images alone."""
    selection, model = Selection("mnist", drawn=100), {"name": "Model"}
    question = Question("attack", Patch(5), selection, model, {"kind": "AttackSeries", "seed": 0}, True)
    finished.write(run, question, attack_rows(index, withstood))


def test_attacks_on_certified_images_are_listed_with_what_they_broke(finished, mlp, tmp_path, attack_rows):
    run = finished.run(mlp, {Patch(5): (90, 62)})
    challenged(finished, run, attack_rows, [0, 3, 61], withstood=2)
    result = collect(run, tmp_path / "results")
    page = document([], [result])
    assert "| MNIST | Patch(5x5 square, everywhere) | all, 100 epochs | mlp | 3 | 21 | 1 |" in page


def test_attacks_on_trimmed_models_are_listed_beside_those_on_whole_ones(
    finished, mlp, tmp_path, attack_rows
):
    whole = finished.collect(mlp, {Patch(5): (90, 62)})
    run = finished.run(mlp, {Patch(5): (91, 63)}, trimmed=True)
    challenged(finished, run, attack_rows, [62], withstood=1)
    assert collect_all(run.path.parent, tmp_path / "results") == (f"{whole.path.name}/trimmed",)
    page = document([], Results(tmp_path / "results").all())
    assert "| all, 100 epochs | mlp, trimmed or rounded | 1 | 7 | 0 |" in page


def test_the_page_lists_every_seed_once_and_says_which_counts(finished, mlp, tmp_path):
    tried = {"mlp": {2019: (50, 0.5)}, "cnn2": {2019: (50, 0.5)}, "cnn4": {2019: (10, 2.3), 2020: (40, 0.8)}}
    for model, seeds in tried.items():
        for seed, (certified, loss) in seeds.items():
            spec = replace(mlp, seed=seed, model=replace(mlp.model, name=model))
            finished.collect(spec, {Patch(5): (90, certified)}, loss=loss)
    tables = [find_table(name) for name in ("training-strategies", "strategy-detail-5x5", "ours")]
    page = document([TableView.of(each, count_rows(each.entries, tmp_path / "results")) for each in tables])
    _, section = page.split("## Seeds\n")
    assert [line for line in section.splitlines() if line.startswith("| MNIST")] == [
        "| MNIST | 5x5 | All Patch | cnn4 | 2019 | 2.3000 | 90.00 | 10.00 | no |",
        "| MNIST | 5x5 | All Patch | cnn4 | 2020 | 0.8000 | 90.00 | 40.00 | yes |",
    ]
    assert "| 1 of 2 for cnn4 |" in page
    assert "| 1 of 2 |" in page


def test_json_has_the_seeds_that_were_passed_over():
    passed_over = (counted_run(7000, 2019, 0.9),)
    counted = CountedRow(ENTRY, "measured", (counted_run(6000, 2020, 0.7),), passed_over)
    (plain,) = TableView.of(TABLE, [counted]).to_json()["rows"]
    assert (plain["certified"], plain["seeds"]) == (60.0, 2)
    assert [(each["seed"], each["training_loss"]) for each in plain["runs"]] == [(2020, 0.7)]
    assert [(each["seed"], each["training_loss"]) for each in plain["passed_over"]] == [(2019, 0.9)]


def test_random_images_and_a_scaled_schedule_are_stated():
    table = find_table("sparse-vs-ablation")
    (entry, *_) = table.chosen(["cifar ablation"])
    run = replace(counted_run(6207), drawn_images=1000)
    shown = TableView.of(table, [CountedRow(entry, "measured", (run,), scale=0.1)]).to_table().to_markdown()
    assert "scaled by 0.1; 1,000 random test images" in shown
