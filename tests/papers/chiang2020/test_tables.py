"""The paper's numbers, and how rows of its tables are found."""

from statistics import fmean

import pytest

from patchcert.errors import InvalidInput
from patchcert.papers.chiang2020.tables import AVERAGED, Entry, find_table, paper_tables, table_names

ROWS = {
    "training-strategies": 22,
    "strategy-detail-2x2": 30,
    "strategy-detail-5x5": 30,
    "large-models": 16,
    "bound-pooling": 30,
    "sparse-detail": 14,
    "sparse-vs-ablation": 12,
    "shape-transfer": 28,
    "compare-defenses": 18,
    "break-imagenet": 12,
}


def test_every_table_has_all_its_rows():
    assert {table.name: len(table.entries) for table in paper_tables()} == ROWS
    assert set(table_names()) == set(ROWS) | {"ours"}


@pytest.mark.parametrize("patch", ["2x2", "5x5"])
def test_the_papers_means_are_those_of_its_single_models(patch):
    detail = find_table(f"strategy-detail-{patch}").entries
    means = [row for row in find_table("training-strategies").entries if row.model == "average"]
    for row in (row for row in means if row.patch == patch):
        same = [each for each in detail if (each.dataset, each.strategy) == (row.dataset, row.strategy)]
        assert sorted(each.model for each in same) == sorted(AVERAGED)
        for name in ("clean", "certified"):
            mean = fmean(getattr(each, name) for each in same)
            assert getattr(row, name) == pytest.approx(mean, abs=0.06), row.label


@pytest.mark.parametrize("table", ["bound-pooling", "large-models"])
def test_rows_that_tables_share_have_the_same_numbers(table):
    detail = {
        (row.dataset, row.patch, row.strategy, row.model): row
        for patch in ("2x2", "5x5")
        for row in find_table(f"strategy-detail-{patch}").entries
    }
    shared = [
        (row, detail[key])
        for row in find_table(table).entries
        if (key := (row.dataset, row.patch, row.strategy, row.model)) in detail
    ]
    assert shared
    for row, same in shared:
        assert row.certified == pytest.approx(same.certified, abs=0.051)
        assert row.clean == pytest.approx(same.clean, abs=0.061)


def test_rows_on_request_are_left_out_unless_asked_for():
    table = find_table("large-models")
    assert len(table.chosen([])) == 14
    assert len(table.chosen(["all cnn5w"])) == 2


def test_rows_are_found_by_all_words_of_any_text():
    table = find_table("strategy-detail-5x5")
    assert len(table.chosen(["MNIST"])) == 15
    assert [entry.model for entry in table.chosen(["mnist all mlp", "cifar random(1) cnn4"])] == [
        "mlp",
        "cnn4",
    ]


def test_words_between_quotes_belong_together():
    table = find_table("bound-pooling")
    assert {entry.strategy for entry in table.chosen(['5x5 "Pool 2 cnn4"'])} == {"Pool 2"}
    assert {entry.strategy for entry in table.chosen(["5x5 pool 2 cnn4"])} == {"Pool 2", "Pool 2-2"}


def test_words_without_rows_get_an_example():
    with pytest.raises(InvalidInput, match="no row of large-models has the words 'svhn'") as caught:
        find_table("large-models").chosen(["svhn"])
    assert "CIFAR-10 2x2 All Patch mlp" in caught.value.hint


def test_an_unknown_table_gets_the_nearest():
    with pytest.raises(InvalidInput, match="no table named 'large-model'") as caught:
        find_table("large-model")
    assert caught.value.hint == "did you mean 'large-models'?"


def test_labels_tell_rows_apart():
    for table in paper_tables():
        labels = [entry.label for entry in table.entries]
        assert len(set(labels)) == len(labels), table.name
    assert Entry("mnist", "mlp", "All Patch", "5x5").label == "MNIST 5x5 All Patch mlp"
