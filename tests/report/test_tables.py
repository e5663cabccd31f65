"""One table in all its formats."""

import csv
import io

import pytest
from rich.console import Console

from patchcert.errors import InvalidInput
from patchcert.report.statistics import Proportion
from patchcert.report.tables import NOT_MEASURED, Column, Table, with_interval


@pytest.fixture
def table() -> Table:
    names = [Column(name, numeric=False) for name in ("data", "patch", "quantity")]
    numbers = [Column("paper (%)"), Column("ours"), Column("difference (points)", signed=True)]
    rows = (
        ("MNIST", "2x2", "certified", 91.5, Proportion(92, 100), 0.5),
        ("MNIST", "5x5", "certified", 62.0, None, None),
        ("CIFAR_10 | 50%", "[bold]2x2[/bold]", "clean", None, Proportion(1, 4), None),
    )
    return Table("Table 2 & more", (*names, *numbers), rows)


def test_gains_have_a_sign_and_missing_numbers_say_so(table):
    assert table.shown()[0][-1] == "+0.5"
    assert table.shown()[1][-2:] == [NOT_MEASURED, NOT_MEASURED]


def test_a_proportion_is_shown_with_interval_and_count():
    assert with_interval(Proportion(5, 10)) == "50.0% (18.7-81.3%, n=10)"
    assert with_interval(None) == NOT_MEASURED


def test_the_terminal_shows_text_literally(table):
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(table.to_rich())
    assert "[bold]2x2[/bold]" in out.getvalue()
    assert "+0.5" in out.getvalue()


def test_markdown_has_one_line_per_row_and_escapes_pipes(table):
    lines = table.to_markdown().splitlines()
    assert lines[0] == "**Table 2 & more**"
    assert lines[3] == "| :--- | :--- | :--- | ---: | ---: | ---: |"
    assert len(lines) == 4 + len(table.rows)
    assert r"CIFAR_10 \| 50%" in lines[-1]


def test_csv_keeps_full_precision_and_leaves_missing_cells_empty(table):
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert float(rows[0]["ours"]) == 0.92
    assert float(rows[0]["ours low"]) == Proportion(92, 100).interval[0]
    assert rows[0]["ours n"] == "100"
    assert rows[1]["ours"] == rows[1]["ours n"] == rows[1]["difference (points)"] == ""
    assert rows[2]["data"] == "CIFAR_10 | 50%"


def test_latex_escapes_its_special_characters(table):
    text = table.to_latex()
    assert r"\caption{Table 2 \& more}" in text
    assert r"CIFAR\_10 | 50\%" in text
    assert r"\begin{tabular}{lllrrr}" in text
    assert text.count(r"\\") == 1 + len(table.rows)


def test_whole_numbers_and_plain_floats_are_written_by_their_column():
    table = Table("t", (Column("count"), Column("seconds", decimals=2)), ((12345, 1.0),))
    assert table.shown() == [["12,345", "1.00"]]


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(InvalidInput, match="row 1 of table 't' has 1 cells, expected 2"):
        Table("t", (Column("a"), Column("b")), ((1, 2), (3,)))
