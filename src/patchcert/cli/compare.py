"""`patchcert compare`: runs, results and leaderboard files in one table."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchcert.cli import options
from patchcert.cli.output import print_table, say
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    from patchcert.comparison.leaderboard import Row

FORMATS = ("table", "markdown", "json", "html")


def compare(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="Run folders with certificates, a folder of results, leaderboard files (.json), or the evidence that "
            "their rows name (.npz).",
        ),
    ],
    published: Annotated[
        bool, typer.Option("--published", help="Also what others have published on the same data.")
    ] = False,
    only_best: Annotated[
        bool,
        typer.Option(
            "--best",
            help="Of trainings with the same kind of proof, data and patch only the one with most certified.",
        ),
    ] = False,
    output: Annotated[str, typer.Option("--format", help=f"{', '.join(FORMATS)}.")] = "table",
    write: Annotated[
        Path | None, typer.Option(help="Write the rows that are counted here to this leaderboard file.")
    ] = None,
) -> None:
    """Put classifiers of all kinds into one table: accuracy, certificates, and what they cost.

    Rows of run folders and results are counted from evidence, and runs that differ in their seed alone are one row;
    rows of leaderboard files are what these state, and counted again where their evidence is named too. A warning says
    which rows must not be compared.
    """
    from patchcert.comparison import view
    from patchcert.comparison.counting import best
    from patchcert.comparison.leaderboard import published_rows, write_rows

    options.check_choice("--format", output, FORMATS)
    options.check_suffix("--write", write, "a leaderboard file", ".json")
    counted, stated = _rows(sources)
    counted = best(counted) if only_best else counted
    if published:
        data = {row.data for row in (*counted, *stated)}
        stated = (*stated, *(row for row in published_rows() if row.data in data))
    rows = (*counted, *stated)
    if not rows:
        raise InvalidInput(
            "there are no certificates of test images in what was named", hint="certify the runs first"
        )
    for warning in view.warnings(rows):
        say(f"warning: {warning}")
    if write is not None:
        write_rows(view.in_order(counted), write)
        say(f"wrote {len(counted)} rows to {write}")
    _print(rows, output)


def _print(rows: "Sequence[Row]", output: str) -> None:
    from patchcert.comparison import view

    if output == "table":
        print_table(view.table(rows).to_rich())
        return
    shown = {"markdown": lambda: view.table(rows).to_markdown(), "json": lambda: view.as_json(rows)}
    typer.echo(shown.get(output, lambda: view.page(rows))(), nl=output != "markdown")


def _rows(sources: "Sequence[Path]") -> "tuple[tuple[Row, ...], tuple[Row, ...]]":
    """The rows that are counted here, and those that files state."""
    from patchcert.cli.target import open_run
    from patchcert.comparison.counting import (
        Proof,
        count,
        proof_of_file,
        proofs_of_results,
        proofs_of_run,
        recounted,
    )
    from patchcert.comparison.leaderboard import Row, read_rows
    from patchcert.evidence.manifest import MANIFEST
    from patchcert.evidence.results import Results

    proofs, files, stated = list[Proof](), list[Proof](), list[Row]()
    for source in sources:
        if source.suffix == ".npz":
            files.append(proof_of_file(source))
        elif source.is_file() or source.suffix == ".json":
            stated += read_rows(source)
        elif (source / MANIFEST).is_file():
            proofs += proofs_of_results(Results(source))
        else:
            proofs += proofs_of_run(open_run(source))
    named = {row.evidence.sha256 for row in stated if row.evidence is not None}
    loose = [row for row in count(files) if row.evidence is None or row.evidence.sha256 not in named]
    rows = [recounted(row, (*count(proofs), *count(files))) for row in stated]
    return (*count(proofs), *loose), tuple(rows)
