"""Charts as geometry: where numbers stand on a drawing, which a template makes as SVG.

Colours are left to the page's style sheet, so that one drawing serves light, dark and print.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from patchcert.evidence import Evidence
from patchcert.report.statistics import Proportion
from patchcert.threats import Patch

WIDTH, HEIGHT = 460.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 92.0, 14.0, 36.0
LABEL_GAP = 15.0
LEAST_SPAN = 10.0

Metrics = Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class Axis:
    """Values from low to high, laid evenly from start to end, and how its ticks are written."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    suffix: str = ""
    start: float = 0.0
    end: float = 100.0

    def place(self, value: float) -> float:
        """Where a value stands."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def show(self, value: float) -> str:
        """A tick's text, with no more decimals than its step needs."""
        step = min((b - a for a, b in zip(self.ticks, self.ticks[1:], strict=False)), default=1.0)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return f"{value:.{decimals}f}{self.suffix}"


@dataclass(frozen=True)
class Point:
    """One measured value, with its interval where it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Points joined by a line; `style` is the class that the style sheet colours."""

    label: str
    points: tuple[Point, ...]
    style: str = "accent"
    markers: bool = False


@dataclass(frozen=True)
class Chart:
    """Series over shared axes, each labelled at its last point without overlaps."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    width: float = WIDTH
    height: float = HEIGHT

    @property
    def summary(self) -> str:
        """What it shows in words, for readers who cannot see it."""
        ends = (f"{each.label} ends at {each.points[-1].y:.4g}{self.y.suffix}" for each in self.series)
        return f"{self.title} against {self.x.label}: {'; '.join(ends)}."

    @property
    def label_places(self) -> list[float]:
        """The heights of the labels."""
        wanted = [self.y.place(each.points[-1].y) for each in self.series]
        return spread(wanted, LABEL_GAP, TOP + 4, HEIGHT - BOTTOM)

    def path(self, series: Series) -> str:
        """The line as an SVG path."""
        return path([(self.x.place(point.x), self.y.place(point.y)) for point in series.points])

    def text(self, point: Point) -> str:
        """What is shown on hovering."""
        text, suffix = f"{point.y:.1f}{self.y.suffix}", self.y.suffix
        return text if point.low is None else f"{text} ({point.low:.1f} to {point.high:.1f}{suffix})"


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> Chart:
    """The chart of those series that have points."""
    across = replace(x, start=LEFT, end=WIDTH - RIGHT)
    down = replace(y, start=HEIGHT - BOTTOM, end=TOP)
    return Chart(title, across, down, tuple(each for each in series if each.points))


def nice_axis(label: str, low: float, high: float, wanted: int = 5, suffix: str = "") -> Axis:
    """An axis over the range, widened to round ticks 1, 2 or 5 times a power of ten apart."""
    span = high - low if high > low else max(abs(high), 1.0)
    magnitude = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(
        factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude * wanted >= span * (1 - 1e-9)
    )
    first, last = math.floor(low / step + 1e-9), math.ceil((low + span) / step - 1e-9)
    ticks = tuple(round(number * step, 10) for number in range(first, last + 1))
    return Axis(label, ticks[0], ticks[-1], ticks, suffix)


def percent_axis(low: float = 0.0) -> Axis:
    """An axis for percentages, from a round value at or below `low` up to 100."""
    return nice_axis("", max(0.0, 10 * math.floor(low / 10)), 100.0, suffix="%")


def whole_axis(label: str, low: int, high: int) -> Axis:
    """An axis whose ticks are whole numbers inside the range."""
    steps = (factor * 10**power for power in range(9) for factor in (1, 2, 5))
    step = next(step for step in steps if high - low <= 8 * step)
    ticks = tuple(float(value) for value in range(low + (-low) % step, high + 1, step))
    return Axis(label, float(low), float(max(high, low + 1)), ticks)


def path(places: Sequence[tuple[float, float]]) -> str:
    """An SVG path through the places; one that is not finite leaves a gap."""
    commands, pen_down = [], False
    for x, y in places:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
        pen_down = True
    return " ".join(commands)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near those wanted, at least a gap apart, and within the range where they fit."""
    order = sorted(range(len(wanted)), key=lambda at: wanted[at])
    placed = [0.0] * len(wanted)
    floor = low
    for at in order:
        placed[at] = max(wanted[at], floor)
        floor = placed[at] + gap
    ceiling = high
    for at in reversed(order):
        placed[at] = min(placed[at], ceiling)
        ceiling = placed[at] - gap
    return placed


def training_curves(metrics: Metrics) -> tuple[Chart, ...]:
    """Loss, accuracies and epsilon by epoch, counted from 1; a quantity that was never written has no chart."""
    epochs = [epoch for row in metrics if (epoch := _epoch(row)) is not None]
    if not epochs:
        return ()
    span = whole_axis("epoch", math.floor(min(epochs)), math.ceil(max(epochs)))
    loss = _series(metrics, "loss", "loss", "accent")
    accuracies = (
        _series(metrics, "clean_accuracy", "clean", "plain", 100.0),
        _series(metrics, "certified_accuracy", "certified", "accent", 100.0),
    )
    epsilon = _series(metrics, "epsilon", "epsilon", "plain")
    highest = max((point.y for point in loss.points), default=1.0)
    lowest = min((point.y for each in accuracies for point in each.points), default=0.0)
    charts = (
        line_chart("Training loss", span, nice_axis("", 0.0, highest), [loss]),
        line_chart(_sample_title(metrics), span, percent_axis(lowest), accuracies),
        line_chart("Reach of the patch (epsilon)", span, nice_axis("", 0.0, 1.0), [epsilon]),
    )
    return tuple(chart for chart in charts if chart.series)


def _sample_title(metrics: Metrics) -> str:
    """On which images accuracies were checked, as far as the last check says so."""
    last = next((row for row in reversed(metrics) if "checked_on" in row), {})
    if not last:
        return "Accuracy while training"
    count, split = _value(last, "checked_images"), str(last["checked_on"])
    kind = "training" if split == "train" else split
    return f"Accuracy on {count:,.0f} {kind} images" if count else f"Accuracy on {kind} images"


def sizes_chart(certificates: Sequence[Evidence]) -> Chart | None:
    """Accuracies against the side of square patches, on the images that all of two or more sides share.

    The certificates are of one kind; of several against the same patch those of the most images are drawn.
    """
    ascending = sorted(certificates, key=lambda rows: rows.total)
    by_side = {side: rows for rows in ascending if (side := _square_side(rows))}
    sides = sorted(by_side)
    if len(sides) < 2:
        return None
    common = reduce(np.intersect1d, [rows.columns["index"] for rows in by_side.values()])
    if not len(common):
        return None
    shares = {side: _shares(by_side[side], common) for side in sides}
    certified = tuple(_point(side, shares[side][1]) for side in sides)
    series = (
        Series("clean", tuple(_point(side, shares[side][0]) for side in sides), "plain", markers=True),
        Series("certified", certified, "accent", markers=True),
    )
    title = f"Certified accuracy against patch size, on {len(common):,} images"
    lowest = min(point.low or 0.0 for point in certified)
    axis = whole_axis("side of the square patch in pixels", sides[0], sides[-1])
    return line_chart(title, axis, percent_axis(lowest), series)


def _shares(rows: Evidence, index: NDArray[np.integer]) -> tuple[Proportion, Proportion]:
    """Clean and certified accuracy on some of the images."""
    kept = np.isin(rows.columns["index"], index)
    return Proportion.of(rows.right_rows[kept]), Proportion.of(rows.columns["certified"][kept])


def _square_side(rows: Evidence) -> int | None:
    """The side of a full square that may be anywhere, else None."""
    threat = rows.threat
    if not isinstance(threat, Patch) or str(threat.rule) != "everywhere" or not threat.is_solid:
        return None
    return threat.height if threat.height == threat.width else None


def _point(side: int, share: Proportion) -> Point:
    low, high = share.interval
    return Point(float(side), 100 * share.value, 100 * low, 100 * high)


def _series(metrics: Metrics, key: str, label: str, style: str, factor: float = 1.0) -> Series:
    values = [(_epoch(row), _value(row, key)) for row in metrics]
    points = tuple(Point(epoch, factor * y) for epoch, y in values if epoch is not None and y is not None)
    return Series(label, points, style, markers=len(points) == 1)


def _epoch(row: Mapping[str, object]) -> float | None:
    """The epoch as messages count it, from 1 on."""
    epoch = _value(row, "epoch")
    return None if epoch is None else epoch + 1


def _value(row: Mapping[str, object], key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


@dataclass(frozen=True)
class Measured:
    """One row to draw, values in per cent; `ours` is None where it was not run.

    The note says why, or what keeps ours from being compared with the paper's, which are then drawn paler.
    """

    label: str
    paper: float | None
    ours: float | None
    low: float | None = None
    high: float | None = None
    anchor: str = ""
    note: str = ""
    decimals: int = 1

    @property
    def paper_text(self) -> str:
        """The paper's number."""
        return "-" if self.paper is None else self._show(self.paper)

    @property
    def ours_text(self) -> str:
        """Our number, or why there is none."""
        return self.note if self.ours is None else self._show(self.ours)

    @property
    def caveat(self) -> str:
        """What keeps our number from being compared with the paper's."""
        return "" if self.ours is None else self.note

    @property
    def summary(self) -> str:
        """The row in words."""
        stated = "the paper has no number" if self.paper is None else f"paper {self.paper_text}%"
        found = f"ours {self.ours_text}{'' if self.ours is None else '%'}"
        interval = ""
        if self.low is not None and self.high is not None:
            interval = f" ({self._show(self.low)} to {self._show(self.high)}%)"
        return f"{self.label}: {stated}, {found}{interval}{', ' if self.caveat else ''}{self.caveat}"

    def _show(self, value: float) -> str:
        return f"{value:.{self.decimals}f}"


@dataclass(frozen=True)
class DotGroup:
    """Rows over one axis, which holds all that is drawn but need not begin at zero."""

    title: str
    rows: tuple[Measured, ...]

    @cached_property
    def axis(self) -> Axis:
        """The smallest axis of round ticks that holds every number; wide enough that small differences look small."""
        found = [value for row in self.rows for value in (row.paper, row.ours, row.low, row.high)]
        values = [value for value in found if value is not None]
        low, high = min(values), max(values)
        if high - low < LEAST_SPAN:
            middle = (low + high) / 2
            low, high = middle - LEAST_SPAN / 2, middle + LEAST_SPAN / 2
            shift = max(0.0, -low) - max(0.0, high - 100)
            low, high = low + shift, high + shift
        return nice_axis("", max(0.0, math.floor(low)), min(100.0, math.ceil(high)), wanted=6, suffix="%")
