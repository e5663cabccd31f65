"""How much of the paper's effort is spent on a table: all of it, a share of the epochs, or a quick look."""

from dataclasses import dataclass, replace

from patchcert.errors import InvalidInput
from patchcert.papers.chiang2020.ablation_plan import VotePlan
from patchcert.papers.chiang2020.attack_plan import AttackPlan
from patchcert.papers.chiang2020.rows import Recipe
from patchcert.train.schedules import EpsilonSchedule, LearningRateSchedule, Schedule
from patchcert.train.spec import DataSettings, ModelSettings, RunSettings, Spec
from patchcert.train.strategies import Ablated, GuidedPlacements, PooledPlacements

QUICK_DATA = "mnist-mini"
QUICK_SCHEDULE = Schedule(8, EpsilonSchedule(1, 4), LearningRateSchedule(initial=4e-3))
QUICK_VOTING = Schedule(20, EpsilonSchedule(0, 0), LearningRateSchedule(0.1, 0.1, 15, decay_from=0))
QUICK_RETAINED = 150
QUICK_POOLED = 80
QUICK_HELD_OUT = 50
QUICK_MODELS = {
    "cnn4": "cnn2",
    "cnn5w": "cnn2",
    "cnn4_c11": "cnn2",
    "cnn4_c13": "cnn2",
    "resnet18_ablation": "cnn2_ablation",
}


@dataclass(frozen=True, slots=True)
class Scale:
    """`factor` shrinks every part of the schedule; `quick` replaces data, models and schedule by small ones.

    A quick look shows that everything works and what a table looks like. Its numbers are about other images
    and networks than the paper's, so that they are no results, and are never counted as such.
    """

    factor: float = 1.0
    quick: bool = False
    quick_train: int = 500
    quick_test: int = 100

    @property
    def words(self) -> str:
        """How tables are labelled."""
        if self.quick:
            return "quick"
        return "full schedule" if self.factor == 1.0 else f"schedule scaled by {self.factor:g}"

    @property
    def test_images(self) -> int | None:
        """How many test images are certified; None for all."""
        return self.quick_test if self.quick else None

    def apply(self, recipe: Recipe) -> Recipe:
        """The runs at this scale, against the same threats."""
        if self.quick:
            specs = tuple(dict.fromkeys(map(self._quick, recipe.specs)))
            attack = recipe.attack and self._quick_attack(recipe.attack)
            return replace(recipe, specs=specs, attack=attack, votes=recipe.votes and self._quick_votes())
        if self.factor == 1.0:
            return recipe
        return replace(recipe, specs=tuple(spec.scaled(self.factor) for spec in recipe.specs))

    def _quick_attack(self, attack: AttackPlan) -> AttackPlan:
        """Anything goes for a defense here: with so few images most settings cost much."""
        images = min(self.quick_test, QUICK_HELD_OUT)
        return replace(
            attack,
            images=images,
            restarts=4,
            steps=10,
            tuned_on=images,
            largest_drop=1.0,
            settings=4,
            sweep_vertices=min(attack.sweep_vertices, 1),
        )

    def _quick_votes(self) -> VotePlan:
        images = min(self.quick_test, QUICK_HELD_OUT)
        return VotePlan(selection=20, estimation=100, images=images, precision="float32")

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
