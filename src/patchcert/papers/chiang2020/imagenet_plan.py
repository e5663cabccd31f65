"""What the ImageNet table asks to be attacked: networks of ours, patches in the corners, no training."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from patchcert.papers.chiang2020.imagenet_corners import DEFENSES, CornerRow, DefenseName
from patchcert.papers.chiang2020.tables import Entry
from patchcert.threats import Patch

OUR_NETWORKS = {"inception_v3": "resnet50", "vgg19": "resnet50"}
"""What is attacked here in place of the paper's networks."""
IMAGES, STEPS = 400, 150


@dataclass(frozen=True, slots=True)
class CornerPlan:
    """One network and one size of patch: every corner once in each stage of the attack, on random images."""

    network: str
    patch: int
    images: int = 400
    steps: int = 150
    step_size: float = 0.05
    restarts: int = 4
    seed: int = 0

    @property
    def threat(self) -> Patch:
        """The patch in one of the corners."""
        return Patch(self.patch, placements="corners")

    @property
    def label(self) -> str:
        """The plan in a few words."""
        seed = f" seed {self.seed}" if self.seed else ""
        return f"imagenet {self.network} {self.patch}x{self.patch}{seed}"

    def fingerprint(self, weights: str, data: Mapping[str, str]) -> str:
        """The name of its results, which also depends on the weights and on the sums of the data."""
        plain = {"plan": self.to_dict(), "weights": weights, "data": dict(sorted(data.items()))}
        digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]
        return f"imagenet-{self.network}-{self.patch}x{self.patch}-{digest}"

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "CornerPlan":
        """The plan that `to_dict` wrote."""
        return cls(**plain)


@dataclass(frozen=True, slots=True)
class Piece:
    """A plan and the defenses that are asked for; the evidence of each appears as soon as it is there."""

    plan: CornerPlan
    defenses: tuple[DefenseName, ...] = DEFENSES


def corner_plan(entry: Entry) -> CornerPlan | None:
    """What a row of the ImageNet table asks for; None for a row of another table."""
    if entry.dataset != "imagenet":
        return None
    side = int(entry.patch.partition("x")[0])
    return CornerPlan(OUR_NETWORKS[entry.model], side, images=IMAGES, steps=STEPS)


def corner_defense(entry: Entry) -> DefenseName:
    """The defense of such a row."""
    return "lgs" if entry.defense == "LGS" else "dw"


def evidence_file(defense: DefenseName, adaptive: bool) -> str:
    """The file of a cell's rows within the folder of its plan."""
    return f"attack-{defense}-{'adaptive' if adaptive else 'plain'}.npz"


def file_of(row: CornerRow) -> str:
    """The file of this cell."""
    return evidence_file(row.defense, row.adaptive)


def pieces_of(entries: Sequence[Entry], seeds: int = 1) -> tuple[Piece, ...]:
    """The plans behind the rows in their order, each once, with the defenses that are asked for."""
    asked: dict[CornerPlan, list[DefenseName]] = {}
    for entry in entries:
        plan = corner_plan(entry)
        if plan is not None:
            for extra in range(seeds):
                asked.setdefault(replace(plan, seed=plan.seed + extra), []).append(corner_defense(entry))
    return tuple(
        Piece(plan, tuple(name for name in DEFENSES if name in names)) for plan, names in asked.items()
    )
