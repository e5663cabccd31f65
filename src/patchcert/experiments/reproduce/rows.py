"""From a row of a table to the runs whose mean it is, and the threats each of them is certified against."""

import re
from dataclasses import dataclass

from patchcert.errors import InvalidInput
from patchcert.experiments.read import read_spec
from patchcert.experiments.reproduce.tables import AVERAGED, Entry
from patchcert.experiments.spec import Spec
from patchcert.threats import Patch, SparsePixels, shapes

AnyThreat = Patch | SparsePixels
_STRATEGY = re.compile(r"(All Patch|Random|Guided|Pool)\s*\(?([\d-]*)\)?")
_CLASSES = 10


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a row's numbers come about: the mean over the specs, each against its worst threat."""

    specs: tuple[Spec, ...]
    threats: tuple[AnyThreat, ...]


def recipe(entry: Entry) -> Recipe | None:
    """The runs and threats behind a row; None for one that does not come from certified training."""
    if entry.preset:
        spec = read_spec(entry.preset)
        return Recipe((spec,), (spec.threat,))
    if entry.defense or entry.strategy == "Random Ablation":
        return None
    models = AVERAGED if entry.model == "average" else (entry.model,)
    specs = tuple(_spec(entry, model) for model in models)
    return Recipe(specs, _threats(entry, specs[0]))


def _spec(entry: Entry, model: str) -> Spec:
    changes = [f"model.name={model}"]
    if entry.hidden:
        changes.append(f"model.hidden={entry.hidden}")
    if entry.pixels:
        return read_spec(f"paper-{entry.dataset}-sparse", [*changes, f"threat.pixels={entry.pixels}"])
    return read_spec(
        f"paper-{entry.dataset}",
        [*changes, f"threat.stamp='{entry.patch}'", *strategy_changes(entry.strategy)],
    )


def strategy_changes(words: str) -> list[str]:
    """The changes to a preset that a strategy's name stands for: 'Guided(20)', 'Pool 2-2'."""
    match = _STRATEGY.fullmatch(words)
    if match is None:
        raise InvalidInput(
            f"unknown strategy {words!r}", hint="known: All Patch, Random(n), Guided(n), Pool n"
        )
    name, numbers = match.groups()
    if name == "All Patch":
        return ["strategy.kind=all"]
    if name == "Random":
        return ["strategy.kind=random", f"strategy.placements={numbers}"]
    if name == "Guided":
        return ["strategy.kind=guided", f"strategy.per_class={int(numbers) // _CLASSES}"]
    return ["strategy.kind=pooled", f"strategy.blocks=[{', '.join(numbers.split('-'))}]"]


def _threats(entry: Entry, spec: Spec) -> tuple[AnyThreat, ...]:
    if not entry.shape:
        return (spec.threat,)
    assert isinstance(spec.threat, Patch)
    return tuple(Patch(stamp) for stamp in shapes.transfer_shapes(spec.threat.pixels)[entry.shape])
