"""`patchcert report RUN...`: one page about runs and their evidence."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchcert.cli import options
from patchcert.cli.output import print_error, print_json, say
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    from patchcert.report.summary import RunSummary
    from patchcert.train.run_folder import Run

INCONSISTENT = 1


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders of `patchcert train`.")],
    out: Annotated[
        Path | None, typer.Option(help="The page; by default report.html in the folder of a single run.")
    ] = None,
    data_dir: options.DataFolder = None,
    maps: Annotated[int, options.number_option("Certificate maps per run.", least=0)] = 8,
) -> None:
    """Put runs and their evidence into one self-contained HTML page.

    Exits with 1 if the evidence contradicts itself: an image that is certified, yet was broken by an attack.
    """
    from patchcert.cli.target import open_run
    from patchcert.report.page import write_report
    from patchcert.report.summary import summarise_run

    path = _page(runs, out)
    opened = [open_run(folder) for folder in runs]
    summaries = [summarise_run(run, maps, data_dir) for run in opened]
    _tell_of_missing_images(opened, summaries)
    write_report(summaries, path)
    consistent = not any(summary.contradictions for summary in summaries)
    say(f"the page is {path.resolve()}")
    results = [
        {"run": str(folder), **summary.shares()} for folder, summary in zip(runs, summaries, strict=True)
    ]
    print_json({"page": str(path), "consistent": consistent, "runs": results})
    exit_if_contradictory(summaries, path)


def exit_if_contradictory(summaries: "list[RunSummary]", page: Path) -> None:
    """Exit with 1 where evidence contradicts itself; the page shows where."""
    if any(summary.contradictions for summary in summaries):
        print_error("the evidence contradicts itself", f"see the red box at the top of {page}")
        raise typer.Exit(INCONSISTENT)


def _tell_of_missing_images(runs: "list[Run]", summaries: "list[RunSummary]") -> None:
    for run, summary in zip(runs, summaries, strict=True):
        if run.is_finished and not summary.classes:
            say(
                f"no pictures of {run.path}: {summary.dataset} was not found; give its folder with --data-dir"
            )


def _page(runs: list[Path], out: Path | None) -> Path:
    path = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    if path.is_dir():
        raise InvalidInput(f"--out {path} is a folder", hint="name a file, like --out page.html")
    return path
