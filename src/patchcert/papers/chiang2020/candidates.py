"""The settings of a defense that are tried, and how they are called in evidence."""

import itertools
from collections.abc import Iterator

import torch
from torch import nn

from patchcert.attacks import smoothing_grid, watermarking_grid
from patchcert.data import Dataset
from patchcert.defenses import Defense
from patchcert.defenses.watermarking import SaliencyKind
from patchcert.errors import RunError
from patchcert.papers.chiang2020.attack_plan import TuningPlan


def candidates(
    plan: TuningPlan, model: nn.Module, dataset: Dataset, device: torch.device
) -> Iterator[Defense]:
    """The defenses that can stand in front of the model; every setting has a description of its own."""
    for defense in itertools.islice(_grid(plan, model, dataset), plan.settings):
        yield defense.to(device)


def describe(defense: Defense) -> str:
    """The setting in words that depend on nothing else."""
    return f"{type(defense).__name__}({defense.extra_repr()})"


def find_candidate(
    setting: str, plan: TuningPlan, model: nn.Module, dataset: Dataset, device: torch.device
) -> Defense:
    """The defense of that description in front of the model."""
    for defense in candidates(plan, model, dataset, device):
        if describe(defense) == setting:
            return defense
    raise RunError(
        f"the chosen setting {setting} is none of those that {plan.defense} is tried with now",
        hint=f"remove the evidence {plan.name} of all models of the row, so that settings are tried again",
    )


def _grid(plan: TuningPlan, model: nn.Module, dataset: Dataset) -> Iterator[Defense]:
    if plan.defense == "lgs":
        return smoothing_grid()
    kinds: tuple[SaliencyKind, ...] = ("gradient", "loss-gradient")
    if any(isinstance(module, nn.ReLU | nn.ReLU6) for module in model.modules()):
        kinds = ("guided", *kinds)
    height, width = plan.weak.threat.height, plan.weak.threat.width
    return watermarking_grid(model, max(height, width), kinds=kinds, fills=(tuple(dataset.mean), "ring"))
