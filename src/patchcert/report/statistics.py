"""How sure a measured accuracy is: exact binomial intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from patchcert.errors import InvalidInput
from patchcert.evidence import Evidence


def clopper_pearson(successes: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact binomial interval: it covers the true proportion with at least this confidence."""
    _check_counts(successes, total)
    if not 0 < confidence < 1:
        raise InvalidInput(f"confidence must lie strictly between 0 and 1, got {confidence}")
    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, successes, total - successes + 1)) if successes > 0 else 0.0
    high = float(beta.ppf(1 - tail, successes + 1, total - successes)) if successes < total else 1.0
    return low, high


def _check_counts(successes: int, total: int) -> None:
    if total < 1 or not 0 <= successes <= total:
        raise InvalidInput(
            f"a proportion needs 0 <= successes <= total and total >= 1, got {successes} of {total}"
        )


@dataclass(frozen=True)
class Proportion:
    """A count out of a total, with its exact 95 % interval."""

    successes: int
    total: int

    def __post_init__(self) -> None:
        """A proportion of nothing is an error here, so that it can never be shown as zero."""
        _check_counts(self.successes, self.total)

    @classmethod
    def of(cls, outcomes: NDArray[np.bool_]) -> "Proportion":
        """The share of true entries."""
        return cls(int(np.count_nonzero(outcomes)), int(outcomes.size))

    @property
    def value(self) -> float:
        """The share itself, in [0, 1]."""
        return self.successes / self.total

    @property
    def percent(self) -> float:
        """The share in per cent."""
        return 100 * self.successes / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Clopper-Pearson interval of the true share."""
        return clopper_pearson(self.successes, self.total)

    def to_dict(self) -> dict[str, Any]:
        """The proportion in plain types, for programs."""
        return {
            "accuracy": self.value,
            "interval": list(self.interval),
            "images": self.total,
            "right": self.successes,
        }


def accuracies(total: int, **counts: int) -> dict[str, Any]:
    """Of each count NAME_accuracy, its share of the total, with NAME_interval; null where the total is 0."""
    shares = {name: Proportion(count, total) if total else None for name, count in counts.items()}
    return {
        key: value
        for name, share in shares.items()
        for key, value in (
            (f"{name}_accuracy", share and share.value),
            (f"{name}_interval", share and list(share.interval)),
        )
    }


def summarise(evidence: Evidence) -> dict[str, Any]:
    """What a command prints of evidence: its counts, its circumstances, and its file."""
    file = None if evidence.path is None else str(evidence.path)
    return {**count(evidence), **evidence.meta, "evidence": file}


def count(evidence: Evidence) -> dict[str, Any]:
    """Counts of images, and shares with exact 95 % intervals; of an attack also how many gradient steps it took."""
    total, right = evidence.total, evidence.correct
    counts = {"images": total, "correct": right}
    if evidence.kind == "certify":
        proven, refuted = evidence.certified, evidence.broken
        counts["certified"] = proven
        if refuted is not None:
            counts |= {"broken": refuted, "open": right - proven - refuted}
        return {**counts, **accuracies(total, clean=right, certified=proven)}
    broken = evidence.broken_rows & evidence.right_rows
    return {
        **counts,
        "withstood": evidence.withstood,
        "broken": int(broken.sum()),
        **accuracies(total, clean=right, attacked=evidence.withstood),
        "gradient_steps": int(evidence.columns["steps"].sum()),
    }


def in_words(evidence: Evidence) -> str:
    """The result of evidence for people, in a line."""
    total, right = evidence.total, evidence.correct
    if not total:
        return "no images, so there is no result"
    if evidence.kind == "attack":
        held = Proportion(evidence.withstood, total)
        return (
            f"of {total} images {right} are right and {evidence.withstood} withstood the attack, "
            f"{_percent(held)}: the truth is at most that"
        )
    proven = Proportion(evidence.certified, total)
    refuted = "" if evidence.broken is None else f", {evidence.broken} broken"
    alert = "" if evidence.guarantee.promise == "recovery" else " or an alert"
    return (
        f"of {total} images {right} are right and {evidence.certified} proven{alert}{refuted}, "
        f"{_percent(proven)}, against {evidence.threat}"
    )


def _percent(share: Proportion) -> str:
    low, high = share.interval
    return f"{share.percent:.1f} % (95 % interval {100 * low:.1f} to {100 * high:.1f})"


def mean_interval(shares: Sequence[Proportion]) -> tuple[float, float]:
    """Covers the mean of the true proportions with a confidence of at least 95 %, however they depend on each other.

    Each has an exact interval whose risk of missing is its part of the whole risk, so that all hold at once;
    runs on the same test images need not be independent. For one proportion it is the Clopper-Pearson interval.
    """
    if not shares:
        raise InvalidInput("a mean needs at least one proportion")
    each = 1 - 0.05 / len(shares)
    ends = [clopper_pearson(share.successes, share.total, each) for share in shares]
    return fmean(low for low, _ in ends), fmean(high for _, high in ends)
