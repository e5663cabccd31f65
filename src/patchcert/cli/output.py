"""What commands say: data on stdout, everything else on stderr. NO_COLOR and pipes are respected by rich."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

_WIDE = 220

Report = Callable[[int, int], None]


def stderr_console() -> Console:
    """Where talk and progress go."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(result: Mapping[str, object]) -> None:
    """The result of a command, as one JSON object on stdout."""
    typer.echo(json.dumps(result, indent=2, allow_nan=False))


def print_table(table: Table) -> None:
    """A table on stdout, as wide as the terminal; where there is none, as wide as it likes."""
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDE)
    console.print(table)


def say(message: str) -> None:
    """One line of talk on stderr."""
    stderr_console().print(Text(message))


def print_error(message: str, hint: str = "") -> None:
    """An `error:` line and, where there is one, a `hint:` line on stderr."""
    console = stderr_console()
    console.print(Text("error: ", style="bold red").append(message, style="not bold default"))
    if hint:
        console.print(Text("hint: ", style="bold cyan").append(hint, style="not bold default"))


@contextmanager
def progress_bar(label: str, unit: str = "") -> Iterator[Report]:
    """A `callable(done, total)` that draws a bar; where stderr is not a terminal only a last line is written."""
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
