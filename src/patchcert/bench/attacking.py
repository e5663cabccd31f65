"""How fast patches are attacked: images and restarts in shared batches, against one restart after the other."""

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn

from patchcert.attacks import AttackResult, PatchAttack, default_batch_size, reference_patch_attack
from patchcert.bench.cases import Case
from patchcert.bench.timing import seconds

STEPS, FEWEST_STEPS = 150, 5


@dataclass(frozen=True, slots=True)
class AttackRates:
    """Image-steps per second, a forward and a backward pass of one image each, of the same steps done both ways.

    No image is let go early, which with random weights would measure luck. The plain loop does one of the
    restarts, each of which costs it the same.
    """

    images: int
    restarts: int
    steps: int
    plain: float
    batched: float
    ratio: float


def attack_rates(case: Case, device: torch.device, images: int, restarts: int, spend: float) -> AttackRates:
    """Both rates for the paper's steps, or for fewer where a call would take longer than `spend` seconds."""
    target = _Target.of(case, device, images)
    attack = PatchAttack(
        FEWEST_STEPS, restarts=restarts, early_stop=False, batch_size=default_batch_size(device)
    )
    short = seconds(lambda: target.batched(attack), device, 0.0)
    steps = min(max(int(spend / short * FEWEST_STEPS), FEWEST_STEPS), STEPS)
    attack, single = replace(attack, steps=steps), replace(attack, steps=steps, restarts=1)
    batched = images * restarts * steps / seconds(lambda: target.batched(attack), device, spend)
    plain = images * steps / seconds(lambda: target.plain(single), device, spend)
    return AttackRates(images, restarts, steps, plain, batched, batched / plain)


@dataclass(frozen=True, slots=True)
class _Target:
    """A network and images that it gets right, so that all of them are attacked."""

    case: Case
    model: nn.Module
    images: Tensor
    labels: Tensor

    @staticmethod
    def of(case: Case, device: torch.device, count: int) -> "_Target":
        model, (images, _) = case.build(device), case.images(count, device)
        with torch.no_grad():
            return _Target(case, model, images, model(images).argmax(dim=1))

    def batched(self, attack: PatchAttack) -> AttackResult:
        return attack.run(self.model, self.images, self.labels, self.case.threat, Generator().manual_seed(0))

    def plain(self, attack: PatchAttack) -> AttackResult:
        generator = Generator().manual_seed(0)
        return reference_patch_attack(
            attack, self.model, self.images, self.labels, self.case.threat, generator
        )
