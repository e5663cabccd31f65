"""One progress bar for every command, on stderr."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from patchcert.cli.output import say, stderr_console

Report = Callable[[int, int], None]


@contextmanager
def progress_bar(label: str, unit: str = "") -> Iterator[Report]:
    """A `callable(done, total)` that draws a bar; where stderr is no terminal only a last line is written."""
    console = stderr_console()
    if not console.is_terminal:
        with _last_line(label, unit) as report:
            yield report
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total or None)


@contextmanager
def _last_line(label: str, unit: str) -> Iterator[Report]:
    done, started = 0, time.perf_counter()

    def report(now: int, total: int) -> None:
        nonlocal done
        done = now

    yield report
    say(f"{label}: {done}{' ' + unit if unit else ''} in {time.perf_counter() - started:.1f} s")
