"""Which attack a row asks for: on how many images, how hard, and behind which defense."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from patchcert.attacks.patch import Search
from patchcert.threats import Patch

DefenseName = Literal["", "lgs", "dw"]


@dataclass(frozen=True, slots=True)
class AttackPlan:
    """The paper's attack, 80 restarts of 150 steps on 400 random test images, unless it is made smaller.

    It is made stronger in where restarts go: a thirtieth of the steps at every placement come first, and the
    restarts are spent on the most promising placements. With `search` "random" they go anywhere, as in the paper.
    A defense's settings are chosen on so many held-out training images: those that withstand the attack that
    does not know of the defense, at a loss of at most `largest_drop` of the clean accuracy.
    """

    patch: str
    defense: DefenseName = ""
    adaptive: bool = False
    images: int = 400
    restarts: int = 80
    steps: int = 150
    seed: int = 0
    tuned_on: int = 1000
    largest_drop: float = 0.02
    settings: int | None = None
    search: Search = "sweep"

    @property
    def threat(self) -> Patch:
        """The patch, anywhere in the image."""
        height, width = (int(side) for side in self.patch.split("x"))
        return Patch((height, width))

    @property
    def name(self) -> str:
        """The name of its evidence; plans that differ have names that differ."""
        kind = "adaptive" if self.adaptive else "plain"
        digest = hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:8]
        return "-".join(filter(None, ["attack", self.patch, self.defense, kind, digest]))

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "AttackPlan":
        """The plan that `to_dict` wrote."""
        return cls(**plain)
