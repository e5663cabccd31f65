"""What a run's process is asked to do, as a file in the run's folder."""

import json
from dataclasses import dataclass
from pathlib import Path

from patchcert.papers.chiang2020.ablation_plan import VotePlan
from patchcert.papers.chiang2020.attack_plan import AttackPlan, TuningPlan
from patchcert.papers.chiang2020.evidence import evidence_name
from patchcert.papers.chiang2020.plan import Task
from patchcert.papers.chiang2020.rows import AnyThreat
from patchcert.threats import threat_from_dict
from patchcert.train.run_folder import write_text

ORDERS = ".task.json"


@dataclass(frozen=True, slots=True)
class Orders:
    """Threats to certify on the first test images or on all, attacks, votes, trials, and the schedule's scale.

    `jobs` is how many runs share the device, without which training times cannot be compared. The trials of all
    `siblings` decide on the setting of a defense; with `tunes_only` the attacks that need it are left for later.
    """

    threats: tuple[AnyThreat, ...] = ()
    limit: int | None = None
    scale: float = 1.0
    attacks: tuple[AttackPlan, ...] = ()
    jobs: int = 1
    votes: tuple[VotePlan, ...] = ()
    tunings: tuple[TuningPlan, ...] = ()
    siblings: tuple[str, ...] = ()
    tunes_only: bool = False

    @property
    def evidence_names(self) -> tuple[str, ...]:
        """What the run's evidence is called once nothing is left for later."""
        certificates = (evidence_name(threat, self.limit) for threat in self.threats)
        return (*certificates, *(each.name for each in (*self.tunings, *self.attacks, *self.votes)))


def write_orders(folder: Path, task: Task, jobs: int) -> None:
    """Leave a task in the folder of its run."""
    plain = {
        "threats": [threat.to_dict() for threat in task.threats],
        "limit": task.test_images,
        "scale": task.scale,
        "attacks": [attack.to_dict() for attack in task.attacks],
        "jobs": jobs,
        "votes": [votes.to_dict() for votes in task.votes],
        "tunings": [tuning.to_dict() for tuning in task.tunings],
        "siblings": list(task.siblings),
        "tunes_only": task.tunes_only,
    }
    write_text(folder / ORDERS, json.dumps(plain))


def read_orders(folder: Path) -> Orders:
    """The task in the folder of a run; nothing to do where there is none."""
    if not (folder / ORDERS).is_file():
        return Orders()
    plain = json.loads((folder / ORDERS).read_text(encoding="utf-8"))
    return Orders(
        threats=tuple(threat_from_dict(threat) for threat in plain["threats"]),
        limit=plain["limit"],
        scale=float(plain["scale"]),
        attacks=tuple(AttackPlan.from_dict(attack) for attack in plain["attacks"]),
        jobs=int(plain["jobs"]),
        votes=tuple(VotePlan.from_dict(votes) for votes in plain.get("votes", [])),
        tunings=tuple(TuningPlan.from_dict(tuning) for tuning in plain.get("tunings", [])),
        siblings=tuple(plain.get("siblings", [])),
        tunes_only=bool(plain.get("tunes_only", False)),
    )
