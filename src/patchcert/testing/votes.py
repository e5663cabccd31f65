"""What a condition on votes promises: it proves a label exactly where no assignment of touched votes takes it away."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from patchcert.certificates.votes import CellScores, Ties, Touched, sum_totals, winners
from patchcert.tensors import Labels
from patchcert.testing.conformance import ConformanceReport, require, run_checks

CELLS, CLASSES = 4, 3
TIES: tuple[Ties, ...] = ("lowest", "abstain")

VoteCondition = Callable[[CellScores, Labels, Touched, Ties], Annotated[Tensor, "n p"]]
"""Of votes (n, classes, cells) that are 0 or 1, labels and the cells that each placement touches: what is proven."""


@dataclass(frozen=True)
class ConditionUnderTest:
    """A condition on votes, and whether it claims to be exact."""

    is_proven: VoteCondition
    exact: bool = True

    def require_brute_force(
        self, maps: CellScores, choices: Annotated[Tensor, "choices k"], what: str
    ) -> None:
        """Require that of every map, label, set of cells and rule for ties the condition says what trying all does."""
        touched = _all_sets()
        for ties in TIES:
            kept = torch.stack([_survivors(maps, cells, choices, ties) for cells in touched], dim=1)  # n p k
            for label in range(CLASSES):
                labels = torch.full((len(maps),), label)
                found = self.is_proven(maps, labels, touched, ties)
                for place, cells in enumerate(touched):
                    case = f"{what}, label {label}, ties {ties}, {_words(cells)}"
                    self._require(found[:, place], kept[:, place, label], maps, case)

    def _require(self, found: Tensor, kept: Tensor, maps: CellScores, what: str) -> None:
        unsound, missed = found & ~kept, ~found & kept
        if unsound.any():
            first = maps[unsound][0].int().tolist()
            require(False, f"{what}: {first} is proven, but an assignment takes the label away")
        if self.exact and missed.any():
            first = maps[missed][0].int().tolist()
            require(False, f"{what}: {first} is not proven, though no assignment takes the label away")


def single_votes_are_proven_exactly(subject: ConditionUnderTest) -> None:
    """Where a cell casts one vote or none, on every map of four cells and three classes."""
    choices = torch.cat([torch.zeros(1, CLASSES), torch.eye(CLASSES)]).double()
    subject.require_brute_force(_maps(choices), choices, "single votes")


def several_votes_are_proven_exactly(subject: ConditionUnderTest) -> None:
    """Where a cell may vote for several classes, on a sample of such maps."""
    choices = torch.tensor(list(itertools.product((0.0, 1.0), repeat=CLASSES)), dtype=torch.float64)
    maps = _maps(choices)
    subject.require_brute_force(maps[::31], choices, "several votes")


VOTE_CHECKS: tuple[Callable[[ConditionUnderTest], None], ...] = (
    single_votes_are_proven_exactly,
    several_votes_are_proven_exactly,
)


def check_votes(
    is_proven: VoteCondition,
    *,
    exact: bool = True,
    checks: Sequence[Callable[[ConditionUnderTest], None]] = VOTE_CHECKS,
) -> ConformanceReport:
    """Raise a ConformanceError unless a condition on votes proves what brute force over all assignments leaves.

    `is_proven` takes votes (n, classes, cells) of 0 or 1, labels (n,), the cells that each placement touches
    (placements, cells) and the rule for ties, and gives bool (n, placements). Most votes win. A condition that is sound
    but asks for more than it must is tried with `exact=False`.
    """
    name = getattr(is_proven, "__name__", type(is_proven).__name__)
    return run_checks(f"votes {name}", ConditionUnderTest(is_proven, exact), checks)


def _all_sets() -> Touched:
    """Every set of at most two cells, and one of three."""
    sizes = [*itertools.combinations(range(CELLS), 1), *itertools.combinations(range(CELLS), 2), (0, 1, 2)]
    sets = [(), *sizes]
    return torch.stack([torch.tensor([cell in chosen for cell in range(CELLS)]) for chosen in sets])


def _maps(choices: Annotated[Tensor, "choices k"]) -> CellScores:
    """Every map whose cells make one of the choices each."""
    picks = torch.cartesian_prod(*[torch.arange(len(choices))] * CELLS)
    return choices[picks].mT


def _survivors(
    maps: CellScores, cells: Annotated[Tensor, "cells"], choices: Annotated[Tensor, "choices k"], ties: Ties
) -> Annotated[Tensor, "n k"]:
    """Which labels win on each map, whatever the touched cells choose."""
    kept = torch.ones(len(maps), CLASSES, dtype=torch.bool)
    for picks in itertools.product(range(len(choices)), repeat=int(cells.sum())):
        changed = maps.clone()
        changed[:, :, cells] = choices[list(picks)].T
        kept &= winners(sum_totals(changed), ties)[:, None] == torch.arange(CLASSES)
    return kept


def _words(cells: Annotated[Tensor, "cells"]) -> str:
    return f"cells {cells.nonzero().flatten().tolist()} touched"
