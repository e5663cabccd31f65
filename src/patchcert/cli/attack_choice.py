"""From the options of `patchcert attack` to an attack."""

from dataclasses import dataclass
from typing import cast, final

import torch

from patchcert.attacks import (
    AdaptiveAttack,
    Attack,
    PatchAttack,
    SparseAttack,
    TransferAttack,
    default_batch_size,
    strongest_attack,
)
from patchcert.attacks.climbing import Loss
from patchcert.attacks.patch import Search
from patchcert.errors import InvalidInput
from patchcert.threats import Patch, SparsePixels


@final
@dataclass(frozen=True)
class AttackChoice:
    """What was asked for; None where the default depends on the threat and the images."""

    steps: int
    step_size: float | None
    restarts: int | None
    loss: str | None
    search: str | None
    defense: str
    settings: tuple[str, ...]
    adaptive: bool
    tune: int | None
    largest_drop: float
    certified_only: bool
    batch_size: int | None

    def __post_init__(self) -> None:
        undefended = self.defense == "none"
        given = {"--adaptive": self.adaptive, "--setting": self.settings, "--tune": self.tune}
        lonely = [option for option, value in given.items() if value]
        if undefended and lonely:
            raise InvalidInput(f"{lonely[0]} needs a defense", hint="give --defense lgs or --defense dw.")
        if self.tune and self.settings:
            raise InvalidInput("--tune chooses what --setting sets", hint="leave one of them out.")
        if self.certified_only and not undefended:
            raise InvalidInput(
                f"--certified-only is about the model itself, not about --defense {self.defense}",
                hint="leave one of them out.",
            )
        if self.certified_only and (self.loss or self.search or self.step_size):
            raise InvalidInput(
                "--certified-only tries every placement with every loss",
                hint="leave out --loss, --search and --step-size.",
            )

    @property
    def kind(self) -> str:
        """The kind of evidence; only that on the undefended model may be set against its certificates."""
        return "attack" if self.defense == "none" else "attack-defended"

    def build(self, threat: Patch | SparsePixels, is_imagenet: bool, device: torch.device) -> Attack:
        """The attack, with its defaults filled in."""
        if self.certified_only:
            size = self._batch_size(is_imagenet, device)
            return strongest_attack(threat, self.steps, 20 if self.restarts is None else self.restarts, size)
        attack = self.inner(threat, is_imagenet, device)
        if self.defense == "none":
            return attack
        return AdaptiveAttack(attack) if self.adaptive else TransferAttack(attack)

    def inner(self, threat: Patch | SparsePixels, is_imagenet: bool, device: torch.device) -> Attack:
        """The attack as it would be on an undefended model."""
        batch_size = self._batch_size(is_imagenet, device)
        loss = None if self.loss is None else cast("Loss", self.loss)
        if isinstance(threat, SparsePixels):
            if self.search is not None:
                raise InvalidInput("--search is about patches, not --sparse", hint="leave it out.")
            restarts = 20 if self.restarts is None else self.restarts
            step_size = 0.1 if self.step_size is None else self.step_size
            return SparseAttack(self.steps, step_size, restarts, loss or "margin", batch_size=batch_size)
        usual = 4 if is_imagenet else 80
        return PatchAttack(
            self.steps,
            0.05 if self.step_size is None else self.step_size,
            usual if self.restarts is None else self.restarts,
            loss or "cross-entropy",
            cast("Search", self.search or "random"),
            batch_size=batch_size,
        )

    def _batch_size(self, is_imagenet: bool, device: torch.device) -> int:
        return self.batch_size or default_batch_size(device, is_imagenet)
