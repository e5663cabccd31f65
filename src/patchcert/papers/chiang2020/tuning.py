"""Every setting of a defense tried in front of a trained model; evidence has one row per setting."""

import time
from typing import Any

import torch
from torch import Generator

from patchcert.attacks import TuningResult, tune_defense
from patchcert.data import Dataset
from patchcert.errors import InvalidInput
from patchcert.papers.chiang2020.attack_plan import TuningPlan
from patchcert.papers.chiang2020.attacking import circumstances, planned_attack
from patchcert.papers.chiang2020.candidates import candidates, describe
from patchcert.train.run_folder import Run


def try_settings(run: Run, dataset: Dataset, plan: TuningPlan, device: torch.device) -> int:
    """Try every setting on training images that the model has not seen; how many settings there are.

    The trials are left as evidence in the run's folder. Which setting is taken, they decide together with those
    of the other models of a row.
    """
    began = time.perf_counter()
    held_out = run.spec.data.validation
    if held_out < plan.tuned_on:
        raise InvalidInput(
            f"the settings of {plan.defense} are to be chosen on {plan.tuned_on} images, but {held_out} were "
            "held out from training",
            hint="hold out more with data.validation",
        )
    model = run.model(device)
    images = dataset.train[len(dataset.train) - plan.tuned_on :].to(device)
    found = tune_defense(
        planned_attack(plan.weak, device),
        model,
        images.floats(),
        images.labels,
        plan.weak.threat,
        candidates(plan, model, dataset, device),
        generator=Generator().manual_seed(plan.seed),
    )
    meta = _meta(run, dataset, plan, device, found) | {"seconds": round(time.perf_counter() - began, 3)}
    run.write_evidence(plan.name, _columns(found, plan.tuned_on), meta)
    return len(found.trials)


def _columns(found: TuningResult, images: int) -> dict[str, Any]:
    return {
        "setting": [describe(trial.defense) for trial in found.trials],
        "clean": [round(trial.clean_accuracy * images) for trial in found.trials],
        "weak": [round(trial.weak_accuracy * images) for trial in found.trials],
    }


def _meta(
    run: Run, dataset: Dataset, plan: TuningPlan, device: torch.device, found: TuningResult
) -> dict[str, Any]:
    return {
        "kind": "tune",
        "plan": plan.to_dict(),
        "threat": plan.weak.threat.to_dict(),
        "undefended_correct": round(found.undefended_accuracy * plan.tuned_on),
        **circumstances(run, dataset, "validation", plan.tuned_on, device),
    }
