"""The list of commands and the one place where errors become messages and exit codes.

Only the module of the command that is called is imported, so that `patchcert --help` answers at once.
"""

import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from patchcert import __version__
from patchcert.cli.examples import GroupedCommand, epilog
from patchcert.cli.factory import import_own
from patchcert.cli.options import Quiet, Verbose
from patchcert.cli.output import INTERRUPTED, Talk, print_error, say, talk, talking
from patchcert.cli.threads import wait_gently
from patchcert.errors import PatchcertError
from patchcert.files import STORAGE_ERRORS

PROGRAM, IMPORT = "patchcert", "--import"
USAGE_ERROR, BUG = 2, 70

COMMANDS = {
    "demo": "Train, certify and attack a small model; no network needed.",
    "train": "Train a model that can be certified, from a SPEC.toml.",
    "choose": "Compare settings on held-out training images.",
    "certify": "Prove a model's predictions against a threat.",
    "predict": "Say what the classifier of a kind of proof predicts.",
    "explain": "Draw why one image is or is not proven.",
    "attack": "Look for patches that change a model's predictions.",
    "compare": "Put runs and leaderboard files into one table.",
    "reproduce": "Recompute a table of the paper.",
    "audit": "Check that evidence, cards and documents can be believed.",
    "report": "Put runs and their evidence into one HTML page.",
    "export": "Write a model as ONNX, and what is claimed of it as VNN-LIB.",
    "bench": "Measure how fast certificates are computed here.",
    "join": "Put trained networks side by side in one, their mean.",
    "trim": "Remove units that are zero on every training image.",
    "zoo": "List, show and add trained models that come with patchcert.",
    "data": "List, fetch and verify data sets.",
}
"""Each command with its help; its module here has a function of its name, or an `app` with commands below it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command line and exit: 0 done, 2 a mistake that the user can correct, 70 a bug, 130 interrupted."""
    wait_gently()
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
    except Exception:
        traceback.print_exc()
        code = BUG
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """The exit code of one command line."""
    try:
        with talking():
            result = create_app(arguments)(list(arguments), prog_name=PROGRAM, standalone_mode=False)
    except PatchcertError as error:
        print_error(error.message, error.hint)
        return USAGE_ERROR
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except OSError as error:
        if error.filename is None and error.errno not in STORAGE_ERRORS:
            raise
        _explain(error)
        return USAGE_ERROR
    except Exception as error:
        if _is_out_of_memory(error):
            what, _, _ = str(error).partition("\n")
            print_error(f"memory does not suffice: {what}", _MEMORY_HINT)
            return USAGE_ERROR
        if not _is_usage_error(error):
            raise
        print_error(_usage_message(error), _usage_hint(arguments))
        return USAGE_ERROR
    if result == INTERRUPTED:
        say("interrupted")
    return result if isinstance(result, int) else 0


def _explain(error: OSError) -> None:
    """An error of the system in words. Without a file it is of stdout or stderr, which take nothing any more."""
    if error.filename is not None:
        print_error(f"{error.filename} cannot be used: {error.strerror}", "name another file or folder.")
        return
    with suppress(OSError):
        print_error(f"the output cannot be written: {error.strerror}", STORAGE_ERRORS[error.errno or 0])
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # so that the exit code stands


def create_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """The application for one command line; commands that are not called are there by name and help only."""
    app = typer.Typer(
        pretty_exceptions_enable=False,
        context_settings=_HELP,
        rich_markup_mode="markdown",
    )
    app.callback(invoke_without_command=True)(_root)
    wanted = _called(arguments or _words_to_complete())
    for name, words in COMMANDS.items():
        if name == wanted:
            _register(app, name)
        else:
            app.command(name, help=words)(_elsewhere)
    return app


def _called(arguments: Sequence[str]) -> str | None:
    """The first word that is neither an option nor the module that --import names."""
    words = zip(arguments, ["", *arguments], strict=False)
    return next((word for word, before in words if word[:1] != "-" and before != IMPORT), None)


def _words_to_complete() -> list[str]:
    """What a shell that asks for completions has on its command line; typer takes it from the same variables."""
    if f"_{PROGRAM.upper()}_COMPLETE" not in os.environ:
        return []
    return (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")).split()[1:]


_HELP = {"help_option_names": ["-h", "--help"]}


def _register(app: typer.Typer, name: str) -> None:
    module = importlib.import_module(f"patchcert.cli.{name}")
    if not hasattr(module, "app"):
        app.command(name, cls=GroupedCommand, epilog=epilog(name))(with_talk(getattr(module, name)))
        return
    for each in module.app.registered_commands:
        each.callback = with_talk(each.callback)
        each.epilog = epilog(f"{name} {each.name or each.callback.__name__}")
    app.add_typer(module.app, name=name, help=COMMANDS[name], epilog=epilog(name))


def with_talk(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, which takes -q and -v too."""
    if "quiet" in command.__annotations__:
        return command

    @functools.wraps(command)
    def talking_command(*arguments: Any, quiet: bool, verbose: bool, **options: Any) -> Any:  # noqa: ANN401
        _choose_talk(quiet, verbose)
        return command(*arguments, **options)

    added = {"quiet": Quiet, "verbose": Verbose}
    signature = inspect.signature(command)
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in added.items()
    ]
    vars(talking_command)["__signature__"] = signature.replace(
        parameters=[*signature.parameters.values(), *more]
    )
    talking_command.__annotations__ = {**command.__annotations__, **added}
    return talking_command


def _choose_talk(quiet: bool, verbose: bool) -> None:
    if quiet or verbose:
        talk(Talk.QUIET if quiet else Talk.VERBOSE)


def _elsewhere() -> None:
    """Stands for a command that was not called."""


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            IMPORT,
            metavar="MODULE",
            help="First import this module, which registers architectures or layers.",
        ),
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Prove that no adversarial patch changes what an image classifier says, and try to break it."""
    if version:
        typer.echo(f"patchcert {__version__}")
        raise typer.Exit
    _choose_talk(quiet, verbose)
    for module in modules or []:
        import_own(module, f"{IMPORT} {module}")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


_MEMORY_HINT = (
    "take less at once (attack --batch-size, certify --setting batch_size or --memory-budget, train --set "
    "optimiser.batch_size), or free the device for it."
)


def _is_out_of_memory(error: Exception) -> bool:
    """On a GPU an error of its own; on a CPU PyTorch has only words for it."""
    named = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return named or (type(error) is RuntimeError and "can't allocate memory" in str(error))


def _is_usage_error(error: Exception) -> bool:
    """Typer's usage errors have their base class in different modules from version to version."""
    return any(base.__name__ == "ClickException" for base in type(error).__mro__)


def _usage_message(error: Exception) -> str:
    format_message = getattr(error, "format_message", None)
    return str(format_message() if callable(format_message) else error)


def _usage_hint(arguments: Sequence[str]) -> str:
    called = next((f" {argument}" for argument in arguments if argument in COMMANDS), "")
    return f"run `patchcert{called} --help` for the options there are."
