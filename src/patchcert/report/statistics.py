"""How sure a measured accuracy is, and whether certificates and attacks agree image by image."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from patchcert.errors import InvalidInput


def clopper_pearson(successes: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact binomial interval: it covers the true proportion with at least this confidence."""
    if total < 1 or not 0 <= successes <= total:
        raise InvalidInput(
            f"a proportion needs 0 <= successes <= total and total >= 1, got {successes} of {total}"
        )
    if not 0 < confidence < 1:
        raise InvalidInput(f"confidence must lie strictly between 0 and 1, got {confidence}")
    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, successes, total - successes + 1)) if successes > 0 else 0.0
    high = float(beta.ppf(1 - tail, successes + 1, total - successes)) if successes < total else 1.0
    return low, high


@dataclass(frozen=True)
class Proportion:
    """A count out of a total, with its exact 95 % interval."""

    successes: int
    total: int

    def __post_init__(self) -> None:
        """A proportion of nothing is an error here, so that it can never be shown as zero."""
        clopper_pearson(self.successes, self.total)

    @classmethod
    def of(cls, outcomes: NDArray[np.bool_]) -> "Proportion":
        """The share of true entries."""
        return cls(int(np.count_nonzero(outcomes)), int(outcomes.size))

    @property
    def value(self) -> float:
        """The share itself, in [0, 1]."""
        return self.successes / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Clopper-Pearson interval of the true share."""
        return clopper_pearson(self.successes, self.total)


def mean_interval(shares: Sequence[Proportion], confidence: float = 0.95) -> tuple[float, float]:
    """Covers the mean of the true proportions with at least this confidence, however they depend on each other.

    Each has an exact interval whose risk of missing is its part of the whole risk, so that all hold at once;
    runs on the same test images need not be independent. For one proportion it is the Clopper-Pearson interval.
    """
    if not shares:
        raise InvalidInput("a mean needs at least one proportion")
    each = 1 - (1 - confidence) / len(shares)
    ends = [clopper_pearson(share.successes, share.total, each) for share in shares]
    return fmean(low for low, _ in ends), fmean(high for _, high in ends)


@dataclass(frozen=True)
class Violation:
    """One image on which two pieces of evidence contradict each other."""

    index: int
    claim: str


@dataclass(frozen=True)
class Bracket:
    """Accuracies on the same images; sound evidence has certified <= empirical <= clean on each of them."""

    clean: Proportion
    empirical: Proportion
    certified: Proportion
    violations: tuple[Violation, ...]

    @property
    def holds(self) -> bool:
        """True when no image contradicts the order."""
        return not self.violations


BROKEN_CERTIFICATE = "certified, but the attack changed the prediction"
BROKEN_CLEAN = "counted as withstanding the attack, but wrong without any attack"
WRONG_CERTIFIED = "certified, but the clean prediction is wrong"


def bracket(
    index: NDArray[np.int64],
    clean: NDArray[np.bool_],
    withstood: NDArray[np.bool_],
    certified: NDArray[np.bool_],
) -> Bracket:
    """The three accuracies on one set of images, with every image that breaks their order named."""
    checks = (
        (certified & ~clean, WRONG_CERTIFIED),
        (certified & clean & ~withstood, BROKEN_CERTIFICATE),
        (withstood & ~clean, BROKEN_CLEAN),
    )
    violations = tuple(Violation(int(image), claim) for broken, claim in checks for image in index[broken])
    return Bracket(Proportion.of(clean), Proportion.of(withstood), Proportion.of(certified), violations)
