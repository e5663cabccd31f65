"""The setting of a defense for all models of a row: found by the trials of every run, wherever they are kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patchcert.errors import RunError
from patchcert.files import sha256
from patchcert.papers.chiang2020.attack_plan import AttackPlan, TuningPlan
from patchcert.papers.chiang2020.evidence import AttackedRows
from patchcert.papers.chiang2020.plan import Task
from patchcert.papers.chiang2020.results import Result
from patchcert.papers.chiang2020.trials import Choice, Trials, choose
from patchcert.train.run_folder import EVIDENCE, SPEC, WEIGHTS


@dataclass(frozen=True, slots=True)
class Archive:
    """Where trials are looked for: in the folders of runs, and in that of results, which outlasts them."""

    runs: Path
    results: Path | None = None

    def trials(self, name: str, plan: TuningPlan) -> Trials | None:
        """The trials of a run; where it has weights at hand, only those that were made with them."""
        weights = self.runs / name / WEIGHTS
        is_known = weights.is_file()
        own = self.runs / name / EVIDENCE / f"{plan.name}.npz"
        found = [Trials.read(own)] if is_known and own.is_file() else []
        if self.results is not None and (self.results / name / SPEC).is_file():
            collected = Result.open(self.results / name).tried(plan)
            found += [] if collected is None else [collected]
        expected = sha256(weights) if is_known else ""
        fitting = (each for each in found if not is_known or each.meta["weights_sha256"] == expected)
        return next(fitting, None)

    def choice(self, siblings: Sequence[str], plan: AttackPlan) -> Choice:
        """The one setting for all runs of a row; refused while one of them has not been tried."""
        found = {name: self.trials(name, plan.tuning) for name in siblings}
        missing = [name for name, trials in found.items() if trials is None]
        if missing or not found:
            raise RunError(
                f"{plan.name} needs the trials {plan.tuning.name} of every run of its row, but "
                f"{', '.join(missing) or 'no run'} has none in {self.runs}, nor among the results",
                hint="see why that run did not finish, and give the command again",
            )
        return choose([trials for trials in found.values() if trials is not None], plan.largest_drop)

    def has_chosen_settings(self, task: Task, result: Path) -> bool:
        """Whether the attacks on defenses in a folder of evidence had the setting that the trials give now."""
        defended = [plan for plan in task.due_attacks if plan.defense]
        if any(self.trials(name, plan.tuning) is None for plan in defended for name in task.siblings):
            return False
        return all(
            AttackedRows.read(result / f"{plan.name}.npz").meta["defense"]
            == self.choice(task.siblings, plan).setting
            for plan in defended
        )


def check_setting(results: Sequence[Result], plan: AttackPlan) -> None:
    """The runs of a row were attacked behind the setting that their own trials give.

    Evidence from before there were trials names no weights that its setting was chosen for; it is let pass.
    """
    attacked = [rows for result in results if (rows := result.attack(plan)) is not None]
    if not any("weights" in rows.meta.get("tuning", {}) for rows in attacked):
        return
    trials = [(result, result.tried(plan.tuning)) for result in results]
    missing = [str(result.path) for result, tried in trials if tried is None]
    if missing:
        raise RunError(
            f"{missing[0]} lacks the trials {plan.tuning.name} that the setting of {plan.name} was chosen by",
            hint="collect the run again",
        )
    chosen = choose([tried for _, tried in trials if tried is not None], plan.largest_drop).setting
    for rows in attacked:
        if rows.meta["defense"] != chosen:
            raise RunError(
                f"{rows.path} attacks {rows.meta['defense']}, but the trials of all models of the row give "
                f"{chosen}",
                hint="give the command that made it again, so that the chosen setting is attacked",
            )
