"""Settings of a defense as tried on the models of a row, and the one setting that is chosen for all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patchcert.errors import RunError
from patchcert.papers.chiang2020.attack_plan import TuningPlan
from patchcert.papers.chiang2020.evidence import load_columns

TRIAL_COLUMNS = ("setting", "clean", "weak")


@dataclass(frozen=True, eq=False)
class Trials:
    """What each setting reached on the held-out images of one model: how many are right, clean and attacked.

    A setting is known by its description, which is the same for every model, and never by its place in a grid.
    """

    path: Path
    columns: Mapping[str, NDArray[Any]]
    meta: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Trials":
        """The trials in a file of evidence, refused if they contradict themselves."""
        columns, meta = load_columns(path, TRIAL_COLUMNS)
        trials = cls(path, columns, meta)
        trials.check()
        return trials

    @property
    def plan(self) -> TuningPlan:
        """How the settings were tried."""
        return TuningPlan.from_dict(self.meta["plan"])

    @property
    def total(self) -> int:
        """On how many images."""
        return int(self.meta["data"]["images"])

    @property
    def settings(self) -> tuple[str, ...]:
        """The descriptions of the settings, in the order tried."""
        return tuple(self.columns["setting"].tolist())

    @property
    def undefended(self) -> Fraction:
        """The share of clean images that the model gets right without a defense."""
        return Fraction(int(self.meta["undefended_correct"]), self.total)

    def reached(self) -> dict[str, tuple[Fraction, Fraction]]:
        """By setting, the shares of images that are right: clean, and under the weak attack."""
        counts = zip(self.columns["clean"].tolist(), self.columns["weak"].tolist(), strict=True)
        shares = ((Fraction(clean, self.total), Fraction(weak, self.total)) for clean, weak in counts)
        return dict(zip(self.settings, shares, strict=True))

    def check(self) -> None:
        """Every setting is there once, with counts that its images allow."""
        lengths = {len(self.columns[name]) for name in TRIAL_COLUMNS}
        if len(lengths) != 1 or not self.settings or len(set(self.settings)) != len(self.settings):
            raise RunError(f"{self.path} does not hold one row for each setting", hint="try them again")
        counts = np.concatenate([self.columns["clean"], self.columns["weak"]])
        if counts.min() < 0 or max(int(counts.max()), int(self.meta["undefended_correct"])) > self.total:
            raise RunError(f"{self.path} contradicts itself: it counts more images than {self.total}")


@dataclass(frozen=True, slots=True)
class Choice:
    """The setting that is chosen for all models of a row, and the means over these models.

    `settings` is how many were tried on all of them, `weights` are the sums of the models' weights.
    """

    setting: str
    clean_accuracy: float
    weak_accuracy: float
    undefended_accuracy: float
    is_within_drop: bool
    settings: int
    weights: tuple[str, ...]


def choose(trials: Sequence[Trials], largest_drop: float) -> Choice:
    """Of the settings tried on every model, the one whose mean weak accuracy is largest.

    Then the mean clean accuracy decides, then the order in which the first model tried them. Only settings that
    cost at most `largest_drop` of the mean clean accuracy are allowed; where none is, the one that costs least
    is taken, and the choice says so. Shares are exact, so that equal ones are equal.
    """
    reached = [each.reached() for each in trials]
    common = [setting for setting in reached[0] if all(setting in others for others in reached)]
    if not common:
        raise RunError(
            f"no setting of {trials[0].plan.defense} was tried on every model of the row: "
            f"{', '.join(str(each.path) for each in trials)}",
            hint="remove these trials and give the command again",
        )
    clean = {setting: _mean([shares[setting][0] for shares in reached]) for setting in common}
    weak = {setting: _mean([shares[setting][1] for shares in reached]) for setting in common}
    undefended = _mean([each.undefended for each in trials])
    floor = undefended - Fraction(str(largest_drop))
    allowed = [setting for setting in common if clean[setting] >= floor]
    if allowed:
        best = max(allowed, key=lambda setting: (weak[setting], clean[setting]))
    else:
        best = max(common, key=lambda setting: (clean[setting], weak[setting]))
    means = (float(clean[best]), float(weak[best]), float(undefended))
    weights = tuple(str(each.meta["weights_sha256"]) for each in trials)
    return Choice(best, *means, is_within_drop=bool(allowed), settings=len(common), weights=weights)


def _mean(shares: Sequence[Fraction]) -> Fraction:
    return sum(shares, Fraction(0)) / len(shares)
