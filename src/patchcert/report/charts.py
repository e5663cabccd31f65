"""The charts of a run: how training went, and what is proven against patches of several sizes."""

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from patchcert.report.figures import Chart, Point, Series, line_chart, nice_axis, percent_axis, whole_axis
from patchcert.report.statistics import Proportion
from patchcert.report.summary import CertificateRows, Integers, RunSummary
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
        charts.append(line_chart(_sample_title(metrics), span, percent_axis(low=lowest), accuracies))
    if epsilon.points:
        charts.append(line_chart("Reach of the patch (epsilon)", span, nice_axis("", 0.0, 1.0), [epsilon]))
    return tuple(charts)


def _sample_title(metrics: Metrics) -> str:
    """On which images accuracies were checked, as far as the last check says so."""
    last = next((row for row in reversed(metrics) if "checked_on" in row), {})
    if not last:
        return "Accuracy while training"
    count, split = _value(last, "checked_images"), str(last["checked_on"])
    kind = "training" if split == "train" else split
    return f"Accuracy on {count:,.0f} {kind} images" if count else f"Accuracy on {kind} images"


def sizes_chart(run: RunSummary) -> Chart | None:
    """Accuracies against the side of square patches, on the images that all of two or more sides share."""
    by_side = {side: rows for rows in reversed(run.certificates) if (side := _square_side(rows))}
    if len(by_side) < 2:
        return None
    sides = sorted(by_side)
    common = reduce(np.intersect1d, [rows.index for rows in by_side.values()])
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
    return line_chart(title, axis, percent_axis(low=lowest), series)


def _shares(rows: CertificateRows, index: Integers) -> tuple[Proportion, Proportion]:
    """Clean and certified accuracy on some of the images."""
    kept = np.isin(rows.index, index)
    return Proportion.of(rows.correct[kept]), Proportion.of(rows.certified[kept])


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
    return Series(label, points, style, markers=len(points) == 1)


def _value(row: Mapping[str, object], key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
