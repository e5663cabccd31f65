"""Double masking of cells: what is proven survives all that touched cells can do, and equals the slow condition."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import patchcert as pc
from patchcert.certificates import ABSTAINED
from patchcert.certificates.votes import (
    UNITS,
    Scores,
    cell_scores,
    doubly_masked_margins,
    doubly_masked_winners,
    is_won,
    masked_margins,
    slow_doubly_masked_margins,
    sum_margins,
    winners,
)
from patchcert.errors import InvalidInput
from patchcert.testing.conformance import seeded

CELLS, CLASSES = 6, 3
ties_rules = st.sampled_from(["lowest", "abstain"])


def exact(values, most):
    return Scores(values, values, values, most)


def drawn_case(seed, largest=4):
    """Scores of three images, windows that leave cells over, and placements inside windows and elsewhere."""
    generator = seeded(seed)
    values = torch.randint(0, largest + 1, (3, CLASSES, CELLS), generator=generator).double()
    windows = torch.zeros(4, CELLS, dtype=torch.bool)
    for row, start in enumerate(torch.randint(0, CELLS - 1, (4,), generator=generator).tolist()):
        windows[row, start : start + 2] = True
    inside = windows & (torch.rand(4, CELLS, generator=generator) < 0.7)
    touched = torch.cat([inside, torch.rand(2, CELLS, generator=generator) < 0.3])
    return values, torch.randint(0, CLASSES, (3,), generator=generator), windows, touched


def written_rule(values, windows, ties):
    """The prediction for one image, by the rule of double masking as docs/concepts/masking.md writes it."""

    def said(one, other):
        return int(winners(values[:, ~(one | other)].sum(dim=1), ties))

    alone = [said(window, window) for window in windows]
    counts = [alone.count(label) for label in range(ABSTAINED, CLASSES)]
    frequent = counts.index(max(counts)) + ABSTAINED
    for label, window in zip(alone, windows, strict=True):
        if label != frequent and all(said(window, second) == label for second in windows):
            return label
    return frequent


@given(st.integers(0, 10**6), ties_rules)
def test_it_predicts_by_the_rule_of_double_masking(seed, ties):
    values, _, windows, _ = drawn_case(seed, largest=2)
    found, counts = doubly_masked_winners(values, windows, ties)
    assert found.tolist() == [written_rule(image, windows, ties) for image in values]
    assert (counts.sum(dim=1) <= len(windows)).all()


@given(st.integers(0, 10**6), ties_rules)
def test_what_is_proven_survives_all_that_touched_cells_can_do(seed, ties):
    values, labels, windows, touched = drawn_case(seed)
    proven = is_won(doubly_masked_margins(exact(values, 4), labels, touched, windows, ties), labels, ties)
    picks = list(itertools.product((0.0, 1.0, 50.0), repeat=CLASSES))
    choices = torch.tensor(picks, dtype=torch.float64).T  # classes, picks
    for image, place in proven.nonzero().tolist():
        cells = touched[place].nonzero().flatten().tolist()
        for one, other in itertools.product(range(len(picks)), repeat=2):
            attacked = values[image].clone()
            attacked[:, cells[:1]], attacked[:, cells[1:]] = choices[:, [one]], choices[:, [other]]
            found, _ = doubly_masked_winners(attacked[None], windows, ties)
            assert found[0] == labels[image]


@given(st.integers(0, 10**6), ties_rules)
def test_fast_margins_prove_what_the_slow_condition_proves(seed, ties):
    values, labels, windows, touched = drawn_case(seed)
    scores = Scores(values, values, values + torch.randint(0, 2, values.shape, generator=seeded(seed + 1)), 5)
    fast = doubly_masked_margins(scores, labels, touched, windows, ties)
    slow = slow_doubly_masked_margins(scores, labels, touched, windows, ties)
    assert torch.equal(is_won(fast, labels, ties), is_won(slow, labels, ties))
    others = torch.arange(CLASSES) != labels[:, None, None]
    assert torch.equal(fast.where(others, torch.inf).amin(dim=2), slow.where(others, torch.inf).amin(dim=2))


@given(st.integers(0, 10**6), ties_rules)
def test_it_proves_all_that_sums_and_masked_sums_prove(seed, ties):
    """Of a patch that touches a window, and of windows of one size: no lazy condition would do."""
    values, labels, windows, _ = drawn_case(seed)
    scores = exact(values, 4)
    double = is_won(doubly_masked_margins(scores, labels, windows, windows, ties), labels, ties)
    for margins in (sum_margins(scores, labels, windows), masked_margins(scores, labels, windows, windows)):
        assert not (is_won(margins, labels, ties) & ~double).any()


def test_nothing_is_proven_where_no_window_holds_what_the_patch_touches():
    values = torch.zeros(1, CLASSES, CELLS, dtype=torch.float64)
    values[0, 1] = 9
    windows, touched = torch.eye(CELLS, dtype=torch.bool)[:3], torch.eye(CELLS, dtype=torch.bool)
    touched[0, 1] = True
    margins = doubly_masked_margins(exact(values, 9), torch.tensor([1]), touched, windows, "lowest")
    assert is_won(margins, torch.tensor([1]), "lowest").tolist() == [[False, True, True, False, False, False]]


def test_scores_of_logits_are_what_exceeds_the_least_and_move_twice_as_far():
    logits = torch.tensor([[[1.0], [-2.0], [4.0]]])
    scores = cell_scores(logits, "logits", slack=2**-10)
    distance = 2**-10 / 2 * 4
    assert scores.values.flatten().tolist() == [3 * UNITS, 0, 6 * UNITS]
    assert scores.lower[0, 2, 0] == (6 - 2 * distance) * UNITS
    assert scores.upper[0, 1, 0] == 2 * distance * UNITS
    broken = cell_scores(logits.index_fill(1, torch.tensor([0]), torch.nan), "logits", slack=0.0)
    assert broken.values.abs().max() == 0
    assert (broken.upper == broken.most).all()


class Strips(nn.Module):
    """Scores of single columns: what is red speaks for class 0, green for 1 and blue for 2."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.AvgPool2d((8, 1))

    def forward(self, images):
        return self.mean(images)


def test_images_are_proven_mapped_and_attacked_by_the_deployed_rule():
    votes = pc.LocalVotes(Strips().eval(), aggregation="double-masked", scores="logits", masked=2)
    images = torch.zeros(2, 3, 8, 8)
    images[0, 1] = 1  # all columns are green
    images[1, 2, :, :5], images[1, 0, :, 5:] = 1, 1  # five are blue, and three red
    labels = torch.tensor([1, 2])
    assert votes.predict(images).tolist() == [1, 2]
    found = votes.certify(images, labels, pc.Patch(2))
    assert found.certified.tolist() == [True, False]
    assert found.placements is not None
    assert found.placements[0].all()
    # Behind two red columns and two blue ones three are blue and one is red; behind four blue ones most are red.
    assert found.placements[1].unflatten(0, (7, 7))[0].tolist() == [False] * 5 + [True] * 2
    attack = pc.PatchAttack(steps=20, step_size=0.2, restarts=4).run(votes, images, labels, pc.Patch(2))
    assert not (attack.succeeded & found.certified).any()


def test_settings_that_do_not_fit_double_masking_are_refused():
    model = Strips().eval()
    with pytest.raises(InvalidInput, match="leave out what a patch of `masked` pixels"):
        pc.LocalVotes(model, aggregation="double-masked")
    with pytest.raises(InvalidInput, match="does not ask what touched cells can give"):
        pc.LocalVotes(model, aggregation="double-masked", scores="clipped", masked=2, bounded=True)
    with pytest.raises(InvalidInput, match="can be moved anywhere by one cell"):
        pc.LocalVotes(model, scores="logits")


@pytest.mark.parametrize(
    ("predictions", "votes", "ties", "is_contradicted"),
    [
        ([0, 1], [[3, 0, 1], [0, 4, 0]], "lowest", False),
        ([2, 1], [[3, 0, 1], [0, 4, 0]], "lowest", False),  # one window may outdo the others
        ([0, 2], [[3, 0, 1], [0, 4, 0]], "lowest", True),
        ([0, -1], [[3, 0, 1], [0, 4, 0]], "lowest", True),
        ([0, 1], [[3, 0, 1], [0, 3, 0]], "lowest", True),
        ([0, 1], [[3, 0, 1], [-1, 5, 0]], "lowest", True),
        ([0, -1], [[3, 0, 1], [0, 1, 0]], "abstain", False),
        ([0, -7], [[3, 0, 1], [0, 1, 0]], "abstain", True),
    ],
)
def test_predictions_follow_from_windows_that_vote(predictions, votes, ties, is_contradicted):
    meta = {"classifier": {"aggregation": "double-masked", "ties": ties}}
    columns = {"votes": np.array(votes), "prediction": np.array(predictions)}
    assert bool(pc.LocalVotes.contradiction(columns, meta)) == is_contradicted
