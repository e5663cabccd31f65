"""Which of several seeds counts: the one whose mean training loss in the last epoch is least.

No test image has a part in it. The decision and its reasons are in docs/decisions/0006-which-seed-counts.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from statistics import fmean

from patchcert.papers.chiang2020.counts import RunOutcome

BySeed = Mapping[int, RunOutcome]


@dataclass(frozen=True, slots=True)
class Choice:
    """One run of each model, and the seeds passed over; `unknown` is one whose loss the choice would need."""

    runs: tuple[RunOutcome, ...]
    passed_over: tuple[RunOutcome, ...] = ()
    unknown: RunOutcome | None = None


def by_model(tried: Sequence[BySeed], limit: int | None = None) -> Choice | None:
    """Of each model by itself the best of its first seeds; None unless every model has one."""
    listed = [[by_seed[seed] for seed in sorted(by_seed)[:limit]] for by_seed in tried]
    if not all(listed):
        return None
    return _choice([[(run,) for run in runs] for runs in listed])


def by_whole_seed(tried: Sequence[BySeed], limit: int | None = None) -> Choice | None:
    """The best of the first seeds that all models have, by their mean loss.

    Behind a defense the models of a row share the setting that trials with their own seed gave.
    """
    common = set.intersection(*(set(by_seed) for by_seed in tried))
    groups = [tuple(by_seed[seed] for by_seed in tried) for seed in sorted(common)[:limit]]
    return _choice([groups]) if groups else None


def _choice(contests: Sequence[Sequence[tuple[RunOutcome, ...]]]) -> Choice:
    """Of each contest the group of runs with the least mean loss; of equal ones the first."""
    runs = tuple(run for groups in contests for run in min(groups, key=_loss))
    contested = [run for groups in contests if len(groups) > 1 for group in groups for run in group]
    passed_over = tuple(run for run in contested if run not in runs)
    unknown = next((run for run in contested if run.training_loss is None), None)
    return Choice(runs, passed_over, unknown)


def _loss(runs: Sequence[RunOutcome]) -> float:
    """Infinite where a loss is not on record, or is no number."""
    mean = fmean(inf if run.training_loss is None else run.training_loss for run in runs)
    return inf if isnan(mean) else mean
