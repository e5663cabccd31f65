"""The patch attack written plainly: one restart after the other, all images side by side, nothing left out.

`PatchAttack` with random search must find the same; tests hold the two together, and benchmarks compare them.
"""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from patchcert.attacks.base import AttackResult, Findings, Task, judge
from patchcert.attacks.campaign import noise
from patchcert.attacks.climbing import sure_lead
from patchcert.attacks.judging import check_batch, evaluate, wrong_lead
from patchcert.attacks.patch import PatchAttack
from patchcert.attacks.placement_search import random_order
from patchcert.attacks.views import put, stamp_cells
from patchcert.bounds import precise_arithmetic
from patchcert.threats import Patch


@precise_arithmetic()
def reference_patch_attack(
    attack: PatchAttack,
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    threat: Patch,
    generator: Generator | None = None,
) -> AttackResult:
    """The result of the settings of `attack`, whose search is taken to be random."""
    check_batch(model, images, labels)
    task = Task(images, labels, threat, generator or torch.Generator().manual_seed(0))
    clean = evaluate(model, images, labels, attack.batch_size).predictions
    right = (clean == labels).nonzero().flatten()
    found = _search(attack, model, images[right], labels[right], threat, task.generator)
    everything = Findings.unchanged(images).updated(right, found)
    return judge(model, task, everything, clean, attack.batch_size)


def _search(
    attack: PatchAttack, model: nn.Module, images: Tensor, labels: Tensor, threat: Patch, generator: Generator
) -> Findings:
    placements = threat.placements(images.shape[2], images.shape[3])
    order = random_order(len(images), len(placements), generator)
    best = images.clone()
    best_lead = images.new_full((len(images),), -torch.inf)
    best_corner = labels.new_full((len(images), 2), -1)
    for restart in range(attack.restarts):
        corner = placements.corners[order[:, restart % len(placements)].cpu()].to(images.device)
        box = threat.boxes(images, corner[:, None])
        lower, upper = box.lower[:, 0], box.upper[:, 0]
        cells = stamp_cells(threat, corner, images.shape[1:])
        start = put(torch.zeros_like(images), cells, noise(images, threat, generator))
        current = (images + start).clamp(lower, upper)
        for step in range(attack.steps + 1):
            current = current.detach().requires_grad_()
            logits = model(current)
            lead = sure_lead(logits.detach(), labels)
            better = lead > best_lead
            if attack.early_stop:
                better &= best_lead <= 0
            best = torch.where(better[:, None, None, None], current.detach(), best)
            best_lead = torch.where(better, lead, best_lead)
            best_corner = torch.where(better[:, None], corner, best_corner)
            if step < attack.steps:
                loss = _loss(attack.loss, logits, labels).sum()
                (gradient,) = torch.autograd.grad(loss, current)
                current = (current + attack.step_size * gradient.sign()).clamp(lower, upper)
    return Findings(best, best_corner, labels.new_full((len(labels),), attack.restarts * attack.steps))


def _loss(name: str, logits: Tensor, labels: Tensor) -> Tensor:
    if name == "margin":
        return wrong_lead(logits, labels)
    return F.cross_entropy(logits, labels, reduction="none")
