from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from attacked_models import Bright, one_pixel
from patchcert.attacks import Attack, Findings, PatchAttack, smoothing_grid, tune_defense, watermarking_grid
from patchcert.defenses import Defense, LocalGradientSmoothing
from patchcert.errors import InvalidInput
from patchcert.threats import Patch


class Dim(Defense):
    """Scales images; strong dimming undoes the attack below and costs clean accuracy."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, images):
        return images * self.factor

    def surrogates(self):
        return (self.forward,)


@dataclass(frozen=True)
class Finds(Attack):
    """Finds the given images."""

    images: torch.Tensor
    batch_size: int = 3

    def propose(self, target, job):
        return replace(Findings.unchanged(job.images), images=self.images)

    def exhaustive(self):
        return self


def tuned(factors, largest_drop, progress=None):
    attack = Finds(one_pixel(0.7, 0.9, 0.9, 0.9))
    images, labels = one_pixel(0.1, 0.2, 0.9, 0.6), torch.tensor([0, 0, 1, 1])
    defenses = [Dim(factor) for factor in factors]
    return tune_defense(
        attack, Bright(), images, labels, Patch(1), defenses, largest_drop=largest_drop, progress=progress
    )


def test_best_has_the_largest_weak_accuracy_within_the_allowed_drop():
    reached: list[tuple[int, int]] = []
    result = tuned((1.0, 0.7, 0.4), 0.25, lambda done, total: reached.append((done, total)))
    assert result.undefended_accuracy == 1.0
    assert [(trial.clean_accuracy, trial.weak_accuracy) for trial in result.trials] == [
        (1.0, 0.5),
        (0.75, 0.75),
        (0.5, 0.5),
    ]
    assert result.best is result.trials[1]
    assert reached == [(1, 3), (2, 3), (3, 3)]


def test_a_smaller_allowed_drop_excludes_the_stronger_defense():
    result = tuned((1.0, 0.7), 0.1)
    assert result.best is result.trials[0]


def test_no_setting_may_be_allowed():
    assert tuned((0.4,), 0.1).best is None


def test_smoothing_grid_has_every_combination_without_impossible_overlaps():
    grid = list(smoothing_grid())
    assert len(grid) == (6 * 4 - 2 - 1) * 9 * 7
    assert all(isinstance(defense, LocalGradientSmoothing) for defense in grid)
    assert all(defense.overlap < defense.window for defense in grid)
    assert len({defense.extra_repr() for defense in grid}) == len(grid)


def test_smoothing_grid_has_windows_with_a_neighbourhood_and_reaches_beyond_the_specification():
    grid = list(smoothing_grid())
    assert {defense.window for defense in grid} == {2, 3, 4, 5, 7, 8}
    assert {0.05, 0.1, 0.2, 0.3} < {defense.threshold for defense in grid}
    assert {1.0, 1.5, 2.3, 3.0, 5.0} < {defense.smoothing for defense in grid}


def test_watermarking_grid_covers_windows_up_to_two_pixels_more_than_the_patch():
    grid = list(watermarking_grid(nn.ReLU(), patch=5))
    assert {defense.window for defense in grid} == {5, 6, 7}
    assert len(grid) == 3 * 4 * 2 * 3 * 2


def test_unequal_numbers_of_images_and_none_are_refused():
    attack = PatchAttack(1, restarts=1)
    with pytest.raises(InvalidInput, match=r"labels must be a long tensor \(2,\), got torch.int64 \(1,\)"):
        tune_defense(attack, Bright(), one_pixel(0.1, 0.2), torch.tensor([0]), Patch(1), [])
    with pytest.raises(InvalidInput, match="a defense is tuned on at least one image, got none"):
        tune_defense(attack, Bright(), torch.zeros(0, 1, 1, 1), torch.zeros(0).long(), Patch(1), [])


class Cap(Defense):
    """Cuts images at a brightness; a low cap undoes every patch and costs the bright class."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, images):
        return images.clamp(max=self.cap)

    def surrogates(self):
        return (self.forward,)


def test_the_weak_attack_is_made_once_and_the_best_allowed_setting_is_chosen():
    images = torch.tensor([0.1, 0.2, 0.3, 0.9]).reshape(-1, 1, 1, 1)
    labels = torch.tensor([0, 0, 0, 1])
    defenses = [Cap(1.0), Cap(0.4)]
    attack = PatchAttack(steps=5, step_size=0.3, restarts=2)
    strict = tune_defense(attack, Bright(), images, labels, Patch(1), defenses, largest_drop=0.1)
    assert strict.undefended_accuracy == 1.0
    assert [trial.weak_accuracy for trial in strict.trials] == [0.0, 0.75]
    assert strict.best is not None
    assert strict.best.defense is defenses[0]
    free = tune_defense(attack, Bright(), images, labels, Patch(1), defenses, largest_drop=0.3)
    assert free.best is not None
    assert free.best.defense is defenses[1]
