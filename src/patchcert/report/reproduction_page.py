"""One self-contained page of reproduced tables: the paper's numbers and ours, to sort, filter and recompute."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import patchcert
from patchcert.errors import InvalidInput
from patchcert.files import atomic_write
from patchcert.papers.chiang2020.counts import Outcome
from patchcert.papers.chiang2020.tables import PaperTable
from patchcert.report.page import page_environment
from patchcert.report.reproduction import QUICK_LABEL
from patchcert.report.reproduction_view import TableView, table_view

TITLE = "Tables of the paper, and ours"


@dataclass(frozen=True)
class Figure:
    """A number at the top of the page."""

    label: str
    value: str
    meaning: str
    style: str


def write_reproduction_page(
    tables: Sequence[tuple[PaperTable, Sequence[Outcome]]], path: Path, source: str, quick: bool = False
) -> Path:
    """The page of the tables, written whole or not at all; `source` is the folder of their evidence."""
    if not tables:
        raise InvalidInput("a page needs at least one table, got none", hint="name a table")
    views = [table_view(table, outcomes, source, quick) for table, outcomes in tables]
    with atomic_write(path) as stream:
        stream.write(render_tables(views, quick).encode())
    return path


def render_tables(views: Sequence[TableView], quick: bool = False) -> str:
    """The page as text; the same views give the same text."""
    return (
        page_environment()
        .get_template("tables.html.j2")
        .render(
            title=views[0].title if len(views) == 1 else TITLE,
            version=patchcert.__version__,
            tables=views,
            figures=_figures(views),
            quick=QUICK_LABEL if quick else "",
        )
    )


def _figures(views: Sequence[TableView]) -> tuple[Figure, ...]:
    rows, measured = sum(len(view.rows) for view in views), sum(view.measured for view in views)
    compared, above = sum(view.compared for view in views), sum(view.above for view in views)
    gaps = [gap for view in views for gap in view.differences]
    apart = f"{_points(min(gaps))} to {_points(max(gaps))}" if gaps else "not measured"
    share = f"{above} of {compared}" if compared else "not measured"
    return (
        Figure("Rows run", f"{measured} of {rows}", "rows of tables; some tables share runs", "plain"),
        Figure(
            "At or above the paper",
            share,
            "rows with the full schedule where the paper has a certified accuracy",
            "accent",
        ),
        Figure("Differences", apart, "lowest and highest, in points: ours less that of the paper", "soft"),
    )


def _points(value: float) -> str:
    return f"{value:+.1f}".replace("-", "\N{MINUS SIGN}")
