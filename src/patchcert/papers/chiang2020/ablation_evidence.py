"""Evidence of votes, one row per test image: how often each class was voted for, and what follows from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patchcert.certificates.ablation import certified_radius, decided_class, probability_lower_bound
from patchcert.errors import RunError
from patchcert.papers.chiang2020.ablation_plan import VotePlan
from patchcert.papers.chiang2020.evidence import load_columns

VOTE_COLUMNS = ("index", "label", "selected", "votes", "prediction", "radius")


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides between votes and radius: pixels of an image, how many are retained, the error rate."""

    pixels: int
    retained: int
    estimation: int
    error_rate: float

    def predictions(self, votes: NDArray[np.integer]) -> NDArray[np.int64]:
        """The class that leads the fresh votes, or -1 where that could be chance."""
        return decided_class(votes, self.error_rate)

    def radii(
        self, votes: NDArray[np.integer], selected: NDArray[np.integer], labels: NDArray[np.integer]
    ) -> NDArray[np.int64]:
        """How many pixels may change; -1 where the selected class is wrong or has no proven majority."""
        agreeing = votes[np.arange(len(votes)), selected].astype(np.int64)
        lower = probability_lower_bound(agreeing, self.estimation, self.error_rate)
        return np.where(selected == labels, certified_radius(lower, self.pixels, self.retained), -1)


def vote_columns(
    rules: Rules,
    index: NDArray[np.integer],
    labels: NDArray[np.integer],
    selected: NDArray[np.integer],
    votes: NDArray[np.integer],
) -> dict[str, NDArray[Any]]:
    """The rows in small types."""
    classes = np.int16 if votes.shape[1] > np.iinfo(np.int8).max else np.int8
    return {
        "index": index.astype(np.int32),
        "label": labels.astype(classes),
        "selected": selected.astype(classes),
        "votes": votes.astype(np.min_scalar_type(rules.estimation)),
        "prediction": rules.predictions(votes).astype(classes),
        "radius": rules.radii(votes, selected, labels).astype(np.int32),
    }


@dataclass(frozen=True, eq=False)
class VotedRows:
    """The evidence of one count of votes; reading it derives predictions and radii from the votes again."""

    path: Path
    columns: Mapping[str, NDArray[Any]]
    meta: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "VotedRows":
        """The rows in a file of evidence, refused if they contradict themselves."""
        columns, meta = load_columns(path, VOTE_COLUMNS)
        rows = cls(path, columns, meta)
        rows.check()
        return rows

    @property
    def plan(self) -> VotePlan:
        """How the votes were counted."""
        return VotePlan.from_dict(self.meta["plan"])

    @property
    def rules(self) -> Rules:
        """What decides between votes and radius."""
        plan = self.plan
        return Rules(self.meta["pixels"], self.meta["retained"], plan.estimation, plan.error_rate)

    @property
    def total(self) -> int:
        """How many images there are."""
        return len(self.columns["label"])

    @property
    def drawn_images(self) -> int | None:
        """How many test images were drawn; None where they are all."""
        return None if self.total == self.meta["data"]["test_images"] else self.total

    @property
    def correct(self) -> int:
        """How many are predicted rightly; an abstention is not."""
        return int(np.count_nonzero(self.columns["prediction"] == self.columns["label"]))

    @property
    def abstained(self) -> int:
        """How many have no prediction, because their two leading classes cannot be told apart."""
        return int(np.count_nonzero(self.columns["prediction"] < 0))

    @property
    def words(self) -> str:
        """What was found, in a line."""
        return (
            f"{self.correct / self.total:.2%} right, {self.certified(1) / self.total:.2%} certified (1 pixel)"
        )

    def certified(self, pixels: int) -> int:
        """How many stay right whichever so many pixels change."""
        return int(np.count_nonzero(self.columns["radius"] >= pixels))

    def check(self) -> None:
        """All votes are there, and predictions and radii are those that follow from them."""
        lengths = {len(self.columns[name]) for name in VOTE_COLUMNS}
        if len(lengths) != 1 or not self.total:
            raise RunError(f"{self.path} has columns of {sorted(lengths)} rows; expected one number above 0")
        if len(np.unique(self.columns["index"])) != self.total:
            raise RunError(f"{self.path} counts an image twice", hint="count the votes of the run again")
        rules, votes = self.rules, self.columns["votes"]
        radii = rules.radii(votes, self.columns["selected"], self.columns["label"])
        broken = np.flatnonzero(
            (votes.sum(axis=1, dtype=np.int64) != rules.estimation)
            | (rules.predictions(votes) != self.columns["prediction"])
            | (radii != self.columns["radius"])
        )
        if broken.size:
            raise RunError(
                f"{self.path} contradicts itself: prediction and radius of row {broken[0]} do not follow from "
                "its votes",
                hint="count the votes of the run again",
            )
