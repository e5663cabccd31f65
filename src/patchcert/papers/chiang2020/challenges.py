"""Proofs that were challenged: attacks on certified images alone, which must all fail."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patchcert.errors import RunError
from patchcert.papers.chiang2020.evidence import ATTACK_COLUMNS, Rows, check_same_images, load_columns
from patchcert.papers.chiang2020.rows import AnyThreat
from patchcert.threats import threat_from_dict

PREFIX = "challenge-"


def is_challenge(meta: Mapping[str, Any]) -> bool:
    """Whether evidence of an attack is about certified images alone."""
    return bool(meta.get("certified_only", False))


@dataclass(frozen=True, eq=False)
class Challenge:
    """The evidence of one attack on certified images."""

    path: Path
    columns: Mapping[str, NDArray[Any]]
    meta: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Challenge":
        """The rows in a file of evidence, refused if they are of another kind or contradict themselves."""
        columns, meta = load_columns(path, ATTACK_COLUMNS)
        if not is_challenge(meta):
            raise RunError(f"{path} holds no attack on certified images", hint="collect the run again")
        if ((columns["prediction_after"] != columns["label"]) != columns["succeeded"]).any():
            raise RunError(f"{path} contradicts itself", hint="attack the run again")
        return cls(path, columns, meta)

    @property
    def threat(self) -> AnyThreat:
        """Within which the images were attacked."""
        return threat_from_dict(self.meta["threat"])

    @property
    def total(self) -> int:
        """How many certified images were attacked."""
        return len(self.columns["label"])

    @property
    def broken(self) -> int:
        """How many proofs were refuted."""
        return int(np.count_nonzero(self.columns["succeeded"]))

    @property
    def steps(self) -> int:
        """Gradient steps spent on all images."""
        return int(self.columns["steps"].sum()) if "steps" in self.columns else 0

    def check_against(self, proven: Sequence[Rows]) -> None:
        """Every attacked image must be one of those that the run's own evidence calls proven."""
        for rows in proven:
            if rows.threat == self.threat and rows.is_of_test_images and rows.limit is None:
                check_same_images(self.path, self.columns, rows)
                if not rows.columns["verdict"][self.columns["index"]].all():
                    raise RunError(f"{self.path} attacks images that {rows.path.name} does not call proven")
                return
        raise RunError(f"{self.path} has no certificates of all test images beside it", hint="collect again")
