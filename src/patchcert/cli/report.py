"""`patchcert report SOURCE...`: one page about models and their evidence."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchcert.cli import options
from patchcert.cli.output import print_error, print_json, say
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patchcert.evidence import Evidence
    from patchcert.report.summary import ModelSummary, Source

INCONSISTENT = 1
PAGE, EVIDENCE = "report.html", ".npz"


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="Run folders of `patchcert train`, and evidence of any model (.npz), as `patchcert certify` and "
            "`patchcert attack` write it with --out.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page; by default report.html in the folder of a single run or beside a single file, and in the "
            "working folder where there are several."
        ),
    ] = None,
    data_dir: options.DataFolder = None,
    maps: Annotated[int, options.number_option("Certificate maps per model.", least=0)] = 8,
) -> None:
    """Put runs and evidence into one self-contained HTML page.

    Evidence of the same weights is about one model, and so is a run with evidence of its weights. Exits with 1 if
    evidence contradicts itself: an image that is certified, yet was broken by an attack.
    """
    from patchcert.report.page import write_report
    from patchcert.report.summary import summarise

    path = _page(sources, out)
    found = _open(sources)
    summaries = [summarise(source, maps, data_dir) for source in found]
    for summary in summaries:
        if summary.no_pictures:
            say(f"no pictures of {summary.name}: {summary.no_pictures}")
    write_report(summaries, path)
    consistent = not any(summary.contradictions for summary in summaries)
    say(f"the page is {path.resolve()}")
    models = [
        {"sources": [str(each) for each in source.paths], **summary.shares()}
        for source, summary in zip(found, summaries, strict=True)
    ]
    print_json({"page": str(path), "consistent": consistent, "models": models})
    exit_if_contradictory(summaries, path)


def exit_if_contradictory(summaries: "Sequence[ModelSummary]", page: Path) -> None:
    """Exit with 1 where evidence contradicts itself; the page shows where."""
    if any(summary.contradictions for summary in summaries):
        print_error("the evidence contradicts itself", f"see the red box at the top of {page}")
        raise typer.Exit(INCONSISTENT)


def _open(sources: list[Path]) -> "tuple[Source, ...]":
    """What was named, model by model."""
    from patchcert.cli.target import open_run
    from patchcert.report.summary import sources_of

    files = [each for each in sources if each.suffix == EVIDENCE or each.is_file()]
    return sources_of(
        [open_run(each) for each in sources if each not in files], [_read(each) for each in files]
    )


def _read(file: Path) -> "Evidence":
    from patchcert.evidence import Evidence

    if not file.exists():
        raise InvalidInput(
            f"there is no {file}", hint=f"write it first: patchcert certify TARGET --out {file}."
        )
    if file.suffix != EVIDENCE:
        raise InvalidInput(
            f"{file} is no evidence; expected a run folder, or a file whose name ends in {EVIDENCE}",
            hint="if it is a model, certify it first: patchcert certify TARGET --out proof.npz.",
        )
    return Evidence.read(file)


def _page(sources: list[Path], out: Path | None) -> Path:
    path = out or _beside(sources) / PAGE
    if path.is_dir():
        raise InvalidInput(f"--out {path} is a folder", hint="name a file, like --out page.html")
    return path


def _beside(sources: list[Path]) -> Path:
    """Where a page is expected: at a single run or file, else in the working folder."""
    if len(sources) > 1:
        return Path()
    return sources[0].parent if sources[0].suffix == EVIDENCE else sources[0]
