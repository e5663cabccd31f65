"""The summary beside a run's evidence: accuracies for people, the circumstances, and the last training loss."""

import json
from pathlib import Path
from typing import Any

from patchcert.files import sha256
from patchcert.papers.chiang2020.ablation_evidence import VotedRows
from patchcert.papers.chiang2020.evidence import AttackedRows, Rows
from patchcert.papers.chiang2020.orders import read_orders
from patchcert.train.environment import source_sha256
from patchcert.train.run_folder import Run, write_text

SUMMARY = "summary.json"
LOSS = "training_loss"


def write_summary(run: Run, target: Path, scale: float) -> None:
    """Sum up a run, and its evidence that lies in the folder."""
    _write(target, _summary(run, target, scale))


def add_loss(run: Run, target: Path) -> bool:
    """Add the training loss to a summary of these very weights, and change nothing else; whether it is there."""
    before = _before(run, target)
    loss = last_loss(run)
    if not before or loss is None:
        return False
    if before.get(LOSS) != loss:
        _write(target, _with_loss(before, loss))
    return True


def last_loss(run: Run) -> float | None:
    """The mean training loss in the last epoch; None where the run folder has lost it."""
    last = [row for row in run.metrics() if row["epoch"] == run.spec.schedule.epochs - 1]
    return last[0].get("loss") if last else None


def voted_accuracies(rows: VotedRows) -> dict[str, float]:
    """The share of images that stays right, by the number of changed pixels."""
    largest = int(rows.columns["radius"].max())
    return {str(pixels): rows.certified(pixels) / rows.total for pixels in range(1, largest + 1)}


def _summary(run: Run, target: Path, scale: float) -> dict[str, Any]:
    """How many runs shared the device is as noted when this training was first collected: orders change later.
    So is the sum of the code, where the run itself has not noted it."""
    rows = [Rows.read(file) for file in sorted(target.glob("certify-*.npz"))]
    attacks = [AttackedRows.read(file) for file in sorted(target.glob("attack-*.npz"))]
    votes = [VotedRows.read(file) for file in sorted(target.glob("votes-*.npz"))]
    counted = [*rows, *votes]
    environment, before, loss = run.environment(), _before(run, target), last_loss(run)
    seconds = round(run.training_seconds, 1)
    is_collected = before.get("training_seconds") == seconds
    return {
        "fingerprint": target.name,
        "scale": scale,
        "clean_accuracy": counted[0].correct / counted[0].total if counted else None,
        "certified_accuracy": {each.path.stem: each.certified / each.total for each in rows},
        "attacked_accuracy": {each.path.stem: each.withstood / each.total for each in attacks},
        "voted_accuracy": {each.path.stem: voted_accuracies(each) for each in votes},
        LOSS: before.get(LOSS) if loss is None else loss,
        "training_seconds": seconds,
        "device": _devices(environment),
        "jobs": int(before.get("jobs", 1)) if is_collected else read_orders(run.path).jobs,
        "versions": environment.get("versions", {}),
        "commit": environment.get("commit", ""),
        "source_sha256": environment.get("source_sha256") or before.get("source_sha256") or source_sha256(),
        "weights_sha256": sha256(run.weights),
    }


def _devices(environment: dict[str, Any]) -> str:
    """The devices that trained, in their order: a run that was stopped may have gone on elsewhere."""
    sessions = [session["device"] for session in environment.get("sessions", [])]
    return ", then ".join(dict.fromkeys(sessions or [environment.get("device", "")]))


def _with_loss(summary: dict[str, Any], loss: float) -> dict[str, Any]:
    """The loss stands before the time that training took, as in new summaries."""
    others = [(key, value) for key, value in summary.items() if key != LOSS]
    at = next((at for at, (key, _) in enumerate(others) if key == "training_seconds"), len(others))
    return dict([*others[:at], (LOSS, loss), *others[at:]])


def _before(run: Run, target: Path) -> dict[str, Any]:
    """What was summed up earlier of the same weights; empty where nothing was."""
    if not (target / SUMMARY).is_file():
        return {}
    before = json.loads((target / SUMMARY).read_text(encoding="utf-8"))
    return before if before.get("weights_sha256") == sha256(run.weights) else {}


def _write(target: Path, summary: dict[str, Any]) -> None:
    write_text(target / SUMMARY, json.dumps(summary, indent=2) + "\n")
