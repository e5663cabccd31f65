"""Rows as one table, as a page, and as a plot of certified accuracy against the cost of a prediction."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import patchcert
from patchcert.comparison.leaderboard import Row, Seeds
from patchcert.report.charts import Axis, nice_axis, path, spread
from patchcert.report.page import page_environment
from patchcert.report.tables import Cell, Column, Table

TITLE = "Kinds of proof compared"
UNKNOWN = "-"
PANEL, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 580.0, 360.0, 48.0, 276.0, 34.0, 46.0
LABEL_GAP = 14.0
ACROSS = 2
"""Panels beside each other, so that their words can be read on a page."""
STYLES = ("first", "second", "third", "fourth")
_STATED = {
    "evidence": "stated, with the sum of its evidence",
    "published": "stated",
    "unconfirmed": "stated, not confirmed",
}
_PRECISION = re.compile(", (tf32|bfloat16|float16)$")
_SIDES = re.compile(r"^(\d+)x(\d+)$")

COLUMNS = (
    *(Column(name, numeric=False) for name in ("data", "patch", "method", "network")),
    Column("parameters, millions", decimals=2),
    Column("clean", decimals=2),
    Column("certified", decimals=2),
    Column("detected", decimals=2),
    Column("seeds: mean ± deviation"),
    Column("passes", decimals=0),
    Column("multiply-adds, millions", decimals=1),
    Column("ms for a prediction", decimals=3),
    Column("s for 10,000 certificates", decimals=1),
    Column("training, minutes", decimals=1),
    *(Column(name, numeric=False) for name in ("device", "pixels", "outside data", "from")),
)

HEADLINES = (
    *(Column(name, numeric=False) for name in ("data", "patch", "proof", "network")),
    Column("right, %", decimals=2),
    Column("proven, %", decimals=2),
    Column("seeds: mean ± deviation"),
    Column("stated by", numeric=False),
)


def in_order(rows: Sequence[Row]) -> tuple[Row, ...]:
    """By data, then by the size of the patch, then those with most certified images first."""
    return tuple(sorted(rows, key=_place))


def _place(row: Row) -> tuple[object, ...]:
    return row.data, _area(row), row.patch, row.promise != "recovery", -row.certified


def _area(row: Row) -> float:
    found = _SIDES.match(row.patch)
    return int(found[1]) * int(found[2]) if found else math.inf


def table(rows: Sequence[Row]) -> Table:
    """All rows, in per cent; certified images stand below what is promised of them. What no row has is left out."""
    cells = [_cells(row) for row in in_order(rows)]
    known = [place for place in range(len(COLUMNS)) if any(row[place] != UNKNOWN for row in cells)]
    return Table(
        TITLE,
        tuple(COLUMNS[place] for place in known),
        tuple(tuple(row[place] for place in known) for row in cells),
    )


def headlines(rows: Sequence[Row], patches: Sequence[str]) -> Table:
    """What a reader asks first: of each family of proofs the row with the most certified images, and all that others
    state, against patches anywhere in 10,000 images of native pixels, without outside data."""
    alike = [row for row in rows if row.patch in patches and row.images == 10_000]
    asked = in_order([row for row in alike if row.is_like_ours and _is_drawn(row)])
    first: dict[tuple[object, ...], Row] = {}
    for row in asked:
        is_ours = row.evidence is not None
        first.setdefault((*row.threat, row.data, _family(row)) if is_ours else (id(row),), row)
    return Table(TITLE, HEADLINES, tuple(_headline(row) for row in first.values()))


def _family(row: Row) -> str:
    return row.method.partition(",")[0]


def _headline(row: Row) -> tuple[Cell, ...]:
    source, seeds = row.source, row.seeds
    doubt = " (not confirmed)" if source.kind == "unconfirmed" else ""
    cells: tuple[Cell, ...] = (
        row.data,
        row.patch,
        _PRECISION.sub("", row.method),
        _short(row),
        row.clean,
        row.certified,
        None if seeds is None else _seed_words(replace(seeds, counted=None)),
        UNKNOWN if row.evidence is not None else source.title + doubt,
    )
    return tuple(UNKNOWN if cell is None else cell for cell in cells)


def _cells(row: Row) -> tuple[Cell, ...]:
    cost, seeds = row.cost, row.seeds
    is_recovery = row.promise == "recovery"
    cells: tuple[Cell, ...] = (
        row.data if row.images == 10_000 else f"{row.data}, {row.images:,} images",
        row.patch if row.placements == "everywhere" else f"{row.patch}, {row.placements}",
        row.method if row.confidence == 1 else f"{row.method}, confidence {row.confidence:.4g}",
        row.network,
        _scaled(row.parameters, 1e6),
        row.clean,
        row.certified if is_recovery else None,
        None if is_recovery else row.certified,
        None if seeds is None else _seed_words(seeds),
        cost.passes,
        _scaled(cost.multiply_adds, 1e6),
        cost.milliseconds,
        cost.certificate_seconds,
        _scaled(cost.training_seconds, 60),
        cost.device,
        row.pixels,
        row.outside_data,
        _origin(row),
    )
    return tuple(UNKNOWN if cell is None else cell for cell in cells)


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _seed_words(seeds: Seeds) -> str:
    if seeds.spread is None:
        return str(seeds.count)
    counted = "" if seeds.counted is None else f"; {seeds.counted} counts"
    return f"{seeds.count}: {seeds.mean:.2f} ± {seeds.spread:.2f}{counted}"


def _origin(row: Row) -> str:
    note = f"; {row.source.note}" if row.source.note else ""
    return f"{'counted' if row.recounted else _STATED[row.source.kind]}: {row.source.title}{note}"


def warnings(rows: Sequence[Row]) -> Iterator[str]:
    """Why rows of the table cannot be read against each other, in words."""
    asked = {
        "data": {row.data for row in rows},
        "threats": {" ".join(row.threat) for row in rows},
        "promises": {row.promise for row in rows},
        "numbers of test images": {f"{row.images:,}" for row in rows},
        "data from outside": {row.outside_data for row in rows},
    }
    for what, values in asked.items():
        if len(values) > 1:
            yield f"the rows have different {what}, and must not be compared across them: {', '.join(sorted(values))}"


@final
@dataclass(frozen=True)
class PlotPoint:
    """A row on the plot, with its words."""

    x: float
    y: float
    label: str
    title: str
    label_y: float


@final
@dataclass(frozen=True)
class PlotLine:
    """The rows against one patch: all as points, and a line through those that no cheaper one equals."""

    label: str
    style: str
    points: tuple[PlotPoint, ...]
    path: str
    published: float | None
    published_title: str


@final
@dataclass(frozen=True)
class Panel:
    """The rows of one data set, with patches of native pixels that may be everywhere, and whose cost is known."""

    data: str
    rows: tuple[Row, ...]
    others: tuple[Row, ...]
    left: float
    top: float

    @cached_property
    def x(self) -> Axis:
        """Multiply-adds of a prediction, in powers of ten."""
        powers = [math.log10(_cost(row)) for row in self.rows]
        low, high = math.floor(min(powers)), math.ceil(max(powers) + 1e-9)
        ticks = tuple(float(power) for power in range(low, max(high, low + 1) + 1))
        return Axis("", ticks[0], ticks[-1], ticks, start=self.left + LEFT, end=self.left + PANEL - RIGHT)

    @cached_property
    def y(self) -> Axis:
        return replace(
            nice_axis("", 0.0, 100.0, suffix="%"), start=self.top + HEIGHT - BOTTOM, end=self.top + TOP
        )

    @cached_property
    def lines(self) -> tuple[PlotLine, ...]:
        """One for each patch, the smallest first."""
        patches = dict.fromkeys(row.patch for row in sorted(self.rows, key=_area))
        wanted = [self.y.place(row.certified) for row in self.rows]
        heights = spread(wanted, LABEL_GAP, self.y.end, self.y.start)
        by_row = dict(zip(map(id, self.rows), heights, strict=True))
        return tuple(
            self._line(patch, STYLES[number % len(STYLES)], by_row) for number, patch in enumerate(patches)
        )

    def _line(self, patch: str, style: str, heights: dict[int, float]) -> PlotLine:
        same = (row for row in self.rows if row.patch == patch)
        rows = sorted(same, key=lambda row: (_cost(row), -row.certified))
        points = tuple(
            PlotPoint(
                self.x.place(math.log10(_cost(row))),
                self.y.place(row.certified),
                _point_words(row, rows),
                f"{row.method}, {row.network}, {patch}: {row.certified:.2f}% certified, "
                f"{_cost(row):.3g} multiply-adds",
                heights[id(row)],
            )
            for row in rows
        )
        rising = [
            (point.x, point.y)
            for place, (point, row) in enumerate(zip(points, rows, strict=True))
            if all(row.certified > other.certified for other in rows[:place])
        ]
        others = (row for row in self.others if row.patch == patch)
        stated = max(others, key=lambda row: row.certified, default=None)
        words = "" if stated is None else f"{stated.source.title}, {patch}: {stated.certified:.1f}%"
        return PlotLine(
            label=patch,
            style=style,
            points=points,
            path=path(rising),
            published=None if stated is None else self.y.place(stated.certified),
            published_title=words,
        )


def panels(rows: Sequence[Row]) -> tuple[Panel, ...]:
    """One for each data set that has rows to draw."""
    drawn = [row for row in rows if row.evidence is not None and row.cost.multiply_adds and _is_drawn(row)]
    stated = [row for row in rows if row.evidence is None and row.is_like_ours and _is_drawn(row)]
    data = sorted({row.data for row in drawn})
    return tuple(
        Panel(
            name,
            _squares([row for row in drawn if row.data == name]),
            tuple(row for row in stated if row.data == name),
            number % ACROSS * PANEL,
            number // ACROSS * HEIGHT,
        )
        for number, name in enumerate(data)
    )


def _is_drawn(row: Row) -> bool:
    return row.promise == "recovery" and row.pixels == "native" and row.placements == "everywhere"


def _squares(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows against squares, whose sides can be compared; all, where there are none."""
    found = ((row, _SIDES.match(row.patch)) for row in rows)
    return tuple(row for row, sides in found if sides and sides[1] == sides[2]) or tuple(rows)


def _point_words(row: Row, drawn: Sequence[Row]) -> str:
    """The method, and the network where another one is drawn with the same."""
    method = _PRECISION.sub("", row.method)
    networks = {other.network for other in drawn if other.method == row.method}
    return method if len(networks) == 1 else f"{method}, {_short(row)}"


def _short(row: Row) -> str:
    """The network without its sizes."""
    return (row.network or UNKNOWN).partition(",")[0]


def _cost(row: Row) -> float:
    assert row.cost.multiply_adds is not None
    return row.cost.multiply_adds


def plot(rows: Sequence[Row]) -> str:
    """Certified accuracy against multiply-adds of a prediction as an SVG drawing, with a line for each patch."""
    made = panels(rows)
    summary = "; ".join(
        f"{panel.data}, {line.label}: {', '.join(point.title for point in line.points)}"
        for panel in made
        for line in panel.lines
    )
    template = page_environment("patchcert.comparison").get_template("plot.svg.j2")
    width, height = PANEL * max(1, min(ACROSS, len(made))), HEIGHT * max(1, math.ceil(len(made) / ACROSS))
    return template.render(panels=made, width=width, height=height, summary=summary)


def page(rows: Sequence[Row]) -> str:
    """A self-contained HTML page with the plot and the table."""
    shown = table(rows)
    template = page_environment("patchcert.comparison").get_template("comparison.html.j2")
    return template.render(
        title=TITLE,
        version=patchcert.__version__,
        columns=shown.columns,
        rows=shown.shown(),
        links=[row.source.link for row in in_order(rows)],
        plot=plot(rows) if panels(rows) else "",
        warnings=list(warnings(rows)),
    )


def as_json(rows: Sequence[Row]) -> str:
    """The rows in the leaderboard's keys, with what they must not be compared across."""
    plain = {"rows": [row.to_dict() for row in in_order(rows)], "warnings": list(warnings(rows))}
    return json.dumps(plain, indent=2, allow_nan=False)
