"""What is to be trained and measured for some rows: every run once, however many rows share it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from patchcert.data import load_dataset
from patchcert.evidence.record import Question
from patchcert.evidence.results import FIRST_SEED, Circumstances
from patchcert.papers.chiang2020.recipes import PAPER_SCALE, Recipe, Scale, recipe
from patchcert.papers.chiang2020.tables import Entry
from patchcert.train.run_folder import SPEC, Run, write_text
from patchcert.train.spec import Spec
from patchcert.train.strategies import RandomPlacements

QUESTIONS, STOP_FILE = ".questions.json", ".stop"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one process does: train a run, unless a `network` comes trained, and answer questions about it.

    Specification and data decide the name, which its folders have among runs and results.
    """

    name: str
    label: str
    questions: tuple[Question, ...]
    spec: Spec | None = None
    network: str = ""
    scale: float = 1.0

    def write(self, folder: Path, jobs: int) -> None:
        """Leave it in the folder of its run; `jobs` is how many runs share the device."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.spec is not None and not (folder / SPEC).is_file():
            Run.create(folder, self.spec)
        Circumstances(self.scale, jobs).write(folder)
        asked = {"network": self.network, "questions": [question.to_dict() for question in self.questions]}
        write_text(folder / QUESTIONS, json.dumps(asked))


def read_questions(folder: Path) -> tuple[str, tuple[Question, ...]]:
    """The network, where it comes trained, and the questions that were left in the folder of a run."""
    plain = json.loads((folder / QUESTIONS).read_text(encoding="utf-8"))
    return plain["network"], tuple(Question.from_dict(each) for each in plain["questions"])


@dataclass(frozen=True, slots=True)
class Effort:
    """At which scale, with how many seeds, and whether training steps may round: to TF32, or also to bfloat16."""

    scale: Scale = PAPER_SCALE
    seeds: int = 1
    tf32: bool = False
    bfloat16: bool = False

    def specs(self, made: Recipe) -> tuple[Spec, ...]:
        """All runs of a recipe, every seed of them."""
        seeded = [replace(spec, seed=spec.seed + extra) for extra in range(self.seeds) for spec in made.specs]
        if self.tf32 or self.bfloat16:
            windows = "bfloat16" if self.bfloat16 else None
            seeded = [
                replace(spec, optimiser=replace(spec.optimiser, tf32=True, windows=windows))
                for spec in seeded
            ]
        return tuple(seeded)


def plan(entries: Sequence[Entry], effort: Effort, data_dir: Path | None) -> tuple[Assignment, ...]:
    """The runs behind the rows in their order; reads the data to know their sums, so that none is missing."""
    checksums: dict[str, Mapping[str, str]] = {}
    planned: dict[str, Assignment] = {}
    for entry in entries:
        made = recipe(entry, effort.scale)
        for spec in effort.specs(made):
            data = spec.data.name
            if data not in checksums:
                checksums[data] = load_dataset(data, data_dir).checksums
            name = spec.fingerprint(checksums[data])
            found = planned.get(name, Assignment(name, _label(spec), (), spec, scale=effort.scale.factor))
            asked = tuple(dict.fromkeys((*found.questions, *made.questions)))
            planned[name] = replace(found, questions=asked)
    return tuple(planned.values())


def _label(spec: Spec) -> str:
    """The run in a few words."""
    strategy = spec.strategy.kind
    if isinstance(spec.strategy, RandomPlacements):
        strategy = f"random({spec.strategy.placements})"
    seed = f" seed {spec.seed}" if spec.seed != FIRST_SEED else ""
    threat = str(spec.threat).partition("(")[2].split(",")[0].rstrip(")")
    return f"{spec.data.name} {spec.model.name} {strategy} {threat}{seed}"
