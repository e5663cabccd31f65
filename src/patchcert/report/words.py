"""Threats and results in plain sentences."""

import math
from collections.abc import Sequence

from patchcert.report.summary import AnyThreat, RunSummary
from patchcert.report.tables import NOT_MEASURED, percent
from patchcert.threats import Patch, shapes


def describe_threat(threat: AnyThreat) -> str:
    """What the attacker may do, in a few words."""
    if isinstance(threat, Patch):
        return f"one {shapes.describe(threat.stamp)} patch, {threat.rule}"
    return f"any {threat.pixels} pixel{'s' if threat.pixels != 1 else ''}"


def lead_sentence(run: RunSummary) -> str:
    """The run's main result as one sentence that claims no more than was proven."""
    rows = run.headline
    if rows is None:
        return f"Certified accuracy: {NOT_MEASURED}."
    proven = rows.certified_accuracy
    return (
        f"For {proven.successes:,} of {proven.total:,} test images ({percent(proven.value)}) "
        f"it is proven that {_freedom(rows.threat)} can change the prediction, "
        "whatever the changed pixels show."
    )


def class_name(classes: Sequence[str], label: int) -> str:
    """The class as the data set calls it, else its number."""
    return classes[label] if 0 <= label < len(classes) else str(label)


def margin_text(margin: float) -> str:
    """A margin with its sign, to two digits that count, so that a narrow proof is not shown as a tie."""
    if not math.isfinite(margin):
        return "not finite"
    return f"{margin:+.2g}" if abs(margin) < 0.1 else f"{margin:+.2f}"


def _freedom(threat: AnyThreat) -> str:
    if isinstance(threat, Patch):
        where = "wherever it is placed" if str(threat.rule) == "everywhere" else f"placed {threat.rule}"
        return f"no {shapes.describe(threat.stamp)} patch, {where},"
    return f"no change of {threat.pixels} pixel{'s' if threat.pixels != 1 else ''}, wherever they lie,"
