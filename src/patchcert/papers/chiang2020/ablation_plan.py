"""How votes are counted for the rows of Random Ablation: how many, on which images, in which arithmetic."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from patchcert.certificates.ablation import Precision


@dataclass(frozen=True, slots=True)
class VotePlan:
    """The original's counts: a class by 1,000 votes, its probability by 10,000 fresh ones, 95 % confidence.

    The votes are on all test images, or on so many that the seed draws.
    """

    selection: int = 1_000
    estimation: int = 10_000
    error_rate: float = 0.05
    images: int | None = None
    precision: Precision = "bfloat16"
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of its evidence; plans that differ have names that differ."""
        digest = hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:8]
        return f"votes-{self.estimation}-{digest}"

    def is_answered_by(self, other: "VotePlan") -> bool:
        """Whether the other plan asks the same of at least as many images."""
        is_enough = other.images is None or (self.images is not None and self.images <= other.images)
        return is_enough and replace(self, images=None) == replace(other, images=None)

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "VotePlan":
        """The plan that `to_dict` wrote."""
        return cls(**plain)
