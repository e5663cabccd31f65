"""From a row of a table to the runs whose mean it is, and the questions that are asked of each of them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from torch import nn

from patchcert.certificates import AnyThreat, IntervalBounds
from patchcert.certificates.ablation import RandomAblation
from patchcert.errors import InvalidInput
from patchcert.evidence.record import Question, Selection
from patchcert.papers.chiang2020.tables import AVERAGED, Entry
from patchcert.threats import Patch, SparsePixels, shapes
from patchcert.train.schedules import EpsilonSchedule, LearningRateSchedule, Schedule
from patchcert.train.spec import DataSettings, ModelSettings, RunSettings, Spec, read_spec
from patchcert.train.strategies import Ablated, GuidedPlacements, PooledPlacements

if TYPE_CHECKING:
    from patchcert.attacks import PatchAttack

_GUIDED = "saliency_kind='guided', fill='ring'"
TUNED = {
    ("mnist", "2x2", "LGS"): "LocalGradientSmoothing(window=2, overlap=1, threshold=0.6, smoothing=1.5)",
    ("cifar10", "2x2", "LGS"): "LocalGradientSmoothing(window=2, overlap=1, threshold=0.6, smoothing=1.0)",
    ("cifar10", "5x5", "LGS"): "LocalGradientSmoothing(window=4, overlap=3, threshold=0.4, smoothing=5.0)",
    ("cifar10", "2x2", "DW"): f"DigitalWatermarking(window=4, quantile=0.98, opening=2, {_GUIDED})",
    ("cifar10", "5x5", "DW"): f"DigitalWatermarking(window=7, quantile=0.95, opening=1, {_GUIDED})",
}
"""The settings of defenses by data set and patch, one for all models of a row: the best of those in the files
`tuning-*.json` among the results. All of them are tried on one model by `patchcert attack RUN --shape 2x2 --defense lgs
--tune 2000 --search sweep`, with `--largest-drop 0.02` (2x2) or `0.16` (5x5). Decision 5 says how one is chosen for all
models, and a test repeats the choice."""

HELD_OUT = 5000
ATTACKED, RESTARTS, STEPS, VERTICES = 400, 80, 150, 16
CORNER_IMAGES, CORNER_STEPS, CORNERS = 400, 150, 4
VOTED_IMAGES = {"cifar10": 1_000}
OUR_NETWORKS = {"inception_v3": "resnet50", "vgg19": "resnet50"}
"""What is attacked here in place of the paper's networks."""
IMAGENET = "imagenet"

QUICK_DATA = "mnist-mini"
QUICK_SCHEDULE = Schedule(8, EpsilonSchedule(1, 4), LearningRateSchedule(initial=4e-3))
QUICK_VOTING = Schedule(20, EpsilonSchedule(0, 0), LearningRateSchedule(0.1, 0.1, 15, decay_from=0))
QUICK_RETAINED, QUICK_POOLED, QUICK_HELD_OUT = 150, 80, 50
QUICK_MODELS = {
    **dict.fromkeys(("cnn4", "cnn5w", "cnn4_c11", "cnn4_c13"), "cnn2"),
    "resnet18_ablation": "cnn2_ablation",
}

_STRATEGY = re.compile(r"(All Patch|Random|Guided|Pool)\s*\(?([\d-]*)\)?")
_CLASSES = 10
_ANY = nn.Identity()
"""Stands for the model in what a classifier says of its own settings."""


@final
@dataclass(frozen=True)
class CornerAttack:
    """The attack on ImageNet, with a patch in each corner; `CornerExperiment` carries it out for both defenses."""

    attack: "PatchAttack"
    adaptive: bool

    def describe(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "adaptive": self.adaptive, "attack": self.attack.describe()}


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of the paper's effort is spent: `factor` scales the schedule, `quick` is a look with small stand-ins.

    A quick look shows that everything works and what a table looks like. Its numbers are about other images
    and networks than the paper's, so that they are no results, and are never counted as such.
    """

    factor: float = 1.0
    quick: bool = False
    quick_train: int = 500
    quick_test: int = 100

    @property
    def words(self) -> str:
        if self.quick:
            return "quick"
        return "full schedule" if self.factor == 1.0 else f"schedule scaled by {self.factor:g}"

    def spec(self, spec: Spec) -> Spec:
        if self.quick:
            return self._quick(spec)
        return spec if self.factor == 1.0 else spec.scaled(self.factor)

    def test_images(self, spec: Spec) -> Selection:
        return Selection(spec.data.name, limit=self.quick_test if self.quick else None)

    def drawn(self, spec: Spec, images: int | None) -> Selection:
        """Random test images, all of them where no number is given."""
        fewest = min(self.quick_test, QUICK_HELD_OUT)
        return Selection(spec.data.name, drawn=fewest if self.quick else images)

    def attack(self) -> "PatchAttack":
        """The paper's attack, made stronger in where restarts go: a few steps at every placement come first."""
        from patchcert.attacks import PatchAttack

        restarts, steps = (4, 10) if self.quick else (RESTARTS, STEPS)
        return PatchAttack(steps, restarts=restarts, search="sweep", sweep_steps=steps // 30)

    def votes(self, retained: int) -> RandomAblation:
        """The counts of the original: a class by 1,000 votes, its probability by 10,000 fresh ones."""
        if self.quick:
            return RandomAblation(_ANY, retained, 20, 100)
        return RandomAblation(_ANY, retained, precision="bfloat16")

    def _quick(self, spec: Spec) -> Spec:
        strategy, images = spec.strategy, self.quick_train
        if isinstance(strategy, GuidedPlacements):
            strategy = replace(strategy, width=2)
        if isinstance(strategy, Ablated):
            strategy = replace(strategy, retained=QUICK_RETAINED)
        if isinstance(strategy, PooledPlacements):
            images = min(images, QUICK_POOLED)
        return replace(
            spec,
            data=DataSettings(
                QUICK_DATA, limit=images, validation=QUICK_HELD_OUT if spec.data.validation else 0
            ),
            model=ModelSettings(QUICK_MODELS.get(spec.model.name, spec.model.name), hidden=64),
            strategy=strategy,
            schedule=QUICK_VOTING if isinstance(strategy, Ablated) else QUICK_SCHEDULE,
            optimiser=replace(spec.optimiser, batch_size=25),
            run=RunSettings(check_every=0),
        )


PAPER_SCALE = Scale()


def parse_scale(text: str) -> Scale:
    """`paper`, `quick`, or a factor such as 0.1 for every part of the schedule."""
    if text == "paper":
        return Scale()
    if text == "quick":
        return Scale(quick=True)
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        hint = "0.1 runs a tenth of the epochs"
        raise InvalidInput(f"--scale {text} is neither paper, quick nor a number above 0", hint=hint)
    return Scale(factor)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a row's numbers come about: the mean over the runs of the specs, each of which answers every question.

    Of several proofs the one with the fewest certified images counts. Votes prove something for any number of
    changed pixels: where `against` is given, the row is about that threat. A `network` was not trained here.
    """

    specs: tuple[Spec, ...]
    proofs: tuple[Question, ...] = ()
    attack: Question | None = None
    against: AnyThreat | None = None
    network: str = ""

    @property
    def questions(self) -> tuple[Question, ...]:
        return (*self.proofs, *((self.attack,) if self.attack else ()))


def recipe(entry: Entry, scale: Scale = PAPER_SCALE) -> Recipe:
    """The runs and questions behind a row."""
    if entry.preset:
        return _proven([read_spec(entry.preset)], scale)
    if entry.dataset == IMAGENET:
        return _corners(entry)
    if entry.strategy == "Random Ablation":
        return _voted(entry, scale)
    models = AVERAGED if entry.model == "average" else (entry.model,)
    if entry.defense:
        return _attacked(entry, models, scale)
    specs = [_spec(entry, model) for model in models]
    return _proven(specs, scale, _shapes(entry, specs[0]) if entry.shape else ())


def _proven(specs: Sequence[Spec], scale: Scale, threats: Iterable[AnyThreat] = ()) -> Recipe:
    """Against other threats than that of training images get verdicts without margins, which is faster."""
    scaled = tuple(dict.fromkeys(map(scale.spec, specs)))
    images, own = scale.test_images(scaled[0]), scaled[0].threat
    bounds = {is_own: IntervalBounds(_ANY, verdicts_only=not is_own).describe() for is_own in (True, False)}
    asked = dict.fromkeys(tuple(threats) or (own,))
    return Recipe(scaled, tuple(Question("certify", each, images, bounds[each == own]) for each in asked))


def _voted(entry: Entry, scale: Scale) -> Recipe:
    spec = scale.spec(read_spec(f"paper-{entry.dataset}-ablation"))
    assert isinstance(spec.strategy, Ablated)
    images = scale.drawn(spec, VOTED_IMAGES.get(entry.dataset))
    votes = Question("certify", spec.threat, images, scale.votes(spec.strategy.retained).describe())
    return Recipe((spec,), (votes,), against=SparsePixels(entry.pixels))


def _attacked(entry: Entry, models: Sequence[str], scale: Scale) -> Recipe:
    """Certified models are those of all-patch training; the others have seen no patch, and fewer images."""
    from patchcert.attacks import AdaptiveAfterTransfer, AttackSeries, TransferAttack

    changes = ["strategy.kind=natural", f"data.validation={HELD_OUT}"]
    if entry.defense == "IBP":
        specs = [_spec(replace(entry, strategy="All Patch"), model) for model in models]
    else:
        specs = [read_spec(f"paper-{entry.dataset}", [*changes, f"model.name={model}"]) for model in models]
    made, attack = _proven(specs, scale, [_patch(entry)]), scale.attack()
    images = scale.drawn(made.specs[0], ATTACKED)
    if entry.defense in ("IBP", "None"):
        return replace(made, attack=_attack(entry, images, {"name": "Model"}, attack.describe()))
    defended = _defended(TUNED[entry.dataset, entry.patch, entry.defense])
    if entry.attack == "plain":
        return Recipe(made.specs, attack=_attack(entry, images, defended, TransferAttack(attack).describe()))
    # The gradient is blind to the steps of a threshold: patches of zeros and ones come first, then both losses.
    vertices = replace(attack, sweep_vertices=1 if scale.quick else VERTICES)
    aware = AdaptiveAfterTransfer(attack, AttackSeries((vertices, replace(attack, loss="margin"))))
    return Recipe(made.specs, attack=_attack(entry, images, defended, aware.describe()))


def _corners(entry: Entry) -> Recipe:
    """A network that was not trained here, attacked with a patch in one of the corners."""
    from patchcert.attacks import PatchAttack
    from patchcert.defenses import DigitalWatermarking, LocalGradientSmoothing

    side, is_adaptive = _patch(entry).height, entry.attack == "adaptive"
    watermarking = DigitalWatermarking.imagenet(_ANY, side)
    defense = LocalGradientSmoothing.imagenet() if entry.defense == "LGS" else watermarking
    defended = _defended(f"{type(defense).__name__}({defense.extra_repr()})")
    attack = CornerAttack(PatchAttack(CORNER_STEPS, restarts=CORNERS, check_every=10), is_adaptive)
    asked = _attack(entry, Selection(IMAGENET, drawn=CORNER_IMAGES), defended, attack.describe())
    corners = replace(asked, threat=Patch(side, placements="corners"))
    return Recipe((), attack=corners, network=OUR_NETWORKS[entry.model])


def _attack(
    entry: Entry, images: Selection, classifier: Mapping[str, Any], attack: Mapping[str, Any]
) -> Question:
    return Question("attack", _patch(entry), images, classifier, {**attack, "seed": images.seed})


def _defended(defense: str) -> dict[str, str]:
    return {"name": "Defended", "defense": defense}


def _patch(entry: Entry) -> Patch:
    height, width = (int(side) for side in entry.patch.split("x"))
    return Patch((height, width))


def _shapes(entry: Entry, spec: Spec) -> tuple[Patch, ...]:
    assert isinstance(spec.threat, Patch)
    return tuple(Patch(stamp) for stamp in shapes.transfer_shapes(spec.threat.pixels)[entry.shape])


def _spec(entry: Entry, model: str) -> Spec:
    changes = [f"model.name={model}"]
    if entry.hidden:
        changes.append(f"model.hidden={entry.hidden}")
    if entry.pixels:
        return _sparse_spec(entry, model, changes)
    changes += [f"threat.stamp='{entry.patch}'", *strategy_changes(entry.strategy)]
    schedule = CHANGED_SCHEDULES.get(changed_schedule(entry, model), ())
    return read_spec(f"paper-{entry.dataset}", [*changes, *schedule])


CHANGED_SCHEDULES: Mapping[int | None, tuple[str, ...]] = {
    7: ("schedule.epsilon.ramp_epochs=6", "schedule.learning_rate.decay_from=62"),
    8: ("schedule.epsilon.natural_epochs=1", "schedule.learning_rate.decay_from=131"),
}
"""By the number of the decision that says why."""


def changed_schedule(entry: Entry, model: str) -> int | None:
    """The decision by which a model of a row is trained with another schedule than the paper's and its code's."""
    has_few = entry.strategy.startswith(("Random(", "Guided("))
    if entry.dataset == "mnist" and model == "cnn4" and has_few:
        return 7
    if model == "cnn5w" and not (entry.patch == "2x2" and has_few):
        return 8
    return None


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
