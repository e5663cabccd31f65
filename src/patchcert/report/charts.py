"""The charts of a run: how training went, and what is proven against patches of several sizes."""

import math
from collections.abc import Mapping, Sequence

from patchcert.report.figures import Chart, Point, Series, line_chart, nice_axis, percent_axis, whole_axis
from patchcert.report.statistics import Proportion
from patchcert.report.summary import CertificateRows, RunSummary
from patchcert.threats import Patch

Metrics = Sequence[Mapping[str, object]]


def training_curves(metrics: Metrics) -> tuple[Chart, ...]:
    """Loss, accuracies and epsilon by epoch; a quantity that was never written has no chart."""
    epochs = [epoch for row in metrics if (epoch := _value(row, "epoch")) is not None]
    if not epochs:
        return ()
    span = whole_axis("epoch", math.floor(min(epochs)), math.ceil(max(epochs)))
    loss = _series(metrics, "loss", "loss", "accent")
    accuracies = (
        _series(metrics, "clean_accuracy", "clean", "plain", 100.0),
        _series(metrics, "certified_accuracy", "certified", "accent", 100.0),
    )
    epsilon = _series(metrics, "epsilon", "epsilon", "plain")
    charts: list[Chart] = []
    if loss.points:
        highest = max(point.y for point in loss.points)
        charts.append(line_chart("Training loss", span, nice_axis("", 0.0, highest), [loss]))
    if any(item.points for item in accuracies):
        lowest = min(point.y for item in accuracies for point in item.points)
        charts.append(line_chart("Accuracy while training", span, percent_axis(low=lowest), accuracies))
    if epsilon.points:
        charts.append(line_chart("Reach of the patch (epsilon)", span, nice_axis("", 0.0, 1.0), [epsilon]))
    return tuple(charts)


def sizes_chart(run: RunSummary) -> Chart | None:
    """Certified and clean accuracy against the side of square patches, once two sides were certified."""
    by_side = {side: rows for rows in reversed(run.certificates) if (side := _square_side(rows))}
    if len(by_side) < 2:
        return None
    sides = sorted(by_side)
    certified = tuple(_point(side, by_side[side].certified_accuracy) for side in sides)
    clean = tuple(_point(side, by_side[side].clean_accuracy) for side in sides)
    series = (
        Series("clean", clean, "plain", markers=True),
        Series("certified", certified, "accent", markers=True),
    )
    lowest = min(point.low or 0.0 for point in certified)
    axis = whole_axis("side of the square patch in pixels", sides[0], sides[-1])
    return line_chart("Certified accuracy against patch size", axis, percent_axis(low=lowest), series)


def _square_side(rows: CertificateRows) -> int | None:
    """The side of a full square that may be anywhere, else None."""
    threat = rows.threat
    if not isinstance(threat, Patch) or str(threat.rule) != "everywhere" or not threat.is_solid:
        return None
    return threat.height if threat.height == threat.width else None


def _point(side: int, share: Proportion) -> Point:
    low, high = share.interval
    return Point(float(side), 100 * share.value, 100 * low, 100 * high)


def _series(metrics: Metrics, key: str, label: str, style: str, factor: float = 1.0) -> Series:
    values = [(_value(row, "epoch"), _value(row, key)) for row in metrics]
    points = tuple(Point(epoch, factor * y) for epoch, y in values if epoch is not None and y is not None)
    return Series(label, points, style)


def _value(row: Mapping[str, object], key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
