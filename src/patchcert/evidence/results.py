"""The folder of results: of each finished run its specification, circumstances and evidence, no weights."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import inf, isnan
from pathlib import Path
from typing import Any, final

import numpy as np

from patchcert.errors import RunError
from patchcert.evidence.manifest import SUMMARY, ListedRun, Manifest, Superseded
from patchcert.evidence.record import Evidence, EvidenceFolder, Question, refuted
from patchcert.files import copy_file, read_json, sha256, write_text
from patchcert.models.storage import is_half
from patchcert.train.environment import commit_of, source_sha256
from patchcert.train.run_folder import ENVIRONMENT, EVIDENCE, METRICS, SPEC, Run
from patchcert.train.schedules import Schedule
from patchcert.train.spec import RunSettings, Spec, read_spec

CIRCUMSTANCES = ".circumstances.json"
TRIMMED = "trimmed"
"""In a run's folder of results: the evidence of its trimmed or rounded model, which no table counts."""
FIRST_SEED = 2019
TRAINED_AGAIN = "trained again: the same specification gave other weights"
MEASURED_AGAIN = "measured again: the same weights gave other rows"
TIMED = "measured again: the same rows, with the time of predictions"


@final
@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a run's specification does not say: the scale of its schedule, and how many runs shared the device."""

    scale: float = 1.0
    jobs: int = 1

    @staticmethod
    def read(run: Path) -> "Circumstances":
        """Those noted in a run's folder; the usual ones where none are."""
        file = run / CIRCUMSTANCES
        return Circumstances(**read_json(file)) if file.is_file() else Circumstances()

    def write(self, run: Path) -> None:
        write_text(run / CIRCUMSTANCES, json.dumps(asdict(self)))


@final
@dataclass(frozen=True)
class Result:
    """One run's folder of results. Accuracies are counted in its evidence; the summary is for people."""

    path: Path
    spec: Spec

    @classmethod
    def open(cls, path: Path) -> "Result":
        return cls(path, read_spec(path / SPEC))

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """What was noted when the result was collected: seconds, training loss, device, versions, scale."""
        return read_json(self.path / SUMMARY)

    @property
    def training_loss(self) -> float | None:
        """The mean training loss in the last epoch; None where it is not on record."""
        return self.summary.get("training_loss")

    @property
    def training_seconds(self) -> float:
        return float(self.summary["training_seconds"])

    @property
    def device(self) -> str:
        return shared_device(self.summary["device"], self.summary.get("jobs", 1))

    @cached_property
    def evidence(self) -> tuple[Evidence, ...]:
        """All evidence, checked: of one set of weights, on the data that named the folder, without contradictions."""
        return self._read(self.path)

    @cached_property
    def trimmed(self) -> tuple[Evidence, ...]:
        """The evidence of the trimmed model, checked likewise."""
        return self._read(self.path / TRIMMED)

    def find(self, question: Question) -> Evidence | None:
        """The answer to a question, where it is there."""
        return next((each for each in self.evidence if each.question == question), None)

    def answers(self, questions: Iterable[Question]) -> bool:
        """Whether there is an answer to every question."""
        return all(self.find(question) is not None for question in questions)

    def _read(self, folder: Path) -> tuple[Evidence, ...]:
        found = EvidenceFolder(folder).all()
        for each in found:
            if self.spec.fingerprint(each.meta["data"]["sha256"]) != self.path.name:
                raise RunError(
                    f"{each.path} is not evidence of the run that its folder is named after",
                    hint="the specification, the data or the version of training changed; collect or train it again",
                )
        check_together(found)
        return found


def check_together(found: Sequence[Evidence]) -> None:
    """Raises unless the files are of one set of weights and the same images, and no attack refutes a proof.

    An attack on certified images alone must be on images that a file beside it calls proven. What it broke is counted,
    not refused.
    """
    if len({each.weights for each in found}) > 1:
        raise RunError(
            f"{found[0].where} and the files beside it are of different weights", hint="collect the run again"
        )
    whole = next((each for each in found if each.selection.is_whole_test_set), None)
    for each in found:
        if whole is not None and each.selection.split == "test":
            _check_same_images(each, whole)
    proven = [each for each in found if each.kind == "certify"]
    for attacked in found:
        if attacked.kind == "attack" and attacked.question.certified_only:
            _check_attacks_proven(attacked, proven)
            continue
        for proof in proven:
            broken = refuted(proof, attacked)
            if broken.size:
                raise RunError(
                    f"{proof.where}: image {broken[0]} is certified, but {attacked.where} broke it"
                )


def _check_same_images(evidence: Evidence, whole: Evidence) -> None:
    index, labels = evidence.columns["index"], whole.columns["label"]
    if index.max(initial=0) >= len(labels) or not np.array_equal(labels[index], evidence.columns["label"]):
        raise RunError(
            f"{evidence.where} is about other images than {whole.where}",
            hint="both must come from the same data set; gather the evidence again",
        )


def _check_attacks_proven(attacked: Evidence, proven: Sequence[Evidence]) -> None:
    whole = [each for each in proven if each.selection.is_whole_test_set]
    beside = [each for each in whole if each.subject == attacked.subject]
    if not beside:
        raise RunError(
            f"{attacked.where} has no certificates of all test images beside it", hint="collect again"
        )
    if not any(each.columns["certified"][attacked.columns["index"]].all() for each in beside):
        raise RunError(f"{attacked.where} attacks images that {beside[0].where} does not call proven")


def experiment_key(spec: Spec) -> str:
    """The same for runs that differ only in seed, schedule, rounding of training steps and housekeeping.

    So may the weights that they begin with, where they are given: others are drawn by the seed.
    """
    model, optimiser = spec.model, spec.optimiser.exact()
    if model.weights is not None:
        model = replace(model, weights_sha256="of whichever weights")
    return replace(
        spec, seed=FIRST_SEED, schedule=Schedule(), optimiser=optimiser, run=RunSettings(), model=model
    ).fingerprint()


def recipe_key(spec: Spec) -> str:
    """The same for runs of one experiment that have the same schedule as well."""
    return f"{experiment_key(spec)} {spec.schedule}"


@final
class Results:
    """All results of runs in a folder, found by what was trained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._by_key: dict[str, list[Result]] = {}
        for spec_file in sorted(folder.glob(f"*/{SPEC}")):
            result = Result.open(spec_file.parent)
            self._by_key.setdefault(experiment_key(result.spec), []).append(result)

    def all(self) -> tuple[Result, ...]:
        """Every result, by name."""
        found = (result for results in self._by_key.values() for result in results)
        return tuple(sorted(found, key=lambda result: result.path.name))

    def of(self, spec: Spec) -> tuple[Result, ...]:
        """The results of this experiment, whatever their seed and schedule."""
        return tuple(self._by_key.get(experiment_key(spec), ()))


def collect(run: Run, folder: Path) -> Result:
    """Copies what a finished run leaves into the folder of results; what it replaces there stays in the manifest."""
    target = folder / fingerprint(run)
    copy_evidence(run.path / EVIDENCE, target, sha256(run.weights), folder)
    _describe(run, target)
    return Result.open(target)


def _describe(run: Run, target: Path) -> None:
    """Writes down how a run was trained, and what the evidence in its folder of results counts."""
    write_text(target / ENVIRONMENT, json.dumps(run.environment(), indent=2) + "\n")
    write_text(target / SUMMARY, json.dumps(_summary(run, target), indent=2) + "\n")
    for name in (SPEC, METRICS):
        if (run.path / name).is_file():
            copy_file(run.path / name, target / name)


def collect_all(runs: Path, folder: Path) -> tuple[str, ...]:
    """Copies every finished run with evidence below a folder to the results; the names they have there.

    The evidence of a model that is trimmed, or rounded to half precision, goes to a folder of its own below that of the
    network as it was trained, which may have none.
    """
    names = []
    for run in (Run.open(spec_file.parent) for spec_file in sorted(runs.glob(f"*/{SPEC}"))):
        if not run.is_finished or not EvidenceFolder(run.path / EVIDENCE).files():
            continue
        if is_altered(run):
            names.append(f"{fingerprint(run)}/{TRIMMED}")
            copy_evidence(run.path / EVIDENCE, folder / names[-1], sha256(run.weights), folder)
            if not (folder / fingerprint(run) / SUMMARY).is_file():
                _describe(run, folder / fingerprint(run))
        else:
            names.append(collect(run, folder).path.name)
    return tuple(names)


def is_altered(run: Run) -> bool:
    """Whether the run has a model that was trimmed, or rounded to half precision, after it was trained."""
    return bool(run.model_spec().widths) or is_half(run.weights)


def fingerprint(run: Run) -> str:
    """The name of a run among results."""
    return run.spec.fingerprint(run.environment().get("data", {}).get("checksums", {}))


def copy_evidence(source: Path, target: Path, weights: str, folder: Path) -> None:
    """Copies evidence of these weights to a folder below that of the results, where none of other weights is kept.

    The counts of what is replaced stay in the manifest. Answers with the same rows are not replaced, unless they are
    the first to say what predictions take.
    """
    there, gone = _by_name(target), dict[str, str]()
    arriving = {name: each for name, each in _by_name(source).items() if each.weights == weights}
    for name, before in there.items():
        after = arriving.get(name)
        if before.weights != weights:
            gone[name] = TRAINED_AGAIN
        elif after is not None and not after.has_rows_of(before):
            gone[name] = MEASURED_AGAIN
        elif after is not None and "prediction" in after.meta.keys() - before.meta.keys():
            gone[name] = TIMED
    if gone:
        about = ListedRun.of(folder / target.relative_to(folder).parts[0])
        lines = [Superseded.of(there[name], about, why) for name, why in gone.items()]
        Manifest.read(folder).superseding(lines).write(folder)
    for name in gone:
        (target / name).unlink()
    for name in arriving.keys() - (there.keys() - gone.keys()):
        copy_file(source / name, target / name)


def _by_name(folder: Path) -> dict[str, Evidence]:
    return {file.name: Evidence.read(file) for file in EvidenceFolder(folder).files()}


def shared_device(device: str, jobs: int) -> str:
    """A device, and that several runs were given to it at once: their training times then include waiting."""
    return f"{device}, {jobs} runs at once" if jobs > 1 else device


def comparable_loss(loss: float | None) -> float:
    """By which the seed of least loss is found: infinite where none is on record, or it is no number."""
    return inf if loss is None or isnan(loss) else loss


def last_loss(run: Run) -> float | None:
    """The mean training loss in the last epoch; None where the run folder has lost it."""
    last = [row for row in run.metrics() if row["epoch"] == run.spec.schedule.epochs - 1]
    return last[0].get("loss") if last else None


def _summary(run: Run, target: Path) -> dict[str, Any]:
    """The circumstances are as noted when this training was first collected, since those in the run folder may change
    later; so are the loss and the sum of the code, where the run folder does not have them."""
    found = EvidenceFolder(target).all()
    proven = [each for each in found if each.kind == "certify"]
    attacked = [each for each in found if each.kind == "attack" and not each.question.certified_only]
    environment, before, loss = run.environment(), _before(run, target), last_loss(run)
    seconds, noted = round(run.training_seconds, 1), Circumstances.read(run.path)
    is_collected = before.get("training_seconds") == seconds
    return {
        "fingerprint": target.name,
        "scale": noted.scale,
        "clean_accuracy": proven[0].correct / proven[0].total if proven else None,
        "certified_accuracy": {each.question.name: each.certified / each.total for each in proven},
        "attacked_accuracy": {each.question.name: each.withstood / each.total for each in attacked},
        "training_loss": before.get("training_loss") if loss is None else loss,
        "training_seconds": seconds,
        "device": devices(environment),
        "jobs": int(before.get("jobs", 1)) if is_collected else noted.jobs,
        "versions": environment.get("versions", {}),
        "commit": environment.get("commit")
        or before.get("commit")
        or commit_of(environment.get("source_sha256", "")),
        "source_sha256": environment.get("source_sha256") or before.get("source_sha256") or source_sha256(),
        "weights_sha256": "" if is_altered(run) else sha256(run.weights),
    }


def devices(environment: Mapping[str, Any]) -> str:
    """The devices that trained, in their order: a run that was stopped may have been resumed elsewhere."""
    sessions = [session["device"] for session in environment.get("sessions", [])]
    return ", then ".join(dict.fromkeys(sessions or [environment.get("device", "")]))


def _before(run: Run, target: Path) -> dict[str, Any]:
    """What was summed up earlier of the same weights; empty where nothing was."""
    if not (target / SUMMARY).is_file():
        return {}
    before = read_json(target / SUMMARY)
    return before if before.get("weights_sha256") == sha256(run.weights) else {}
