"""From run folders to the folder of results: specification, circumstances and evidence, no weights."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from patchcert.files import atomic_write, sha256
from patchcert.papers.chiang2020.challenges import PREFIX as CHALLENGE
from patchcert.papers.chiang2020.challenges import is_challenge
from patchcert.papers.chiang2020.orders import read_orders
from patchcert.papers.chiang2020.results import TRIMMED, Result
from patchcert.papers.chiang2020.summaries import add_loss, write_summary
from patchcert.train.run_folder import ENVIRONMENT, EVIDENCE, SPEC, Run, read_arrays, read_meta, write_text

UNPLANNED = "unplanned-"
"""Begins the names of attacks that no table asked for; cards of the zoo count them."""


def collect(run: Run, name: str, folder: Path, scale: float = 1.0) -> Result:
    """Copy what a finished run leaves into the folder of results; evidence of other weights is removed."""
    target = folder / name
    _bring(run, collected_names(run), target)
    write_text(target / ENVIRONMENT, json.dumps(run.environment(), indent=2) + "\n")
    write_summary(run, target, scale)
    _copy(run.path / SPEC, target / SPEC)
    return Result.open(target)


def collect_trimmed(run: Run, result: Path) -> None:
    """Copy all evidence of a trimmed model to a folder of its own below that of the network as it was trained."""
    _bring(run, collected_names(run), result / TRIMMED)


def collect_all(runs: Path, folder: Path) -> tuple[str, ...]:
    """Copy every finished and certified run below a folder to the results; the names they have there.

    Of a run whose evidence is among the results alone, with these weights, the training loss is noted there.
    """
    found = [Run.open(spec_file.parent) for spec_file in sorted(runs.glob(f"*/{SPEC}"))]
    names = [_collect_one(run, folder) for run in found if run.is_finished]
    return tuple(name for name in names if name is not None)


def _collect_one(run: Run, folder: Path) -> str | None:
    """The name among the results, where there was something to bring."""
    name = run.spec.fingerprint(run.environment().get("data", {}).get("checksums", {}))
    if all(new.startswith(UNPLANNED) for new in collected_names(run)):
        return name if add_loss(run, folder / name) else None
    if run.model_spec().widths:
        collect_trimmed(run, folder / name)
        return f"{name}/{TRIMMED}"
    collect(run, name, folder, read_orders(run.path).scale)
    return name


def _bring(run: Run, files: Mapping[str, Path], target: Path) -> None:
    """Copy files of evidence to their names in a folder; what is there, or here, of other weights is not kept."""
    weights = sha256(run.weights)
    for file in target.glob("*.npz"):
        if _weights_of(file) != weights:
            file.unlink()
    for name, file in files.items():
        if _weights_of(file) == weights:
            _copy(file, target / name)


def collected_names(run: Run) -> dict[str, Path]:
    """The files of evidence by their names among results, where challenges and unplanned attacks are told apart."""
    found = {}
    for file in sorted((run.path / EVIDENCE).glob("*.npz")):
        kind, _, rest = file.name.partition("-")
        meta = run.evidence_meta(file.stem)
        if kind == "attack" and is_challenge(meta):
            found[f"{CHALLENGE}{rest}"] = file
        elif kind == "attack" and "plan" not in meta:
            found[f"{UNPLANNED}{rest}"] = file
        elif kind in ("attack", "certify", "tune", "votes"):
            found[file.name] = file
    return found


def _weights_of(file: Path) -> str:
    return read_meta(file, read_arrays(file)).get("weights_sha256", "")


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as read, atomic_write(target) as write:
        shutil.copyfileobj(read, write)
