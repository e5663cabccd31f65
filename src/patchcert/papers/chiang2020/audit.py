"""Whether the paper's numbers are the paper's, and the page of results is what the evidence gives."""

from collections.abc import Sequence
from pathlib import Path

from patchcert.evidence.audit import Finding
from patchcert.evidence.manifest import Manifest
from patchcert.evidence.results import Results
from patchcert.papers.chiang2020.counting import count_rows
from patchcert.papers.chiang2020.tables import (
    AUTHORS_FILE,
    AUTHORS_SHA256,
    NUMBERS_SHA256,
    PAPER_FILE,
    authors_sha256,
    find_table,
    numbers_sha256,
    read_authors,
    read_tables,
    table_names,
)
from patchcert.papers.chiang2020.view import TableView, document


def audit_paper(folder: Path) -> tuple[Finding, ...]:
    """Whether the numbers in the files of a folder are those that were compared with paper and repository."""
    paper, authors = folder / PAPER_FILE, folder / AUTHORS_FILE
    found = {
        paper: (numbers_sha256(read_tables(paper.read_text(encoding="utf-8"))), NUMBERS_SHA256),
        authors: (authors_sha256(read_authors(authors.read_text(encoding="utf-8"))), AUTHORS_SHA256),
    }
    return tuple(
        Finding(file, f"its numbers have the sum {there[:16]}..., not the frozen {frozen[:16]}...")
        for file, (there, frozen) in found.items()
        if there != frozen
    )


def all_views(results: Results) -> tuple[TableView, ...]:
    """Every table with every row, counted from results."""
    tables = map(find_table, table_names())
    return tuple(
        TableView.of(table, count_rows(table.matching([], on_request=True), results)) for table in tables
    )


def results_page(views: Sequence[TableView], results: Results) -> str:
    """The page of results that the evidence gives."""
    return document(views, results.all(), Manifest.read(results.folder).superseded)


def audit_page(page: Path, expected: str) -> tuple[Finding, ...]:
    """Whether the page of results is the one that the evidence gives."""
    there = page.read_text(encoding="utf-8")
    if expected == there:
        return ()
    lines = zip(expected.splitlines(), there.splitlines(), strict=False)
    differing = next((number for number, (made, stated) in enumerate(lines, 1) if made != stated), None)
    where = "its end differs" if differing is None else f"line {differing} is the first that differs"
    return (Finding(page, f"is not what the evidence gives: {where}"),)
