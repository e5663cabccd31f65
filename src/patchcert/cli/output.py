"""What commands say: data on stdout, everything else on stderr. NO_COLOR and pipes are respected by rich."""

import json
from collections.abc import Mapping

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 220


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
