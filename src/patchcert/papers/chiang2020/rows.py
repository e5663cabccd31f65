"""From a row of a table to the runs whose mean it is, and the threats each of them is certified against."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from patchcert.errors import InvalidInput
from patchcert.papers.chiang2020.ablation_plan import VotePlan
from patchcert.papers.chiang2020.attack_plan import AttackPlan, DefenseName
from patchcert.papers.chiang2020.tables import AVERAGED, Entry
from patchcert.threats import Patch, SparsePixels, shapes
from patchcert.train.spec import Spec, read_spec

AnyThreat = Patch | SparsePixels
_STRATEGY = re.compile(r"(All Patch|Random|Guided|Pool)\s*\(?([\d-]*)\)?")
_CLASSES = 10
HELD_OUT = 5000
VOTED_IMAGES = {"cifar10": 1_000}
LARGEST_DROPS = {"2x2": 0.02, "5x5": 0.16}
TUNED_ON = 2000
ADAPTIVE_VERTICES = 16


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a row's numbers come about: the mean over the specs, each against its worst threat, or attacked.

    Of votes it is asked what they prove against so many changed `pixels`.
    """

    specs: tuple[Spec, ...]
    threats: tuple[AnyThreat, ...]
    attack: AttackPlan | None = None
    votes: VotePlan | None = None
    pixels: int = 0


def recipe(entry: Entry) -> Recipe | None:
    """The runs, threats and attacks behind a row; None for one that comes from elsewhere."""
    if entry.preset:
        spec = read_spec(entry.preset)
        return Recipe((spec,), (spec.threat,))
    if entry.dataset == "imagenet":
        return None
    if entry.strategy == "Random Ablation":
        spec = read_spec(f"paper-{entry.dataset}-ablation")
        plan = VotePlan(images=VOTED_IMAGES.get(entry.dataset))
        return Recipe((spec,), (), votes=plan, pixels=entry.pixels)
    models = AVERAGED if entry.model == "average" else (entry.model,)
    if entry.defense:
        return _attacked(entry, models)
    specs = tuple(_spec(entry, model) for model in models)
    return Recipe(specs, _threats(entry, specs[0]))


def _attacked(entry: Entry, models: Sequence[str]) -> Recipe:
    """Certified models are those of all-patch training; the others have seen no patch, and fewer images."""
    if entry.defense == "IBP":
        specs = tuple(_spec(replace(entry, strategy="All Patch"), model) for model in models)
        return Recipe(specs, (specs[0].threat,), AttackPlan(entry.patch))
    changes = ["strategy.kind=natural", f"data.validation={HELD_OUT}"]
    specs = tuple(read_spec(f"paper-{entry.dataset}", [*changes, f"model.name={model}"]) for model in models)
    if entry.defense == "None":
        plan = AttackPlan(entry.patch)
        return Recipe(specs, (plan.threat,), plan)
    drop = LARGEST_DROPS[entry.patch]
    defense: DefenseName = "lgs" if entry.defense == "LGS" else "dw"
    plan = AttackPlan(
        entry.patch,
        defense,
        adaptive=entry.attack == "adaptive",
        tuned_on=TUNED_ON,
        largest_drop=drop,
        sweep_vertices=ADAPTIVE_VERTICES if entry.attack == "adaptive" else 0,
        both_losses=entry.attack == "adaptive",
    )
    return Recipe(specs, (), plan)


def _spec(entry: Entry, model: str) -> Spec:
    changes = [f"model.name={model}"]
    if entry.hidden:
        changes.append(f"model.hidden={entry.hidden}")
    if entry.pixels:
        return _sparse_spec(entry, model, changes)
    return read_spec(
        f"paper-{entry.dataset}",
        [
            *changes,
            f"threat.stamp='{entry.patch}'",
            *strategy_changes(entry.strategy),
            *_schedule(entry, model),
        ],
    )


def _schedule(entry: Entry, model: str) -> list[str]:
    """Where the paper's schedule fails: decisions 7 and 8."""
    has_few = entry.strategy.startswith(("Random", "Guided"))
    if entry.dataset == "mnist" and model == "cnn4" and has_few:
        return ["schedule.epsilon.ramp_epochs=6", "schedule.learning_rate.decay_from=62"]
    if model == "cnn5w" and not (entry.patch == "2x2" and has_few):
        return ["schedule.epsilon.natural_epochs=1", "schedule.learning_rate.decay_from=131"]
    return []


def _sparse_spec(entry: Entry, model: str, changes: Sequence[str]) -> Spec:
    """On MNIST the authors' code ramps epsilon in 10 epochs, but only for mlp; convolutions keep the paper's 60."""
    ramp = [] if entry.dataset != "mnist" or model == "mlp" else ["schedule.epsilon.ramp_epochs=60"]
    pixels = f"threat.pixels={entry.pixels}"
    return read_spec(f"paper-{entry.dataset}-sparse", [*changes, pixels, *ramp])


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
