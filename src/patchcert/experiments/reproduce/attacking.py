"""Attacks on a trained run, as planned; evidence has one row per attacked image."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from patchcert.attacks import (
    AdaptiveAttack,
    AttackResult,
    PatchAttack,
    TransferAttack,
    evidence_columns,
    tune_defense,
)
from patchcert.attacks.settings import default_batch_size
from patchcert.data import Dataset, Split
from patchcert.defenses import Defended, Defense, Trial, smoothing_grid, watermarking_grid
from patchcert.errors import InvalidInput
from patchcert.experiments.environment import device_name
from patchcert.experiments.reproduce.attack_plan import AttackPlan
from patchcert.experiments.runs import Run
from patchcert.files import sha256


def attack_run(run: Run, dataset: Dataset, plan: AttackPlan, device: torch.device) -> float:
    """Attack the run's model as planned and leave the evidence in its folder; the accuracy under attack."""
    began = time.perf_counter()
    model = run.model(device)
    index = drawn_images(len(dataset.test), plan.images, plan.seed)
    chosen = dataset.test[index].to(device)
    facts: dict[str, Any] = {"defense": None}
    if plan.defense:
        candidates = [defense.to(device) for defense in _candidates(plan, model, dataset)]
        facts = _known_choice(run, plan) or _tuned(run, plan, model, dataset, candidates)
        defended = Defended(candidates[facts["tuning"]["choice"]], model).to(device)
        result = _attack_defended(plan, defended, chosen)
    else:
        generator = Generator().manual_seed(plan.seed)
        attack = planned_attack(plan, device)
        result = attack.run(model, chosen.floats(), chosen.labels, plan.threat, generator)
    meta = _meta(run, dataset, plan, device) | facts | {"seconds": round(time.perf_counter() - began, 3)}
    run.write_evidence(plan.name, evidence_columns(result, index), meta)
    return result.accuracy


def _attack_defended(plan: AttackPlan, defended: Defended, chosen: Split) -> AttackResult:
    """By patches for the undefended model; an adaptive attack goes on from the very same patches."""
    images, labels = chosen.floats(), chosen.labels
    attack, generator = planned_attack(plan, images.device), Generator().manual_seed(plan.seed)
    weak = TransferAttack(attack).run(defended, images, labels, plan.threat, generator)
    if not plan.adaptive:
        return weak
    return AdaptiveAttack(attack).run_after(weak, defended, images, labels, plan.threat, generator)


def drawn_images(total: int, images: int, seed: int) -> Tensor:
    """Positions of the attacked images: a random draw that depends on the seed alone, in order."""
    return torch.randperm(total, generator=Generator().manual_seed(seed))[:images].sort().values


def planned_attack(plan: AttackPlan, device: torch.device) -> PatchAttack:
    """The plan's attack, as it would be on an undefended model."""
    return PatchAttack(
        plan.steps,
        restarts=plan.restarts,
        search=plan.search,
        sweep_steps=plan.steps // 30,
        batch_size=default_batch_size(device),
    )


def _known_choice(run: Run, plan: AttackPlan) -> dict[str, Any]:
    """What was chosen for the attack that differs only in what it knows; empty where there was none."""
    other = replace(plan, adaptive=not plan.adaptive).name
    if other not in run.evidence_names():
        return {}
    meta = run.evidence_meta(other)
    is_same = meta["weights_sha256"] == sha256(run.weights)
    return {key: meta[key] for key in ("defense", "tuning")} if is_same else {}


def _tuned(
    run: Run, plan: AttackPlan, model: nn.Module, dataset: Dataset, candidates: Sequence[Defense]
) -> dict[str, Any]:
    """The best setting of the defense on training images that the model has not seen.

    Where every setting costs more accuracy than the plan allows, the one that costs least; evidence says so.
    """
    held_out = run.spec.data.validation
    if held_out < plan.tuned_on:
        raise InvalidInput(
            f"the settings of {plan.defense} are to be chosen on {plan.tuned_on} images, but {held_out} were "
            "held out from training",
            hint="hold out more with data.validation",
        )
    device = next(model.parameters()).device
    images = dataset.train[len(dataset.train) - plan.tuned_on :].to(device)
    found = tune_defense(
        planned_attack(plan, device),
        model,
        images.floats(),
        images.labels,
        plan.threat,
        candidates,
        largest_drop=plan.largest_drop,
        generator=Generator().manual_seed(plan.seed),
    )
    best = found.best or max(found.trials, key=lambda trial: (trial.clean_accuracy, trial.weak_accuracy))
    undefended = {"undefended_accuracy": found.undefended_accuracy, "is_within_drop": found.best is not None}
    return _describe(found.trials.index(best), best, undefended)


def _candidates(plan: AttackPlan, model: nn.Module, dataset: Dataset) -> Iterator[Defense]:
    side = max(plan.threat.height, plan.threat.width)
    mean = tuple(dataset.mean)
    grid = smoothing_grid() if plan.defense == "lgs" else watermarking_grid(model, side, fills=(mean, "ring"))
    return itertools.islice(grid, plan.settings)


def _describe(choice: int, trial: Trial, undefended: Mapping[str, Any]) -> dict[str, Any]:
    defense = trial.defense
    reached = {"clean_accuracy": trial.clean_accuracy, "weak_accuracy": trial.weak_accuracy}
    return {
        "defense": f"{type(defense).__name__}({defense.extra_repr()})",
        "tuning": {"choice": choice, **reached, **undefended},
    }


def _meta(run: Run, dataset: Dataset, plan: AttackPlan, device: torch.device) -> dict[str, Any]:
    return {
        "kind": "attack-defended" if plan.defense else "attack",
        "plan": plan.to_dict(),
        "threat": plan.threat.to_dict(),
        "adaptive": plan.adaptive,
        "seed": plan.seed,
        "weights_sha256": sha256(run.weights),
        "data": {
            "name": dataset.name,
            "split": "test",
            "images": plan.images,
            "limit": None,
            "sha256": dict(dataset.checksums),
        },
        "device": device_name(device),
        "versions": run.environment().get("versions", {}),
    }
