"""Whether a folder of results can be believed: every file is the one listed, and says what its own columns, the true
labels and the files beside it bear out."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from patchcert.data.labels import label_files, true_labels
from patchcert.errors import PatchcertError
from patchcert.evidence.manifest import SUMMARY, ListedFile, ListedRun, Manifest, counted, listed_files
from patchcert.evidence.record import MODEL, Evidence, EvidenceFolder, implies, predictor_of, refuted
from patchcert.evidence.results import TRIMMED, Result, check_together, devices
from patchcert.files import read_json, sha256
from patchcert.threats import Patch
from patchcert.train.run_folder import ENVIRONMENT, METRICS, SPEC, Run

NEAR_TIES = 1e-3
"""The share of images whose prediction may differ from machine to machine; among the results none does."""
CONTESTED = 20
"""Rows with votes for more than one class, without which two networks may well have the same votes."""
_OWN_PREDICTIONS = predictor_of(MODEL)
"""What `Evidence.about` calls a model that is asked as it is."""


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, and in which file."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@final
@dataclass(frozen=True)
class Audit:
    """What was looked at and found. `without_curve` and `without_commit` are runs from before these were kept."""

    files: int
    findings: tuple[Finding, ...]
    without_curve: tuple[str, ...] = ()
    without_commit: tuple[str, ...] = ()
    superseded: int = 0


def audit_results(folder: Path, beside: Sequence[Path] = ()) -> Audit:
    """Every check that needs nothing but the folder; `beside` are measurements, pictures and trials that its
    manifest lists as well."""
    manifest = Manifest.read(folder)
    findings = [*_against_manifest(manifest, folder, beside)]
    own, others = sorted(folder.rglob("*.npz")), [file for file in beside if file.suffix == ".npz"]
    for file in (*own, *others):
        findings += audit_evidence(file)
    findings += _against_each_other(_readable(own), _readable(others))
    runs = sorted(file.parent for file in folder.glob(f"*/{SUMMARY}"))
    for run in runs:
        findings += _audit_run(run)
    trained = [run for run in runs if (run / SPEC).is_file()]
    return Audit(
        files=len(manifest.files),
        findings=tuple(findings),
        without_curve=tuple(run.name for run in trained if not (run / METRICS).is_file()),
        without_commit=tuple(run.name for run in trained if not _commit(run)),
        superseded=len(manifest.superseded),
    )


def _commit(run: Path) -> str:
    with suppress(PatchcertError):  # a summary that cannot be read is named already
        return read_json(run / SUMMARY).get("commit", "")
    return ""


def _readable(files: Sequence[Path]) -> tuple[Evidence, ...]:
    found = []
    for file in files:
        with suppress(PatchcertError):  # what cannot be read is named already
            found.append(Evidence.read(file))
    return tuple(found)


def _against_each_other(own: Sequence[Evidence], others: Sequence[Evidence]) -> Iterator[Finding]:
    """Results are named after their questions; and what lies beside them says nothing else of the same weights."""
    for each in own:
        if each.path is not None and each.path.stem != each.question.name:
            yield Finding(each.path, f"is named otherwise than its question, {each.question.name}")
    yield from _proofs_agree((*own, *others))
    yield from _no_rows_are_copied((*own, *others))
    for each in others:
        alike = [one for one in (*own, *others) if one.weights == each.weights]
        assert each.path is not None
        for one in alike:
            for proof, attack in ((each, one), (one, each)):
                if proof.kind != "certify" or attack.question.certified_only:
                    continue
                broken = refuted(proof, attack)
                if broken.size:
                    what = f"image {broken[0]} is certified in {proof.where} and broken in {attack.where}"
                    yield Finding(each.path, what)
        yield from (found for found in same_predictions(alike) if found.path == each.path)


def _proofs_agree(found: Sequence[Evidence]) -> Iterator[Finding]:
    """What a proof shows against a larger patch, or by a weaker method, others of the same weights show too, but for a
    few near-ties on other hardware."""
    by_weights: dict[str, list[Evidence]] = {}
    for each in found:
        if each.kind == "certify" and each.selection.is_whole_test_set:
            by_weights.setdefault(each.weights, []).append(each)
    pairs = ((hard, easy) for alike in by_weights.values() for hard in alike for easy in alike)
    for hard, easy in pairs:
        if not implies(hard, easy):
            continue
        alone = np.flatnonzero(hard.columns["certified"] & ~easy.columns["certified"])
        if len(alone) > NEAR_TIES * hard.total and hard.path is not None:
            first = hard.columns["index"][alone[0]]
            what = f"certifies {len(alone)} images that {easy.where} does not, which is easier"
            yield Finding(hard.path, f"{what}: {first} is the first")


def _no_rows_are_copied(found: Sequence[Evidence]) -> Iterator[Finding]:
    """Margins and leads are those of one network and question, votes those of one network; but for rows that tell
    nothing apart."""
    seen: dict[tuple[str, bytes], Evidence] = {}
    for each in found:
        for name in ("margin", "lead", "votes"):
            if name not in each.columns or not _tells_apart(each.columns[name]):
                continue
            first = seen.setdefault((name, each.columns[name].tobytes()), each)
            is_same = first.weights == each.weights and (name == "votes" or first.question == each.question)
            if not is_same and each.path is not None:
                yield Finding(each.path, f"has every {name} of {first.where}, which is about something else")


def _tells_apart(values: NDArray[Any]) -> bool:
    """Not where all rows have one number, such as 0 where masks withstand an attack, nor where nearly all have all of
    their votes for one class."""
    if values.ndim == 1:
        return len(np.unique(values)) > 1
    return int(((values > 0).sum(axis=1) > 1).sum()) >= CONTESTED


def _against_manifest(manifest: Manifest, folder: Path, beside: Sequence[Path]) -> Iterator[Finding]:
    """Files that are missing, changed or not listed, and facts of runs that are not those listed."""
    if not manifest.files:
        yield Finding(folder, "has no manifest: write one with `patchcert audit --write`")
        return
    yield from _compare(manifest.files, folder, listed_files(folder))
    yield from _compare(manifest.beside, folder.parent, beside)
    yield from _against_listed_runs(manifest.runs, folder)


def _against_listed_runs(listed: Sequence[ListedRun], folder: Path) -> Iterator[Finding]:
    """Every run has one line, which says what its folder says: figures in documents are taken from these lines."""
    for run in listed:
        with suppress(PatchcertError):  # a summary that cannot be read is named among its run's files
            for what in run.differences(folder).values():
                yield Finding(folder / run.run / SUMMARY, what)
    lines = Counter(run.run for run in listed)
    for file in sorted(folder.glob(f"*/{SPEC}")):
        if lines[file.parent.name] != 1:
            yield Finding(file.parent, f"has {lines[file.parent.name]} lines among the runs of the manifest")


def _compare(listed: Sequence[ListedFile], folder: Path, there: Sequence[Path]) -> Iterator[Finding]:
    lines = {entry.path: entry for entry in listed}
    found = {file.relative_to(folder).as_posix(): file for file in there}
    for path in sorted(lines.keys() - found.keys()):
        yield Finding(folder / path, "is listed in the manifest, but missing")
    for path in sorted(found.keys() - lines.keys()):
        yield Finding(found[path], "is not listed in the manifest")
    for path in sorted(found.keys() & lines.keys()):
        if sha256(found[path]) != lines[path].sha256:
            yield Finding(found[path], "does not have the SHA-256 sum that the manifest lists")
            continue
        with suppress(PatchcertError):  # what cannot be read is named already
            if ListedFile.of(found[path], folder) != lines[path]:
                yield Finding(found[path], "counts otherwise than its line in the manifest")


def audit_evidence(file: Path) -> tuple[Finding, ...]:
    """Whether the rows of a file are complete, have the true labels, and bear out its verdicts and successes."""
    try:
        evidence = Evidence.read(file)
    except PatchcertError as error:
        return (Finding(file, error.message),)
    checks = (_labels, _verdicts, _successes, _steps, _placements, _times)
    return tuple(Finding(file, what) for check in checks if (what := check(evidence)))


def _labels(evidence: Evidence) -> str:
    data, index = evidence.meta["data"], evidence.columns["index"]
    split = evidence.selection.split
    labels = true_labels(data["name"], split, data.get("sha256", {}))
    if labels is None:
        is_published = data["name"] in label_files(split)
        return f"is about {data['name']} of other files than those published" if is_published else ""
    if not evidence.question.certified_only:
        expected = evidence.selection.positions(len(labels)).numpy()
        if not np.array_equal(index, expected):
            return f"has {len(index)} rows; expected one for each of the {len(expected)} images that were asked for"
    if index.max(initial=0) >= len(labels):
        return f"names image {index.max()}, but {data['name']} has {len(labels)} {split} images"
    wrong = np.flatnonzero(labels[index] != evidence.columns["label"])
    if not wrong.size:
        return ""
    row = wrong[0]
    return (
        f"{wrong.size} labels are not those of {data['name']}: image {index[row]} is a {labels[index[row]]}, "
        f"not a {evidence.columns['label'][row]}"
    )


def _verdicts(evidence: Evidence) -> str:
    """Certified is exactly what is predicted rightly and has a positive margin, or a radius or lead that suffices."""
    columns = evidence.columns
    if evidence.kind != "certify":
        return ""
    right = evidence.right_rows
    if "margin" in columns:
        proven, by = right & (columns["margin"] > 0), "margin"
    elif "radius" in columns:
        proven, by = right & (columns["radius"] >= evidence.threat.pixels), "radius"
    elif "lead" in columns:
        proven, by = right & (columns["lead"] > evidence.meta["classifier"]["slack"]), "lead"
    else:
        return ""
    wrong = np.flatnonzero(proven != columns["certified"])
    if not wrong.size:
        return ""
    return f"{wrong.size} verdicts do not follow from their {by}: image {columns['index'][wrong[0]]} is the first"


def _successes(evidence: Evidence) -> str:
    """An attack succeeds exactly where a wrong class leads. An image that is wrong by itself counts as broken, unless
    it was attacked plainly behind a defense, which may put it right."""
    columns = evidence.columns
    if evidence.kind != "attack":
        return ""
    if "margin" in columns:
        wrong = np.flatnonzero((columns["margin"] > 0) != columns["succeeded"])
        if wrong.size:
            first = columns["index"][wrong[0]]
            return f"{wrong.size} successes do not follow from their margins: image {first} is the first"
    mended = np.flatnonzero((columns["prediction"] != columns["label"]) & ~columns["succeeded"])
    if mended.size and (evidence.is_undefended or _is_adaptive(evidence)):
        return f"image {columns['index'][mended[0]]} withstood the attack, but is wrong without one"
    return ""


def _steps(evidence: Evidence) -> str:
    """Success ends an attack on an image: one that withstood was tried with as many steps as any other."""
    if evidence.kind != "attack":
        return ""
    steps = evidence.columns["steps"]
    spared = np.flatnonzero(~evidence.columns["succeeded"] & (steps < steps.max(initial=0)))
    if not spared.size:
        return ""
    first = evidence.columns["index"][spared[0]]
    return (
        f"{spared.size} images withstood fewer steps than others were tried with: image {first} is the first"
    )


def _placements(evidence: Evidence) -> str:
    """Patches, and the weakest places of proofs, are where the threat can be; an image that an attack broke has one."""
    top, left = ("worst_top", "worst_left") if evidence.kind == "certify" else ("top", "left")
    columns, size = evidence.columns, evidence.meta["data"].get("image")
    if top not in columns or size is None or not isinstance(evidence.threat, Patch):
        return ""
    corners = np.array([[-1, -1], *evidence.threat.placements(*size[1:]).corners.tolist()])
    outside = ~np.isin(_codes(columns[top], columns[left]), _codes(*corners.T))
    if evidence.kind == "attack":
        outside |= columns["succeeded"] & evidence.right_rows & (columns["top"] < 0)
    wrong = np.flatnonzero(outside)
    if not wrong.size:
        return ""
    return f"{wrong.size} rows have no place of {evidence.threat}: image {columns['index'][wrong[0]]} is the first"


def _codes(tops: NDArray[np.integer], lefts: NDArray[np.integer]) -> NDArray[np.int64]:
    """A number for each pair, another for every other pair of numbers that fit into 31 bits."""
    return tops.astype(np.int64) * 2**32 + lefts.astype(np.int64)


def _times(evidence: Evidence) -> str:
    """The time of predictions is that of images which were asked for, and the whole took some time."""
    if "seconds" not in evidence.meta or not evidence.meta.get("device"):
        return "does not say how many seconds it took on which device"
    images = evidence.meta.get("prediction", {"images": 1})["images"]
    return f"states the time of {images} predictions, but has {evidence.total} images" * (
        images > evidence.total
    )


def _audit_run(run: Path) -> Iterator[Finding]:
    """Whether the files of a run agree with each other."""
    for folder in (run, run / TRIMMED):
        try:
            found = _together(run, folder)
        except PatchcertError as error:
            yield Finding(folder, error.message)
            continue
        yield from same_predictions(found)
        yield from _adaptive_is_stronger(found)
        yield from _all_that_is_proven_was_attacked(found)
        if folder == run:
            yield from _readable_findings(run, _audit_summary(run, found))
            yield from _readable_findings(run, _audit_circumstances(run, found))
    if (run / SPEC).is_file():
        yield from _readable_findings(run, _audit_curve(run))


def _readable_findings(run: Path, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings; a file that cannot be read ends them, and is one."""
    try:
        yield from findings
    except PatchcertError as error:
        yield Finding(run, error.message)


def _together(run: Path, folder: Path) -> Sequence[Evidence]:
    """The evidence of a run, or of its trimmed model, checked as a whole."""
    if (run / SPEC).is_file():
        result = Result.open(run)
        return result.evidence if folder == run else result.trimmed
    found = EvidenceFolder(folder).all()
    check_together(found)
    return found


def same_predictions(found: Sequence[Evidence]) -> Iterator[Finding]:
    """The same weights say the same of the same clean images, but for a few near-ties on other hardware."""
    own = [each for each in found if each.is_undefended and each.about[1] == _OWN_PREDICTIONS]
    whole_sets = [each for each in own if each.selection.is_whole_test_set]
    whole = min(whole_sets, key=lambda each: "margin" not in each.columns, default=None)
    if whole is None:
        return
    for each in own:
        if (each.selection.data, each.selection.split) != (whole.selection.data, whole.selection.split):
            continue
        expected = whole.columns["prediction"][each.columns["index"]]
        differ = np.count_nonzero(expected != each.columns["prediction"])
        if differ > NEAR_TIES * each.total and each.path is not None:
            what = f"{differ} predictions are not those in {whole.where}, of the same weights"
            yield Finding(each.path, what)


def _adaptive_is_stronger(found: Sequence[Evidence]) -> Iterator[Finding]:
    """An adaptive attack begins with what the plain one found: it breaks every image that the plain one broke."""
    attacks = [each for each in found if each.kind == "attack" and not each.is_undefended]
    plain = [each for each in attacks if not _is_adaptive(each)]
    for adaptive in filter(_is_adaptive, attacks):
        for weak in (each for each in plain if each.subject == adaptive.subject):
            both = np.array_equal(weak.columns["index"], adaptive.columns["index"])
            spared = weak.columns["succeeded"] & ~adaptive.columns["succeeded"] if both else np.zeros(0, bool)
            if spared.any() and adaptive.path is not None:
                first = weak.columns["index"][np.flatnonzero(spared)[0]]
                what = "images withstood the adaptive attack, but not the plain one"
                yield Finding(adaptive.path, f"{spared.sum()} {what}: {first} is the first")


def _all_that_is_proven_was_attacked(found: Sequence[Evidence]) -> Iterator[Finding]:
    """An attack on certified images alone leaves out none of those that a proof beside it certifies."""
    proofs = [each for each in found if each.kind == "certify" and each.selection.is_whole_test_set]
    for attack in (each for each in found if each.kind == "attack" and each.question.certified_only):
        beside = [each for each in proofs if each.subject == attack.subject]
        left_out = min((_left_out(attack, proof) for proof in beside), default=0)
        if left_out and attack.path is not None:
            yield Finding(attack.path, f"leaves out {left_out} images that are certified, and were asked for")


def _left_out(attack: Evidence, proof: Evidence) -> int:
    asked = attack.selection.positions(proof.total).numpy()
    return len(np.setdiff1d(asked[proof.columns["certified"][asked]], attack.columns["index"]))


def _is_adaptive(evidence: Evidence) -> bool:
    attack = evidence.question.attack
    return attack["kind"] == "AdaptiveAfterTransfer" or attack.get("adaptive") is True


def _audit_summary(run: Path, found: Sequence[Evidence]) -> Iterator[Finding]:
    """The summary, which people read, says what the rows say."""
    summary, file = read_json(run / SUMMARY), run / SUMMARY
    if summary.get("fingerprint") != run.name:
        yield Finding(file, f"is of {summary.get('fingerprint')}")
    if any(each.weights != summary.get("weights_sha256") for each in found):
        yield Finding(file, "is of other weights than the evidence beside it")
    stated = {**summary.get("certified_accuracy", {}), **summary.get("attacked_accuracy", {})}
    stated |= {name: cell["accuracy"] for name, cell in summary.get("cells", {}).items()}
    shares = {
        each.question.name: counted(each) / each.total for each in found if not each.question.certified_only
    }
    for name in stated.keys() | shares.keys():
        if stated.get(name) != shares.get(name):
            yield Finding(file, f"states {stated.get(name)} for {name}; its rows count {shares.get(name)}")


def _audit_circumstances(run: Path, found: Sequence[Evidence]) -> Iterator[Finding]:
    """The summary has the clean accuracy of the rows, and device and versions of the environment beside it."""
    summary, file = read_json(run / SUMMARY), run / ENVIRONMENT
    environment = read_json(file) if file.is_file() else {}
    proofs = [each for each in found if each.kind == "certify"]
    expected: dict[str, Any] = {}
    if (run / SPEC).is_file():
        expected |= {"device": devices(environment), "versions": environment.get("versions", {})}
        expected |= {"clean_accuracy": proofs[0].correct / proofs[0].total if proofs else None}
    for name, value in expected.items():
        if summary.get(name) != value:
            yield Finding(
                run / SUMMARY, f"states {name} as {summary.get(name)}; what lies beside it gives {value}"
            )


def _audit_curve(run: Path) -> Iterator[Finding]:
    """Runs that know the sum of the code that trained them came after curves were kept, and must have theirs."""
    summary, file = read_json(run / SUMMARY), run / METRICS
    if not file.is_file():
        if read_json(run / ENVIRONMENT).get("source_sha256"):
            yield Finding(file, "is missing: every run keeps its training curve")
        return
    rows = Run.open(run).metrics()
    epochs = Result.open(run).spec.schedule.epochs
    if [row["epoch"] for row in rows] != list(range(epochs)):
        yield Finding(file, f"does not have one row for each of the {epochs} epochs")
    elif rows[-1].get("loss") != summary.get("training_loss"):
        yield Finding(
            run / SUMMARY,
            f"states a training loss of {summary.get('training_loss')}; the curve ends at {rows[-1].get('loss')}",
        )
    if round(sum(row["seconds"] for row in rows), 1) != summary.get("training_seconds"):
        yield Finding(
            run / SUMMARY, "states another training time than the epochs of its curve took together"
        )
    if not summary.get("source_sha256"):
        yield Finding(run / SUMMARY, "lacks the sum of the code that trained it")
