"""The paper's tables beside ours, for terminals, documents and programs; what was not run says so."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from patchcert.papers.chiang2020.challenges import Challenge
from patchcert.papers.chiang2020.counts import Outcome, RunOutcome, certified_gaps
from patchcert.papers.chiang2020.results import Result
from patchcert.papers.chiang2020.tables import DATA_NAMES, PaperTable
from patchcert.report.reproduction_seeds import SEEDS, seeds_table
from patchcert.report.reproduction_words import (
    ABSENT,
    model_words,
    number_of_seeds,
    schedule_words,
    seeds_words,
    training_words,
)
from patchcert.report.tables import Cell, Column, Table

OF_CORRECT = "under attack, of those right at first"
OF_ATTACKED = "certified of those attacked"
QUICK_LABEL = "QUICK LOOK, NOT A RESULT (small images, networks and schedules stand in for the paper's)"

HEADING = """# Results

Every number of ours is counted from the rows of evidence in [`results/`](../results), one per test image, by

```bash
patchcert reproduce all --from results --write docs/results.md
```

and a test holds this page to them. The last epoch counts; of several seeds that with the least training loss
([why](decisions/0006-which-seed-counts.md)). Neither an epoch nor a seed is chosen on test images; which rows have
several seeds may be, and notes say what else was decided after a look at them. Certificates cover every placement,
and all test images unless a row says how many. Accuracies are in per cent, differences in points.
[How to reproduce them](guides/reproduce.md).
"""


CHALLENGES = """Certified test images, drawn at random, were attacked with all we have, as by `patchcert attack
--certified-only`: every placement by both losses, then 20 restarts of 150 steps at the weakest; for sparse changes both
losses, and every placement of the largest square. None may break.
"""


def reproduction_table(table: PaperTable, outcomes: Sequence[Outcome], quick: bool = False) -> Table:
    """One row for each row of the paper's table, with its numbers and ours."""
    title = f"{QUICK_LABEL}: {table.title}" if quick else _title(table)
    shown, digits = _Shown.of(outcomes), decimals(table)
    columns = [
        *(Column(name, numeric=False) for name in ("data", "threat", "training", "model")),
        *(Column(name, digits) for name in ("paper clean", "clean")),
        *(Column(name, digits) for name in ("paper under attack", "under attack") if shown.attacked),
        *((Column(OF_CORRECT, digits),) if shown.of_correct else ()),
        *(Column(name, digits) for name in ("paper certified", "certified")),
        *((Column(OF_ATTACKED, digits),) if shown.of_attacked else ()),
        Column("difference", digits, signed=True),
        *((Column("spread over seeds", decimals=2),) if shown.several else ()),
        *(Column("seeds"), Column("paper hours"), Column("training seconds", decimals=0)),
        *(Column(name, numeric=False) for name in ("hardware", "schedule")),
    ]
    rows = tuple(_row(outcome, shown, quick) for outcome in outcomes)
    return Table(title, tuple(columns), rows)


def reproduction_document(
    tables: Sequence[tuple[PaperTable, Sequence[Outcome]]], results: Sequence[Result] = ()
) -> str:
    """A Markdown page of all tables, of several seeds and of all challenged proofs, the same for the same evidence."""
    parts = [HEADING, _overview(tables)]
    for table, outcomes in tables:
        notes = "".join(f"- {note}\n" for note in table.notes)
        grid = reproduction_table(table, outcomes).to_markdown().partition("\n\n")[2]
        head = f"## {table.title}\n\n{_source(table)}{table.caption}\n"
        parts.append("\n".join(filter(None, [head, notes, grid])))
    for table, words in ((seeds_table(tables), SEEDS), (challenge_table(results), CHALLENGES)):
        if table.rows:
            grid = table.to_markdown().partition("\n\n")[2]
            parts.append("\n".join([f"## {table.title}\n\n{words}", grid]))
    return "\n".join(parts)


def challenge_table(results: Sequence[Result]) -> Table:
    """Every attack on certified images that is among the results, and how many proofs it refuted."""
    names = ("data", "threat", "training", "model", "hardware of the attack")
    columns = [Column(name, numeric=False) for name in names]
    columns[4:4] = [Column(name) for name in ("certified images", "gradient steps", "broken")]
    rows = tuple(
        (
            DATA_NAMES.get(result.spec.data.name, result.spec.data.name),
            str(challenge.threat),
            f"{result.spec.strategy.kind}, {result.spec.schedule.epochs} epochs",
            model,
            challenge.total,
            challenge.steps,
            challenge.broken,
            str(challenge.meta.get("device", ABSENT)),
        )
        for result in results
        for model, challenges in _challenged(result)
        for challenge in challenges
    )
    return Table("Challenged proofs", tuple(columns), rows)


def _challenged(result: Result) -> tuple[tuple[str, Sequence[Challenge]], ...]:
    """The network as it was trained and its trimmed model, each with the attacks on its proofs."""
    name = result.spec.model.name
    return (name, result.challenges), (f"{name}, trimmed", result.trimmed_challenges)


def reproduction_json(
    table: PaperTable, outcomes: Sequence[Outcome], quick: bool = False
) -> Mapping[str, Any]:
    """All that is known, down to the counts of every run."""
    return {
        "table": table.name,
        "title": table.title,
        "quick": quick,
        "rows": [_plain_outcome(outcome) for outcome in outcomes],
    }


def decimals(table: PaperTable) -> int:
    """The decimals that the paper gives in most cells of the table."""
    values = [
        value for entry in table.entries for value in (entry.clean, entry.certified) if value is not None
    ]
    fine = sum(round(value, 1) != value for value in values)
    return 2 if 2 * fine > len(values) else 1


def _overview(tables: Sequence[tuple[PaperTable, Sequence[Outcome]]]) -> str:
    columns = (
        Column("table", numeric=False),
        Column("rows"),
        Column("run"),
        Column("with the full schedule"),
        Column("certified at or above the paper"),
        Column("by the first seed alone"),
        *(Column(f"{which} difference", 2, signed=True) for which in ("lowest", "median", "highest")),
    )
    rows = tuple(_overview_row(table, outcomes) for table, outcomes in tables)
    return Table("What was run", columns, rows).to_markdown()


def _overview_row(table: PaperTable, outcomes: Sequence[Outcome]) -> tuple[Cell, ...]:
    gaps = certified_gaps(outcomes)
    return (
        table.name,
        len(outcomes),
        sum(outcome.status == "measured" for outcome in outcomes),
        sum(outcome.status == "measured" and outcome.scale == 1.0 for outcome in outcomes),
        _not_below(gaps),
        _not_below(certified_gaps([outcome.by_first_seed for outcome in outcomes])),
        *((min(gaps), median(gaps), max(gaps)) if gaps else (ABSENT,) * 3),
    )


def _not_below(gaps: Sequence[float]) -> str:
    return f"{sum(gap >= 0 for gap in gaps)} of {len(gaps)}" if gaps else ABSENT


def _title(table: PaperTable) -> str:
    return f"{table.title} (section {table.section} of the paper)" if table.section else table.title


def _source(table: PaperTable) -> str:
    return f"Section {table.section} of the paper. " if table.section else ""


@dataclass(frozen=True, slots=True)
class _Shown:
    """Columns that only some tables have."""

    attacked: bool
    of_correct: bool
    of_attacked: bool
    several: bool

    @staticmethod
    def of(outcomes: Sequence[Outcome]) -> "_Shown":
        return _Shown(
            any(outcome.entry.empirical is not None for outcome in outcomes),
            any(outcome.empirical_of_correct is not None for outcome in outcomes),
            any(outcome.certified_of_attacked is not None for outcome in outcomes),
            any(outcome.spread is not None for outcome in outcomes),
        )


def _row(outcome: Outcome, shown: _Shown, quick: bool) -> tuple[Cell, ...]:
    entry = outcome.entry
    missing = "" if outcome.status == "measured" else outcome.status
    missing += f" ({outcome.note})" if missing and outcome.note else ""
    cells: list[Cell] = [
        DATA_NAMES.get(entry.dataset, entry.dataset) + (" (by mnist-mini)" if quick else ""),
        entry.threat_words,
        training_words(outcome),
        model_words(outcome),
        _number(entry.clean),
        _number(outcome.clean),
    ]
    if shown.attacked:
        cells += [_number(entry.empirical), missing or _number(outcome.empirical)]
    if shown.of_correct:
        cells.append(_number(outcome.empirical_of_correct))
    cells += [_number(entry.certified), missing or _number(outcome.certified)]
    if shown.of_attacked:
        cells.append(_number(outcome.certified_of_attacked))
    cells.append(_number(outcome.difference))
    if shown.several:
        cells.append(_number(outcome.spread))
    cells += [
        seeds_words(outcome),
        _number(entry.hours),
        _number(outcome.seconds),
        outcome.hardware or ABSENT,
        schedule_words(outcome, quick),
    ]
    return tuple(cells)


def _number(value: float | None) -> Cell:
    return ABSENT if value is None else float(value)


def _plain_outcome(outcome: Outcome) -> dict[str, Any]:
    entry = outcome.entry
    return {
        "row": entry.label,
        "status": outcome.status,
        "note": outcome.note,
        "paper": {name: getattr(entry, name) for name in ("clean", "empirical", "certified", "hours")},
        "clean": outcome.clean,
        "empirical": outcome.empirical,
        "empirical_of_initially_correct": outcome.empirical_of_correct,
        "certified": outcome.certified,
        "certified_of_attacked": outcome.certified_of_attacked,
        "difference": outcome.difference,
        "spread": outcome.spread,
        "seconds": outcome.seconds,
        "scale": outcome.scale if outcome.runs else None,
        "seeds": number_of_seeds(outcome),
        "runs": [_plain_run(run) for run in outcome.runs],
        "passed_over": [_plain_run(run) for run in outcome.passed_over],
    }


def _plain_run(run: RunOutcome) -> dict[str, Any]:
    return {
        "fingerprint": run.fingerprint,
        "model": run.model,
        "seed": run.seed,
        "training_loss": run.training_loss,
        "images": run.clean.total,
        "correct": run.clean.successes,
        "certified": [
            {"threat": threat.to_dict(), "certified": count.successes} for threat, count in run.certified
        ],
        "attacked": None if run.attacked is None else run.attacked.total,
        "withstood": None if run.attacked is None else run.attacked.successes,
        "certified_of_attacked": run.certified_of_attacked and run.certified_of_attacked.successes,
        "initially_correct": None if run.initially_correct is None else run.initially_correct.total,
        "withstood_of_them": None if run.initially_correct is None else run.initially_correct.successes,
        "defense": run.defense,
        "seconds": run.seconds,
        "device": run.device,
    }
