"""Downloads from the official mirrors: a file gets its name only when it is complete and its checksum is right."""

import hashlib
import http.client
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from patchcert.data.files import RECORD, data_folders, locate, read, read_archive, recorded_sums
from patchcert.data.sources import Source
from patchcert.errors import DataError
from patchcert.files import STORAGE_ERRORS, atomic_write, naming, sha256, write_text, write_together

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes that have come and the bytes there are (0 while unknown)."""

_CHUNK = 1 << 18
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True, slots=True)
class _Download:
    """A published file, where to get it, and where a user would put it by hand."""

    name: str
    sha256: str | None
    mirrors: tuple[str, ...]
    target: Path


def fetch(
    source: Source,
    data_dir: str | Path | None = None,
    mirror: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder of the files in the first data folder; what is missing or damaged there is downloaded."""
    root = data_folders(data_dir)[0]
    with suppress(DataError):
        present = locate(source, root)
        read(source, present)
        return present.folder
    mirrors = (_url(mirror),) if mirror else source.mirrors
    folder = root / source.folders[0]
    for name in source.published:
        target = (root if source.archive else folder) / name
        wanted = _Download(name, source.sums.get(name), mirrors, target)
        if source.archive:
            _fetch_archive(source, wanted, folder, progress)
        else:
            _fetch_file(wanted, progress)
    return folder


def _url(mirror: str) -> str:
    """A mirror as a URL; a folder of this machine may be given by its path."""
    return mirror if "://" in mirror else Path(mirror).expanduser().resolve().as_uri()


def _fetch_file(wanted: _Download, progress: Progress | None) -> None:
    if wanted.sha256 is not None and wanted.target.is_file() and sha256(wanted.target) == wanted.sha256:
        return
    with atomic_write(wanted.target) as stream:
        actual = _download(wanted, stream, progress)
    _record(wanted.target.parent, {wanted.name: actual})


def _fetch_archive(source: Source, wanted: _Download, folder: Path, progress: Progress | None) -> None:
    """Only the files that are read are kept, with their sums; the archive is not."""
    with naming(wanted.target):
        wanted.target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=wanted.target.parent, prefix=".fetch-") as scratch:
            archive = Path(scratch) / wanted.name
            with archive.open("wb") as stream:
                _download(wanted, stream, progress)
            checked = read_archive(source, archive)
    write_together({folder / name: file.content for name, file in checked.items()})
    _record(folder, {name: file.sha256 for name, file in checked.items()})


def _download(wanted: _Download, stream: IO[bytes], progress: Progress | None) -> str:
    """Fill the stream from the first mirror that delivers the right bytes; their sum."""
    failures: list[str] = []
    for mirror in wanted.mirrors:
        url = f"{mirror.rstrip('/')}/{wanted.name}"
        stream.seek(0)
        stream.truncate()
        try:
            actual = _copy(url, wanted.name, stream, progress)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
                raise
            failures.append(f"{url} ({_reason(error)})")
            continue
        if wanted.sha256 in (None, actual):
            return actual
        failures.append(f"{url} (the SHA-256 of what came is {actual}, not {wanted.sha256})")
    raise DataError(
        f"{wanted.name} could not be fetched from {', '.join(failures)}",
        hint=f"download it by hand and put it at {wanted.target}, or name another mirror with --mirror.",
    )


def _copy(url: str, name: str, stream: IO[bytes], progress: Progress | None) -> str:
    digest, done = hashlib.sha256(), 0
    request = urllib.request.Request(url, headers={"User-Agent": "patchcert"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
        total = int(response.headers.get("Content-Length") or 0)
        while chunk := response.read(_CHUNK):
            stream.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(name, done, total)
    if total and done != total:
        raise OSError(f"the connection ended after {done} of {total} bytes")
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    return str(error.reason if isinstance(error, urllib.error.URLError) else error) or type(error).__name__


def _record(folder: Path, sums: dict[str, str]) -> None:
    known = {**recorded_sums(folder), **sums}
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(known.items()))
    write_text(folder / RECORD, lines)
