"""One self-contained HTML page of tables: the paper's numbers and ours, to sort, filter and recompute."""

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import patchcert
from patchcert.errors import InvalidInput
from patchcert.files import write_text
from patchcert.papers.chiang2020.counting import ABSENT, CountedRow, CountedRun, Rule
from patchcert.papers.chiang2020.tables import Entry
from patchcert.papers.chiang2020.view import (
    QUANTITIES,
    QUICK_LABEL,
    Quantity,
    TableView,
    not_below,
)
from patchcert.report.charts import DotGroup, Measured
from patchcert.report.page import page_environment
from patchcert.report.statistics import Proportion
from patchcert.report.tables import NOT_MEASURED

TITLE = "Tables of the paper, and ours"
ON_PAGE = (
    *("data", "threat", "training", "model", "paper clean", "clean", "paper under attack", "under attack"),
    *("paper certified", "certified", "difference"),
)
NEAR = 1.0
"""In points: rows that differ by no more than this are counted at the top of the page."""
_MINUS = "\N{MINUS SIGN}"
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)]*)\)")


@dataclass(frozen=True)
class PageCell:
    """A text and the value that it is sorted by; a cell without one is sorted last."""

    text: str
    sort: float | str | None = None
    small: tuple[str, ...] = ()
    style: str = ""


@dataclass(frozen=True)
class PageRow:
    """One row of a table with its cells by column, and what is behind it: runs by fingerprint, and a command.

    The words of the command are also in `also` other rows.
    """

    view: CountedRow
    anchor: str
    cells: tuple[PageCell, ...]
    runs: tuple[tuple[str, str], ...]
    command: str
    also: int


@dataclass(frozen=True)
class PageTable:
    """A table with its charts and rows; commands have a few words on what they do."""

    view: TableView
    columns: tuple[tuple[str, bool], ...]
    rows: tuple[PageRow, ...]
    charts: tuple["Chart", ...]
    commands: tuple[tuple[str, str], ...]


def write_page(views: Sequence[TableView], path: Path, source: str) -> Path:
    """The page of the tables, written whole or not at all; `source` is the folder of their evidence."""
    if not views:
        raise InvalidInput("a page needs at least one table, got none", hint="name a table")
    gaps = _all_gaps(views, "loss")
    rows, measured = sum(len(view.rows) for view in views), sum(view.measured for view in views)
    environment = page_environment("patchcert.papers.chiang2020")
    environment.filters["linked"] = partial(linked, root=Path(source).parent, page=path)
    text = environment.get_template("tables.html.j2").render(
        title=views[0].paper.title if len(views) == 1 else TITLE,
        version=patchcert.__version__,
        tables=[page_table(view, source) for view in views],
        run=f"{measured} of {rows}",
        above=not_below(gaps, NOT_MEASURED),
        above_by=[not_below(_all_gaps(views, rule), NOT_MEASURED) for rule in ("first", "mean")],
        middle=_signed(median(gaps), 2) if gaps else NOT_MEASURED,
        middle_by=[_signed(median(by), 2) for rule in ("first", "mean") if (by := _all_gaps(views, rule))],
        within=sum(abs(gap) <= NEAR for gap in gaps),
        near=NEAR,
        compared=len(gaps),
        quick=QUICK_LABEL if views[0].quick else "",
    )
    write_text(path, text)
    return path


def linked(note: str, root: Path, page: Path) -> list[tuple[str, str]]:
    """The parts of a note, each with the address that it leads to from the page, or with none.

    Links of notes begin at the root of a checkout; those to files that are not there become words.
    """
    found, end = [], 0
    for link in _LINK.finditer(note):
        target = root / link["target"]
        address = Path(os.path.relpath(target, page.parent)).as_posix() if target.is_file() else ""
        found += [(note[end : link.start()], ""), (link["text"], address)]
        end = link.end()
    return [*found, (note[end:], "")]


def _all_gaps(views: Sequence[TableView], rule: Rule) -> list[float]:
    return [gap for view in views for gap in view.gaps(rule)]


def page_table(view: TableView, source: str) -> PageTable:
    """What the page shows of a table; `source` is the folder of evidence that its numbers were counted from."""
    name = view.paper.name
    shown = [each for each in QUANTITIES if each.name in ON_PAGE and _is_shown(each, view)]
    anchors = [f"{name}-{position}" for position in range(1, len(view.rows) + 1)]
    recount = f"patchcert reproduce {name} --from {shlex.quote(source)}"
    return PageTable(
        view,
        columns=(*((each.name.capitalize(), each.numeric) for each in shown), ("Training time", True)),
        rows=tuple(_row(view, *each, shown) for each in zip(anchors, view.rows, strict=True)),
        charts=charts(view, anchors),
        commands=(
            ("Recount from evidence, without training", recount),
            ("Train, certify and attack again", f"patchcert reproduce {name} --data-dir DATA"),
        ),
    )


def _is_shown(quantity: Quantity, view: TableView) -> bool:
    """Certified accuracies are left out where neither the paper nor we have any."""
    has_proofs = any(row.entry.certified is not None or row.certified is not None for row in view.rows)
    return quantity.is_shown(view) and (has_proofs or "certified" not in quantity.name)


def _row(view: TableView, anchor: str, row: CountedRow, shown: Sequence[Quantity]) -> PageRow:
    entry, digits = row.entry, view.digits
    command = ["patchcert", "reproduce", view.paper.name, "--rows", entry.label, *_effort(row)]
    runs = (
        *(_facts(run) for run in row.runs),
        *(_facts(run, "passed over: another seed has less") for run in row.passed_over),
    )
    return PageRow(
        row,
        anchor,
        cells=(*(_cell(each, row, digits) for each in shown), _time(row)),
        runs=runs,
        command=shlex.join([*command, "--data-dir", "DATA"]),
        also=sum(other != entry for other in view.paper.matching([entry.label])),
    )


def _cell(quantity: Quantity, row: CountedRow, digits: int) -> PageCell:
    """A number of ours has its interval beneath it, or says why there is none."""
    value, beneath = quantity.value(row), _beneath(quantity.name, row, digits)
    if not quantity.numeric:
        return PageCell(str(value), str(value))
    if quantity.count is not None and row.missing:
        return PageCell(row.status, None, _lines(row.note), "missing")
    if not isinstance(value, float):
        return PageCell(ABSENT, small=beneath)
    if quantity.signed:
        return PageCell(_signed(value, digits), value, (), "gain" if value >= 0 else "loss")
    interval = quantity.interval(row)
    if interval is None:
        return PageCell(f"{value:.{digits}f}", value, beneath)
    words = " to ".join(f"{end:.{digits}f}" for end in interval)
    return PageCell(f"{value:.{digits}f}", value, (words, *beneath), "ours")


def _beneath(name: str, row: CountedRow, digits: int) -> tuple[str, ...]:
    """What the authors' code states, shares of some images alone, and which of several seeds counts."""
    if name == "paper certified":
        stated = row.stated_by_authors
        return () if stated is None else (f"authors' code {stated:.2f}",)
    if name == "under attack":
        share = row.empirical_of_correct
        return () if share is None else (f"{share:.{digits}f} of those right at first",)
    if name == "certified":
        share = row.certified_of_attacked
        apart = "" if row.mean is None else f", mean {row.mean:.2f}"
        apart += "" if row.spread is None else f", deviation {row.spread:.2f}"
        seeds = f"seeds: {row.seeds}{apart}" if row.passed_over else ""
        return _lines("" if share is None else f"{share:.{digits}f} of those attacked", seeds)
    return ()


def _signed(points: float, digits: int) -> str:
    return f"{points:+.{digits}f}".replace("-", _MINUS)


def _time(row: CountedRow) -> PageCell:
    hours = row.entry.hours
    paper = "" if hours is None else f"paper {hours:g} h"
    if row.seconds is None:
        return PageCell(ABSENT, None, _lines(paper))
    is_named = row.schedule.startswith(("changed", "quick"))
    shortened = "" if row.schedule == "full" else row.schedule if is_named else f"schedule {row.schedule}"
    return PageCell(duration(row.seconds), row.seconds, _lines(shortened, row.hardware, paper))


def _lines(*texts: str) -> tuple[str, ...]:
    return tuple(text for text in texts if text)


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _effort(row: CountedRow) -> list[str]:
    """The options with which the runs behind a row were made; none for one that was not run."""
    seeds = row.number_of_seeds
    scale = "quick" if row.quick else "" if row.scale == 1.0 else f"{row.scale:g}"
    rounded = {words for run in (*row.runs, *row.passed_over) for words in run.roundings}
    rounding = "--bfloat16" if "bfloat16 windows" in rounded else "--tf32" if "TF32" in rounded else ""
    return [
        *(["--scale", scale] if scale else []),
        *(["--seeds", str(seeds)] if seeds > 1 else []),
        *filter(None, [rounding]),
    ]


def _facts(run: CountedRun, remark: str = "") -> tuple[str, str]:
    """The fingerprint of a run behind a row, and what was counted."""
    counts = [f"{_of(run.clean)} images right"]
    counts += [f"{_of(count)} proven against {threat}" for threat, count in run.certified]
    if run.attacked is not None:
        behind = f" behind {run.defense}" if run.defense else ""
        counts.append(f"{_of(run.attacked)} right under attack{behind}")
    loss = "" if run.training_loss is None else f"training loss {run.training_loss:.4f}"
    words = (f"{run.model}, seed {run.seed}", f"{duration(run.seconds)} on {run.device}", loss, remark)
    return run.fingerprint, f"{', '.join(_lines(*words))}: {'; '.join(counts)}"


def _of(count: Proportion) -> str:
    return f"{count.successes:,} of {count.total:,}"


@dataclass(frozen=True)
class Chart:
    """All rows of a table that have one quantity, grouped by images and threat."""

    title: str
    groups: tuple[DotGroup, ...]

    @property
    def is_mixed(self) -> bool:
        """Whether some of our numbers cannot be compared with the paper's."""
        return any(row.caveat for group in self.groups for row in group.rows)


def charts(view: TableView, anchors: Sequence[str]) -> tuple[Chart, ...]:
    """A chart of what is proven and one of what withstood an attack, each where the table is about it."""
    label, drawn = _labels(view.rows), []
    for title, name in (("Certified accuracy", "certified"), ("Accuracy under attack", "under attack")):
        ours, paper = (_quantity(each) for each in (name, f"paper {name}"))
        groups: dict[str, list[Measured]] = {}
        for anchor, row in zip(anchors, view.rows, strict=True):
            point = _measured(row, paper, ours)
            if point.paper is not None or point.ours is not None:
                point = replace(point, label=label(row), anchor=anchor, decimals=view.digits)
                groups.setdefault(_group(row.entry), []).append(point)
        if groups:
            joined = _joined(groups).items()
            drawn.append(Chart(title, tuple(DotGroup(name, tuple(rows)) for name, rows in joined)))
    return tuple(drawn)


def _quantity(name: str) -> Quantity:
    return next(quantity for quantity in QUANTITIES if quantity.name == name)


def _joined(groups: Mapping[str, Sequence[Measured]]) -> Mapping[str, Sequence[Measured]]:
    """Groups of one row each become one group, whose rows say which they were."""
    if max(map(len, groups.values())) > 1:
        return groups
    return {"": [replace(row, label=f"{name}: {row.label}") for name, (row,) in groups.items()]}


def _measured(row: CountedRow, paper: Quantity, ours: Quantity) -> Measured:
    stated, found, interval = paper.value(row), ours.value(row), ours.interval(row)
    stated = stated if isinstance(stated, float) else None
    if interval is None or not isinstance(found, float):
        return Measured("", stated, None, note=NOT_MEASURED if row.status == "measured" else row.status)
    note = row.note if row.scale == 1.0 else f"schedule {replace(row, quick=False).schedule}"
    return Measured("", stated, found, *interval, note=note)


def _group(entry: Entry) -> str:
    threat = f"{entry.patch} and shapes of as many pixels" if entry.shape else entry.threat_words
    return f"{entry.data_name}, {threat}"


def _labels(rows: Sequence[CountedRow]) -> Callable[[CountedRow], str]:
    """A row's label without the words that all rows of the table share."""
    parts: tuple[Callable[[CountedRow], str], ...] = (
        lambda row: row.entry.shape,
        lambda row: row.training,
        lambda row: row.entry.model_words,
    )
    differing = [part for part in parts if len(set(map(part, rows))) > 1] or [parts[1]]
    return lambda row: ", ".join(filter(None, (part(row) for part in differing)))
