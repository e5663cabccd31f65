"""Dot charts of two numbers per row, the paper's and ours: places in per cent of the width, for any width."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from patchcert.report.figures import Axis, Tick, nice_axis

LEAST_SPAN = 10.0


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


@dataclass(frozen=True)
class Dots:
    """A drawn row: places along the axis in per cent of its length, and the words for them."""

    label: str
    anchor: str
    paper: float | None
    ours: float | None
    low: float | None
    high: float | None
    paper_text: str
    ours_text: str
    note: str
    summary: str


@dataclass(frozen=True)
class DotGroup:
    """Rows over one axis, which holds all that is drawn but need not begin at zero."""

    title: str
    rows: tuple[Dots, ...]
    ticks: tuple[Tick, ...]


def dot_group(title: str, rows: Sequence[Measured], decimals: int = 1) -> DotGroup:
    """The rows over the smallest axis of round ticks that holds every number and interval."""
    values = [
        value for row in rows for value in (row.paper, row.ours, row.low, row.high) if value is not None
    ]
    axis = _axis(min(values), max(values))
    drawn = tuple(_dots(row, axis, decimals) for row in rows)
    return DotGroup(title, drawn, tuple(Tick(_place(axis, at), axis.show(at)) for at in axis.ticks))


def _axis(low: float, high: float) -> Axis:
    """Wide enough that small differences look small, within 0 to 100 per cent."""
    if high - low < LEAST_SPAN:
        middle = (low + high) / 2
        low, high = middle - LEAST_SPAN / 2, middle + LEAST_SPAN / 2
        shift = max(0.0, -low) - max(0.0, high - 100)
        low, high = low + shift, high + shift
    return nice_axis("", max(0.0, math.floor(low)), min(100.0, math.ceil(high)), wanted=6, suffix="%")


def _place(axis: Axis, value: float) -> float:
    return 100 * (value - axis.low) / (axis.high - axis.low)


def _dots(row: Measured, axis: Axis, decimals: int) -> Dots:
    def place(value: float | None) -> float | None:
        return None if value is None else _place(axis, value)

    paper = "-" if row.paper is None else f"{row.paper:.{decimals}f}"
    ours = row.note if row.ours is None else f"{row.ours:.{decimals}f}"
    return Dots(
        label=row.label,
        anchor=row.anchor,
        paper=place(row.paper),
        ours=place(row.ours),
        low=place(row.low),
        high=place(row.high),
        paper_text=paper,
        ours_text=ours,
        note="" if row.ours is None else row.note,
        summary=_summary(row, paper, ours, decimals),
    )


def _summary(row: Measured, paper: str, ours: str, decimals: int) -> str:
    stated = "the paper has no number" if row.paper is None else f"paper {paper}%"
    found = f"ours {ours}" if row.ours is None else f"ours {ours}%"
    interval = "" if row.low is None else f" ({row.low:.{decimals}f} to {row.high:.{decimals}f}%)"
    caveat = f", {row.note}" if row.note and row.ours is not None else ""
    return f"{row.label}: {stated}, {found}{interval}{caveat}"
