"""The folder of results: of each finished run its specification, circumstances and evidence, no weights."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from patchcert.errors import RunError
from patchcert.papers.chiang2020.ablation_evidence import VotedRows
from patchcert.papers.chiang2020.ablation_plan import VotePlan
from patchcert.papers.chiang2020.attack_plan import AttackPlan, TuningPlan
from patchcert.papers.chiang2020.challenges import PREFIX as CHALLENGE
from patchcert.papers.chiang2020.challenges import Challenge
from patchcert.papers.chiang2020.evidence import AttackedRows, Rows
from patchcert.papers.chiang2020.plan import FIRST_SEED, Task
from patchcert.papers.chiang2020.rows import AnyThreat
from patchcert.papers.chiang2020.summaries import LOSS, SUMMARY
from patchcert.papers.chiang2020.trials import Trials
from patchcert.train.run_folder import SPEC
from patchcert.train.schedules import Schedule
from patchcert.train.spec import RunSettings, Spec, read_spec

TRIMMED = "trimmed"
"""In a run's folder of results: the evidence of its trimmed model, which no table counts."""


@dataclass(frozen=True)
class Result:
    """One run's folder of results. Accuracies are counted in its rows; the summary is for people."""

    path: Path
    spec: Spec

    @classmethod
    def open(cls, path: Path) -> "Result":
        """The result in a folder."""
        return cls(path, read_spec(path / SPEC))

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """What was noted when the result was collected: seconds, training loss, device, versions, scale."""
        return json.loads((self.path / SUMMARY).read_text(encoding="utf-8"))

    @property
    def training_loss(self) -> float | None:
        """The mean training loss in the last epoch; None where it was collected before that was noted."""
        return self.summary.get(LOSS)

    @cached_property
    def rows(self) -> tuple[Rows, ...]:
        """All evidence, checked: gathered with one set of weights, and on the data that named the folder."""
        found = tuple(Rows.read(file) for file in sorted(self.path.glob("certify-*.npz")))
        self._check(found)
        whole = [rows for rows in found if rows.is_of_test_images and rows.limit is None]
        for rows in whole[1:]:
            if not np.array_equal(rows.columns["label"], whole[0].columns["label"]):
                raise RunError(
                    f"{rows.path} is about other images than {whole[0].path.name}",
                    hint="certify the run again",
                )
        return found

    @cached_property
    def attacks(self) -> tuple[AttackedRows, ...]:
        """The evidence of attacks, checked likewise, and held against the certificates."""
        found = tuple(AttackedRows.read(file) for file in sorted(self.path.glob("attack-*.npz")))
        self._check((*self.rows, *found))
        for attacked, proven in itertools.product(found, self.rows):
            attacked.check_against(proven)
        return found

    @cached_property
    def challenges(self) -> tuple[Challenge, ...]:
        """Attacks on certified images alone, checked likewise."""
        return self._challenges(self.path, self.rows)

    @cached_property
    def trimmed_challenges(self) -> tuple[Challenge, ...]:
        """Those of the trimmed model, held against its own certificates."""
        folder = self.path / TRIMMED
        return self._challenges(folder, [Rows.read(file) for file in sorted(folder.glob("certify-*.npz"))])

    def _challenges(self, folder: Path, proven: Sequence[Rows]) -> tuple[Challenge, ...]:
        found = tuple(Challenge.read(file) for file in sorted(folder.glob(f"{CHALLENGE}*.npz")))
        self._check((*proven, *found))
        for challenge in found:
            challenge.check_against(proven)
        return found

    def attack(self, plan: AttackPlan) -> AttackedRows | None:
        """The rows of this very attack, where they are there."""
        return next((rows for rows in self.attacks if rows.plan == plan), None)

    @cached_property
    def trials(self) -> tuple[Trials, ...]:
        """What settings of defenses reached on held-out images, checked likewise."""
        found = tuple(Trials.read(file) for file in sorted(self.path.glob("tune-*.npz")))
        self._check((*self.rows, *self.attacks, *found))
        return found

    def tried(self, plan: TuningPlan) -> Trials | None:
        """The trials that followed this very plan, where they are there."""
        return next((trials for trials in self.trials if trials.plan == plan), None)

    @cached_property
    def votes(self) -> tuple[VotedRows, ...]:
        """The evidence of votes, checked likewise."""
        found = tuple(VotedRows.read(file) for file in sorted(self.path.glob("votes-*.npz")))
        self._check((*self.rows, *found))
        for rows in found:
            if rows.meta["retained"] != getattr(self.spec.strategy, "retained", None):
                raise RunError(f"{rows.path} holds votes on other images than the run was trained on")
        return found

    def voted(self, plan: VotePlan) -> VotedRows | None:
        """The rows of votes that were counted like this, on as many images as there are."""
        same = [rows for rows in self.votes if replace(plan, images=rows.plan.images) == rows.plan]
        return max(same, key=lambda rows: rows.total, default=None)

    def _check(self, found: Sequence[Rows | AttackedRows | VotedRows | Challenge | Trials]) -> None:
        if len({rows.meta["weights_sha256"] for rows in found}) > 1:
            raise RunError(f"{self.path} holds evidence of different weights", hint="collect the run again")
        for rows in found:
            if self.spec.fingerprint(rows.meta["data"]["sha256"]) != self.path.name:
                raise RunError(
                    f"{rows.path} is not evidence of the run that its folder is named after",
                    hint="the specification, the data or the version of training changed; collect or train it again",
                )

    def evidence(self, threat: AnyThreat, limit: int | None) -> Rows | None:
        """The rows for a threat on the first test images, or on all of them, where they are there."""
        for rows in self.rows:
            if rows.is_of_test_images and rows.limit == limit and rows.threat == threat:
                return rows
        return None

    def covers(
        self,
        threats: Sequence[AnyThreat],
        limit: int | None,
        attacks: Sequence[AttackPlan] = (),
        votes: Sequence[VotePlan] = (),
        tunings: Sequence[TuningPlan] = (),
    ) -> bool:
        """Whether there is evidence for all threats, attacks and trials, and votes on at least as many images."""
        proven = all(self.evidence(threat, limit) is not None for threat in threats)
        voted = all(any(plan.is_answered_by(rows.plan) for rows in self.votes) for plan in votes)
        tried = all(self.tried(plan) is not None for plan in tunings)
        return proven and voted and tried and all(self.attack(plan) is not None for plan in attacks)


def experiment_key(spec: Spec) -> str:
    """The same for runs that differ only in seed, schedule, rounding of training steps and housekeeping."""
    optimiser = spec.optimiser.exact()
    return replace(
        spec, seed=FIRST_SEED, schedule=Schedule(), optimiser=optimiser, run=RunSettings()
    ).fingerprint()


class Results:
    """All results in a folder, found by what was trained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._by_key: dict[str, list[Result]] = {}
        for spec_file in sorted(folder.glob(f"*/{SPEC}")):
            result = Result.open(spec_file.parent)
            self._by_key.setdefault(experiment_key(result.spec), []).append(result)

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def all(self) -> tuple[Result, ...]:
        """Every result, by name."""
        return tuple(
            sorted(itertools.chain.from_iterable(self._by_key.values()), key=lambda result: result.path.name)
        )

    def named(self, fingerprint: str) -> Result:
        """The result of the run of that name."""
        return next(result for result in self.all() if result.path.name == fingerprint)

    def of(self, spec: Spec) -> tuple[Result, ...]:
        """The results of this experiment, whatever their seed and schedule."""
        return tuple(self._by_key.get(experiment_key(spec), ()))


def find_result(folder: Path | None, task: Task) -> Result | None:
    """What the folder of results has of this very run."""
    if folder is None or not (folder / task.name / SPEC).is_file():
        return None
    return Result.open(folder / task.name)


def is_complete(folder: Path | None, task: Task) -> bool:
    """Whether the results have evidence for everything the task asks."""
    result = find_result(folder, task)
    return result is not None and result.covers(
        task.threats, task.test_images, task.due_attacks, task.votes, task.tunings
    )
