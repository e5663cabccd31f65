"""What trials on held-out training images have found, as a table: each setting beside what it proves."""

from collections.abc import Iterator, Sequence
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
from patchcert.train.toml import Place, decode, parse_toml

_COLUMNS = (
    Column("trial", numeric=False),
    Column("settings", numeric=False),
    Column("seeds"),
    Column("right, %"),
    Column("certified, %"),
)


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """Changes of the specification, like `strategy.worst_of=12`, and settings of the proof, like `threshold=0.2`."""

    name: str
    set: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Trials:
    """A specification, the changes that are common to all trials and those of each, and the proof that ranks them: its
    method, and settings, of which a trial may have more.

    All are trained without the last `held_out` training images, and certified on the first `images` of these. With
    `seeds` each trial is trained from each of them, and ranked by its mean. `earlier` names what another recipe trained
    and is only kept.
    """

    spec: str
    trials: tuple[Trial, ...]
    set: tuple[str, ...] = ()
    method: str | None = None
    settings: tuple[str, ...] = ()
    held_out: int = 5000
    images: int = 1000
    seeds: tuple[int, ...] = ()
    earlier: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.seeds)) < len(self.seeds):
            raise InvalidInput(f"seeds are {list(self.seeds)}; expected each of them once")
        names = [trial.name for trial in self.trials]
        if not names or len(set(names)) < len(names):
            raise InvalidInput(f"trials are {names}; expected one at least, each of a name of its own")
        strange = [name for name in names if name in ("", ".", "..") or Path(name).name != name]
        if strange:
            raise InvalidInput(f"a trial is called {strange[0]!r}; expected a name that a folder can have")
        if not 1 <= self.images <= self.held_out:
            raise InvalidInput(f"images is {self.images}; expected 1 to held_out = {self.held_out}")

    def proof_settings(self, trial: Trial) -> tuple[str, ...]:
        """The settings of the proof that ranks a trial."""
        return (*self.settings, *trial.settings)

    def changes(self, trial: Trial) -> tuple[str, ...]:
        """How a trial is trained otherwise than the specification says."""
        return (*self.set, *trial.set, f"data.validation={self.held_out}")

    def runs(self, trial: Trial, out: Path) -> list["TrialRun"]:
        """The runs of a trial below a folder: one, or one for each seed."""
        changes = self.changes(trial)
        if not self.seeds:
            return [TrialRun(trial, out / trial.name, changes)]
        return [
            TrialRun(trial, out / trial.name / f"seed-{seed}", (*changes, f"seed={seed}"), seed)
            for seed in self.seeds
        ]


@final
@dataclass(frozen=True, slots=True)
class TrialRun:
    """One run of a trial: its folder, and all changes of the specification, that of the seed among them if any."""

    trial: Trial
    folder: Path
    changes: tuple[str, ...]
    seed: int | None = None


def read_trials(file: Path) -> Trials:
    """The trials that a file asks for; unknown keys and wrong types are refused by name."""
    return decode(Trials, parse_toml(file.read_text(encoding="utf-8"), str(file)), Place(str(file)))


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
    asked = read_trials(trials)
    _check_named(asked, folder)
    for trial in asked.trials:
        runs = sorted(path.parent for path in (folder / trial.name).rglob(EVIDENCE))
        proofs = tuple(proof for run in runs for proof in EvidenceFolder(run / EVIDENCE).all())
        if proofs:
            _check(proofs, asked.proof_settings(trial))
            _check_trained(asked, trial, runs)
            yield TrialResult(trial.name, (*trial.set, *trial.settings), proofs)


def _check_named(asked: Trials, folder: Path) -> None:
    """Raises if there are results that the file does not name: what was tried is not left out of the table."""
    named = {trial.name for trial in asked.trials} | set(asked.earlier)
    stored = {file.relative_to(folder).parts[0] for file in folder.rglob(EVIDENCE)}
    if stored - named:
        raise InvalidInput(
            f"{folder / min(stored - named)} has results of no trial that is named",
            hint="name it below [[trials]], or among `earlier` if it was trained by another recipe",
        )


def _check_trained(asked: Trials, trial: Trial, runs: Sequence[Path]) -> None:
    """Raises unless the specifications beside the proofs have the settings and all the seeds of the trial."""
    changes = asked.changes(trial)
    specs = [read_spec(run / SPEC) for run in runs]
    for run, spec in zip(runs, specs, strict=True):
        if read_spec(run / SPEC, changes).fingerprint() != spec.fingerprint():
            raise InvalidInput(f"{run} was not trained with the settings of the trial {trial.name}")
    seeds = sorted(spec.seed for spec in specs)
    if asked.seeds and seeds != sorted(asked.seeds):
        raise InvalidInput(f"the trial {trial.name} has the seeds {seeds}; expected {list(asked.seeds)}")


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
