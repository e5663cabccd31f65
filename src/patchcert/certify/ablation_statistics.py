"""The counting behind Random Ablation: how often a change is seen, and what votes prove."""

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from patchcert.errors import InvalidInput

ABSTAINED = -1


def seen_probability(pixels: int, retained: int, changed: int) -> Fraction:
    """The exact chance that at least one of `changed` pixels is among the `retained` of all `pixels`."""
    if not (0 < retained <= pixels and 0 <= changed <= pixels):
        raise InvalidInput(
            f"ablation needs 0 < retained <= pixels and 0 <= changed <= pixels, got {retained} retained and "
            f"{changed} changed of {pixels}",
            hint="MNIST uses 45 of 784, CIFAR-10 75 of 1024",
        )
    unseen = Fraction(1)
    for index in range(changed):
        unseen *= Fraction(max(pixels - retained - index, 0), pixels - index)
    return 1 - unseen


def certified_radius(probability: NDArray[np.float64], pixels: int, retained: int) -> NDArray[np.int64]:
    """The largest number of changed pixels that leave a class of this probability in the lead.

    Changing r pixels moves the probability by at most `seen_probability(r)`, so the class leads while the
    probability less that exceeds 1/2. Is -1 where not even the unchanged image has a proven majority.
    """
    thresholds = []
    for changed in range(pixels + 1):
        needed = Fraction(1, 2) + seen_probability(pixels, retained, changed)
        if needed >= 1:
            break
        thresholds.append(math.nextafter(float(needed), 1.0))  # rounding must not add a pixel
    return np.searchsorted(np.asarray(thresholds), probability, side="left") - 1


def probability_lower_bound(
    votes: NDArray[np.integer], samples: int, error_rate: float
) -> NDArray[np.float64]:
    """Clopper and Pearson's one-sided bound: the probability is below it in at most `error_rate` of cases."""
    bound = stats.beta.ppf(error_rate, np.maximum(votes, 1), samples - votes + 1)
    return np.where(votes > 0, bound, 0.0)


def is_decided(
    first: NDArray[np.integer], second: NDArray[np.integer], error_rate: float
) -> NDArray[np.bool_]:
    """Whether a fair coin splits the two leading classes' votes so unevenly with a chance of at most that."""
    both = first + second
    chance = np.minimum(2 * stats.binom.sf(np.maximum(first, second) - 1, both, 0.5), 1.0)
    return chance <= error_rate


def decided_class(votes: NDArray[np.integer], error_rate: float) -> NDArray[np.int64]:
    """The class that leads the votes (n, classes), or ABSTAINED where that could be chance (`is_decided`)."""
    second, first = np.partition(votes.astype(np.int64), -2, axis=1)[:, -2:].T
    return np.where(is_decided(first, second, error_rate), votes.argmax(axis=1), ABSTAINED)
