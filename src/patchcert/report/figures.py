"""Charts as geometry: pure functions from numbers to coordinates, which a template draws as SVG.

Colours are left to the page's style sheet, so that one drawing serves light, dark and print.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 460.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 92.0, 14.0, 36.0
LABEL_GAP = 15.0


@dataclass(frozen=True)
class Scale:
    """Values from low to high, laid evenly from start to end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Where a value stands."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


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
class Axis:
    """A range of values and how its ticks are written."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    suffix: str = ""

    def show(self, value: float) -> str:
        """A tick's text, with no more decimals than its step needs."""
        step = min((b - a for a, b in zip(self.ticks, self.ticks[1:], strict=False)), default=1.0)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return f"{value:.{decimals}f}{self.suffix}"


@dataclass(frozen=True)
class Tick:
    """Where a tick stands on the page, and its text."""

    at: float
    text: str


@dataclass(frozen=True)
class Mark:
    """A drawn point: its centre, whisker ends and the text shown on hovering."""

    x: float
    y: float
    low: float | None
    high: float | None
    text: str


@dataclass(frozen=True)
class Line:
    """A drawn series: an SVG path and the label at its end."""

    label: str
    style: str
    path: str
    marks: tuple[Mark, ...]
    label_y: float


@dataclass(frozen=True)
class Chart:
    """A line chart ready to draw; `summary` says in words what it shows, for readers who cannot see it."""

    title: str
    summary: str
    x_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> Chart:
    """The chart of some series over shared axes, each labelled at its last point without overlaps."""
    across = Scale(x.low, x.high, LEFT, WIDTH - RIGHT)
    down = Scale(y.low, y.high, HEIGHT - BOTTOM, TOP)
    drawn = [item for item in series if item.points]
    label_ys = spread([down(item.points[-1].y) for item in drawn], LABEL_GAP, TOP + 4, HEIGHT - BOTTOM)
    lines = [_line(item, across, down, at, y.suffix) for item, at in zip(drawn, label_ys, strict=True)]
    return Chart(
        title,
        _summary(title, drawn, x, y),
        x.label,
        tuple(Tick(across(value), x.show(value)) for value in x.ticks),
        tuple(Tick(down(value), y.show(value)) for value in y.ticks),
        tuple(lines),
    )


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


def percent_axis(label: str = "", low: float = 0.0) -> Axis:
    """An axis for percentages, from a round value at or below `low` up to 100."""
    return nice_axis(label, max(0.0, 10 * math.floor(low / 10)), 100.0, suffix="%")


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


def _line(item: Series, across: Scale, down: Scale, label_y: float, suffix: str) -> Line:
    drawn = path([(across(point.x), down(point.y)) for point in item.points])
    marks = tuple(_mark(point, across, down, suffix) for point in item.points) if item.markers else ()
    return Line(item.label, item.style, drawn, marks, label_y)


def _mark(point: Point, across: Scale, down: Scale, suffix: str) -> Mark:
    text = f"{point.y:.1f}{suffix}"
    if point.low is None or point.high is None:
        return Mark(across(point.x), down(point.y), None, None, text)
    text += f" ({point.low:.1f} to {point.high:.1f}{suffix})"
    return Mark(across(point.x), down(point.y), down(point.low), down(point.high), text)


def _summary(title: str, drawn: Sequence[Series], x: Axis, y: Axis) -> str:
    ends = (f"{item.label} ends at {item.points[-1].y:.4g}{y.suffix}" for item in drawn)
    return f"{title} against {x.label}: {'; '.join(ends)}."
