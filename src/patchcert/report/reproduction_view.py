"""What the page of reproduced tables draws: every text and place, no markup, no number typed by hand."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from patchcert.papers.chiang2020.counts import Count, Outcome, RunOutcome, certified_gaps
from patchcert.papers.chiang2020.imagenet_plan import corner_plan
from patchcert.papers.chiang2020.rows import recipe
from patchcert.papers.chiang2020.tables import DATA_NAMES, PaperTable
from patchcert.report.reproduction import decimals
from patchcert.report.reproduction_charts import ChartView, Counter, charts, share_of
from patchcert.report.reproduction_words import (
    ABSENT,
    model_words,
    number_of_seeds,
    schedule_words,
    seeds_words,
    training_words,
)


@dataclass(frozen=True)
class Cell:
    """A text and the value that it is sorted by; a cell without one is sorted last."""

    text: str
    sort: float | str | None = None
    small: tuple[str, ...] = ()
    style: str = ""


@dataclass(frozen=True)
class RunFacts:
    """One run behind a row."""

    fingerprint: str
    words: str
    counts: tuple[str, ...]


@dataclass(frozen=True)
class RowView:
    """One row of a table with its cells by column, and what is behind it."""

    anchor: str
    label: str
    data: str
    threat: str
    status: str
    cells: tuple[Cell, ...]
    runs: tuple[RunFacts, ...]
    command: str
    also: int


@dataclass(frozen=True)
class TableView:
    """A table: its words, its charts, its rows."""

    anchor: str
    name: str
    title: str
    source: str
    caption: str
    notes: tuple[str, ...]
    columns: tuple[tuple[str, bool], ...]
    rows: tuple[RowView, ...]
    charts: tuple[ChartView, ...]
    measured: int
    full: int
    above: int
    compared: int
    differences: tuple[float, ...]
    commands: tuple[tuple[str, str], ...]


def table_view(table: PaperTable, outcomes: Sequence[Outcome], source: str, quick: bool = False) -> TableView:
    """The view of a table; `source` is the folder of evidence that its numbers were counted from."""
    digits = decimals(table)
    attacked = any(outcome.entry.empirical is not None for outcome in outcomes)
    certified = any(
        outcome.entry.certified is not None or outcome.certified is not None for outcome in outcomes
    )
    whole = [outcome for outcome in outcomes if outcome.status == "measured" and outcome.scale == 1.0]
    gaps = () if quick else certified_gaps(outcomes)
    anchors = [f"{table.name}-{position}" for position in range(1, len(outcomes) + 1)]
    rows = zip(anchors, outcomes, strict=True)
    return TableView(
        anchor=table.name,
        name=table.name,
        title=table.title,
        source=f"Section {table.section} of the paper" if table.section else "",
        caption=table.caption,
        notes=table.notes,
        columns=_columns(attacked, certified),
        rows=tuple(_row(table, anchor, each, (attacked, certified), digits, quick) for anchor, each in rows),
        charts=charts(outcomes, anchors, digits),
        measured=sum(outcome.status == "measured" for outcome in outcomes),
        full=0 if quick else len(whole),
        above=sum(gap >= 0 for gap in gaps),
        compared=len(gaps),
        differences=gaps,
        commands=(
            (
                "Recount from evidence, without training",
                f"patchcert reproduce {table.name} --from {shlex.quote(source)}",
            ),
            ("Train, certify and attack again", f"patchcert reproduce {table.name} --data-dir DATA"),
        ),
    )


def _columns(attacked: bool, certified: bool) -> tuple[tuple[str, bool], ...]:
    """Names, and whether a column holds numbers."""
    words = ((name, False) for name in ("Data", "Threat", "Training", "Model"))
    names = [
        "Paper clean",
        "Clean",
        *(("Paper under attack", "Under attack") if attacked else ()),
        *(("Paper certified", "Certified") if certified else ()),
        "Difference",
        "Training time",
    ]
    return (*words, *((name, True) for name in names))


def _row(
    table: PaperTable,
    anchor: str,
    outcome: Outcome,
    shown: tuple[bool, bool],
    digits: int,
    quick: bool,
) -> RowView:
    entry = outcome.entry
    data = DATA_NAMES.get(entry.dataset, entry.dataset)
    attacked, certified = shown
    words = (data + (" (by mnist-mini)" if quick else ""), entry.threat_words, training_words(outcome))
    cells = [
        *(Cell(word, word) for word in (*words, model_words(outcome))),
        *_pair(entry.clean, outcome, lambda run: run.clean, digits),
        *(_attacked_pair(outcome, digits) if attacked else ()),
        *(_certified_pair(outcome, digits) if certified else ()),
        _difference(outcome.difference, digits),
        _time(outcome, quick),
    ]
    command, also = _command(table, outcome, quick)
    runs = (
        *(_facts(run) for run in outcome.runs),
        *(_facts(run, "passed over: another seed has less") for run in outcome.passed_over),
    )
    return RowView(
        anchor, entry.label, data, entry.threat_words, outcome.status, tuple(cells), runs, command, also
    )


def _pair(paper: float | None, outcome: Outcome, count: Counter, digits: int) -> tuple[Cell, Cell]:
    """The paper's number, and ours with its interval, or why there is none."""
    stated = Cell(ABSENT) if paper is None else Cell(f"{paper:.{digits}f}", paper)
    if outcome.status != "measured":
        return stated, Cell(outcome.status, None, _lines(outcome.note), "missing")
    share = share_of(outcome, count)
    if share is None:
        return stated, Cell(ABSENT)
    interval = f"{share.low:.{digits}f} to {share.high:.{digits}f}"
    return stated, Cell(f"{share.value:.{digits}f}", share.value, (interval,), "ours")


def _worst(run: RunOutcome) -> Count | None:
    return run.worst


def _attacked_pair(outcome: Outcome, digits: int) -> tuple[Cell, Cell]:
    """Under attack; beneath it the share of those that are right without attack and defense, where known."""
    stated, ours = _pair(outcome.entry.empirical, outcome, lambda run: run.attacked, digits)
    share = outcome.empirical_of_correct
    if share is None:
        return stated, ours
    return stated, replace(ours, small=(*ours.small, f"{share:.{digits}f} of those right at first"))


def _certified_pair(outcome: Outcome, digits: int) -> tuple[Cell, Cell]:
    """Our cell also has the share of the attacked images, and which of several seeds counts and how they differ."""
    stated, ours = _pair(outcome.entry.certified, outcome, _worst, digits)
    share = outcome.certified_of_attacked
    beneath = "" if share is None else f"{share:.{digits}f} of those attacked"
    apart = "" if outcome.spread is None else f", deviation {outcome.spread:.2f}"
    seeds = f"seeds: {seeds_words(outcome)}{apart}" if outcome.passed_over else ""
    return stated, replace(ours, small=(*ours.small, *_lines(beneath, seeds)))


def _difference(points: float | None, digits: int) -> Cell:
    if points is None:
        return Cell(ABSENT)
    text = f"{points:+.{digits}f}".replace("-", "\N{MINUS SIGN}")
    return Cell(text, points, (), "gain" if points >= 0 else "loss")


def _time(outcome: Outcome, quick: bool) -> Cell:
    hours = outcome.entry.hours
    paper = "" if hours is None else f"paper {hours:g} h"
    if outcome.seconds is None:
        return Cell(ABSENT, None, _lines(paper))
    schedule = schedule_words(outcome, quick)
    shortened = "" if schedule == "full" else f"schedule {schedule}"
    return Cell(duration(outcome.seconds), outcome.seconds, _lines(shortened, outcome.hardware, paper))


def _lines(*texts: str) -> tuple[str, ...]:
    return tuple(text for text in texts if text)


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _command(table: PaperTable, outcome: Outcome, quick: bool) -> tuple[str, int]:
    """What runs this row as it was run, and how many other rows hold its words too; nothing where none does."""
    entry = outcome.entry
    if recipe(entry) is None and corner_plan(entry) is None:
        return "", 0
    words = ["patchcert", "reproduce", table.name, "--rows", entry.label, *_effort(outcome, quick)]
    also = sum(other != entry for other in table.matching([entry.label]))
    return shlex.join([*words, "--data-dir", "DATA"]), also


def _effort(outcome: Outcome, quick: bool) -> list[str]:
    """The options with which the runs behind a row were made; none for one that was not run."""
    runs = (*outcome.runs, *outcome.passed_over)
    seeds = number_of_seeds(outcome)
    scale = "quick" if quick else "" if outcome.scale == 1.0 else f"{outcome.scale:g}"
    return [
        *(["--scale", scale] if scale else []),
        *(["--seeds", str(seeds)] if seeds > 1 else []),
        *_rounding([words for run in runs for words in run.roundings]),
    ]


def _rounding(words: Sequence[str]) -> list[str]:
    if "bfloat16 windows" in words:
        return ["--bfloat16"]
    return ["--tf32"] if "TF32" in words else []


def _facts(run: RunOutcome, remark: str = "") -> RunFacts:
    counts = [f"{run.clean.successes:,} of {run.clean.total:,} images right"]
    counts += [
        f"{count.successes:,} of {count.total:,} proven against {threat}" for threat, count in run.certified
    ]
    if run.attacked is not None:
        behind = f" behind {run.defense}" if run.defense else ""
        counts.append(f"{run.attacked.successes:,} of {run.attacked.total:,} right under attack{behind}")
    loss = "" if run.training_loss is None else f"training loss {run.training_loss:.4f}"
    words = (f"{run.model}, seed {run.seed}", f"{duration(run.seconds)} on {run.device}", loss, remark)
    return RunFacts(run.fingerprint, ", ".join(_lines(*words)), tuple(counts))
