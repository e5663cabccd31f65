"""The manifest of a folder of results: every file there ever was, what it is evidence of, and what became of it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, final

from patchcert.errors import RunError
from patchcert.evidence.record import Evidence
from patchcert.files import atomic_write, read_json, sha256
from patchcert.train.run_folder import ENVIRONMENT, METRICS, SPEC
from patchcert.train.spec import Spec, read_spec
from patchcert.train.toml import to_table

MANIFEST, SUMMARY = "manifest.json", "summary.json"
VERSION = 1
_FREE = ("README.md", MANIFEST)
_REWRITTEN = (SUMMARY, ENVIRONMENT)
"""Written again when a run is collected again. What decides which seed counts is in the entry of the run."""
_REMADE = ("docs/pictures", "trials")
REPLACED = "replaced: another file has its name"
_LOCKED = ("training", "seed", "weights_sha256", "training_loss")


class _Line:
    """A value that stands as one line in the manifest."""

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of `asdict`; unknown and missing keys are refused."""
        known = {field.name for field in fields(cls)}  # pyright: ignore[reportArgumentType]
        if set(plain) != known:
            raise RunError(f"a line of the manifest has the keys {sorted(plain)}; expected {sorted(known)}")
        return cls(**plain)


@final
@dataclass(frozen=True, slots=True)
class ListedRun(_Line):
    """A trained run: the choice among seeds rests on these facts, so they never change while the weights do not."""

    run: str
    training: str
    seed: int
    weights_sha256: str
    training_loss: float | None
    training_seconds: float
    has_curve: bool
    commit: str
    source_sha256: str

    @staticmethod
    def of(folder: Path) -> "ListedRun":
        """What a run's folder of results says; that of a network which was not trained here has its name alone."""
        spec = read_spec(folder / SPEC) if (folder / SPEC).is_file() else None
        file = folder / SUMMARY
        summary = read_json(file) if file.is_file() else {}
        return ListedRun(
            run=folder.name,
            training=folder.name if spec is None else training_words(spec),
            seed=0 if spec is None else spec.seed,
            weights_sha256=summary.get("weights_sha256", ""),
            training_loss=summary.get("training_loss"),
            training_seconds=summary.get("training_seconds", 0.0),
            has_curve=(folder / METRICS).is_file(),
            commit=summary.get("commit", ""),
            source_sha256=summary.get("source_sha256", ""),
        )

    def differences(self, folder: Path) -> dict[str, str]:
        """What a folder of results says otherwise of the run, by the name of the fact; nothing if it is not there."""
        if not (folder / self.run / SUMMARY).is_file():
            return {}
        now = ListedRun.of(folder / self.run)
        return {
            name: f"{name} is {getattr(now, name)}, the manifest has {getattr(self, name)}"
            for name in (field.name for field in fields(self))
            if getattr(now, name) != getattr(self, name)
        }


@final
@dataclass(frozen=True, slots=True)
class ListedFile(_Line):
    """A file: its sum and what it is evidence of, with the counts of images where it has any."""

    path: str
    sha256: str
    evidence_of: str
    images: int | None = None
    right: int | None = None
    counted: int | None = None
    """Images proven or, of an attack, withstood."""

    @property
    def may_go(self) -> bool:
        """Whether it may go without a trace: a picture, or trials, of which what was found is listed by itself."""
        return self.images is None and self.path.rpartition("/")[0] in _REMADE

    @staticmethod
    def of(file: Path, folder: Path) -> "ListedFile":
        path = file.relative_to(folder).as_posix()
        if file.suffix != ".npz":
            return ListedFile(path, sha256(file), file.stem)
        found = Evidence.read(file)
        return ListedFile(
            path, sha256(file), question_words(found), found.total, found.correct, counted(found)
        )


@final
@dataclass(frozen=True, slots=True)
class Superseded(_Line):
    """Evidence that no longer lies among the results: what it counted, and why something else counts now.

    `commit` is the last one that has the file in full, where the history of a checkout has it.
    """

    run: str
    training: str
    seed: int
    weights_sha256: str
    training_loss: float | None
    evidence_of: str
    sha256: str
    images: int
    right: int
    counted: int
    why: str
    commit: str = ""

    @staticmethod
    def of(evidence: Evidence, run: "ListedRun", why: str) -> "Superseded":
        """The line of evidence of a run that is about to be replaced."""
        assert evidence.path is not None
        return Superseded(
            run=run.run,
            training=run.training,
            seed=run.seed,
            weights_sha256=evidence.weights,
            training_loss=run.training_loss,
            evidence_of=question_words(evidence),
            sha256=sha256(evidence.path),
            images=evidence.total,
            right=evidence.correct,
            counted=counted(evidence),
            why=why,
        )

    @staticmethod
    def of_line(entry: ListedFile, why: str) -> "Superseded":
        """The line of a file that belongs to no run, and of which no more than its line is left."""
        return Superseded(
            run=entry.path,
            training=entry.path,
            seed=0,
            weights_sha256="",
            training_loss=None,
            evidence_of=entry.evidence_of,
            sha256=entry.sha256,
            images=entry.images or 0,
            right=entry.right or 0,
            counted=entry.counted or 0,
            why=why,
        )


@final
@dataclass(frozen=True)
class Manifest:
    """All runs, all files and all that was superseded. `beside` is what lies outside the folder: measurements,
    pictures and trials.

    No result is ever dropped: `updated` refuses a folder that lacks one which is listed and not superseded.
    """

    runs: tuple[ListedRun, ...] = ()
    files: tuple[ListedFile, ...] = ()
    beside: tuple[ListedFile, ...] = ()
    superseded: tuple[Superseded, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest of a folder of results; an empty one where there is none yet."""
        file = folder / MANIFEST
        if not file.is_file():
            return cls()
        try:
            plain = json.loads(file.read_text(encoding="utf-8"))
            if plain["version"] != VERSION:
                raise ValueError(f"its version is {plain['version']}, expected {VERSION}")
            return cls(
                tuple(map(ListedRun.from_dict, plain["runs"])),
                tuple(map(ListedFile.from_dict, plain["files"])),
                tuple(map(ListedFile.from_dict, plain["beside"])),
                tuple(map(Superseded.from_dict, plain["superseded"])),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{file} is no manifest: {error}", hint="take it from the history") from error

    def write(self, folder: Path) -> None:
        """Store it in a folder of results, an entry per line, so that histories show what changed."""
        parts = ",\n".join(f' "{field.name}": {_lines(getattr(self, field.name))}' for field in fields(self))
        with atomic_write(folder / MANIFEST) as stream:
            stream.write(f'{{\n "version": {VERSION},\n{parts}\n}}\n'.encode())

    def superseding(self, lines: Iterable[Superseded]) -> "Manifest":
        """The same with more that is superseded; each only once."""
        return replace(self, superseded=tuple(dict.fromkeys((*self.superseded, *lines))))

    def updated(self, folder: Path, beside: Sequence[Path] = ()) -> "Manifest":
        """The manifest of what lies in the folder now, with nothing lost of what this one has."""
        lost = self.lost(folder, beside)
        if lost:
            raise RunError(
                f"{lost[0]}; {len(lost)} such entries would be lost from the manifest",
                hint="put the files back as they were; only `collect` supersedes evidence, and it keeps the counts",
            )
        return self.superseding(self._replaced(folder.parent)).now(folder, beside)

    def _replaced(self, root: Path) -> tuple[Superseded, ...]:
        """The lines of evidence beside the results that was measured again: its counts stay."""
        rows = [entry for entry in self.beside if entry.images is not None]
        changed = [entry for entry in rows if sha256(root / entry.path) != entry.sha256]
        return tuple(Superseded.of_line(entry, REPLACED) for entry in changed)

    def now(self, folder: Path, beside: Sequence[Path] = ()) -> "Manifest":
        """What lies in the folder, and what this manifest has of superseded evidence."""
        runs = tuple(ListedRun.of(file.parent) for file in sorted(folder.glob(f"*/{SPEC}")))
        files = tuple(ListedFile.of(file, folder) for file in listed_files(folder))
        others = tuple(ListedFile.of(file, folder.parent) for file in sorted(beside))
        return Manifest(runs, files, others, self.superseded)

    def lost(self, folder: Path, beside: Sequence[Path] = ()) -> list[str]:
        """What the manifest has, and the folder no longer has in that form: one message for each."""
        gone, retrained, messages = {line.sha256 for line in self.superseded}, self._retrained(folder), []
        for entry in self.files:
            file, run = folder / entry.path, entry.path.partition("/")[0]
            if entry.sha256 in gone or (run in retrained and file.suffix != ".npz"):
                continue
            if not file.is_file():
                messages.append(f"{file} is listed, but missing")
            elif file.name not in _REWRITTEN and sha256(file) != entry.sha256:
                messages.append(f"{file} does not have the SHA-256 sum that the manifest lists")
        for run in self.runs:
            if run.run not in retrained:
                messages += [f"{folder / run.run / SUMMARY}: {what}" for what in self.changed(run, folder)]
        there = {file.relative_to(folder.parent).as_posix() for file in beside}
        kept = [each.path for each in self.beside if not each.may_go]
        return messages + [f"{path} is listed, but missing" for path in kept if path not in there]

    def _retrained(self, folder: Path) -> set[str]:
        """Runs with other weights than those listed, whose evidence is superseded."""
        superseded = {line.weights_sha256 for line in self.superseded} - {""}
        listed = [run for run in self.runs if run.weights_sha256 in superseded]
        return {
            run.run for run in listed if ListedRun.of(folder / run.run).weights_sha256 != run.weights_sha256
        }

    @staticmethod
    def changed(run: ListedRun, folder: Path) -> list[str]:
        """What a folder says otherwise of a run that is there, of what is locked once it is known."""
        differences = run.differences(folder)
        return [
            differences[name] for name in _LOCKED if name in differences and getattr(run, name) is not None
        ]


def listed_files(folder: Path) -> tuple[Path, ...]:
    """Every file below a folder of results that must be in its manifest."""
    found = (file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
    return tuple(sorted(file for file in found if file.relative_to(folder).as_posix() not in _FREE))


def training_words(spec: Spec) -> str:
    """What was trained, in a line: data, model, strategy with its settings, threat, epochs."""
    settings = to_table(spec.strategy)
    strategy = " ".join(f"{name}={value}" for name, value in settings.items()).removeprefix("kind=")
    model = spec.model.name + (f" of {spec.model.hidden} hidden units" if spec.model.hidden else "")
    ramp = spec.schedule.epsilon
    return (
        f"{spec.data.name}, {model}, {strategy}, {spec.threat}, {spec.schedule.epochs} epochs "
        f"({ramp.natural_epochs} natural, {ramp.ramp_epochs} of ramp)"
    )


def question_words(evidence: Evidence) -> str:
    """What was asked, in a line."""
    asked = evidence.question
    how = asked.classifier.get("defense") or asked.classifier["name"]
    attack = f" by {asked.attack['kind']}" if asked.kind == "attack" else ""
    return f"{asked.kind} {asked.threat}, {how}{attack}{', certified images alone' * asked.certified_only}"


def counted(evidence: Evidence) -> int:
    """Images proven or, of an attack, withstood."""
    return evidence.certified if evidence.kind == "certify" else evidence.withstood


def _lines(entries: Sequence[Any]) -> str:
    if not entries:
        return "[]"
    return "[\n" + ",\n".join(f"  {json.dumps(asdict(each))}" for each in entries) + "\n ]"
