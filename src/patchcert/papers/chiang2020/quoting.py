"""Figures in documents: each stands beside the query that gives it, so that none is typed and all can be made again.

A figure is followed by its query in a comment, which readers do not see:

    94.1<!--= row ours 2x2 certified --> %

A table lies between `<!-- table: QUERY -->` and `<!-- end of table -->`. docs/concepts/evidence.md has all queries.
"""

import html
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast, final

from patchcert.bench.report import markdown
from patchcert.comparison import view as comparison
from patchcert.comparison.counting import best, count, proofs_of_imagenet, proofs_of_results, proofs_of_zoo
from patchcert.comparison.leaderboard import FROZEN as PUBLISHED_SHA256
from patchcert.comparison.leaderboard import Row, parse_rows, published_rows, published_sha256
from patchcert.comparison.trials import trials_table
from patchcert.errors import InvalidInput, PatchcertError
from patchcert.evidence.audit import Finding
from patchcert.evidence.manifest import ListedFile, ListedRun, Manifest, Superseded
from patchcert.evidence.record import Evidence
from patchcert.evidence.results import Results, recipe_key
from patchcert.models import ModelSpec, build
from patchcert.papers.chiang2020.counting import CountedRow, Rule, count_rows
from patchcert.papers.chiang2020.tables import (
    AUTHORS_FILE,
    FROZEN,
    NUMBERS,
    authors_entries,
    content_sha256,
    find_table,
    holds,
    table_names,
)
from patchcert.papers.chiang2020.view import (
    RULES,
    TableView,
    compared_gaps,
    document,
    grid,
)
from patchcert.report.tables import Column, Table
from patchcert.train.run_folder import Run
from patchcert.train.toml import nearest
from patchcert.work import parameter_count
from patchcert.zoo.audit import whole_proof
from patchcert.zoo.card import Card
from patchcert.zoo.shelf import Zoo

ENTRIES = Path("src/patchcert/zoo/entries")
PAGE = Path("docs/results.md")
PLOT = Path("docs/pictures/comparison.svg")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "results/README.md", "docs/**/*.md")
NEVER_WRITTEN = ("CHANGELOG.md", "docs/**/*.ipynb")
"""Read by the same rule as documents, but left alone by `--write`: a history says what it said when it was written,
and a notebook is made from its page."""
OUTSIDE_RESULTS = "docs/measurements/*.npz"
UNITS = ("60", "3600", "100", "1000", "1e6", "0.5e6", "0.25e6")
"""What figures are divided by: seconds to minutes and hours, images to per cent of 10,000, and weights of one, two and
four bytes to megabytes. By any other number a query could give whatever is wanted."""

_FIGURE = re.compile(r"(?P<text>[-+]?\d[\d,]*(?:\.\d+)?)<!--= (?P<query>.*?) -->", re.DOTALL)
_TABLE = re.compile(r"<!-- table: (?P<query>[^\n]*?) -->\n(?P<text>.*?)<!-- end of table -->", re.DOTALL)
_TIME = r"(?:milli|micro|nano)?seconds?|[mn\u00b5\u03bc]s|minutes?|hours?|days?"
_UNIT = rf"(?:\s?[%\u00d7]|x\b|(?:\s|-)(?:points?|pp|times|fold|{_TIME}|per[ -]?cent)\b)"
_OUTCOME = r"(?:certified|proven|broken|withstood|right|above|below)"
_COUNTED = (
    rf"(?:(?:out )?of (?:the )?\d[\d,]*|of them|in \d[\d,]*|(?:images )?(?:more )?(?:are |were )?{_OUTCOME})"
)
_FOUND = r"(?:certif(?:y|ies|ied)|prov(?:e|es|en|ed)|br(?:eak|eaks|oke)|withst(?:and|ands|ood))"
_RESULT = re.compile(
    rf"(?<![\w.\-/])[-+]?\d[\d,]*(?:\.\d+{_UNIT}?|{_UNIT})|(?<![\w.\-/])\d[\d,]* {_COUNTED}\b"
    rf"|\b{_FOUND}:? \d[\d,]*\b"
)
"""What looks like a result where it stands outside code and markers: decimals, shares, times, and counts."""
_HIDDEN = (
    _TABLE,
    re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?<!--= .*? -->\s?(?:%|x\b)?", re.DOTALL),
    re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL),
    re.compile(r"`[^`\n]*`"),
    re.compile(r"\]\([^)]*\)"),
)
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "CHANGELOG.md": ("0 %",),
    "README.md": ("3.11", "96.0%", "68.0%", "0 %"),
    "docs/concepts/votes.md": ("8 of 32", "64 times"),
    "docs/decisions/0005-one-setting-per-table-row.md": ("2 points", "16 points"),
    "docs/decisions/0006-which-seed-counts.md": ("1 of 3", "2.30"),
    "docs/decisions/0012-rows-that-stay-below-the-paper.md": ("2.30", "4 of them"),
    "docs/guides/command-line.md": ("95 %", "0 %"),
    "docs/guides/reproduce.md": ("1 of 3", "95 %", "1.2 times", "0.05", "0.9", "0.01", "0.001", "5 %"),
    "docs/guides/zero-percent.md": ("0 %",),
    "docs/index.md": ("0 %",),
    "docs/guides/train.md": ("1.0", "0.0", "0.5", "10.0", "20.0", "2.30", "0.998", "0.05"),
}
"""By document, what looks like a result and is none: settings, definitions, levels of confidence, versions, log(10);
and what the first example of the README prints, which a test runs."""


@final
@dataclass(frozen=True)
class Sources:
    """What figures are taken from: a checkout with its results, cards, measurements and the paper's tables."""

    root: Path
    results: Path

    @cached_property
    def found(self) -> Results:
        """All results; every file of evidence is read once."""
        return Results(self.results)

    @cached_property
    def views(self) -> Mapping[str, TableView]:
        """Every table with every row, by name."""
        rows = {table: table.matching([], on_request=True) for table in map(find_table, table_names())}
        return {table.name: TableView.of(table, count_rows(rows[table], self.found)) for table in rows}

    @cached_property
    def page(self) -> str:
        return document(tuple(self.views.values()), self.found.all(), self.manifest.superseded)

    @cached_property
    def compared(self) -> tuple[Row, ...]:
        """The rows of all kinds of proof: the best of ours, and what others have published."""
        files = tuple(self.root.glob(OUTSIDE_RESULTS))
        trained = (*proofs_of_results(self.found), *proofs_of_zoo(self.zoo, files))
        return (*best(count(trained)), *count(proofs_of_imagenet(files)), *published_rows())

    @cached_property
    def plot(self) -> str:
        return comparison.plot(self.compared)

    @cached_property
    def manifest(self) -> Manifest:
        return Manifest.read(self.results)

    @property
    def zoo(self) -> Zoo:
        return Zoo(self.root / ENTRIES)

    @property
    def documents(self) -> tuple[Path, ...]:
        """All documents whose figures are brought up to date; the page of results is made as a whole."""
        return tuple(page for page in self._matching(DOCUMENTS) if page != self.root / PAGE)

    @property
    def never_written(self) -> tuple[Path, ...]:
        """What is only read: the changelog and notebooks."""
        return self._matching(NEVER_WRITTEN)

    def _matching(self, patterns: Sequence[str]) -> tuple[Path, ...]:
        return tuple(page for pattern in patterns for page in sorted(self.root.glob(pattern)))

    def figure(self, query: str) -> float:
        words = shlex.split(query)
        if len(words) > 2 and words[-2] == "/":
            if words[-1] not in UNITS:
                raise InvalidInput(
                    f"{query!r} divides by {words[-1]}, which is no unit", hint=", ".join(UNITS)
                )
            return self.figure(shlex.join(words[:-2])) / float(words[-1])
        kind, arguments = words[0] if words else "", words[1:]
        if kind not in _FIGURES:
            raise InvalidInput(
                f"{query!r} begins with no kind of figure", hint=nearest(kind, tuple(_FIGURES))
            )
        try:
            return float(_FIGURES[kind](self, *arguments))
        except TypeError as error:
            raise InvalidInput(
                f"{query!r} has the wrong number of words, or gives no number: {error}"
            ) from error

    def table(self, query: str) -> str:
        kind, *arguments = shlex.split(query)
        if kind not in _TABLES:
            raise InvalidInput(f"{query!r} begins with no kind of table", hint=nearest(kind, tuple(_TABLES)))
        return _TABLES[kind](self, *arguments)

    def read(self, name: str) -> Any:  # noqa: ANN401 - plain JSON of any shape
        return json.loads(self.measurement(name).read_text(encoding="utf-8"))

    def measurement(self, name: str) -> Path:
        """A committed measurement, or a file of the results, which the manifest lists."""
        if any(entry.path == name for entry in self.manifest.beside):
            return self.root / name
        inside = name.removeprefix("results/")
        if inside != name and any(entry.path == inside for entry in self.manifest.files):
            return self.results / inside
        raise InvalidInput(
            f"{name} is no measurement that the manifest lists",
            hint="put it into docs/measurements, and call `patchcert audit results --write`",
        )


def updated(text: str, sources: Sources) -> str:
    """The document with every figure and table as its query gives it; figures keep their decimals."""
    text = _TABLE.sub(
        lambda found: (
            f"<!-- table: {found['query']} -->\n{sources.table(found['query'])}<!-- end of table -->"
        ),
        text,
    )
    return _FIGURE.sub(
        lambda found: f"{shown(sources.figure(found['query']), found['text'])}<!--= {found['query']} -->",
        text,
    )


def shown(value: float, like: str) -> str:
    """A number with as many decimals as another has, and with a sign where that has one."""
    decimals = len(like.partition(".")[2])
    text = f"{value:,.{decimals}f}"
    return f"+{text}" if like.startswith("+") and not text.startswith("-") else text


def audit_paper(folder: Path) -> tuple[Finding, ...]:
    """Whether the files of a folder say what was compared with paper and repository."""
    found = {name: content_sha256((folder / name).read_text(encoding="utf-8")) for name in FROZEN}
    return tuple(
        Finding(folder / name, f"has the sum {there[:16]}..., not the frozen {FROZEN[name][:16]}...")
        for name, there in found.items()
        if there != FROZEN[name]
    )


def audit_published(file: Path) -> tuple[Finding, ...]:
    """Whether what others have published is what was compared with its sources, and our notes state no results."""
    text, frozen = file.read_text(encoding="utf-8"), PUBLISHED_SHA256
    try:
        rows, there = parse_rows(text, file.name), published_sha256(text)
    except PatchcertError as error:
        return (Finding(file, error.message),)
    wrong = [f"has the sum {there}, not the frozen {frozen[:16]}..."] if there != frozen else []
    typed = [figure for row in rows for _, figure in typed_figures(row.source.note or "")]
    wrong += [f"a note has {figure!r}, but results stand in rows, which are frozen" for figure in typed]
    return tuple(Finding(file, what) for what in wrong)


def audit_page(page: Path, expected: str) -> tuple[Finding, ...]:
    """Whether the page of results is the one that the evidence gives."""
    there = page.read_text(encoding="utf-8")
    if expected == there:
        return ()
    lines = zip(expected.splitlines(), there.splitlines(), strict=False)
    differing = next((number for number, (made, stated) in enumerate(lines, 1) if made != stated), None)
    where = "its end differs" if differing is None else f"line {differing} is the first that differs"
    return (Finding(page, f"is not what the evidence gives: {where}"),)


def audit_documents(sources: Sources) -> tuple[Finding, ...]:
    """What is wrong with the page of results, and with figures in all other documents."""
    try:
        findings = [*audit_page(sources.root / PAGE, sources.page)]
    except PatchcertError as error:
        return (Finding(sources.root / PAGE, f"cannot be made from the evidence: {error.message}"),)
    plot = sources.root / PLOT
    if not plot.is_file() or plot.read_text(encoding="utf-8") != sources.plot:
        findings.append(Finding(plot, "is not the drawing that the evidence gives"))
    for each in (*sources.documents, *sources.never_written):
        findings += audit_document(each, sources)
    return tuple(findings)


def audit_document(document: Path, sources: Sources) -> Iterator[Finding]:
    """Figures that are not what their queries give, and what looks like a result but has no query."""
    allowed = SETTINGS.get(document.relative_to(sources.root).as_posix(), ())
    for place, text in _passages(document):
        for what in _wrong(text, sources):
            yield Finding(document, f"{place}{what}")
        for line, typed in typed_figures(text, allowed):
            yield Finding(document, f"{place}line {line} has {typed!r}, which no query gives")


def _passages(document: Path) -> Iterator[tuple[str, str]]:
    """What is read as text, after the place where it stands: a page as a whole, of a notebook each cell but code."""
    text = document.read_text(encoding="utf-8")
    if document.suffix != ".ipynb":
        yield "", text
        return
    for number, cell in enumerate(json.loads(text)["cells"], 1):
        if cell["cell_type"] != "code":
            yield f"cell {number} (docs/making/notebook.py makes it anew): ", "".join(cell["source"])


def _wrong(text: str, sources: Sources) -> Iterator[str]:
    for pattern, made in ((_TABLE, sources.table), (_FIGURE, sources.figure)):
        for found in pattern.finditer(text):
            try:
                value = made(found["query"])
            except (PatchcertError, KeyError, OSError, ValueError) as error:
                yield f"the query {found['query']!r} gives nothing: {error}"
                continue
            expected = value if isinstance(value, str) else shown(value, found["text"])
            if expected != found["text"]:
                what = "the table" if isinstance(value, str) else f"{found['text']}, but {expected} is what"
                yield f"{what} {found['query']!r} gives{' is another' if isinstance(value, str) else ''}"


def typed_figures(text: str, allowed: Sequence[str] = ()) -> Iterator[tuple[int, str]]:
    """What looks like a result outside code, tables and markers, with its line, but for what is allowed. The lines of a
    paragraph are read as one."""
    for pattern in _HIDDEN:
        text = pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    text = html.unescape(re.sub(r"(?<!\w)[*_]+|[*_]+(?!\w)", "", text)).replace("\\%", "%")
    for found in _RESULT.finditer(re.sub(r"(?<!\n)\n(?!\n)|\u00a0", " ", text)):
        if found[0] not in allowed:
            yield text.count("\n", 0, found.start()) + 1, found[0]


def _row(sources: Sources, table: str, words: str, what: str) -> float | None:
    """Of the one row of a table that holds all words."""
    if table not in sources.views:
        raise InvalidInput(f"there is no table {table!r}", hint=nearest(table, tuple(sources.views)))
    view = sources.views[table]
    chosen = view.paper.matching([words])
    rows = [row for row in view.rows if row.entry in chosen]
    if len(rows) != 1:
        raise InvalidInput(f"{len(rows)} rows of {table} have the words {words!r}; expected one")
    if what not in _ROW:
        raise InvalidInput(f"a row has no {what!r}", hint=nearest(what, tuple(_ROW)))
    return _ROW[what](rows[0])


def _loss(row: CountedRow) -> float | None:
    (run,) = row.runs
    return run.training_loss


_SAME = ("clean", "certified", "empirical", "difference", "mean", "spread", "seconds", "scale")
_ROW: Mapping[str, Callable[[CountedRow], float | None]] = {
    **{name: attrgetter(name) for name in _SAME},
    **{f"paper-{name}": attrgetter(f"entry.{name}") for name in NUMBERS},
    "first": attrgetter("by_first_seed.certified"),
    "seeds": attrgetter("number_of_seeds"),
    "loss": _loss,
}


def _run(sources: Sources, name: str, what: str, shape: str = "") -> float | None:
    """Of one run by its fingerprint, whichever seed counts; against the threat of its training, or another shape.

    Mean, spread and number of seeds are of those that were certified against the threat.
    """
    run = next((each for each in sources.manifest.runs if each.run == name), None)
    if run is None:
        raise InvalidInput(f"there is no run {name}")
    if what in ("loss", "seconds"):
        return run.training_loss if what == "loss" else run.training_seconds
    threat = f"Patch({shape}, everywhere)" if shape else run.training.split(", ", 3)[3].rpartition("), ")[0]
    question = _quoted(sources, run, threat)
    if what in ("mean", "spread", "seeds"):
        found = (_proofs_against(sources, seed, threat).get(question) for seed in _seeds_of(sources, run))
        shares = [_share(_counts(line), "certified") for line in found if line is not None]
        if what == "spread":
            return stdev(shares) if len(shares) > 1 else None
        return fmean(shares) if what == "mean" else len(shares)
    return _share(_counts(_proofs_against(sources, run, threat)[question]), what)


def _epoch(sources: Sources, name: str, number: str) -> float | None:
    """How many seconds an epoch of a run took, by its training curve; epochs are counted from 0."""
    run = next((each for each in sources.found.all() if each.path.name == name), None)
    curve = [] if run is None else Run.open(run.path).metrics()
    found = [row["seconds"] for row in curve if str(row["epoch"]) == number]
    if not found:
        raise InvalidInput(f"there is no run {name} with a curve that has epoch {number}")
    return found[0]


def _seeds_of(sources: Sources, run: ListedRun) -> tuple[ListedRun, ...]:
    """The run and those that are other seeds of it."""
    recipes = {each.path.name: recipe_key(each.spec) for each in sources.found.all()}
    return tuple(each for each in sources.manifest.runs if recipes[each.run] == recipes[run.run])


def _quoted(sources: Sources, run: ListedRun, threat: str) -> str:
    """The name of a run's proof against a threat; of several, by other settings, that which most of its seeds have."""
    seeds = [_proofs_against(sources, seed, threat) for seed in _seeds_of(sources, run)]
    count = {name: sum(name in each for each in seeds) for name in _proofs_against(sources, run, threat)}
    most = [name for name, number in count.items() if number == max(count.values())]
    if len(most) != 1:
        raise InvalidInput(
            f"run {run.run} has {len(most)} proofs against {threat} that as many seeds have; expected one",
            hint="quote the file: evidence results/RUN/FILE.npz certified",
        )
    return most[0]


def _counts(line: ListedFile) -> tuple[int, int, int]:
    """Images, right and proven ones."""
    return line.images or 0, line.right or 0, line.counted or 0


def _proofs_against(sources: Sources, run: ListedRun, threat: str) -> dict[str, ListedFile]:
    """By the names of their files, which say what was asked."""
    start = f"{run.run}/certify"
    lines = [
        each for each in sources.manifest.files if each.path.startswith(start) and threat in each.evidence_of
    ]
    return {each.path.partition("/")[2]: each for each in lines}


def _superseded(sources: Sources, name: str, what: str) -> float | None:
    """Of a run that no longer counts; where it was certified against several threats, that of its training."""
    lines = [line for line in sources.manifest.superseded if line.run == name]
    lines = [line for line in lines if line.evidence_of.startswith("certify ")]
    own = [line for line in lines if _threat_of(line) in line.training] or lines
    if not own:
        raise InvalidInput(f"no superseded run is named {name}")
    last = own[-1]
    return last.training_loss if what == "loss" else _share((last.images, last.right, last.counted), what)


def _threat_of(line: Superseded) -> str:
    return line.evidence_of.removeprefix("certify ").rpartition(", ")[0]


def _share(counts: tuple[int, int, int], what: str) -> float:
    images, right, proven = counts
    if what not in ("clean", "certified"):
        raise InvalidInput(
            f"a run has no {what!r}", hint="clean, certified, mean, spread, seeds, loss or seconds"
        )
    return 100 * (right if what == "clean" else proven) / images


def _card(sources: Sources, name: str, path: str) -> float:
    if path == "units":
        return sum(sources.zoo.card(name).model.widths or ())
    return _at(sources.zoo.card(name).to_dict(), path)


def _evidence(sources: Sources, file: str, what: str) -> float:
    """A count of a single file of evidence."""
    found = Evidence.read(sources.measurement(file))
    counts = {
        "images": found.total,
        "correct": found.correct,
        "certified": found.certified,
        "broken": found.broken,
        "open": None if found.broken is None else found.correct - found.certified - found.broken,
        "seconds": found.meta["seconds"],
    }
    if counts.get(what) is None:
        raise InvalidInput(f"{file} does not count {what!r}", hint=nearest(what, tuple(counts)))
    return float(counts[what])


def _at(plain: Any, path: str) -> float:  # noqa: ANN401 - plain JSON of any shape
    """What stands at a dotted path; positions in lists are numbers from 0."""
    for key in path.split("."):
        try:
            plain = plain[int(key)] if isinstance(plain, list) else plain[key]
        except (KeyError, IndexError, ValueError) as error:
            raise InvalidInput(f"there is nothing at {key!r} of {path!r}") from error
    return plain


def _compared(sources: Sources, rule: str, what: str) -> float:
    """Of the rows that have three seeds whatever their first one reached: how they compare with the paper."""
    if rule not in RULES or what not in _GAPS:
        raise InvalidInput(
            f"rows are not compared by {rule!r} and {what!r}", hint=", ".join((*RULES, *_GAPS))
        )
    return _GAPS[what](compared_gaps(tuple(sources.views.values()), cast("Rule", rule)))


_GAPS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "rows": len,
    "above": lambda gaps: sum(gap > 0 for gap in gaps),
    "mean": fmean,
    "lowest": min,
    "highest": max,
}


def _authors(sources: Sources, words: str, what: str) -> float | None:
    """Of the one line of the authors' repository that holds all words."""
    found = [each for each in authors_entries() if holds(each, words)]
    if len(found) != 1 or what not in ("clean", "certified"):
        raise InvalidInput(f"{len(found)} lines of {AUTHORS_FILE} have the words {words!r} and {what!r}")
    return getattr(found[0], what)


def _parameters(sources: Sources, model: str) -> float:
    """Of a network for CIFAR-10 as the paper has it."""
    return parameter_count(build(ModelSpec(model, 3, 32, 32)))


_FIGURES: Mapping[str, Callable[..., Any]] = {
    "row": _row,
    "run": _run,
    "epoch": _epoch,
    "superseded": _superseded,
    "card": _card,
    "json": lambda sources, file, path: _at(sources.read(file), path),
    "evidence": _evidence,
    "compare": _compared,
    "authors": _authors,
    "parameters": _parameters,
}


def _stored_table(sources: Sources, file: str) -> str:
    """A table that was written down as it is, where no rows of images were kept."""
    plain = sources.read(file)
    columns = tuple(
        Column(each["name"], each.get("decimals", 1), numeric=each.get("numeric", True))
        for each in plain["columns"]
    )
    return grid(Table("", columns, tuple(tuple(row) for row in plain["rows"])))


def _trimmed_table(sources: Sources) -> str:
    """Every trimmed model of the zoo: its size and certified images, whole and trimmed."""
    columns = (
        Column("model", numeric=False),
        *(Column(f"MB, {which}", decimals=1) for which in ("whole", "trimmed")),
        *(Column(f"certified, {which}") for which in ("whole", "trimmed")),
        Column("images that differ"),
    )
    rows = []
    for card in map(sources.zoo.card, sources.zoo.names()):
        if card.model.widths:
            whole = whole_proof(card, sources.results).columns["certified"]
            size = sources.zoo.weights(card.name).stat().st_size / 1e6
            differ = int((whole != card.proof.certified_marks).sum())
            counts = int(whole.sum()), card.proof.certified, differ
            rows.append((card.name, _whole_megabytes(card), size, *counts))
    return grid(Table("", columns, tuple(rows)))


def _whole_megabytes(card: Card) -> float:
    """What the network takes as it was trained, in float32."""
    hidden = tomllib.loads(card.training.spec)["model"].get("hidden")
    whole = build(replace(card.model, widths=(), hidden=hidden))
    return 4 * parameter_count(whole) / 1e6


def _sources_table(sources: Sources) -> str:
    links = {row.source.link: row.source.title for row in sources.compared if row.source.link}
    columns = tuple(Column(name, numeric=False) for name in ("source", "link"))
    return grid(Table("", columns, tuple((title, f"[{link}]({link})") for link, title in links.items())))


_TABLES: Mapping[str, Callable[..., str]] = {
    "bench": lambda sources, file: markdown(sources.read(file)),
    "stored": _stored_table,
    "trimmed": _trimmed_table,
    "methods": lambda sources: grid(comparison.table(sources.compared)),
    "headlines": lambda sources, *patches: grid(comparison.headlines(sources.compared, patches)),
    "sources": _sources_table,
    "trials": lambda sources, name: grid(trials_table(sources.root / "trials", name)),
}
