"""The settings of a defense, chosen on validation images by what it makes of a weak attack."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from patchcert.defenses.base import Defended, Defense
from patchcert.defenses.saliency import SaliencyKind
from patchcert.defenses.smoothing import LocalGradientSmoothing
from patchcert.defenses.watermarking import DigitalWatermarking, Fill
from patchcert.errors import InvalidInput
from patchcert.progress import Progress


@dataclass(frozen=True)
class Trial:
    """One setting and what it reached on the validation images."""

    defense: Defense
    clean_accuracy: float
    weak_accuracy: float


@dataclass(frozen=True)
class SearchResult:
    """All trials in the order tried, and what the model does without a defense."""

    undefended_accuracy: float
    largest_drop: float
    trials: tuple[Trial, ...]

    @property
    def allowed(self) -> tuple[Trial, ...]:
        """The trials that cost no more clean accuracy than allowed."""
        floor = self.undefended_accuracy - self.largest_drop - 1e-9
        return tuple(trial for trial in self.trials if trial.clean_accuracy >= floor)

    @property
    def best(self) -> Trial | None:
        """The allowed trial of largest weak accuracy, then clean accuracy; None where none is allowed."""
        return max(self.allowed, key=lambda trial: (trial.weak_accuracy, trial.clean_accuracy), default=None)


def search_defense(
    model: nn.Module,
    defenses: Iterable[Defense],
    clean: Tensor,
    attacked: Tensor,
    labels: Tensor,
    *,
    largest_drop: float = 0.02,
    batch_size: int = 1024,
    progress: Progress | None = None,
) -> SearchResult:
    """Tries every defense on validation images and on the same images under a weak attack.

    A weak attack does not know the defense, so `attacked` is made once on the undefended model and each
    trial costs two forward passes. `largest_drop` is the clean accuracy that a defense may cost (0.02 for 2
    points).
    """
    if clean.shape != attacked.shape or len(clean) != len(labels) or len(clean) == 0:
        raise InvalidInput(
            f"the search needs as many attacked images and labels as clean images, got {tuple(clean.shape)}, "
            f"{tuple(attacked.shape)} and {len(labels)} labels",
            hint="attack the validation images on the undefended model first",
        )
    candidates = tuple(defenses)
    trials: list[Trial] = []
    for index, defense in enumerate(candidates):
        defended = Defended(defense, model)
        clean_accuracy = accuracy(defended, clean, labels, batch_size)
        trials.append(Trial(defense, clean_accuracy, accuracy(defended, attacked, labels, batch_size)))
        if progress is not None:
            progress(index + 1, len(candidates))
    return SearchResult(accuracy(model, clean, labels, batch_size), largest_drop, tuple(trials))


def accuracy(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int = 1024) -> float:
    """The share of images that the model gets right."""
    with torch.no_grad():
        right = [
            (model(batch).argmax(dim=1) == truth).sum()
            for batch, truth in zip(images.split(batch_size), labels.split(batch_size), strict=True)
        ]
    return float(torch.stack(right).sum()) / len(images)


def smoothing_grid(
    windows: Sequence[int] = (2, 3, 4, 5, 7, 8),
    overlaps: Sequence[int] = (0, 1, 2, 3),
    thresholds: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
    factors: Sequence[float] = (0.5, 0.75, 1.0, 1.5, 2.3, 3.0, 5.0),
) -> Iterator[LocalGradientSmoothing]:
    """Every combination in which the overlap is smaller than the window.

    Windows begin at two pixels. A window of one pixel has no neighbourhood whose mean gradient could be asked
    for: it thresholds pixels one by one, which is not the defense that was published. In thresholds and factors
    the grid is wide enough that the best lies inside; small patches are found best by small windows with a
    threshold that only a very abrupt change exceeds.
    """
    for window, overlap, threshold, factor in itertools.product(windows, overlaps, thresholds, factors):
        if overlap < window:
            yield LocalGradientSmoothing(window, overlap, threshold, factor)


def watermarking_grid(
    model: nn.Module,
    patch: int,
    *,
    quantiles: Sequence[float] = (0.8, 0.9, 0.95, 0.98),
    openings: Sequence[int] = (1, 2),
    kinds: Sequence[SaliencyKind] = ("guided", "gradient", "loss-gradient"),
    fills: Sequence[Fill] = ((0.0,), "ring"),
) -> Iterator[DigitalWatermarking]:
    """Every combination, with windows from the patch's side to two pixels more.

    Leave "guided" out of the kinds for a model without ReLU modules.
    """
    windows = range(patch, patch + 3)
    for settings in itertools.product(windows, quantiles, openings, kinds, fills):
        yield DigitalWatermarking(model, *settings)
