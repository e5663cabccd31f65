"""The charts of reproduced tables: for each row the paper's number and ours, with its interval."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from patchcert.papers.chiang2020.counts import Count, Outcome, RunOutcome
from patchcert.papers.chiang2020.tables import DATA_NAMES, Entry
from patchcert.report.charts import DotGroup, Measured, dot_group
from patchcert.report.reproduction_words import schedule_words, training_words
from patchcert.report.statistics import Proportion, mean_interval

Counter = Callable[[RunOutcome], Count | None]


@dataclass(frozen=True)
class ChartView:
    """All rows of a table that have one quantity, grouped by images and threat."""

    title: str
    groups: tuple[DotGroup, ...]

    @property
    def is_mixed(self) -> bool:
        """Whether some of our numbers cannot be compared with the paper's."""
        return any(row.note for group in self.groups for row in group.rows)


@dataclass(frozen=True)
class Share:
    """A mean over runs and its interval, in per cent."""

    value: float
    low: float
    high: float


def share_of(outcome: Outcome, count: Counter) -> Share | None:
    """The mean of one number over the runs of a row that count; None unless all have it."""
    counts = [count(run) for run in outcome.runs]
    found = [Proportion(each.successes, each.total) for each in counts if each is not None]
    if not found or len(found) < len(counts):
        return None
    low, high = mean_interval(found)
    return Share(100 * fmean(share.value for share in found), 100 * low, 100 * high)


def charts(outcomes: Sequence[Outcome], anchors: Sequence[str], digits: int) -> tuple[ChartView, ...]:
    """A chart of what is proven and one of what withstood an attack, each where the table is about it."""
    label = _labels(outcomes)
    quantities: tuple[tuple[str, Callable[[Entry], float | None], Counter], ...] = (
        ("Certified accuracy", lambda entry: entry.certified, lambda run: run.worst),
        ("Accuracy under attack", lambda entry: entry.empirical, lambda run: run.attacked),
    )
    drawn = []
    for title, paper, count in quantities:
        groups: dict[str, list[Measured]] = {}
        for anchor, outcome in zip(anchors, outcomes, strict=True):
            stated, ours = paper(outcome.entry), share_of(outcome, count)
            if stated is not None or ours is not None:
                row = _measured(label(outcome), stated, ours, anchor, outcome)
                groups.setdefault(_group(outcome.entry), []).append(row)
        if groups:
            joined = _joined(groups)
            drawn.append(ChartView(title, tuple(dot_group(*group, digits) for group in joined.items())))
    return tuple(drawn)


def _joined(groups: Mapping[str, Sequence[Measured]]) -> Mapping[str, Sequence[Measured]]:
    """Groups of one row each become one group, whose rows say which they were."""
    if max(map(len, groups.values())) > 1:
        return groups
    return {"": [replace(row, label=f"{name}: {row.label}") for name, (row,) in groups.items()]}


def _measured(label: str, paper: float | None, ours: Share | None, anchor: str, outcome: Outcome) -> Measured:
    if ours is None:
        note = "not measured" if outcome.status == "measured" else outcome.status
        return Measured(label, paper, None, anchor=anchor, note=note)
    note = outcome.note if outcome.scale == 1.0 else f"schedule {schedule_words(outcome, quick=False)}"
    return Measured(label, paper, ours.value, ours.low, ours.high, anchor, note)


def _group(entry: Entry) -> str:
    threat = f"{entry.patch} and shapes of as many pixels" if entry.shape else entry.threat_words
    return f"{DATA_NAMES.get(entry.dataset, entry.dataset)}, {threat}"


def _labels(outcomes: Sequence[Outcome]) -> Callable[[Outcome], str]:
    """A row's label without the words that all rows of the table share."""
    parts: tuple[Callable[[Outcome], str], ...] = (
        lambda outcome: outcome.entry.shape,
        training_words,
        lambda outcome: outcome.entry.model_words,
    )
    differing = [part for part in parts if len(set(map(part, outcomes))) > 1] or [training_words]
    return lambda outcome: ", ".join(filter(None, (part(outcome) for part in differing)))
