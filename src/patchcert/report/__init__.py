"""What was found, for people: tables, figures, and one self-contained HTML page per set of runs."""

from collections.abc import Sequence
from pathlib import Path

from patchcert.report.collect import Pictures as Pictures
from patchcert.report.collect import summarise_run as summarise_run
from patchcert.report.html import Page as Page
from patchcert.report.html import write_page as write_page
from patchcert.report.summary import RunSummary as RunSummary
from patchcert.train.run_folder import Run


def write_report(
    runs: Sequence[Run | RunSummary], path: str | Path, pictures: Pictures | None = None
) -> Page:
    """One self-contained page about the runs, side by side where there are several."""
    summaries = [run if isinstance(run, RunSummary) else summarise_run(run, pictures) for run in runs]
    return write_page(summaries, Path(path))
