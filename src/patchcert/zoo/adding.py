"""From a finished run and its evidence to a model of the zoo."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from patchcert.errors import RunError
from patchcert.files import sha256
from patchcert.models import is_half
from patchcert.papers.chiang2020.collecting import collected_names
from patchcert.papers.chiang2020.orders import read_orders
from patchcert.papers.chiang2020.results import TRIMMED
from patchcert.papers.chiang2020.summaries import SUMMARY
from patchcert.report.evidence import read_files
from patchcert.report.summary import AttackRows, CertificateRows, RunSummary
from patchcert.train.run_folder import EVIDENCE, Run
from patchcert.train.spec import Spec, write_spec
from patchcert.zoo.card import AttackCount, Card, Proof, Training
from patchcert.zoo.naming import entry_name
from patchcert.zoo.shelf import Zoo

PROOF_DTYPE = "float32"
NOTE = (
    "The numbers are those of this one run as it ended: {weights_of}. Of several runs for the same images, threat "
    "and architecture the zoo keeps the one with the most certified test images; a number chosen like that is "
    "a little too high as an estimate for new images."
)
PLANNED = ("images", "restarts", "steps", "seed", "search")
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
    name, weights = entry_name(run.spec), sha256(_finished(run).weights)
    training = _training(run, name, results)
    files = _evidence_files(run, results, training.run)
    file, rows = _headline(run, files, weights)
    return Card(
        name=name,
        data=run.spec.data.name,
        data_sha256=dict(_data(rows).get("sha256", {})),
        threat=run.spec.threat,
        model=run.model_spec(),
        parameters=sum(parameter.numel() for parameter in run.model().parameters()),
        weights_sha256=weights,
        proof=_proof(rows, file),
        attacks=tuple(_count(attack, rows, name) for attack in _attacks(files, weights, rows)),
        training=training,
        note=NOTE.format(weights_of=training.weights_of),
    )


def _training(run: Run, name: str, results: Path | None) -> Training:
    environment = run.environment()
    fingerprint = run.spec.fingerprint(environment.get("data", {}).get("checksums", {}))
    return Training(
        run=fingerprint,
        command=_command(run, name),
        weights_of=_weights_of(run),
        seconds=round(run.training_seconds, 1),
        device=environment.get("device", ""),
        runs_at_once=_runs_at_once(run, None if results is None else results / fingerprint),
        versions=dict(environment.get("versions", {})),
        commit=environment.get("commit", ""),
        spec=write_spec(run.spec),
    )


def _runs_at_once(run: Run, collected: Path | None) -> int:
    """How many runs shared the device: as the collected summary says, else as the run was told."""
    summary = None if collected is None else collected / SUMMARY
    if summary is None or not summary.is_file():
        return read_orders(run.path).jobs
    return int(json.loads(summary.read_text(encoding="utf-8")).get("jobs", 1))


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


def _finished(run: Run) -> Run:
    if not run.is_finished:
        raise RunError(
            f"the run in {run.path} has not finished training",
            hint=f"go on with: patchcert train {run.path} --resume",
        )
    return run


def _evidence_files(run: Run, results: Path | None, fingerprint: str) -> list[Path]:
    """Every piece of evidence once: collected files may be copies of the run's own under other names."""
    own = sorted((run.path / EVIDENCE).glob("*.npz"))
    collected: list[Path] = []
    if results is not None:
        whole = results / fingerprint
        collected = sorted((whole / TRIMMED if run.model_spec().widths else whole).glob("*.npz"))
    names = {file.name for file in own} | set(collected_names(run))
    distinct = {
        sha256(file): file for file in (*reversed(collected), *own) if file in own or file.name not in names
    }
    return sorted(distinct.values(), key=lambda file: (file not in own, file.name))


def _headline(run: Run, files: Sequence[Path], weights: str) -> tuple[Path, CertificateRows]:
    """The certificates that count, and their file."""
    for file in files:
        for rows in read_files([file], weights).certificates:
            if _is_headline(rows, run.spec):
                return file, rows
    raise RunError(
        f"{run.path} has no certificates of all test images against {run.spec.threat}",
        hint=f"certify it first: patchcert certify {run.path}; collected evidence is named with --results",
    )


def _is_headline(rows: CertificateRows, spec: Spec) -> bool:
    """Whether the rows are about the threat trained against and all test images of the run's own data."""
    data, settings = _data(rows), rows.meta.get("settings", {})
    dtype = settings.get("dtype", PROOF_DTYPE) if isinstance(settings, dict) else ""
    is_whole = data.get("name") == spec.data.name and data.get("limit", 0) is None
    in_order = np.array_equal(rows.index, np.arange(len(rows.index)))
    return rows.threat == spec.threat and is_whole and in_order and dtype == PROOF_DTYPE


def _attacks(files: Sequence[Path], weights: str, rows: CertificateRows) -> list[AttackRows]:
    """All attacks on the undefended model within the same threat; none may contradict the certificates."""
    found = [attack for file in files for attack in read_files([file], weights).attacks]
    found = [attack for attack in found if attack.threat == rows.threat]
    found = [attack for attack in found if _data(attack).get("name") == _data(rows).get("name")]
    summary = RunSummary("", threat=rows.threat, certificates=(rows,), attacks=found)
    if summary.violations:
        first = summary.violations[0]
        raise RunError(
            f"the evidence contradicts itself: image {first.index} is {first.claim}",
            hint="do not rely on this run; `patchcert report` lists all such images",
        )
    return found


def _data(rows: CertificateRows | AttackRows) -> dict[str, Any]:
    data = rows.meta.get("data", {})
    return dict(data) if isinstance(data, dict) else {}


def _proof(rows: CertificateRows, file: Path) -> Proof:
    device = str(rows.meta.get("device", ""))
    return Proof.count(rows.correct, rows.certified, PROOF_DTYPE, device, sha256(file))


def _count(rows: AttackRows, proven: CertificateRows, name: str) -> AttackCount:
    meta: dict[str, Any] = dict(rows.meta)
    return AttackCount(
        images=len(rows.index),
        withstood=int((~rows.succeeded).sum()),
        certified=int(proven.certified[rows.index].sum()),
        certified_only=rows.certified_only,
        command=_attack_command(meta, name),
        settings=dict(meta.get("settings") or meta.get("plan") or {}),
        device=str(meta.get("device", "")),
    )


def _attack_command(meta: dict[str, Any], name: str) -> str:
    """What repeats the attack on the zoo's model: as it was given, or as the plan of a table says."""
    plan = meta.get("plan")
    if plan is not None:
        options = (f"--{option} {plan[option]}" for option in PLANNED if option in plan)
        return f"patchcert attack zoo:{name} {' '.join(options)}"
    words = shlex.split(str(meta.get("command", "")))
    if words[:2] != ["patchcert", "attack"] or len(words) < 3 or words[2].startswith("-"):
        return shlex.join(words)
    return shlex.join([*words[:2], f"zoo:{name}", *_without_places(words[3:])])


def _without_places(words: Sequence[str]) -> list[str]:
    """The options less those that name folders, files or devices of one machine."""
    pairs = zip(words, ["", *words], strict=False)
    return [word for word, before in pairs if not {before, word.partition("=")[0]} & PLACES]


def _command(run: Run, name: str) -> str:
    trained = f"patchcert zoo spec {name} > {name}.toml && patchcert train {name}.toml --out runs/{name}"
    if not run.model_spec().widths:
        return trained
    half = " --half" if is_half(run.weights) else ""
    return f"{trained} && patchcert trim runs/{name}{half} --out runs/{name}-trimmed"


def _weights_of(run: Run) -> str:
    spec = run.spec
    words = f"the weights of the last of {spec.schedule.epochs} epochs"
    if spec.select != "last":
        words = f"the weights of the epoch that was best on {spec.data.validation:,} held-out training images"
    trimmed = ", without channels and units that no training image opens" if run.model_spec().widths else ""
    return words + trimmed + (", rounded to half precision" if is_half(run.weights) else "")
