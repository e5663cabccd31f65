"""Attacks on a trained run, as planned; evidence has one row per attacked image."""

import time
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Generator, Tensor

from patchcert.attacks import (
    AdaptiveAfterTransfer,
    AttackResult,
    AttackSeries,
    PatchAttack,
    TransferAttack,
    default_batch_size,
)
from patchcert.data import Dataset, Split
from patchcert.defenses import Defended
from patchcert.errors import InvalidInput
from patchcert.files import sha256
from patchcert.papers.chiang2020.attack_plan import AttackPlan
from patchcert.papers.chiang2020.candidates import find_candidate
from patchcert.papers.chiang2020.trials import Choice
from patchcert.train.environment import describe_machine
from patchcert.train.run_folder import Run


def attack_run(
    run: Run, dataset: Dataset, plan: AttackPlan, device: torch.device, choice: Choice | None = None
) -> float:
    """Attack the run's model as planned and leave the evidence in its folder; the accuracy under attack.

    A defense stands in front of it with the chosen setting.
    """
    began = time.perf_counter()
    model = run.model(device)
    index = drawn_images(len(dataset.test), plan.images, plan.seed)
    chosen = dataset.test[index].to(device)
    facts: dict[str, Any] = {"defense": None}
    if plan.defense:
        if choice is None:
            raise InvalidInput(
                f"{plan.name} needs a setting of the defense", hint="choose one by trials on held-out images"
            )
        defense = find_candidate(choice.setting, plan.tuning, model, dataset, device)
        result = _attack_defended(plan, Defended(defense, model).to(device), chosen)
        reached = asdict(choice)
        facts = {"defense": reached.pop("setting"), "tuning": reached}
    else:
        generator = Generator().manual_seed(plan.seed)
        attack = planned_attack(plan, device)
        result = attack.run(model, chosen.floats(), chosen.labels, plan.threat, generator)
    meta = _meta(run, dataset, plan, device) | facts | {"seconds": round(time.perf_counter() - began, 3)}
    run.write_evidence(plan.name, result.columns(index), meta)
    return result.accuracy


def _attack_defended(plan: AttackPlan, defended: Defended, chosen: Split) -> AttackResult:
    """By patches for the undefended model; an adaptive attack continues from the very same patches."""
    images, labels = chosen.floats(), chosen.labels
    attack, generator = planned_attack(plan, images.device), Generator().manual_seed(plan.seed)
    unaware = replace(attack, sweep_vertices=0)
    by_margin = (replace(unaware, loss="margin"),) if plan.both_losses else ()
    aware = AdaptiveAfterTransfer(unaware, AttackSeries((attack, *by_margin)))
    made = aware if plan.adaptive else TransferAttack(unaware)
    return made.run(defended, images, labels, plan.threat, generator)


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
        sweep_vertices=plan.sweep_vertices,
        batch_size=default_batch_size(device),
    )


def circumstances(
    run: Run, dataset: Dataset, split: str, images: int, device: torch.device
) -> dict[str, Any]:
    """With which weights, on which images, where and with what evidence was gathered."""
    return {
        "weights_sha256": sha256(run.weights),
        "data": {
            "name": dataset.name,
            "split": split,
            "images": images,
            "limit": None,
            "sha256": dict(dataset.checksums),
        },
        **describe_machine(device),
    }


def _meta(run: Run, dataset: Dataset, plan: AttackPlan, device: torch.device) -> dict[str, Any]:
    return {
        "kind": "attack-defended" if plan.defense else "attack",
        "plan": plan.to_dict(),
        "threat": plan.threat.to_dict(),
        "adaptive": plan.adaptive,
        "seed": plan.seed,
        **circumstances(run, dataset, "test", plan.images, device),
    }
