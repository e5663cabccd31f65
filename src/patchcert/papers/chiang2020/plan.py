"""What is to be trained and certified for some rows: every run once, however many rows share it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from patchcert.data import load_dataset
from patchcert.papers.chiang2020.ablation_plan import VotePlan
from patchcert.papers.chiang2020.attack_plan import AttackPlan, TuningPlan
from patchcert.papers.chiang2020.evidence import evidence_name
from patchcert.papers.chiang2020.rows import AnyThreat, Recipe, recipe
from patchcert.papers.chiang2020.scales import Scale
from patchcert.papers.chiang2020.tables import Entry
from patchcert.train.spec import Spec
from patchcert.train.strategies import RandomPlacements

FIRST_SEED = 2019
PAPER_SCALE = Scale()


@dataclass(frozen=True, slots=True)
class Task:
    """One run, what it is certified against and how it is attacked; spec and data decide its name.

    Behind a defense it is attacked with the setting that the trials of all its `siblings` decide on: the names of
    the runs of a row, its own among them. So these attacks come last; a task that `tunes_only` stops before.
    """

    name: str
    spec: Spec
    threats: tuple[AnyThreat, ...]
    test_images: int | None = None
    scale: float = 1.0
    attacks: tuple[AttackPlan, ...] = ()
    votes: tuple[VotePlan, ...] = ()
    tunings: tuple[TuningPlan, ...] = ()
    siblings: tuple[str, ...] = ()
    tunes_only: bool = False

    @property
    def due_attacks(self) -> tuple[AttackPlan, ...]:
        """The attacks that are to be done; none behind a defense before its setting is chosen."""
        return tuple(plan for plan in self.attacks if not (plan.defense and self.tunes_only))

    @property
    def evidence_names(self) -> tuple[str, ...]:
        """What the run's evidence is called once all is done."""
        certificates = (evidence_name(threat, self.test_images) for threat in self.threats)
        return (*certificates, *(each.name for each in (*self.tunings, *self.due_attacks, *self.votes)))

    @property
    def label(self) -> str:
        """The run in a few words."""
        spec = self.spec
        strategy = spec.strategy.kind
        if isinstance(spec.strategy, RandomPlacements):
            strategy = f"random({spec.strategy.placements})"
        seed = f" seed {spec.seed}" if spec.seed != FIRST_SEED else ""
        return f"{spec.data.name} {spec.model.name} {strategy} {_threat_words(spec.threat)}{seed}"


@dataclass(frozen=True, slots=True)
class Effort:
    """At which scale, with how many seeds, and whether training steps may round: to TF32, or also to bfloat16.

    `voted_images` is on how many random test images votes are counted, where not on those of the recipe.
    """

    scale: Scale = PAPER_SCALE
    seeds: int = 1
    tf32: bool = False
    bfloat16: bool = False
    voted_images: int | None = None

    def recipe(self, entry: Entry) -> Recipe:
        """All runs of a row, every seed of them, its threats and its attack; nothing where none is known."""
        found = recipe(entry)
        if found is None:
            return Recipe((), ())
        scaled = self.scale.apply(found)
        specs = [
            replace(spec, seed=spec.seed + extra) for extra in range(self.seeds) for spec in scaled.specs
        ]
        if self.tf32 or self.bfloat16:
            windows = "bfloat16" if self.bfloat16 else None
            specs = [
                replace(spec, optimiser=replace(spec.optimiser, tf32=True, windows=windows)) for spec in specs
            ]
        votes = scaled.votes
        if votes is not None and self.voted_images is not None:
            votes = replace(votes, images=self.voted_images)
        return replace(scaled, specs=tuple(specs), votes=votes)


def plan(entries: Sequence[Entry], effort: Effort, data_dir: Path | None) -> tuple[Task, ...]:
    """The runs behind the rows in their order; reads the data to know their sums, so that none is missing."""
    checksums: dict[str, Mapping[str, str]] = {}
    tasks: dict[str, Task] = {}
    for entry in entries:
        made = effort.recipe(entry)
        for spec in made.specs:
            if spec.data.name not in checksums:
                checksums[spec.data.name] = load_dataset(spec.data.name, data_dir).checksums
        names = {spec: spec.fingerprint(checksums[spec.data.name]) for spec in made.specs}
        for spec, name in names.items():
            siblings = tuple(names[other] for other in made.specs if other.seed == spec.seed)
            task = tasks.get(name, Task(name, spec, (), effort.scale.test_images, effort.scale.factor))
            tasks[name] = _extended(task, made, siblings)
    return tuple(tasks.values())


def _extended(task: Task, made: Recipe, siblings: tuple[str, ...]) -> Task:
    """The task with what one more row asks of it."""
    attacks = (made.attack,) if made.attack else ()
    defended = tuple(attack for attack in attacks if attack.defense)
    votes = (made.votes,) if made.votes else ()
    return replace(
        task,
        threats=tuple(dict.fromkeys((*task.threats, *made.threats))),
        attacks=tuple(dict.fromkeys((*task.attacks, *attacks))),
        votes=tuple(dict.fromkeys((*task.votes, *votes))),
        tunings=tuple(dict.fromkeys((*task.tunings, *(attack.tuning for attack in defended)))),
        siblings=tuple(dict.fromkeys((*task.siblings, *(siblings if defended else ())))),
    )


def _threat_words(threat: AnyThreat) -> str:
    return str(threat).partition("(")[2].split(",")[0].rstrip(")")
