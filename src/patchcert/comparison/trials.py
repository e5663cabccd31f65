"""What trials on held-out training images have found, as a table: each setting beside what it proves."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, final

from patchcert.errors import InvalidInput, PatchcertError
from patchcert.evidence import Evidence, EvidenceFolder
from patchcert.evidence.audit import Finding
from patchcert.report.tables import Column, Table
from patchcert.train.run_folder import EVIDENCE, SPEC
from patchcert.train.spec import read_spec

_COLUMNS = (
    Column("trial", numeric=False),
    Column("settings", numeric=False),
    Column("seeds"),
    Column("right, %"),
    Column("certified, %"),
)


@final
@dataclass(frozen=True, slots=True)
class TrialResult:
    """The proofs of one trial, one for each of its seeds."""

    name: str
    settings: tuple[str, ...]
    proofs: tuple[Evidence, ...]

    @property
    def certified(self) -> float:
        """Per cent of the held-out images, the mean over seeds."""
        return fmean(_per_cent(each.certified, each) for each in self.proofs)

    def cells(self) -> tuple[Any, ...]:
        """Its row, without sums of files: of seeds the mean, and for what is certified the deviation of a sample."""
        shares = [_per_cent(each.certified, each) for each in self.proofs]
        right = fmean(_per_cent(each.correct, each) for each in self.proofs)
        shown = [each for each in self.settings if not each.startswith("model.weights_sha256=")]
        settings = ", ".join(f"`{each}`" for each in shown) or "as given"
        spread = f" ± {stdev(shares):.1f}" if len(shares) > 1 else ""
        return self.name, settings, len(shares), right, f"{self.certified:.1f}{spread}"


def trials_table(folder: Path, name: str) -> Table:
    """The trials of FOLDER/NAME.toml of which FOLDER/results/NAME has evidence, the one that proves most first."""
    trials, results = folder / f"{name}.toml", folder / "results" / name
    found = sorted(_results(trials, results), key=lambda each: -each.certified)
    if not found:
        raise InvalidInput(f"{results} has no evidence of the trials in {trials}")
    if len({(each.proofs[0].selection, each.proofs[0].threat) for each in found}) > 1:
        raise InvalidInput(f"the trials in {results} are not all of the same images and threat")
    return Table("", _COLUMNS, tuple(each.cells() for each in found))


def audit_trials(folder: Path) -> Iterator[Finding]:
    """Files of trials that say otherwise than what was stored of them, whether or not a document shows it."""
    for stored in sorted((folder / "results").glob("*/")):
        try:
            trials_table(folder, stored.name)
        except (PatchcertError, KeyError, OSError, ValueError) as error:
            yield Finding(folder / f"{stored.name}.toml", f"does not fit its results: {error}")


def _results(trials: Path, folder: Path) -> Iterator[TrialResult]:
    asked = tomllib.loads(trials.read_text(encoding="utf-8"))
    _check_named(asked, folder)
    for trial in asked["trials"]:
        runs = sorted(path.parent for path in (folder / trial["name"]).rglob(EVIDENCE))
        proofs = tuple(proof for run in runs for proof in EvidenceFolder(run / EVIDENCE).all())
        if proofs:
            _check(proofs, (*asked.get("settings", ()), *trial.get("settings", ())))
            _check_trained(asked, trial, runs)
            yield TrialResult(trial["name"], (*trial.get("set", ()), *trial.get("settings", ())), proofs)


def _check_named(asked: Mapping[str, Any], folder: Path) -> None:
    """Raises if there are results that the file does not name: what was tried is not left out of the table."""
    named = {trial["name"] for trial in asked["trials"]} | set(asked.get("earlier", ()))
    stored = {file.relative_to(folder).parts[0] for file in folder.rglob(EVIDENCE)}
    if stored - named:
        raise InvalidInput(
            f"{folder / min(stored - named)} has results of no trial that is named",
            hint="name it below [[trials]], or among `earlier` if it was trained by another recipe",
        )


def _check_trained(asked: Mapping[str, Any], trial: Mapping[str, Any], runs: Sequence[Path]) -> None:
    """Raises unless the specifications beside the proofs have the settings and all the seeds of the trial."""
    changes = (*asked.get("set", ()), *trial.get("set", ()), f"data.validation={asked.get('held_out', 5000)}")
    specs = [read_spec(run / SPEC) for run in runs]
    for run, spec in zip(runs, specs, strict=True):
        if read_spec(run / SPEC, changes).fingerprint() != spec.fingerprint():
            raise InvalidInput(f"{run} was not trained with the settings of the trial {trial['name']}")
    seeds = sorted(spec.seed for spec in specs)
    if seeds != sorted(asked.get("seeds", seeds)):
        raise InvalidInput(f"the trial {trial['name']} has the seeds {seeds}; expected {asked['seeds']}")


def _check(proofs: Sequence[Evidence], settings: Sequence[str]) -> None:
    """Raises unless they are proofs of the same held-out images with these settings, each of a network of its own."""
    for proof in proofs:
        if not proof.has_settings(settings):
            raise InvalidInput(f"{proof.where} is no proof with the settings {' '.join(settings)}")
        if proof.kind != "certify" or not proof.selection.split.startswith("validation:"):
            raise InvalidInput(f"{proof.where} is no proof of held-out images")
        if proof.question != proofs[0].question:
            raise InvalidInput(f"{proof.where} answers another question than {proofs[0].where}")
    if len({proof.weights for proof in proofs}) < len(proofs):
        raise InvalidInput(f"{proofs[0].where} and the proofs of other seeds are not all of other weights")


def _per_cent(count: int, proof: Evidence) -> float:
    return 100 * count / proof.total
