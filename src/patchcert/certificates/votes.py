"""Votes of the parts of an image, and what a patch can make of their counts at each placement, exactly.

A cell is whatever votes on a part of the image: a band, a block, a place of a map of local scores. The conditions,
`sum_margins`, `masked_margins` and `doubly_masked_margins`, are proven in docs/concepts/votes.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, final

import torch
from torch import Tensor

from patchcert.bounds.network import zero_at_label
from patchcert.certificates.classifier import ABSTAINED
from patchcert.errors import InvalidInput
from patchcert.tensors import Images, Labels
from patchcert.threats.patch import Patch, choices

ScoreKind = Literal["one-hot", "threshold", "heaviside", "clipped", "softmax", "positive", "logits"]
"""What a cell gives a class: one vote for its largest logit, a vote for every class whose softmax reaches a threshold
or whose logit is above 0, the logit clipped to [0, 1], the softmax, the logit where it is above 0, or by how much the
logit exceeds the least of the cell's."""
Aggregation = Literal["sum", "masked-sum", "double-masked"]
"""How the scores of cells are put together: `sum_totals`, `masked_totals` or `doubly_masked_winners`."""
Ties = Literal["lowest", "abstain"]
"""Which class wins among those that share the largest count: that of the lowest index, or none."""

UNITS = 2**16
"""Scores that are no votes are whole numbers of 1/65,536, so that their sums are exact."""
LARGEST = 2**20
"""Scores without a limit of their own are cut off here: sums of up to 2^16 cells stay below 2^53, up to which float64
counts exactly."""

UNLIMITED: tuple[ScoreKind, ...] = ("positive", "logits")
"""Scores that are only as large as a network makes them."""

CellScores = Annotated[Tensor, "n k cells"]
Touched = Annotated[Tensor, "p cells"]
"""True where a placement touches what a cell sees."""
CellCounts = Annotated[Tensor, "n k"]
Windows = Annotated[Tensor, "_ cells"]
"""Sets of cells, of which a masked sum leaves out the weightiest, and double masking any two."""
VoteMargins = Annotated[Tensor, "n p k"]


@final
@dataclass(frozen=True, slots=True)
class Scores:
    """What every cell gives every class, in whole units, which float64 holds: between 0 and `most`.

    `values` are what was computed. `lower` and `upper` bound what the same cell gives when it is computed anew in other
    company; where a cell's logits are NaN or infinite they are 0 and `most`, and its values are 0.
    """

    values: CellScores
    lower: CellScores
    upper: CellScores
    most: int

    def of(self, rows: slice | Tensor) -> "Scores":
        """Those of some images."""
        return Scores(self.values[rows], self.lower[rows], self.upper[rows], self.most)


def cell_scores(
    logits: CellScores,
    kind: ScoreKind,
    slack: float,
    threshold: float | None = None,
    sizes: Annotated[Tensor, "n 1 1"] | None = None,
) -> Scores:
    """The scores of logits, and of all logits that differ by at most half the slack times the image's largest one.

    That is the largest absolute value of these logits, or where they come from larger numbers, one of `sizes`.
    """
    logits = logits.double()
    is_finite = logits.isfinite().all(dim=1, keepdim=True)
    logits = logits.where(is_finite, 0.0)
    largest = logits.abs().amax(dim=(1, 2), keepdim=True)
    distance = slack / 2 * (largest if sizes is None else torch.maximum(largest, sizes.double()))
    most = 1 if kind in ("one-hot", "threshold", "heaviside") else UNITS
    most = LARGEST * UNITS if kind in UNLIMITED else most
    _check_exact(logits.shape[2], most)
    values, lower, upper = _bounded_scores(logits, distance, kind, threshold)
    return Scores(
        values=values.double() * is_finite,
        lower=lower.double() * is_finite,
        upper=upper.double().where(is_finite, float(most)),
        most=most,
    )


def _check_exact(cells: int, most: int) -> None:
    """No sum of scores, nor a difference of two, reaches 2^53."""
    if cells * most > 2**52:
        raise InvalidInput(
            f"sums of {cells} scores of up to {most} units are not exact",
            hint="use scores of at most 1, or a network with a smaller map",
        )


def _bounded_scores(
    logits: CellScores, distance: Annotated[Tensor, "n 1 1"], kind: ScoreKind, threshold: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The scores, and bounds of them where each logit moves by the distance."""
    if kind == "one-hot":
        best = logits.argmax(dim=1, keepdim=True)
        one_hot = torch.zeros_like(logits, dtype=torch.bool).scatter(1, best, True)
        first = logits.amax(dim=1, keepdim=True)
        second = logits.masked_fill(one_hot, -torch.inf).amax(dim=1, keepdim=True)
        # The leader falls and another rises, each by the distance.
        return one_hot, one_hot & (first - second > 2 * distance), logits >= first - 2 * distance
    if kind == "heaviside":
        return logits > 0, logits - distance > 0, logits + distance > 0
    if kind in ("clipped", "positive"):
        largest = 1 if kind == "clipped" else LARGEST
        return _whole(logits, largest), _whole(logits - distance, largest), _whole(logits + distance, largest)
    if kind == "logits":
        # Both the logit and the least one move by the distance.
        above = logits - logits.amin(dim=1, keepdim=True)
        ends = (above, above - 2 * distance, above + 2 * distance)
        return _whole(ends[0], LARGEST), _whole(ends[1], LARGEST), _whole(ends[2], LARGEST)
    # Where logits z move by at most d, dp_i = p_i (dz_i - sum p_j dz_j) is at most 2 d p_i (1 - p_i) <= d / 2.
    # 2^-40 is far more than float64 loses in a softmax of some thousand classes.
    softmax, distance = logits.softmax(dim=1), distance / 2 + 2**-40
    if kind == "threshold":
        assert threshold is not None
        return softmax >= threshold, softmax - distance >= threshold, softmax + distance >= threshold
    return _whole(softmax, 1), _whole(softmax - distance, 1), _whole(softmax + distance, 1)


def _whole(scores: Tensor, largest: int) -> Tensor:
    """The scores between 0 and the largest in whole units; rounding never reverses the order of two of them."""
    return (scores.clamp(0, largest) * UNITS).round()


MarginsOf = Callable[[Scores, Labels, Touched], VoteMargins]
"""What a kind of sum proves where placements touch cells: `sum_margins`, or with windows `masked_margins` or
`doubly_masked_margins`."""


def winners(totals: Annotated[Tensor, "... k"], ties: Ties) -> Annotated[Tensor, "..."]:
    """The class of the largest total; of several that of the lowest index, or none."""
    largest = totals.amax(dim=-1, keepdim=True)
    best = (totals == largest).int().argmax(dim=-1)
    if ties == "lowest":
        return best
    return best.where((totals == largest).sum(dim=-1) == 1, ABSTAINED)


def sum_totals(values: CellScores) -> Annotated[Tensor, "n k"]:
    """What all cells give each class together."""
    return values.sum(dim=2)


def masked_totals(values: CellScores, windows: Windows) -> Annotated[Tensor, "n k"]:
    """What all cells give each class, without the window that gives it most."""
    return values.sum(dim=2) - (values @ windows.to(values).T).amax(dim=2)


def touched_cells(threat: Patch, seen: Annotated[Tensor, "pixels ..."], images: Images) -> Touched:
    """Which cells see a pixel that the patch covers, at each of its placements; pixels are counted row by row."""
    covered = threat.placements(*images.shape[2:]).masks(threat.stamp).flatten(1)
    return (covered.float() @ seen.flatten(1).float() > 0).to(images.device)


def sum_margins(scores: Scores, labels: Labels, touched: Touched) -> VoteMargins:
    """The least lead of the label's sum over each class's sum with the patch at each placement; 0 at the label.

    Touched cells give the label nothing and the other class all they can: exact, since a cell may do just that.
    """
    inside = touched.to(scores.lower)
    own = _of(labels, scores.lower)
    kept = own.sum(dim=1, keepdim=True) - own @ inside.T  # n p
    reached = scores.upper.sum(dim=2, keepdim=True) - scores.upper @ inside.T + scores.most * inside.sum(1)
    return zero_at_label(kept.unsqueeze(2) - reached.mT, labels[:, None])


def masked_margins(scores: Scores, labels: Labels, touched: Touched, windows: Windows) -> VoteMargins:
    """The least lead of the label's masked sum over each class's with the patch at each placement; 0 at the label.

    Touched cells give the label nothing. Another class gets no more than what a window that holds all touched cells
    leaves over, however much they give it; where there is no such window, nothing is proven.
    """
    masks, own = windows.to(scores.lower), _of(labels, scores.lower)
    left_over = scores.upper.sum(dim=2, keepdim=True) - scores.upper @ masks.T  # n k windows
    is_held = touched.to(masks) @ (1 - masks).T == 0  # by each of the windows
    margins = []
    for cells, holders in zip(touched, is_held.cpu(), strict=True):
        outside = own * ~cells
        kept = outside.sum(dim=1) - (outside @ masks.T).amax(dim=1)
        reached = torch.full_like(left_over[:, :, 0], torch.inf)
        if bool(holders.any()):
            reached = left_over[:, :, holders.nonzero().flatten().to(labels.device)].amin(dim=2)
        margins.append(kept.unsqueeze(1) - reached)
    return zero_at_label(torch.stack(margins, dim=1), labels[:, None])


def doubly_masked_winners(values: CellScores, windows: Windows, ties: Ties) -> tuple[Labels, CellCounts]:
    """What double masking makes of cells, and for how many windows each class leads in what they leave over.

    It is the class that leads for most windows, unless one of the others leads for some window and stays ahead with
    each second window too. Two such classes would both lead outside of the union of their windows, so there is one.
    """
    left_over = values.sum(dim=2, keepdim=True) - values @ windows.to(values).T
    alone = winners(left_over.mT, ties)
    classes = torch.arange(values.shape[1], device=values.device)
    counts = (alone[:, None, :] == classes[:, None]).to(values).sum(dim=2)
    abstained = (alone == ABSTAINED).sum(dim=1)
    frequent = counts.argmax(dim=1).where(counts.amax(dim=1) > abstained, ABSTAINED)
    found, split = frequent.clone(), (alone != frequent[:, None]).any(dim=1).nonzero().flatten()
    for index in range(len(windows) if len(split) else 0):
        own = alone[split, index]
        said = winners(_outside(values[split], windows, index).mT, ties)
        stays = (said == own[:, None]).all(dim=1)
        found[split] = own.where(stays & (own != frequent[split]), found[split])
    return found, counts


def doubly_masked_margins(
    scores: Scores, labels: Labels, touched: Touched, windows: Windows, ties: Ties
) -> VoteMargins:
    """The least lead of the label behind the best window that holds all touched cells and any second one; 0 at the
    label.

    Such sums hold nothing that the patch touches. Where no window holds all touched cells, nothing is proven. The best
    window is the one behind which the label wins, if there is one, and whose least lead is largest.
    """
    ends = scores.upper.scatter(1, *_rows_of(labels, scores.lower))
    least = torch.stack([_least_leads(ends, labels, windows, index) for index in range(len(windows))], dim=1)
    # In halves of a unit, so that a class which wins a tie against the label asks for one more.
    classes = torch.arange(least.shape[2], device=labels.device)
    wins_ties = (labels[:, None] < classes) & (ties == "lowest")
    strength = 2 * least + torch.where(wins_ties, 1, -1)[:, None, :]
    strength = strength.scatter(2, labels[:, None, None].expand(-1, len(windows), 1), torch.inf).amin(dim=2)
    is_held = touched.to(least) @ (1 - windows.to(least)).T == 0
    margins = []
    for holders in is_held:
        best = strength.masked_fill(~holders, -torch.inf).argmax(dim=1)
        found = least[torch.arange(len(least), device=best.device), best]
        margins.append(found if bool(holders.any()) else torch.full_like(found, -torch.inf))
    return zero_at_label(torch.stack(margins, dim=1), labels[:, None])


def _least_leads(ends: CellScores, labels: Labels, windows: Windows, index: int) -> Annotated[Tensor, "n k"]:
    """The least lead of the label over each class behind this window and any second one."""
    sums = _outside(ends, windows, index)
    own = sums.gather(1, labels[:, None, None].expand(-1, 1, sums.shape[2]))
    return (own - sums).amin(dim=2)


def _outside(values: CellScores, windows: Windows, index: int) -> Annotated[Tensor, "n k windows"]:
    """What cells give each class that lie neither in the window of this index nor in each of the windows."""
    kept = values * ~windows[index]
    return kept.sum(dim=2, keepdim=True) - kept @ windows.to(kept).T


def scores_between(
    lower: CellScores, upper: CellScores, kind: ScoreKind, slack: float, most: int
) -> tuple[CellScores, CellScores]:
    """The least and the largest scores of all logits between these, each moved by at most half the slack times the
    image's largest one; 0 and `most` where that is not finite.

    It is for scores that never fall with their own logit, and do not depend on those of other classes.
    """
    lower, upper = lower.double(), upper.double()
    distance = slack / 2 * torch.maximum(lower.abs(), upper.abs()).amax(dim=(1, 2), keepdim=True)
    lower, upper = lower - distance, upper + distance
    is_finite = (lower.isfinite() & upper.isfinite()).all(dim=1, keepdim=True)
    least, _, _ = _bounded_scores(lower.where(is_finite, 0.0), torch.zeros_like(distance), kind, None)
    _, _, largest = _bounded_scores(upper.where(is_finite, 0.0), torch.zeros_like(distance), kind, None)
    return least.double() * is_finite, largest.double().where(is_finite, float(most))


def bounded_margins(
    scores: Scores, labels: Labels, windows: Windows | None = None
) -> Annotated[Tensor, "n k"]:
    """The least lead of the label's sum, or with windows of its masked sum, over each class's; 0 at the label.

    Every score lies between `lower` and `upper`, also in the cells that the patch touches. Sums and masked sums never
    fall when a score rises, so that these ends decide.
    """
    kept, reached = (
        sum_totals(ends) if windows is None else masked_totals(ends, windows)
        for ends in (scores.lower, scores.upper)
    )
    own = kept.gather(1, labels[:, None])
    return zero_at_label(own - reached, labels)


def _of(labels: Labels, values: CellScores) -> Annotated[Tensor, "n cells"]:
    return values[torch.arange(len(labels), device=labels.device), labels]


def _rows_of(labels: Labels, values: CellScores) -> tuple[Tensor, Tensor]:
    """Where the rows of the labels are, and what they hold, as `scatter` takes them."""
    index = labels[:, None, None].expand(-1, 1, values.shape[2])
    return index, values.gather(1, index)


def maximal(windows: Windows) -> Windows:
    """Each window once, without those inside another: of scores that are not negative none is weightier, and the outer
    one holds whatever they hold."""
    distinct = windows.unique(dim=0)
    counts = distinct.double()
    is_inside = counts @ (1 - counts).T == 0  # of distinct windows, a set is inside itself or a larger one
    return distinct[is_inside.sum(dim=1) == 1]


def is_won(margins: Annotated[Tensor, "n ... k"], labels: Labels, ties: Ties) -> Annotated[Tensor, "n ..."]:
    """Whether the label leads every other class, or is level with it where it wins ties; NaN does not."""
    classes = torch.arange(margins.shape[-1], device=labels.device)
    own = labels.reshape(-1, *[1] * (margins.dim() - 1))
    wins_ties = (own < classes) & (ties == "lowest")
    return ((margins > 0) | ((margins == 0) & wins_ties) | (own == classes)).all(dim=-1)


_SETS_AT_ONCE = 2**12
_MARGINS_AT_ONCE = 2**26
"""Numbers held at once by the margins of some images: half a gigabyte."""


def proven_placements(
    margins_of: MarginsOf, scores: Scores, labels: Labels, touched: Touched, ties: Ties
) -> Annotated[Tensor, "n p"]:
    """At which placements the label wins whatever the patch holds, some images at a time.

    Placements that touch the same cells are looked at once.
    """
    touched, place = touched.unique(dim=0, return_inverse=True)
    size = max(1, _MARGINS_AT_ONCE // (len(touched) * scores.values.shape[1]))
    found = []
    for start in range(0, len(labels), size):
        rows = slice(start, start + size)
        found.append(is_won(margins_of(scores.of(rows), labels[rows], touched), labels[rows], ties))
    return torch.cat(found)[:, place]


def proven_for_several(
    margins_of: MarginsOf,
    scores: Scores,
    labels: Labels,
    touched: Touched,
    ties: Ties,
    patches: int,
) -> Annotated[Tensor, "n"]:
    """Whether the label wins with `patches` patches at any placements: together they touch what each of them does."""
    distinct = touched.unique(dim=0)
    is_proven = torch.ones_like(labels, dtype=torch.bool)
    for some in choices(len(distinct), patches).to(labels.device).split(_SETS_AT_ONCE):
        together = distinct[some].any(dim=1)
        is_proven &= proven_placements(margins_of, scores, labels, together, ties).all(dim=1)
    return is_proven


def is_won_by_count(
    scores: Scores, labels: Labels, touched: Touched, ties: Ties, patches: int = 1
) -> Annotated[Tensor, "n"]:
    """The classical test: a lead of twice the votes of the most cells that any placement touches, for each patch.

    It asks more than `sum_margins`, which looks at the cells of each placement, and proves the same; a reference.
    """
    worst = 2 * patches * scores.most * int(touched.sum(dim=1).max())
    own, others = _of(labels, scores.lower).sum(dim=1), scores.upper.sum(dim=2)
    return is_won(own[:, None] - others - worst, labels, ties)


def slow_margins(
    scores: Scores, labels: Labels, touched: Touched, windows: Windows | None = None
) -> VoteMargins:
    """`sum_margins`, or with windows `masked_margins`, one image, placement and class at a time; a reference."""
    count, classes, _ = scores.values.shape
    margins = scores.lower.new_zeros(count, len(touched), classes)
    for image, label in enumerate(labels.tolist()):
        for place, cells in enumerate(touched):
            for other in set(range(classes)) - {label}:
                own, rival = scores.lower[image, label].clone(), scores.upper[image, other].clone()
                own[cells] = 0
                if windows is None:
                    rival[cells] = scores.most
                    margins[image, place, other] = own.sum() - rival.sum()
                    continue
                held = max((float(own[window].sum()) for window in windows), default=0.0)
                over = [
                    float(rival[~window].sum()) for window in windows if not bool((cells & ~window).any())
                ]
                margins[image, place, other] = own.sum() - held - min(over, default=torch.inf)
    return margins


def slow_doubly_masked_margins(
    scores: Scores, labels: Labels, touched: Touched, windows: Windows, ties: Ties
) -> VoteMargins:
    """`doubly_masked_margins`, one image, placement and pair of windows at a time; a reference."""
    count, classes, _ = scores.values.shape
    margins = scores.lower.new_full((count, len(touched), classes), -torch.inf)
    for image, label in enumerate(labels.tolist()):
        for place, cells in enumerate(touched):
            best = -torch.inf
            for window in windows:
                if bool((cells & ~window).any()):
                    continue
                leads = torch.zeros(classes, dtype=scores.lower.dtype)
                needs = list[float]()
                for other in set(range(classes)) - {label}:
                    own, rival = scores.lower[image, label], scores.upper[image, other]
                    pairs = (float((own - rival)[~(window | second)].sum()) for second in windows)
                    leads[other] = min(pairs)
                    needs.append(float(leads[other]) + (0.5 if ties == "lowest" and label < other else -0.5))
                if min(needs) > best:
                    best, margins[image, place] = min(needs), leads
            margins[image, place, label] = 0
    return margins
