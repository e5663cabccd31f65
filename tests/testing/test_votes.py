"""The suite accepts the conditions of the package, and refuses those that are too strong or too weak."""

import pytest
import torch

from patchcert.certificates.votes import (
    Scores,
    bounded_margins,
    is_won,
    is_won_by_count,
    slow_margins,
    sum_margins,
)
from patchcert.testing import ConformanceError, check_votes


def exact(votes):
    return Scores(votes, votes, votes, 1)


def by_margins(votes, labels, touched, ties):
    return is_won(sum_margins(exact(votes), labels, touched), labels, ties)


def by_bounds(votes, labels, touched, ties):
    """Touched cells bounded by all that a vote can be."""
    found = []
    for cells in touched:
        limits = Scores(votes, votes.masked_fill(cells, 0.0), votes.masked_fill(cells, 1.0), 1)
        found.append(is_won(bounded_margins(limits, labels), labels, ties))
    return torch.stack(found, dim=1)


def by_count(votes, labels, touched, ties):
    return torch.stack([is_won_by_count(exact(votes), labels, cells[None], ties) for cells in touched], dim=1)


@pytest.mark.parametrize("condition", [by_margins, by_bounds])
def test_exact_conditions_conform(condition):
    assert not check_votes(condition).failures


def test_the_slow_reference_conforms_on_some_maps():
    def slow(votes, labels, touched, ties):
        few = slow_margins(exact(votes[::40]), labels[::40], touched)
        found = by_margins(votes, labels, touched, ties)
        found[::40] = is_won(few, labels[::40], ties)
        return found

    check_votes(slow)


def test_the_classical_count_is_sound_but_not_exact():
    check_votes(by_count, exact=False)
    with pytest.raises(ConformanceError, match="is not proven, though no assignment takes the label away"):
        check_votes(by_count)


def test_a_condition_that_forgets_ties_is_refused():
    def careless(votes, labels, touched, ties):
        margins = sum_margins(exact(votes), labels, touched)
        return (margins >= 0).all(dim=2)

    with pytest.raises(ConformanceError, match="is proven, but an assignment takes the label away"):
        check_votes(careless, exact=False)


def test_a_condition_that_forgets_what_touched_cells_can_give_is_refused():
    def careless(votes, labels, touched, ties):
        kept = votes[:, :, None] * ~touched
        margins = kept.sum(dim=3).mT
        own = margins.gather(2, labels[:, None, None].expand(-1, len(touched), 1))
        return is_won(own - margins, labels, ties)

    with pytest.raises(ConformanceError, match="single_votes_are_proven_exactly"):
        check_votes(careless, exact=False)
