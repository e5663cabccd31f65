"""What is to be trained and certified for some rows: every run once, however many rows share it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from patchcert.data import load_dataset
from patchcert.experiments.reproduce.rows import AnyThreat, recipe
from patchcert.experiments.reproduce.scales import Scale
from patchcert.experiments.reproduce.tables import Entry
from patchcert.experiments.spec import RandomTraining, Spec

FIRST_SEED = 2019
PAPER_SCALE = Scale()


@dataclass(frozen=True, slots=True)
class Task:
    """One run and all threats it is certified against; `name` is its folder, decided by spec and data."""

    name: str
    spec: Spec
    threats: tuple[AnyThreat, ...]
    test_images: int | None = None
    scale: float = 1.0

    @property
    def label(self) -> str:
        """The run in a few words."""
        spec = self.spec
        strategy = spec.strategy.kind
        if isinstance(spec.strategy, RandomTraining):
            strategy = f"random({spec.strategy.placements})"
        seed = f" seed {spec.seed}" if spec.seed != FIRST_SEED else ""
        return f"{spec.data.name} {spec.model.name} {strategy} {_threat_words(spec.threat)}{seed}"


@dataclass(frozen=True, slots=True)
class Effort:
    """At which scale, with how many seeds, and whether training steps may round products to TF32."""

    scale: Scale = PAPER_SCALE
    seeds: int = 1
    tf32: bool = False

    def specs(self, entry: Entry) -> tuple[tuple[Spec, ...], tuple[AnyThreat, ...]]:
        """All runs of a row, every seed of them, and its threats; neither where it is not trained here."""
        found = recipe(entry)
        if found is None:
            return (), ()
        scaled = self.scale.apply(found)
        specs = [
            replace(spec, seed=spec.seed + extra) for extra in range(self.seeds) for spec in scaled.specs
        ]
        if self.tf32:
            specs = [replace(spec, optimiser=replace(spec.optimiser, tf32=True)) for spec in specs]
        return tuple(specs), scaled.threats


def plan(entries: Sequence[Entry], effort: Effort, data_dir: Path | None) -> tuple[Task, ...]:
    """The runs behind the rows in their order; reads the data to know their sums, so that none is missing."""
    checksums: dict[str, Mapping[str, str]] = {}
    tasks: dict[str, Task] = {}
    for entry in entries:
        specs, threats = effort.specs(entry)
        for spec in specs:
            if spec.data.name not in checksums:
                checksums[spec.data.name] = load_dataset(spec.data.name, data_dir).checksums
            name = spec.fingerprint(checksums[spec.data.name])
            known = tasks[name].threats if name in tasks else ()
            merged = tuple(dict.fromkeys((*known, *threats)))
            tasks[name] = Task(name, spec, merged, effort.scale.test_images, effort.scale.factor)
    return tuple(tasks.values())


def _threat_words(threat: AnyThreat) -> str:
    return str(threat).partition("(")[2].split(",")[0].rstrip(")")
