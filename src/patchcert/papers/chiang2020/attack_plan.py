"""Which attack a row asks for: on how many images, how hard, and behind which defense."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from patchcert.attacks.patch import Search
from patchcert.threats import Patch

DefenseName = Literal["", "lgs", "dw"]
_LATER = ("sweep_vertices", "both_losses")


@dataclass(frozen=True, slots=True)
class TuningPlan:
    """Every setting of a defense tried on so many held-out training images, clean and under a weak attack.

    The attack does not know of the defense. `settings` is how many of the grid are tried, all where None.
    """

    patch: str
    defense: DefenseName
    tuned_on: int
    restarts: int = 80
    steps: int = 150
    seed: int = 0
    settings: int | None = None
    search: Search = "sweep"

    @property
    def weak(self) -> "AttackPlan":
        """The attack on the undefended model that the settings are to withstand."""
        return AttackPlan(
            self.patch, restarts=self.restarts, steps=self.steps, seed=self.seed, search=self.search
        )

    @property
    def name(self) -> str:
        """The name of its evidence; plans that differ have names that differ."""
        return f"tune-{self.patch}-{self.defense}-{_digest(self.to_dict())}"

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "TuningPlan":
        """The plan that `to_dict` wrote."""
        return cls(**plain)


@dataclass(frozen=True, slots=True)
class AttackPlan:
    """The paper's attack, 80 restarts of 150 steps on 400 random test images, unless it is made smaller.

    It is made stronger in where restarts go: a thirtieth of the steps at every placement come first, and the
    restarts are spent on the most promising placements. With `search` "random" they go anywhere, as in the paper.
    An adaptive attack first tries `sweep_vertices` patches of zeros and ones at every placement; with `both_losses`
    all restarts that follow the cross entropy are followed by as many that follow the margin.

    A defense's setting is one for all models of a row, chosen by `tuning`: the one that withstands the attack
    that does not know of the defense best, at a loss of at most `largest_drop` of the clean accuracy.
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
    sweep_vertices: int = 0
    both_losses: bool = False

    @property
    def threat(self) -> Patch:
        """The patch, anywhere in the image."""
        height, width = (int(side) for side in self.patch.split("x"))
        return Patch((height, width))

    @property
    def tuning(self) -> TuningPlan:
        """The trials that the setting of the defense is chosen by; plain and adaptive attacks share them."""
        return TuningPlan(
            self.patch,
            self.defense,
            self.tuned_on,
            self.restarts,
            self.steps,
            self.seed,
            self.settings,
            self.search,
        )

    @property
    def name(self) -> str:
        """The name of its evidence; plans that differ have names that differ."""
        kind = "adaptive" if self.adaptive else "plain"
        return "-".join(filter(None, ["attack", self.patch, self.defense, kind, _digest(self.to_dict())]))

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain types; what came later is named only where it is used, so that earlier names stay."""
        return {key: value for key, value in asdict(self).items() if value or key not in _LATER}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "AttackPlan":
        """The plan that `to_dict` wrote."""
        return cls(**plain)


def _digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]
