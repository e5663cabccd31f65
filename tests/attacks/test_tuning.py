import torch
from torch import nn

from patchcert.attacks import PatchAttack, tune_defense
from patchcert.defenses import Defense
from patchcert.threats import Patch


class Bright(nn.Module):
    """Says 1 where the first pixel exceeds one half."""

    def forward(self, images):
        value = images[:, 0, 0, 0]
        return torch.stack([0.5 - value, value - 0.5], dim=1)


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
