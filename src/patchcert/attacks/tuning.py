"""The settings of a defense, chosen on held-out images by how it withstands an attack that does not know it."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from torch import nn

from patchcert.attacks.base import Attack, AttackedModel, AttackJob, require_contained, seeded
from patchcert.bounds import precise_arithmetic
from patchcert.defenses import Defended, Defense, DigitalWatermarking, LocalGradientSmoothing
from patchcert.defenses.watermarking import Fill, SaliencyKind
from patchcert.errors import InvalidInput
from patchcert.progress import Progress
from patchcert.tensors import Images, Labels
from patchcert.threats import Threat


@final
@dataclass(frozen=True)
class TuningTrial:
    """One setting of a defense and what it reached on the held-out images."""

    defense: Defense
    clean_accuracy: float
    weak_accuracy: float
    """Under the attack that does not know the defense."""


@final
@dataclass(frozen=True)
class TuningResult:
    """All trials in the order tried, and the accuracy of the model without a defense."""

    undefended_accuracy: float
    largest_drop: float
    trials: tuple[TuningTrial, ...]

    @property
    def allowed(self) -> tuple[TuningTrial, ...]:
        """The trials that cost no more clean accuracy than allowed."""
        # Accuracies are quotients of counts: two that differ at all differ by far more than 1e-9.
        floor = self.undefended_accuracy - self.largest_drop - 1e-9
        return tuple(trial for trial in self.trials if trial.clean_accuracy >= floor)

    @property
    def best(self) -> TuningTrial | None:
        """The allowed trial of largest weak accuracy, then clean accuracy; None where none is allowed."""
        return max(self.allowed, key=lambda trial: (trial.weak_accuracy, trial.clean_accuracy), default=None)


@precise_arithmetic()
def tune_defense(
    attack: Attack,
    model: nn.Module,
    images: Images,
    labels: Labels,
    threat: Threat,
    defenses: Iterable[Defense],
    *,
    largest_drop: float = 0.02,
    progress: Progress | None = None,
) -> TuningResult:
    """Every defense tried on held-out images, and on the same images as attacked on the undefended model.

    The attack does not know the defense, so it runs once, and each trial costs two forward passes. Best is what
    withstands it and costs at most `largest_drop` of clean accuracy (0.02 for 2 points). The images must not be
    those that the defense is later judged on.
    """
    target = AttackedModel.of(model)
    target.check(images, labels)
    if not len(images):
        raise InvalidInput("a defense is tuned on at least one image, got none", hint="hold out some images")
    job = AttackJob(images, labels, threat, seeded())
    attacked = attack.exhaustive().propose(target, job).images
    require_contained(threat, images, attacked)
    candidates, trials = tuple(defenses), []
    for number, defense in enumerate(candidates, 1):
        defended = AttackedModel.of(Defended(defense, model))
        reached = (accuracy(defended, each, labels, attack.batch_size) for each in (images, attacked))
        trials.append(TuningTrial(defense, *reached))
        if progress is not None:
            progress(number, len(candidates))
    undefended = accuracy(target, images, labels, attack.batch_size)
    return TuningResult(undefended, largest_drop, tuple(trials))


def accuracy(target: AttackedModel, images: Images, labels: Labels, batch_size: int) -> float:
    """The share of images that the model gets right."""
    predictions = target.evaluate(images, labels, batch_size).predictions
    return float((predictions == labels).sum()) / len(images)


def smoothing_grid() -> Iterator[LocalGradientSmoothing]:
    """Every combination in which the overlap is smaller than the window.

    Windows begin at two pixels. A window of one pixel has no neighbourhood whose mean gradient could be asked
    for: it thresholds pixels one by one, which is not the defense that was published. In thresholds and factors
    the grid is wide enough that the best lies inside; small patches are found best by small windows with a
    threshold that only a very abrupt change exceeds.
    """
    windows, overlaps = (2, 3, 4, 5, 7, 8), (0, 1, 2, 3)
    thresholds = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    factors = (0.5, 0.75, 1.0, 1.5, 2.3, 3.0, 5.0)
    for window, overlap, threshold, factor in itertools.product(windows, overlaps, thresholds, factors):
        if overlap < window:
            yield LocalGradientSmoothing(window, overlap, threshold, factor)


def watermarking_grid(
    model: nn.Module, patch: int, fills: Sequence[Fill] = ((0.0,), "ring")
) -> Iterator[DigitalWatermarking]:
    """Every combination, with windows from the patch's side to two pixels more."""
    windows, quantiles, openings = range(patch, patch + 3), (0.8, 0.9, 0.95, 0.98), (1, 2)
    kinds: tuple[SaliencyKind, ...] = ("guided", "gradient", "loss-gradient")
    for settings in itertools.product(windows, quantiles, openings, kinds, fills):
        yield DigitalWatermarking(model, *settings)
