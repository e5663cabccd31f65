"""The conditions of votes against brute force: over all that touched cells can do, and over their slow references.

tests/testing/test_votes.py holds those of sums to all that touched votes can do.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchcert.certificates import ABSTAINED
from patchcert.certificates.votes import (
    LARGEST,
    UNITS,
    Scores,
    bounded_margins,
    cell_scores,
    is_won,
    is_won_by_count,
    masked_margins,
    masked_totals,
    maximal,
    proven_placements,
    scores_between,
    slow_margins,
    sum_margins,
    sum_totals,
    winners,
)
from patchcert.errors import InvalidInput

CELLS, CLASSES = 5, 3


def exact(values, most=1):
    values = torch.as_tensor(values, dtype=torch.float64)
    return Scores(values, values, values, most)


def survives(values, cells, choices, label, ties, windows=None):
    """Whether the label wins for every choice in every touched cell."""
    where = cells.nonzero().flatten().tolist()
    changed = []
    for picks in itertools.product(choices, repeat=len(where)):
        votes = values.clone()
        for cell, pick in zip(where, picks, strict=True):
            votes[:, cell] = pick
        changed.append(votes)
    stacked = torch.stack(changed)
    totals = sum_totals(stacked) if windows is None else masked_totals(stacked, windows)
    return bool((winners(totals, ties) == label).all())


cell_sets = st.sets(st.integers(0, CELLS - 1), max_size=3)
ties_rules = st.sampled_from(["lowest", "abstain"])


def mask(chosen):
    return torch.tensor([cell in chosen for cell in range(CELLS)])


def one_hot(chosen):
    values = torch.zeros(CLASSES, CELLS, dtype=torch.float64)
    for cell, label in enumerate(chosen):
        if label >= 0:
            values[label, cell] = 1
    return values


whole_scores = st.lists(st.integers(0, 4), min_size=2 * CELLS, max_size=2 * CELLS)
window_sets = st.lists(st.sets(st.integers(0, CELLS - 1), min_size=1, max_size=3), min_size=1, max_size=4)


@given(whole_scores, window_sets, st.data(), st.integers(0, 1), ties_rules)
def test_masked_sums_are_proven_exactly_where_extreme_scores_leave_the_label(
    scores, chosen, data, label, ties
):
    """With scores up to far more than all clean ones together; the patch touches a window, or a part of one."""
    values = torch.tensor(scores, dtype=torch.float64).view(2, CELLS)
    windows = torch.stack([mask(each) for each in chosen])
    window = data.draw(st.sampled_from(chosen))
    cells = mask(data.draw(st.sets(st.sampled_from(sorted(window)), min_size=1)))
    labels, huge = torch.tensor([label]), 1000.0
    margins = masked_margins(exact(values[None], 1000), labels, cells[None], windows)
    proven = bool(is_won(margins, labels, ties)[0, 0])
    choices = [torch.tensor(pair, dtype=torch.float64) for pair in itertools.product((0.0, huge), repeat=2)]
    assert proven == survives(values, cells, choices, label, ties, windows)


def test_masked_sums_prove_nothing_where_no_window_holds_what_the_patch_touches():
    values = torch.tensor([[[9.0] * CELLS, [0.0] * CELLS]], dtype=torch.float64)
    windows = torch.stack([mask({0}), mask({1}), mask({2, 3})])
    margins = masked_margins(
        exact(values, 9), torch.tensor([0]), torch.stack([mask({0, 1}), mask({1})]), windows
    )
    assert is_won(margins, torch.tensor([0]), "lowest").tolist() == [[False, True]]


@given(st.integers(0, 10**6))
def test_fast_margins_equal_their_slow_reference(seed):
    generator = torch.Generator().manual_seed(seed)
    lower = torch.randint(0, 5, (3, CLASSES, CELLS), generator=generator).double()
    upper = lower + torch.randint(0, 2, lower.shape, generator=generator)
    scores, labels = Scores(lower, lower, upper, 6), torch.tensor([0, 2, 1])
    touched = torch.rand(7, CELLS, generator=generator) < 0.4
    windows = torch.rand(5, CELLS, generator=generator) < 0.6
    assert torch.equal(sum_margins(scores, labels, touched), slow_margins(scores, labels, touched))
    fast, slow = (
        masked_margins(scores, labels, touched, windows),
        slow_margins(scores, labels, touched, windows),
    )
    assert torch.equal(fast, slow)


@given(st.integers(0, 10**6), ties_rules)
def test_the_classical_count_proves_no_more(seed, ties):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2, (40, 2, 9), generator=generator).double()
    values[:20, 0] = 1
    labels = torch.randint(0, 2, (40,), generator=generator)
    touched = torch.rand(6, 9, generator=generator) < 0.3
    counted = is_won_by_count(exact(values), labels, touched, ties)
    proven = is_won(sum_margins(exact(values), labels, touched), labels, ties).all(dim=1)
    assert not (counted & ~proven).any()


def test_the_classical_count_misses_what_each_placement_proves():
    values = one_hot([0, 0, 0, 1, 1])[None]
    touched, labels = torch.stack([mask({3}), mask({4})]), torch.tensor([0])
    assert is_won(sum_margins(exact(values), labels, touched), labels, "lowest").all()
    assert not is_won_by_count(exact(values), labels, touched, "lowest").any()


@given(st.integers(0, 10**6))
def test_windows_inside_others_change_no_masked_sum(seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 9, (4, CLASSES, CELLS), generator=generator).double()
    windows = torch.rand(8, CELLS, generator=generator) < 0.5
    kept = maximal(windows)
    assert torch.equal(masked_totals(values, windows), masked_totals(values, kept))
    for one, other in itertools.permutations(kept, 2):
        assert (one & ~other).any()


def test_ties_go_to_the_lowest_index_or_to_none():
    totals = torch.tensor([[2, 2, 1], [0, 0, 0], [1, 3, 3], [1, 2, 0]]).double()
    assert winners(totals, "lowest").tolist() == [0, 0, 1, 1]
    assert winners(totals, "abstain").tolist() == [ABSTAINED, ABSTAINED, ABSTAINED, 1]


def test_many_images_are_looked_at_in_parts(monkeypatch):
    monkeypatch.setattr("patchcert.certificates.votes._MARGINS_AT_ONCE", 1)
    values = torch.stack([one_hot([0, 0, 0, 1, 2]), one_hot([0, 1, 0, 1, 2])])
    touched, labels = torch.stack([mask({0}), mask({3})]), torch.tensor([0, 0])
    found = proven_placements(sum_margins, exact(values), labels, touched, "lowest")
    assert found.tolist() == [[True, True], [False, True]]


@pytest.mark.parametrize(
    ("kind", "expected", "most"),
    [
        ("one-hot", [0, 1, 0], 1),
        ("threshold", [0, 1, 1], 1),
        ("heaviside", [0, 1, 1], 1),
        ("clipped", [0, UNITS, 0.75 * UNITS], UNITS),
        ("positive", [0, 1.5 * UNITS, 0.75 * UNITS], LARGEST * UNITS),
    ],
)
def test_scores_of_each_kind(kind, expected, most):
    logits = torch.tensor([-3.0, 1.5, 0.75]).view(1, 3, 1)
    found = cell_scores(logits, kind, slack=0.0, threshold=0.3)
    assert found.values.flatten().tolist() == expected
    assert found.most == most
    assert torch.equal(found.lower, found.values) or kind == "threshold"


@given(
    st.sampled_from(["one-hot", "threshold", "heaviside", "clipped", "softmax", "positive"]),
    st.integers(0, 10**6),
    st.sampled_from([1e-4, 0.05, 0.5]),
)
def test_scores_stay_within_their_bounds_when_logits_move(kind, seed, slack):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    logits[0, :2] = logits[0, 2]  # level, which any move decides
    found = cell_scores(logits, kind, slack, threshold=0.25)
    most = slack / 2 * logits.abs().amax(dim=(1, 2), keepdim=True)
    for step in (
        torch.rand(logits.shape, generator=generator),
        torch.rand(logits.shape, generator=generator).round(),
    ):
        moved = cell_scores(logits + (2 * step.double() - 1) * most, kind, 0.0, threshold=0.25).values
        assert (found.lower <= moved).all()
        assert (moved <= found.upper).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", ["one-hot", "threshold", "heaviside", "clipped", "softmax", "positive"])
def test_logits_that_are_not_finite_vote_for_nothing_and_count_as_anything(kind, value):
    logits = torch.tensor([[[5.0, value], [1.0, 2.0]]])
    found = cell_scores(logits, kind, 1e-4, threshold=0.3)
    assert found.values[0, :, 1].tolist() == [0, 0]
    assert found.lower[0, :, 1].tolist() == [0, 0]
    assert found.upper[0, :, 1].tolist() == [found.most, found.most]
    assert found.lower[0, 0, 0] > 0


def test_maps_too_large_for_exact_sums_are_refused():
    with pytest.raises(InvalidInput, match="sums of 70000 scores of up to 68719476736 units are not exact"):
        cell_scores(torch.zeros(1, 2, 70_000), "positive", 0.0)
    assert cell_scores(torch.zeros(1, 2, 70_000), "softmax", 0.0).most == UNITS


def test_sums_of_scores_are_exact():
    values = cell_scores(torch.full((1, 2, 4096), 2.0**21), "positive", 0.0).values
    assert values.sum() == 2 * 4096 * LARGEST * UNITS < 2**53


@given(
    st.sampled_from(["heaviside", "clipped", "positive"]), st.integers(0, 10**6), st.sampled_from([0.0, 0.05])
)
def test_scores_of_logits_between_two_ends_are_bounded_and_the_ends_reached(kind, seed, slack):
    generator = torch.Generator().manual_seed(seed)
    lower = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    upper = lower + torch.rand(lower.shape, generator=generator)
    least, largest = scores_between(lower, upper, kind, slack, UNITS)
    share = torch.rand(lower.shape, generator=generator).double()
    moved = slack / 2 * torch.maximum(lower.abs(), upper.abs()).amax(dim=(1, 2), keepdim=True)
    for logits in (lower - moved, upper + moved, torch.lerp(lower, upper, share)):
        values = cell_scores(logits, kind, 0.0).values
        assert (least <= values).all()
        assert (values <= largest).all()
    assert torch.equal(least, cell_scores(lower - moved, kind, 0.0).values)
    assert torch.equal(largest, cell_scores(upper + moved, kind, 0.0).values)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_bounds_that_are_not_finite_say_nothing(value):
    lower, upper = torch.zeros(1, 2, 2), torch.ones(1, 2, 2)
    upper[0, 1, 0] = value
    least, largest = scores_between(lower, upper, "clipped", 0.0, UNITS)
    assert least[0, :, 0].tolist() == [0, 0]
    assert largest[0, :, 0].tolist() == [UNITS, UNITS]


@given(whole_scores, whole_scores, window_sets, cell_sets, st.integers(0, 1), ties_rules, st.booleans())
def test_bounded_sums_hold_for_every_score_between_the_bounds(
    first, second, chosen, cells, label, ties, masked
):
    """Where no window is left out, all ends are reached at once: then the condition is exact too."""
    one, other = (torch.tensor(each, dtype=torch.float64).view(1, 2, CELLS) for each in (first, second))
    inside, labels = mask(cells), torch.tensor([label])
    lower, upper = torch.minimum(one, other).where(inside, one), torch.maximum(one, other).where(inside, one)
    windows = torch.stack([mask(each) for each in chosen]) if masked else None
    margins = bounded_margins(Scores(one, lower, upper, 4), labels, windows)
    proven = bool(is_won(margins, labels, ties)[0])
    reached = []
    for ends in itertools.product((False, True), repeat=2 * len(cells)):
        values = lower[0].clone()
        values[:, inside] = torch.where(
            torch.tensor(ends, dtype=torch.bool).view(2, len(cells)), upper[0][:, inside], lower[0][:, inside]
        )
        reached.append(values)
    stacked = torch.stack(reached)
    totals = sum_totals(stacked) if windows is None else masked_totals(stacked, windows)
    is_kept = bool((winners(totals, ties) == label).all())
    assert proven <= is_kept
    assert masked or proven == is_kept
