"""All seeds of the rows that were run with several: what they reached, and which of them counts."""

from collections.abc import Hashable, Iterable, Sequence

from patchcert.papers.chiang2020.counts import Outcome, RunOutcome
from patchcert.papers.chiang2020.tables import DATA_NAMES, PaperTable
from patchcert.report.reproduction_words import ABSENT, training_words
from patchcert.report.tables import Cell, Column, Table

SEEDS = """Of the seeds that were run for a row the one whose mean training loss in the last epoch is least counts,
for a mean of models the best seed of each; no test image has a part in that choice. The rows All Patch, Random(10)
and Guided(10) of mlp, cnn2 and cnn4 on CIFAR-10 have three seeds each. Elsewhere more seeds are run only for rows whose
first one failed or fell below the paper, on the test images too. Read a number with several seeds as the best of so
many tries ([why](decisions/0006-which-seed-counts.md)); `--seeds 1` counts the first alone. Here are all of them; runs
that rows share stand here once.
"""


def seeds_table(tables: Sequence[tuple[PaperTable, Sequence[Outcome]]]) -> Table:
    """Every seed of every model that was run with several, each only once however many rows share it."""
    columns = (
        *(Column(name, numeric=False) for name in ("data", "threat", "training", "model")),
        *(Column("seed"), Column("training loss", decimals=4)),
        *(Column(name, decimals=2) for name in ("clean", "certified")),
        Column("counts", numeric=False),
    )
    several: dict[Hashable, tuple[Outcome, RunOutcome]] = {}
    for outcome, run in _contested(outcome for _, outcomes in tables for outcome in outcomes):
        seeds = [each.fingerprint for each in outcome.seeds_of(run)]
        threats = tuple(threat for threat, _ in run.certified)
        several.setdefault((run.fingerprint, *seeds, threats, run.defense), (outcome, run))
    rows = tuple(
        _row(outcome, run, each) for outcome, run in several.values() for each in outcome.seeds_of(run)
    )
    return Table("Seeds", columns, rows)


def _contested(outcomes: Iterable[Outcome]) -> list[tuple[Outcome, RunOutcome]]:
    """The runs that were chosen among several seeds."""
    return [(outcome, run) for outcome in outcomes for run in outcome.runs if len(outcome.seeds_of(run)) > 1]


def _row(outcome: Outcome, chosen: RunOutcome, run: RunOutcome) -> tuple[Cell, ...]:
    entry = outcome.entry
    shortened = "" if outcome.scale == 1.0 else f", scaled by {outcome.scale:g}"
    return (
        DATA_NAMES.get(entry.dataset, entry.dataset),
        entry.threat_words,
        f"{training_words(outcome)}{shortened}",
        run.model if entry.model == "average" else entry.model_words,
        str(run.seed),
        ABSENT if run.training_loss is None else run.training_loss,
        run.clean.percent,
        ABSENT if run.worst is None else run.worst.percent,
        "yes" if run == chosen else "no",
    )
