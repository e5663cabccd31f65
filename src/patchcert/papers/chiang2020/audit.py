"""Whether the paper's numbers are the paper's, and the page of results is what the evidence gives."""

from pathlib import Path

from patchcert.errors import PatchcertError
from patchcert.evidence.audit import Finding
from patchcert.evidence.results import Results
from patchcert.papers.chiang2020.counting import count_rows
from patchcert.papers.chiang2020.tables import (
    NUMBERS_SHA256,
    find_table,
    numbers_sha256,
    read_tables,
    table_names,
)
from patchcert.papers.chiang2020.view import TableView, document


def audit_paper(file: Path) -> tuple[Finding, ...]:
    """Whether the numbers in a file are those that were compared with the paper."""
    found = numbers_sha256(read_tables(file.read_text(encoding="utf-8")))
    what = f"the paper's numbers have the sum {found[:16]}..., not the frozen {NUMBERS_SHA256[:16]}..."
    return () if found == NUMBERS_SHA256 else (Finding(file, what),)


def all_views(results: Path) -> tuple[TableView, ...]:
    """Every table with every row, counted from a folder of results."""
    tables = map(find_table, table_names())
    return tuple(
        TableView.of(table, count_rows(table.matching([], on_request=True), results)) for table in tables
    )


def audit_page(page: Path, results: Path) -> tuple[Finding, ...]:
    """Whether the page of results is the one that the evidence gives."""
    try:
        expected = document(all_views(results), Results(results).all())
    except PatchcertError as error:
        return (Finding(page, f"cannot be made from the evidence: {error.message}"),)
    lines = zip(expected.splitlines(), page.read_text(encoding="utf-8").splitlines(), strict=False)
    differing = [number for number, (made, there) in enumerate(lines, 1) if made != there]
    if expected == page.read_text(encoding="utf-8"):
        return ()
    where = f"line {differing[0]} is the first that differs" if differing else "it has other lines at its end"
    return (Finding(page, f"is not what the evidence gives: {where}"),)
