"""Which folder a run may use: a new one, or its own unfinished one when it is to be resumed."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from patchcert.errors import RunError
from patchcert.train.plain import to_plain
from patchcert.train.run_folder import ENVIRONMENT, SPEC, Run
from patchcert.train.spec import Spec

try:
    import fcntl
except ImportError:
    fcntl = None


def prepare_run(folder: Path, spec: Spec, resume: bool) -> Run:
    """The run in a folder; refuses one that holds something else, or is neither new nor to be resumed."""
    for leftover in folder.glob(".*.part"):
        leftover.unlink(missing_ok=True)
    if not (folder / SPEC).is_file():
        if folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise RunError(f"{folder} is not empty and holds no run", hint="give another folder with --out")
        return Run.create(folder, spec)
    run = Run.open(folder)
    if not (resume or run.is_finished or run.state.is_file() or run.metrics()):
        return _begin_anew(run, spec)
    if run.spec.fingerprint() != spec.fingerprint():
        difference = _first_difference(to_plain(run.spec), to_plain(spec))
        raise RunError(f"{folder} holds a different run: {difference}", hint="give another folder with --out")
    if not resume:
        if run.is_finished:
            raise RunError(
                f"{folder} already holds this run, finished",
                hint="give another folder with --out, or delete it",
            )
        raise RunError(f"{folder} holds this run, unfinished", hint="add --resume to go on with it")
    return run


def _begin_anew(run: Run, spec: Spec) -> Run:
    """Another run in the folder of one that was refused, or killed, before it had a state to lose."""
    (run.path / ENVIRONMENT).unlink(missing_ok=True)
    return Run.create(run.path, spec)


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keeps a second process out of the folder; the hold ends with this process, however it ends."""
    if fcntl is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(
                f"another process is training in {folder}",
                hint="wait for it, or give another folder with --out",
            ) from error
        yield


def _first_difference(there: Mapping[str, Any], here: Mapping[str, Any], path: str = "") -> str:
    for key in dict.fromkeys([*there, *here]):
        name, old, new = f"{path}{key}", there.get(key), here.get(key)
        if old == new or name == "run":
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            return _first_difference(old, new, f"{name}.")
        return f"{name} is {old!r} there and {new!r} here"
    return "it was written by another version"
