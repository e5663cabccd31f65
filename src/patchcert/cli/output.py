"""What commands say: data on stdout, everything else on stderr. NO_COLOR and pipes are respected by rich."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from enum import IntEnum
from typing import final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

INTERRUPTED = 130
"""The exit code after Ctrl-C."""
STDERR = 2
_WIDE = 220
FIRST_LINE, NEXT_LINE, LAST_LINE = 2.0, 10.0, 60.0
"""Without a terminal seconds to the first line of progress and between lines; in long work they come less often."""

Report = Callable[[float, int], None]
Clock = Callable[[], float]


class Talk(IntEnum):
    """How much is said on stderr; errors always are."""

    QUIET = 0
    USUAL = 1
    VERBOSE = 2


_TALK: ContextVar[Talk] = ContextVar("talk", default=Talk.USUAL)


@contextmanager
def talking(amount: Talk = Talk.USUAL) -> Iterator[None]:
    """So much is said while this lasts, unless `talk` changes it."""
    token = _TALK.set(amount)
    try:
        yield
    finally:
        _TALK.reset(token)


def talk(amount: Talk) -> None:
    """So much is said from now on, until the command ends."""
    _TALK.set(amount)


def is_quiet() -> bool:
    """Whether nothing but errors is to be said."""
    return _TALK.get() == Talk.QUIET


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


def say(message: str, least: Talk = Talk.USUAL) -> None:
    """One line of talk on stderr, if at least so much is wanted."""
    if _TALK.get() >= least:
        stderr_console().print(Text(message))


def say_at_once(message: str) -> None:
    """A line of talk from a signal handler: past the stream, which refuses a line in the midst of another."""
    if not is_quiet():
        os.write(STDERR, f"{message}\n".encode())


def detail(message: str) -> None:
    """A line that is said with --verbose alone."""
    say(message, Talk.VERBOSE)


def print_error(message: str, hint: str = "") -> None:
    """An `error:` line and, where there is one, a `hint:` line on stderr."""
    console = stderr_console()
    console.print(Text("error: ", style="bold red").append(message, style="not bold default"))
    if hint:
        console.print(Text("hint: ", style="bold cyan").append(hint, style="not bold default"))


def duration(seconds: float) -> str:
    """A time in the units that people would use: 8 s, 3 min, 2 h 10 min."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@final
class Pace:
    """How long work still takes, if the rest goes on as what was done since the first report."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock, self.began = clock, clock()
        self.done, self.total, self.at = 0.0, 0, self.began
        self.first: tuple[float, float] | None = None

    def note(self, done: float, total: int) -> None:
        """So much is done now."""
        self.done, self.total, self.at = done, total, self.clock()
        self.first = self.first or (self.at, done)

    @property
    def elapsed(self) -> float:
        """Seconds since the work began."""
        return self.clock() - self.began

    @property
    def remaining(self) -> float | None:
        """The seconds that are left; None where nothing is known of them yet, or more have passed than were left."""
        if self.first is None or self.done <= self.first[1]:
            return None
        each = (self.at - self.first[0]) / (self.done - self.first[1])
        left = each * (self.total - self.done) - (self.clock() - self.at)
        return left if left > 0 else None if self.done < self.total else 0.0

    def __str__(self) -> str:
        left = self.remaining  # read once, as it changes with the time
        return "" if left is None else f"about {duration(left)} to go"


@contextmanager
def progress_bar(label: str, unit: str = "") -> Iterator[Report]:
    """A `callable(done, total)` that draws a bar; where stderr is not a terminal, a line is written now and then."""
    console, pace = stderr_console(), Pace()
    if is_quiet():
        yield pace.note
        return
    if not console.is_terminal:
        with regular_lines(lambda: _line(label, unit, pace)):
            yield pace.note
        say(f"{label}: {int(pace.done)}{' ' + unit if unit else ''} in {pace.elapsed:.1f} s")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    with Progress(
        *columns, TimeElapsedColumn(), TextColumn("{task.fields[pace]}"), console=console
    ) as progress:
        task = progress.add_task(label, total=None, pace=pace)

        def report(done: float, total: int) -> None:
            pace.note(done, total)
            progress.update(task, completed=done, total=total or None)

        yield report


def _line(label: str, unit: str, pace: Pace) -> str:
    """Where the work stands; nothing of work that is about to end."""
    left, rest = pace.remaining, str(pace)
    if pace.elapsed < NEXT_LINE and left is not None and left < NEXT_LINE:
        return ""
    amount = f"{int(pace.done)} of {pace.total} {unit}".strip() if pace.total else "nothing yet"
    return f"{label}: {amount} after {duration(pace.elapsed)}{', ' + rest if rest else ''}"


@contextmanager
def regular_lines(
    line: Callable[[], str], first: float = FIRST_LINE, every: float = NEXT_LINE
) -> Iterator[None]:
    """Says the line after `first` seconds and then every so often while this lasts, whatever else goes on.

    The distance of lines grows to a tenth of the time that has passed, so that a long log stays short.
    """
    ended, began = threading.Event(), time.monotonic()

    def speak() -> None:
        wait = first
        while not ended.wait(wait):
            if text := line():
                say(text)
            passed = time.monotonic() - began
            wait = every - first if passed < every else min(max(every, passed / 10), max(every, LAST_LINE))

    speaker = threading.Thread(target=copy_context().run, args=(speak,), daemon=True)
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()
