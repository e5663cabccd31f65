"""The paper's tables beside ours, in one view for every format; what was not run says so."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from patchcert.evidence.manifest import Superseded
from patchcert.evidence.record import Evidence
from patchcert.evidence.results import Result
from patchcert.papers.chiang2020.counting import ABSENT, CountedRow, CountedRun, Rule
from patchcert.papers.chiang2020.tables import DATA_NAMES, PaperTable
from patchcert.report.statistics import Proportion, mean_interval
from patchcert.report.tables import Cell, Column, Table

QUICK_LABEL = "QUICK LOOK, NOT A RESULT (small images, networks and schedules stand in for the paper's)"

HEADING = """# Results

Every number of ours is counted from the rows of evidence in [`results/`](../results), one per test image, by

```bash
patchcert reproduce all --from results --write docs/results.md
```

and `patchcert audit results` holds this page to them. The last epoch counts; of several seeds the one with the least
training loss ([why](decisions/0006-which-seed-counts.md)), and the mean and the standard deviation over all of them
stand beside it. Neither an epoch nor a seed is chosen on test images; which rows have several seeds may be, and notes
say what else was decided after a look at them. "Changed schedule" marks rows that depart from the schedule of the
paper and its code, for a reason that the decision gives. What the authors' repository states, later than the paper,
has a column wherever it states anything. Certificates cover every placement, and all test images unless a row says how
many. Accuracies are in per cent, differences in points, and compared are rows whose schedule was not shortened.
[How to reproduce them](guides/reproduce.md).
"""

COMPARED = """The rows All Patch, Random(10) and Guided(10) of mlp, cnn2 and cnn4 on CIFAR-10 have three seeds each,
whatever the first one reached, so that they show what the choice of a seed is worth:
"""

SEEDS = """Of the seeds that were run for a row the one with the least mean training loss in the last epoch counts,
for a mean of models the best seed of each; no test image is part of that choice. The rows All Patch, Random(10)
and Guided(10) of mlp, cnn2 and cnn4 on CIFAR-10 have three seeds each. Elsewhere more seeds are run only for rows whose
first one failed or fell below the paper, on the test images too. Read a number with several seeds as the best of that
many tries ([why](decisions/0006-which-seed-counts.md)); `--seeds 1` counts the first alone. Here are all of them; runs
that rows share stand here once.
"""

CHALLENGED = """Certified test images, drawn at random, were attacked with all we have, as by `patchcert attack
--certified-only`: every placement by both losses, then 20 restarts of 150 steps at the weakest; for sparse changes both
losses, and every placement of the largest square. None may break.
"""


SUPERSEDED = """Evidence that something else has replaced: recipes that were changed, runs that were trained again,
short runs. `results/manifest.json` has its sums and the commits that have its rows.
"""

RULES: Mapping[Rule, str] = {
    "loss": "the seed of least training loss, as in the tables",
    "first": "the first seed",
    "mean": "the mean over all seeds",
}
"""Three ways to make one number of several seeds."""
SHORT_RULES: Mapping[Rule, str] = {"loss": "least loss", "first": "first seed", "mean": "mean of seeds"}
SEEDED = ("All Patch", "Random(10)", "Guided(10)")
"""The strategies whose rows on CIFAR-10 have three seeds each, whatever the first one reached."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A column: what it shows of a row, and the counts that it is the mean of, where it is one.

    Per cent have the decimals of the paper's table unless others are given. An `optional` column stands in tables that
    have a row with something to show.
    """

    name: str
    value: Callable[[CountedRow], Cell]
    numeric: bool = True
    decimals: int | None = None
    signed: bool = False
    optional: bool = False
    count: Callable[[CountedRun], Proportion | None] | None = None

    def column(self, digits: int) -> Column:
        return Column(
            self.name, digits if self.decimals is None else self.decimals, self.signed, self.numeric
        )

    def is_shown(self, view: "TableView") -> bool:
        return not self.optional or any(self.value(row) is not None for row in view.rows)

    def cell(self, row: CountedRow) -> Cell:
        value = self.value(row)
        return ABSENT if value is None else value

    def interval(self, row: CountedRow) -> tuple[float, float] | None:
        """Of the mean over the runs of a row that count, in per cent; None unless all have it."""
        counts = [None if self.count is None else self.count(run) for run in row.runs]
        found = [count for count in counts if count is not None]
        if not found or len(found) < len(counts):
            return None
        low, high = mean_interval(found)
        return 100 * low, 100 * high


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


QUANTITIES = (
    Quantity("data", lambda row: row.data, numeric=False),
    Quantity("threat", lambda row: row.entry.threat_words, numeric=False),
    Quantity("training", lambda row: row.training, numeric=False),
    Quantity("model", lambda row: row.model, numeric=False),
    Quantity("paper clean", lambda row: _float(row.entry.clean)),
    Quantity("clean", lambda row: row.clean, count=lambda run: run.clean),
    Quantity("paper under attack", lambda row: _float(row.entry.empirical), optional=True),
    Quantity(
        "under attack",
        lambda row: None if row.entry.empirical is None else row.missing or row.empirical,
        optional=True,
        count=lambda run: run.attacked,
    ),
    Quantity("under attack, of those right at first", lambda row: row.empirical_of_correct, optional=True),
    Quantity("paper certified", lambda row: _float(row.entry.certified)),
    Quantity("authors' code certified", lambda row: row.stated_by_authors, decimals=2, optional=True),
    Quantity("certified", lambda row: row.missing or row.certified, count=lambda run: run.worst),
    Quantity("certified of those attacked", lambda row: row.certified_of_attacked, optional=True),
    Quantity("difference", lambda row: row.difference, signed=True),
    Quantity("mean over seeds", lambda row: row.mean if row.passed_over else None, decimals=2, optional=True),
    Quantity("spread over seeds", lambda row: row.spread, decimals=2, optional=True),
    Quantity("seeds", lambda row: row.seeds, decimals=1),
    Quantity("paper hours", lambda row: _float(row.entry.hours), decimals=1),
    Quantity("training seconds", lambda row: _float(row.seconds), decimals=0),
    Quantity("hardware", lambda row: row.hardware or ABSENT, numeric=False),
    Quantity("schedule", lambda row: row.schedule, numeric=False),
)


@dataclass(frozen=True)
class TableView:
    """A table of the paper with its counted rows."""

    paper: PaperTable
    rows: tuple[CountedRow, ...]
    quick: bool = False

    @classmethod
    def of(cls, paper: PaperTable, rows: Sequence[CountedRow], quick: bool = False) -> "TableView":
        return cls(paper, tuple(replace(row, quick=quick) for row in rows), quick)

    @property
    def digits(self) -> int:
        """The decimals that the paper gives in most cells of the table."""
        found = [value for entry in self.paper.entries for value in (entry.clean, entry.certified)]
        values = [value for value in found if value is not None]
        fine = sum(round(value, 1) != value for value in values)
        return 2 if 2 * fine > len(values) else 1

    @property
    def measured(self) -> int:
        return sum(row.status == "measured" for row in self.rows)

    @property
    def counted(self) -> tuple[CountedRow, ...]:
        """The rows that are results."""
        return () if self.quick else tuple(row for row in self.rows if row.status == "measured")

    @property
    def full(self) -> int:
        """How many rows were run with the paper's whole schedule."""
        return sum(row.scale == 1.0 and not row.changed for row in self.counted)

    @property
    def changed(self) -> int:
        """How many rows were run with another schedule, for some of their models at least."""
        return sum(row.changed != "" for row in self.counted)

    def gaps(self, rule: Rule = "loss") -> tuple[float, ...]:
        """Our certified accuracies less the paper's, in points, of the rows whose schedule was not shortened."""
        whole = [row for row in self.counted if row.scale == 1.0]
        return tuple(gap for row in whole if (gap := row.difference_by(rule)) is not None)

    def not_below(self, rule: Rule = "loss") -> str:
        """How many of these are not below the paper."""
        return not_below(self.gaps(rule))

    def to_table(self) -> Table:
        """One row for each row of the paper's table, with its numbers and ours."""
        section = f" (section {self.paper.section} of the paper)" if self.paper.section else ""
        title = f"{QUICK_LABEL}: {self.paper.title}" if self.quick else f"{self.paper.title}{section}"
        shown = [quantity for quantity in QUANTITIES if quantity.is_shown(self)]
        columns = tuple(quantity.column(self.digits) for quantity in shown)
        return Table(title, columns, tuple(tuple(each.cell(row) for each in shown) for row in self.rows))

    def to_json(self) -> Mapping[str, Any]:
        rows = [row.to_json() for row in self.rows]
        return {"table": self.paper.name, "title": self.paper.title, "quick": self.quick, "rows": rows}

    def to_section(self) -> str:
        notes = "".join(f"- {_from_docs(note)}\n" for note in self.paper.notes)
        head = f"## {self.paper.title}\n\n{self.paper.source}{self.paper.caption}\n"
        return "\n".join(filter(None, [head, notes, grid(self.to_table())]))


def _from_docs(note: str) -> str:
    """A note whose links, which begin at the root of a checkout, lead there from its folder of documents."""
    return note.replace("](docs/", "](").replace("](results/", "](../results/")


def document(
    views: Sequence[TableView], results: Sequence[Result] = (), superseded: Sequence[Superseded] = ()
) -> str:
    """A Markdown page of all tables, of several seeds, of challenged proofs and of what no longer counts, the same for
    the same evidence."""
    parts, compared = [HEADING, overview_table(views).to_markdown()], compared_table(views)
    parts += [COMPARED, grid(compared)] if compared.rows else []
    parts += [view.to_section() for view in views]
    for table, words in (
        (seeds_table(views), SEEDS),
        (challenged_table(results), CHALLENGED),
        (superseded_table(superseded), SUPERSEDED),
    ):
        if table.rows:
            parts.append("\n".join([f"## {table.title}\n\n{words}", grid(table)]))
    return "\n".join(parts)


def grid(table: Table) -> str:
    """The table without its title."""
    return table.to_markdown().partition("\n\n")[2]


def overview_table(views: Sequence[TableView]) -> Table:
    """How much of each table was run, and how it compares with the paper by each way to count several seeds."""
    columns = (
        Column("table", numeric=False),
        *(Column(name) for name in ("rows", "run", "full schedule", "changed schedule")),
        *(Column(f"at or above the paper, {rule}") for rule in SHORT_RULES.values()),
        *(Column(f"median difference, {rule}", 2, signed=True) for rule in SHORT_RULES.values()),
        *(Column(f"{which} difference", 2, signed=True) for which in ("lowest", "highest")),
    )
    return Table("What was run", columns, tuple(_overview_row(view) for view in views))


def compared_table(views: Sequence[TableView]) -> Table:
    """The rows that all have three seeds beside the paper, by each of the three ways to count them."""
    columns = (
        Column("what counts", numeric=False),
        *(Column(name) for name in ("rows", "above the paper")),
        *(Column(f"{name} difference", 2, signed=True) for name in ("mean", "lowest", "highest")),
    )
    found = {words: compared_gaps(views, rule) for rule, words in RULES.items()}
    rows = tuple(
        (words, len(gaps), sum(gap > 0 for gap in gaps), fmean(gaps), min(gaps), max(gaps))
        for words, gaps in found.items()
        if gaps
    )
    return Table("Rows with three seeds", columns, rows)


def compared_gaps(views: Sequence[TableView], rule: Rule) -> tuple[float, ...]:
    """Our certified accuracies less the paper's, by one of the `RULES`, of the rows that all have three seeds."""
    rows = [row for view in views if view.paper.name.startswith("strategy-detail") for row in view.rows]
    seeded = [row for row in rows if row.entry.dataset == "cifar10" and row.entry.strategy in SEEDED]
    return tuple(gap for row in seeded if (gap := row.difference_by(rule)) is not None)


def _overview_row(view: TableView) -> tuple[Cell, ...]:
    gaps = view.gaps()
    return (
        view.paper.name,
        len(view.rows),
        view.measured,
        view.full,
        view.changed,
        *(view.not_below(rule) for rule in RULES),
        *(median(view.gaps(rule)) if gaps else ABSENT for rule in RULES),
        *((min(gaps), max(gaps)) if gaps else (ABSENT,) * 2),
    )


def not_below(gaps: Sequence[float], absent: str = ABSENT) -> str:
    """How many differences are not negative, of how many."""
    return f"{sum(gap >= 0 for gap in gaps)} of {len(gaps)}" if gaps else absent


def seeds_table(views: Sequence[TableView]) -> Table:
    """Every seed of every model that was run with several, each only once however many rows share it."""
    columns = (
        *(Column(name, numeric=False) for name in ("data", "threat", "training", "model")),
        *(Column("seed"), Column("training loss", decimals=4)),
        *(Column(name, decimals=2) for name in ("clean", "certified")),
        Column("counts", numeric=False),
    )
    several: dict[Hashable, tuple[CountedRow, CountedRun]] = {}
    rows = [row for view in views for row in view.rows]
    for row, run in ((each, run) for each in rows for run in each.runs):
        seeds = [each.fingerprint for each in row.seeds_of(run)]
        if len(seeds) > 1:
            threats = tuple(threat for threat, _ in run.certified)
            several.setdefault((run.fingerprint, *seeds, threats, run.defense), (row, run))
    shown = (_seed_row(row, run, each) for row, run in several.values() for each in row.seeds_of(run))
    return Table("Seeds", columns, tuple(shown))


def _seed_row(row: CountedRow, best: CountedRun, run: CountedRun) -> tuple[Cell, ...]:
    entry, scale = row.entry, row.scale
    return (
        entry.data_name,
        entry.threat_words,
        row.training if scale == 1.0 else f"{row.training}, scaled by {scale:g}",
        run.model if entry.model == "average" else entry.model_words,
        str(run.seed),
        ABSENT if run.training_loss is None else run.training_loss,
        run.clean.percent,
        ABSENT if run.worst is None else run.worst.percent,
        "yes" if run == best else "no",
    )


def challenged_table(results: Sequence[Result]) -> Table:
    """Every attack on certified images alone that is among the results, and how many proofs it refuted."""
    columns = (
        *(Column(name, numeric=False) for name in ("data", "threat", "training", "model")),
        *(Column(name) for name in ("certified images", "gradient steps", "broken")),
        Column("hardware of the attack", numeric=False),
    )
    rows = tuple(
        _challenged_row(result, model, evidence)
        for result in results
        for model, found in (("", result.evidence), (", trimmed or rounded", result.trimmed))
        for evidence in found
        if evidence.question.certified_only
    )
    return Table("Challenged proofs", columns, rows)


def superseded_table(lines: Sequence[Superseded]) -> Table:
    """All that was counted once and no longer is, with why."""
    names = ("training", "seed", "evidence", "images", "right", "proven or withstood", "why")
    columns = tuple(Column(name, numeric=name not in ("training", "evidence", "why")) for name in names)
    rows = tuple(
        (line.training, str(line.seed), line.evidence_of, line.images, line.right, line.counted, line.why)
        for line in sorted(lines, key=lambda line: (line.why, line.training, line.seed, line.evidence_of))
    )
    return Table("Superseded", columns, rows)


def _challenged_row(result: Result, trimmed: str, evidence: Evidence) -> tuple[Cell, ...]:
    spec = result.spec
    return (
        DATA_NAMES.get(spec.data.name, spec.data.name),
        str(evidence.threat),
        f"{spec.strategy.kind}, {spec.schedule.epochs} epochs",
        f"{spec.model.name}{trimmed}",
        evidence.total,
        int(evidence.columns["steps"].sum()),
        evidence.total - evidence.withstood,
        str(evidence.meta.get("device", ABSENT)),
    )
