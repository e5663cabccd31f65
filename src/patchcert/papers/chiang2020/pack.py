"""Results and unfinished runs as one tar file, to carry them from one machine to another."""

import shutil
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from patchcert.errors import InvalidInput
from patchcert.files import atomic_write
from patchcert.papers.chiang2020.orders import ORDERS, read_orders
from patchcert.papers.chiang2020.runner import LOG
from patchcert.train.run_folder import ENVIRONMENT, METRICS, SPEC, STATE, WEIGHTS, Run

RESULTS, RUNS = "results", "runs"


@dataclass(frozen=True, slots=True)
class Packed:
    """What went into a tar file, and which runs were left out because it would have grown too large."""

    path: Path
    results: int
    runs: int
    left_out: tuple[str, ...]


def pack(
    path: Path,
    results: Path,
    runs: Path | None,
    unfinished: bool = True,
    weights: bool = False,
    limit: int | None = None,
) -> Packed:
    """Write all results, and of the runs those that are to go on, the trained weights, or both.

    Results are always packed; runs only while the file stays below `limit` bytes, the smallest first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    chosen = _choose_runs(runs, results, unfinished, weights) if runs is not None else []
    left_out = []
    with tarfile.open(path, compression(path)) as tar:
        counted = _add(tar, RESULTS, results, (file for file in sorted(results.rglob("*")) if file.is_file()))
        used = counted
        for run, files in sorted(chosen, key=lambda pair: _size(pair[1])):
            if limit is not None and used + _size(files) > limit:
                left_out.append(run.path.name)
                continue
            used += _add(tar, RUNS, run.path.parent, files)
    packed = len(chosen) - len(left_out)
    kept = {file.parent for file in results.glob("*/*.npz")}
    return Packed(path, len(kept), packed, tuple(left_out))


def unpack(path: Path, results: Path, runs: Path) -> Packed:
    """Bring results and runs to their folders; a run that has finished here is not replaced."""
    if not path.is_file():
        raise InvalidInput(f"there is no {path}", hint="give a file that --pack wrote")
    found: dict[str, set[str]] = {RESULTS: set(), RUNS: set()}
    with tarfile.open(path) as tar:
        for member in tar.getmembers():
            place = PurePosixPath(member.name)
            if len(place.parts) < 3 or place.parts[0] not in found or not member.isfile():
                continue
            if ".." in place.parts:
                raise InvalidInput(f"{path} holds {member.name}, which leads out of its folder")
            kind, name = place.parts[:2]
            target = results if kind == RESULTS else runs
            if kind == RUNS and (target / name / WEIGHTS).is_file():
                continue
            found[kind].add(name)
            _extract(tar, member, target.joinpath(*place.parts[1:]))
    return Packed(path, len(found[RESULTS]), len(found[RUNS]), ())


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    source = tar.extractfile(member)
    assert source is not None
    with source, atomic_write(target) as stream:
        shutil.copyfileobj(source, stream)


def _choose_runs(
    folder: Path, results: Path, unfinished: bool, weights: bool
) -> list[tuple[Run, list[Path]]]:
    """A run that is trained, but whose evidence has not all come to the results yet, is unfinished here too."""
    chosen = []
    for spec_file in sorted(folder.glob(f"*/{SPEC}")):
        run = Run.open(spec_file.parent)
        is_collected = _is_collected(run, results / run.path.name)
        if run.is_finished and (weights or not is_collected):
            chosen.append((run, _existing(run, (SPEC, ENVIRONMENT, METRICS, ORDERS, *_votes(run), WEIGHTS))))
        elif not run.is_finished and unfinished:
            chosen.append((run, _existing(run, (SPEC, ENVIRONMENT, METRICS, ORDERS, LOG, STATE))))
    return chosen


def _is_collected(run: Run, result: Path) -> bool:
    asked = read_orders(run.path).evidence_names
    return (result / SPEC).is_file() and all((result / f"{name}.npz").is_file() for name in asked)


def _votes(run: Run) -> list[str]:
    """Votes that are being counted; the weights come after them, since a run that has weights is not replaced."""
    return sorted(file.name for file in run.path.glob(".votes-*.npz"))


def _existing(run: Run, names: Iterable[str]) -> list[Path]:
    return [file for name in names if (file := run.path / name).is_file()]


def _add(tar: tarfile.TarFile, top: str, folder: Path, files: Iterable[Path]) -> int:
    used = 0
    for file in files:
        tar.add(file, f"{top}/{file.relative_to(folder).as_posix()}")
        used += file.stat().st_size
    return used


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def compression(path: Path) -> Literal["w", "w:gz"]:
    """How a tar file of this name is written."""
    if path.name.endswith((".tar.gz", ".tgz")):
        return "w:gz"
    if path.suffix == ".tar":
        return "w"
    raise InvalidInput(f"--pack {path} is no name of a tar file", hint="end it with .tar or .tar.gz")
