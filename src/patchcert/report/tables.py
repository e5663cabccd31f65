"""One table for the terminal, Markdown, CSV and LaTeX; a missing number stays visibly missing."""

import csv
import io
from dataclasses import dataclass

from rich.table import Table as RichTable
from rich.text import Text

from patchcert.errors import InvalidInput
from patchcert.report.statistics import Proportion

NOT_MEASURED = "not measured"

Cell = str | int | float | Proportion | None


def percent(share: float) -> str:
    """A share in [0, 1] as a percentage, e.g. `91.5%`."""
    return f"{100 * share:.1f}%"


def with_interval(proportion: Proportion | None) -> str:
    """A proportion with interval and count, as `84.1% (81.7-86.3%, n=1,000)`, or that it is not measured."""
    if proportion is None:
        return NOT_MEASURED
    low, high = proportion.interval
    return f"{percent(proportion.value)} ({100 * low:.1f}-{percent(high)}, n={proportion.total:,})"


@dataclass(frozen=True)
class Column:
    """A heading and how its numbers are written; `signed` puts a plus before gains."""

    name: str
    decimals: int = 1
    signed: bool = False
    numeric: bool = True

    def show(self, cell: Cell) -> str:
        """The cell as a reader sees it."""
        if cell is None:
            return NOT_MEASURED
        if isinstance(cell, Proportion):
            return with_interval(cell)
        if isinstance(cell, float):
            return f"{cell:+.{self.decimals}f}" if self.signed else f"{cell:.{self.decimals}f}"
        return f"{cell:,}" if isinstance(cell, int) else cell


@dataclass(frozen=True)
class Table:
    """Rows under columns; floats are plain numbers in the unit that the column's name states."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        """Every row has one cell per column."""
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise InvalidInput(
                    f"row {number} of table {self.title!r} has {len(row)} cells, expected {len(self.columns)}"
                )

    def shown(self) -> list[list[str]]:
        """All cells as text, in rows."""
        return [
            [column.show(cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows
        ]

    def to_rich(self) -> RichTable:
        """A table for the terminal; text is literal, never read as markup."""
        table = RichTable(title=Text(self.title), title_justify="left", show_edge=False, pad_edge=False)
        for column in self.columns:
            table.add_column(Text(column.name), justify="right" if column.numeric else "left")
        for row in self.shown():
            table.add_row(*(Text(cell) for cell in row))
        return table

    def to_markdown(self) -> str:
        """A GitHub-flavoured Markdown table with the title above it."""
        rules = ["---:" if column.numeric else ":---" for column in self.columns]
        heading = [_markdown(column.name) for column in self.columns]
        body = [[_markdown(cell) for cell in row] for row in self.shown()]
        lines = [f"| {' | '.join(row)} |" for row in (heading, rules, *body)]
        return "\n".join([f"**{_markdown(self.title)}**", "", *lines]) + "\n"

    def to_csv(self) -> str:
        """Full-precision values; a proportion becomes four columns, a missing value an empty cell."""
        counted = [
            any(isinstance(row[at], Proportion) for row in self.rows) for at in range(len(self.columns))
        ]
        columns = list(zip(self.columns, counted, strict=True))
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([name for column, is_counted in columns for name in _csv_names(column, is_counted)])
        for row in self.rows:
            cells = zip(row, counted, strict=True)
            writer.writerow([value for cell, is_counted in cells for value in _csv_values(cell, is_counted)])
        return out.getvalue()

    def to_latex(self) -> str:
        """A `tabular` with booktabs rules inside a captioned `table`."""
        alignment = "".join("r" if column.numeric else "l" for column in self.columns)
        rows = [" & ".join(_latex(cell) for cell in row) + r" \\" for row in self.shown()]
        heading = " & ".join(_latex(column.name) for column in self.columns) + r" \\"
        body = [r"\toprule", heading, r"\midrule", *rows, r"\bottomrule"]
        opening = [r"\begin{table}", r"\centering", rf"\caption{{{_latex(self.title)}}}"]
        return (
            "\n".join(
                [*opening, rf"\begin{{tabular}}{{{alignment}}}", *body, r"\end{tabular}", r"\end{table}"]
            )
            + "\n"
        )


def _csv_names(column: Column, counted: bool) -> list[str]:
    parts = ("", " low", " high", " n") if counted else ("",)
    return [column.name + part for part in parts]


def _csv_values(cell: Cell, counted: bool) -> list[str | int | float | None]:
    if isinstance(cell, Proportion):
        return [cell.value, *cell.interval, cell.total]
    return [cell, None, None, None] if counted else [cell]


def _markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "\n": " ",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
