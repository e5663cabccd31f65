"""Files that are either complete or absent, and their SHA-256 sums.

Whatever the system refuses while a file is written, such as on a full disk, becomes one error that names the file.
"""

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from patchcert.errors import RunError, StorageError

STORAGE_ERRORS = {
    errno.ENOSPC: "free some space there, or write to another disk.",
    errno.EDQUOT: "free some of your share of the disk, or write to another one.",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or write to another disk.",
    errno.EROFS: "name a file on a disk that can be written to.",
    errno.EIO: "see whether the disk is well, or write to another one.",
}
"""What the system says when it has no room for what is written, or no way to write it; and what to do then."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """In this block the system touches nothing but the path: what it refuses is said with its name."""
    try:
        yield
    except OSError as error:
        raise _refused(path, error) from error


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that takes its name only when the block ends without an error."""
    unfinished = path.parent / f".{path.name}.{uuid.uuid4().hex}.part"
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = unfinished.open("xb")
    try:
        yield stream
        with naming(path):
            _settle(stream)
            stream.close()
            os.replace(unfinished, path)
    except BaseException as error:
        _drop(stream, unfinished)
        if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
            raise _refused(path, error) from error
        raise


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path} is damaged: it is no JSON", hint=_DAMAGED) from error
    if not isinstance(facts, dict):
        raise RunError(f"{path} is damaged: it is no JSON object", hint=_DAMAGED)
    return facts


_DAMAGED = "restore it, or delete it and make again what it is part of"


def write_text(path: Path, text: str) -> None:
    """Replace a text file whole."""
    with atomic_write(path) as stream:
        stream.write(text.encode())


def write_together(files: Mapping[Path, bytes]) -> None:
    """All of these files, or none of them: no file takes its name before there is room for every one."""
    with ExitStack() as stack:
        streams = {path: stack.enter_context(atomic_write(path)) for path in files}
        for path, stream in streams.items():
            with naming(path):
                stream.write(files[path])
                _settle(stream)


@contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """A folder that is empty or not there yet, and is so again if the block ends with an error."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    with naming(path):
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for entry in path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for folder in missing:
            folder.rmdir()
        raise


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, which appears whole or not at all."""
    with source.open("rb") as read, atomic_write(target) as write:
        shutil.copyfileobj(read, write)


def sha256(path: Path) -> str:
    """The SHA-256 sum of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _settle(stream: IO[bytes]) -> None:
    """Bring what was written to the disk, where it turns out whether there is room for it."""
    stream.flush()
    os.fsync(stream.fileno())


def _drop(stream: IO[bytes], unfinished: Path) -> None:
    with suppress(OSError):
        stream.close()  # writes what is left over once more, in vain where the disk is full
    unfinished.unlink(missing_ok=True)


def _refused(path: Path, error: OSError) -> StorageError:
    hint = STORAGE_ERRORS.get(error.errno or 0, "name a file in a folder that you may write to.")
    return StorageError(f"{path} cannot be written: {error.strerror or error}", hint)
