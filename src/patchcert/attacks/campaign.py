"""Everything an attacker has, aimed at images that are said to be proven."""

import math
from dataclasses import dataclass
from typing import Annotated, final

import torch
from torch import Generator, Tensor, nn

from patchcert.attacks.base import Attack, AttackResult
from patchcert.attacks.climbing import Loss
from patchcert.attacks.composite import AttackSeries, AttackWithin
from patchcert.attacks.patch import PatchAttack
from patchcert.attacks.sparse import SparseAttack
from patchcert.attacks.views import PerImage, Predictor
from patchcert.errors import InvalidInput
from patchcert.progress import Progress
from patchcert.tensors import Images, Labels
from patchcert.threats import Patch, SparsePixels


@final
@dataclass(frozen=True, eq=False)
class CertifiedAttackResult:
    """What the attacks made of the certified images."""

    index: Annotated[Tensor, "m"]
    """Positions of the certified images in the batch."""
    result: AttackResult
    """The attack on those images alone."""

    @property
    def broken(self) -> Annotated[Tensor, "b"]:
        """Positions in the batch of certified images that an attack changed: each refutes its proof."""
        return self.index[self.result.succeeded]

    @property
    def withstood(self) -> bool:
        """Whether no certified image was broken."""
        return not bool(self.result.succeeded.any())


def attack_certified(
    model: nn.Module | Predictor,
    images: Images,
    labels: Labels,
    threat: Patch | SparsePixels,
    certified: PerImage,
    attack: Attack | None = None,
    generator: Generator | None = None,
    progress: Progress | None = None,
) -> CertifiedAttackResult:
    """Attacks the certified images, by default with `strongest_attack`; one that breaks is a false proof."""
    if certified.shape != labels.shape or certified.dtype != torch.bool:
        raise InvalidInput(
            f"certified must be bool ({len(labels)},), got {certified.dtype} {tuple(certified.shape)}",
            hint="pass `certificates.certified` for the same images",
        )
    attack = attack or strongest_attack(threat)
    index = certified.to(images.device).nonzero().flatten()
    result = attack.run(model, images[index], labels[index], threat, generator, progress)
    return CertifiedAttackResult(index, result)


def strongest_attack(
    threat: Patch | SparsePixels, steps: int = 150, restarts: int = 20, batch_size: int = 1024
) -> Attack:
    """For patches, a sweep of all placements with either loss, then restarts at the weakest ones.

    For sparse pixels, the pixels of largest gain with either loss, then the sweeps of the largest square patch
    that has no more pixels.
    """
    losses: tuple[Loss, ...] = ("margin", "cross-entropy")
    sweeps = tuple(
        PatchAttack(steps, 0.05, restarts, loss, "sweep", sweep_steps, batch_size=batch_size)
        for loss, sweep_steps in zip(losses, (20, 5), strict=True)
    )
    if isinstance(threat, Patch):
        return AttackSeries(sweeps)
    climbs = tuple(
        SparseAttack(steps, restarts=restarts, loss=loss, batch_size=batch_size) for loss in losses
    )
    if threat.unit != "pixel":
        return AttackSeries(climbs)
    square = Patch(math.isqrt(threat.pixels))
    return AttackSeries((*climbs, *(AttackWithin(sweep, square) for sweep in sweeps)))
