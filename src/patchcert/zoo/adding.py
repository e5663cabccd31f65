"""From a finished run and its evidence to a model of the zoo, and from there to a run folder again."""

import hashlib
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import numpy as np

from patchcert.errors import RunError
from patchcert.evidence import Evidence, EvidenceFolder
from patchcert.evidence.results import SUMMARY, TRIMMED, Circumstances, fingerprint, is_altered
from patchcert.files import copy_file, new_folder, read_json, sha256, write_text
from patchcert.models import is_half
from patchcert.report.summary import ModelSummary, read_test_evidence
from patchcert.threats import Patch, SparsePixels, shapes
from patchcert.train.run_folder import EVIDENCE, SPEC, Run, check_new
from patchcert.train.spec import Spec, write_spec
from patchcert.work import parameter_count
from patchcert.zoo.card import AttackCount, Card, ProofCount, Training, pack_marks
from patchcert.zoo.shelf import Zoo

NOTE = (
    "The numbers are those of this one run as it ended: {weights_of}. Of several runs for the same images, threat "
    "and architecture the zoo keeps the one with the most certified test images; a number chosen like that is "
    "a little too high as an estimate for new images."
)
PLACES = {"--data-dir", "--out", "--device", "--batch-size"}

Status = Literal["added", "replaced", "updated", "kept"]


@final
@dataclass(frozen=True, slots=True)
class Addition:
    """What became of a run: `kept` means that the model which is there stays, for the stated reason."""

    card: Card
    status: Status
    reason: str = ""


def add_run(zoo: Zoo, run: Run, results: Path | None = None, replace: bool = False) -> Addition:
    """Store the run's model unless the zoo has one of that name with as many certified images."""
    card = make_card(run, results)
    status, reason = _decide(zoo, card, replace)
    if status != "kept":
        zoo.put(card, run.weights)
    return Addition(card, status, reason)


def make_card(run: Run, results: Path | None = None) -> Card:
    """The card of a finished run, from evidence in its folder, else in a folder of collected results."""
    if not run.is_finished:
        raise RunError(
            f"the run in {run.path} has not finished training",
            hint=f"resume with: patchcert train {run.path} --resume",
        )
    name, weights = entry_name(run.spec), sha256(run.weights)
    training = _training(run, name, results)
    found = _evidence(run, weights, None if results is None else results / training.run)
    proven = _headline(run, found)
    return Card(
        name=name,
        data=run.spec.data.name,
        data_sha256=dict(proven.meta["data"].get("sha256", {})),
        threat=run.spec.threat,
        model=run.model_spec(),
        parameters=parameter_count(run.model()),
        weights_sha256=weights,
        proof=count_proof(proven),
        attacks=tuple(count_attack(attack, proven, name) for attack in found.headline_attacks),
        training=training,
        note=NOTE.format(weights_of=training.weights_of),
    )


def copy_to_run(zoo: Zoo, name: str, folder: Path) -> Run:
    """A finished run with a model's weights and specification; it has no metrics and no evidence yet."""
    card = zoo.card(name)
    zoo.load(name)
    check_new(folder)
    environment = {
        "versions": dict(card.training.versions),
        "device": card.training.device,
        "commit": card.training.commit,
        "data": {"name": card.data, "checksums": dict(card.data_sha256)},
        "zoo": name,
    }
    with new_folder(folder):
        write_text(folder / SPEC, card.training.spec)
        run = Run.open(folder)
        run.write_environment(environment)
        copy_file(zoo.weights(name), run.weights)
    return run


def entry_name(spec: Spec) -> str:
    """Data set, threat, architecture, like `mnist-5x5-mlp`; runs that differ in width, strategy or seed share it."""
    words = spec.data.name, _threat_word(spec.threat), spec.model.name
    return "-".join(re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-") for word in words)


def _threat_word(threat: Patch | SparsePixels) -> str:
    """A rectangle that may be anywhere is its size; whatever words do not tell apart gets a digest."""
    if isinstance(threat, SparsePixels):
        bound = "" if threat.bound == "tight" else f"-{threat.bound}"
        return f"{threat.pixels}-pixel{'s' if threat.pixels > 1 else ''}{bound}"
    stamp = f"{threat.height}x{threat.width}" if threat.is_solid else shapes.describe(threat.stamp)
    rule = str(threat.rule)
    where = "" if rule == "everywhere" else f"-{rule}"
    is_spelt_out = threat.is_solid and rule in ("everywhere", "corners")
    if is_spelt_out:
        return f"{stamp}{where}"
    digest = hashlib.sha256(json.dumps(threat.to_dict(), sort_keys=True).encode()).hexdigest()
    return f"{stamp}{where}-{digest[:8]}"


def _decide(zoo: Zoo, card: Card, replace: bool) -> tuple[Status, str]:
    if card.name not in zoo.names():
        return "added", ""
    there = zoo.card(card.name)
    if there.weights_sha256 == card.weights_sha256:
        return "updated", "the zoo had the same weights"
    if replace:
        return "replaced", "as asked for"
    if (there.data_sha256, there.proof.images) != (card.data_sha256, card.proof.images):
        return "kept", "the other was certified on other images, so that they cannot be compared"
    ours, theirs = card.proof.certified, there.proof.certified
    counted = f"{ours:,} certified images against {theirs:,}"
    return ("replaced", counted) if ours > theirs else ("kept", counted)


def _evidence(run: Run, weights: str, collected: Path | None) -> ModelSummary:
    """The run's evidence. Of a question that was answered here and among the results, the answer here counts."""
    folders = [run.path / EVIDENCE]
    if collected is not None:
        folders.insert(0, collected / TRIMMED if is_altered(run) else collected)
    found = [each for folder in folders for each in read_test_evidence(EvidenceFolder(folder), weights)]
    return ModelSummary.of(run, {each.question: each for each in found}.values())


def _headline(run: Run, found: ModelSummary) -> Evidence:
    """The certificates that count: of all test images, against the threat trained against, and not contradicted."""
    proven = found.headline
    if proven is None or not _is_whole(proven, run.spec):
        raise RunError(
            f"{run.path} has no certificates of all test images against {run.spec.threat}",
            hint=f"certify it first: patchcert certify {run.path}; collected evidence is named with --results",
        )
    if found.contradictions:
        first = found.contradictions[0]
        raise RunError(
            f"the evidence contradicts itself: image {first.index} is {first.claim}",
            hint="do not rely on this run; `patchcert report` lists all such images",
        )
    return proven


def _is_whole(proven: Evidence, spec: Spec) -> bool:
    in_order = np.array_equal(proven.columns["index"], np.arange(proven.total))
    asked = proven.threat == spec.threat and proven.selection.data == spec.data.name
    return asked and proven.selection.is_whole_test_set and in_order


def count_proof(proven: Evidence) -> ProofCount:
    """What a card says of certificates of all test images."""
    assert proven.path is not None
    return ProofCount(
        images=proven.total,
        right=proven.correct,
        certified=proven.certified,
        classifier=dict(proven.meta["classifier"]),
        device=proven.meta.get("device", ""),
        evidence=sha256(proven.path),
        right_images=pack_marks(proven.right_rows),
        certified_images=pack_marks(proven.columns["certified"]),
        seconds=proven.meta.get("seconds"),
    )


def count_attack(attack: Evidence, proven: Evidence, name: str) -> AttackCount:
    """What the card of that name says of an attack on images that these certificates are about."""
    assert attack.path is not None
    return AttackCount(
        images=attack.total,
        withstood=attack.withstood,
        certified=int(proven.columns["certified"][attack.columns["index"]].sum()),
        certified_only=attack.question.certified_only,
        command=_attack_command(attack.meta.get("command", ""), name),
        settings=dict(attack.question.attack),
        device=attack.meta.get("device", ""),
        evidence=sha256(attack.path),
        seconds=attack.meta.get("seconds"),
    )


def _attack_command(command: str, name: str) -> str:
    """What repeats an attack on the zoo's model, less the folders, files and devices of one machine."""
    words = shlex.split(command)
    if words[:2] != ["patchcert", "attack"] or len(words) < 3 or words[2].startswith("-"):
        return shlex.join(words)
    pairs = zip(words[3:], words[2:], strict=False)
    kept = [word for word, before in pairs if not {before, word.partition("=")[0]} & PLACES]
    return shlex.join([*words[:2], f"zoo:{name}", *kept])


def _training(run: Run, name: str, results: Path | None) -> Training:
    environment, name_of_results = run.environment(), fingerprint(run)
    return Training(
        run=name_of_results,
        command=_training_command(run, name),
        weights_of=_weights_of(run),
        seconds=round(run.training_seconds, 1),
        device=environment.get("device", ""),
        runs_at_once=_runs_at_once(run, None if results is None else results / name_of_results),
        versions=dict(environment.get("versions", {})),
        commit=environment.get("commit", ""),
        spec=write_spec(run.spec),
    )


def _runs_at_once(run: Run, collected: Path | None) -> int:
    """How many runs shared the device: as the collected summary says, else as the run's folder says."""
    summary = None if collected is None else collected / SUMMARY
    if summary is None or not summary.is_file():
        return Circumstances.read(run.path).jobs
    return int(read_json(summary).get("jobs", 1))


def _training_command(run: Run, name: str) -> str:
    trained = f"patchcert zoo spec {name} > {name}.toml && patchcert train {name}.toml --out runs/{name}"
    is_trimmed, half = bool(run.model_spec().widths), " --half" if is_half(run.weights) else ""
    if not is_trimmed and not half:
        return trained
    words, suffix = (half, "trimmed") if is_trimmed else (" --half --keep-units", "half")
    return f"{trained} && patchcert trim runs/{name}{words} --out runs/{name}-{suffix}"


def _weights_of(run: Run) -> str:
    spec = run.spec
    words = f"the weights of the last of {spec.schedule.epochs} epochs"
    if spec.select != "last":
        words = f"the weights of the epoch that was best on {spec.data.validation:,} held-out training images"
    trimmed = ", without channels and units that no training image opens" if run.model_spec().widths else ""
    return words + trimmed + (", rounded to half precision" if is_half(run.weights) else "")
