"""Classifiers whose predictions are made of what the parts of an image say: `VoteClassifier`, and what attacks on them
differentiate."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Annotated, Any, final, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.certificates.batches import BatchedClassifier, check_counts
from patchcert.certificates.checks import check_fit, check_images, check_inputs, check_labels
from patchcert.certificates.classifier import (
    ABSTAINED,
    AnyThreat,
    Ballots,
    Certificates,
    Columns,
    first_row,
)
from patchcert.certificates.votes import (
    UNLIMITED,
    Aggregation,
    CellCounts,
    CellScores,
    MarginsOf,
    ScoreKind,
    Scores,
    Ties,
    Touched,
    Windows,
    doubly_masked_margins,
    doubly_masked_winners,
    masked_margins,
    masked_totals,
    maximal,
    proven_for_several,
    proven_placements,
    sum_margins,
    sum_totals,
    winners,
)
from patchcert.errors import InvalidInput
from patchcert.progress import Progress
from patchcert.tensors import Images, Labels
from patchcert.threats import Patch
from patchcert.threats.patch import patch_and_count


class VoteClassifier(BatchedClassifier):
    """Predicts the class that cells give most, and proves it where the cells that a patch does not touch decide.

    Scores are at least 0 and in whole units, so that every sum is exact. `sum` predicts the class with the largest sum.
    `masked-sum` first leaves out, class by class, the window of cells that gives it most; windows are the cells that a
    patch of `masked` pixels (a side, or height and width) can touch. A patch then gains nothing by large scores, which
    need no upper limit. `double-masked` is double masking (`DoubleMasking`) of cells instead of pixels: the class that
    leads in what most windows leave over wins, unless another one leads outside some window, and outside of it and each
    second window too. Sums behind windows that hold all touched cells show nothing of a patch, so that scores need no
    limit either, and of the patch that windows are made for it proves all that the others prove.
    """

    aggregation: Aggregation
    masked: int | tuple[int, int] | None
    ties: Ties
    batch_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(batch_size=self.batch_size)
        for name, kinds in (("aggregation", get_args(Aggregation)), ("ties", get_args(Ties))):
            if getattr(self, name) not in kinds:
                raise InvalidInput(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(kinds)}")
        if (self.aggregation == "sum") != (self.masked is None):
            raise InvalidInput(
                f"aggregation is {self.aggregation!r} with masked={self.masked}: a masked sum and double masking leave "
                "out what a patch of `masked` pixels can touch, a sum nothing",
                hint="give aggregation='double-masked' and masked=5 for patches of 5x5, or neither",
            )
        if self.aggregation == "sum" and self.score_kind in UNLIMITED:
            raise InvalidInput(
                f"a sum of scores without upper limit ({self.score_kind!r}) can be moved anywhere by one cell",
                hint="choose scores with a limit, or aggregation='double-masked'",
            )
        if self.masked is not None:
            Patch(self.masked)

    @property
    @abstractmethod
    def score_kind(self) -> ScoreKind:
        """What a cell gives a class."""

    @abstractmethod
    def local_scores(
        self, images: Images, progress: Progress | None = None, with_probe: bool = False
    ) -> Scores:
        """What every cell gives every class; with a probe of whether that depends on the batch."""

    @abstractmethod
    def touched(self, threat: Patch, images: Images) -> Touched:
        """Which cells see a pixel that the patch covers, at each of its placements."""

    def windows(self, images: Images) -> Windows:
        """The sets of cells of which one or two are left out; part of the classifier, and so kept once found."""
        size = (images.shape[2], images.shape[3])
        if size not in self._windows:
            assert self.masked is not None
            self._windows[size] = maximal(self.touched(Patch(self.masked), images))
        return self._windows[size].to(images.device)

    @cached_property
    def _windows(self) -> dict[tuple[int, int], Windows]:
        return {}

    def decide(self, values: CellScores, images: Images) -> tuple[Labels, CellCounts]:
        """What is predicted of images of this size whose cells give this; and what cells give each class together, or
        for how many windows it leads."""
        if self.aggregation == "double-masked":
            return doubly_masked_winners(values, self.windows(images), self.ties)
        totals = self.totals(values, images)
        return winners(totals, self.ties), totals

    def totals(self, scores: CellScores, images: Images) -> CellCounts:
        """The sum of scores, for a masked sum without the weightiest window."""
        is_masked = self.aggregation == "masked-sum"
        return masked_totals(scores, self.windows(images)) if is_masked else sum_totals(scores)

    def margins_of(self, images: Images) -> MarginsOf:
        """The condition that images of this size are proven by."""
        if self.aggregation == "sum":
            return sum_margins
        windows = self.windows(images)
        if self.aggregation == "masked-sum":
            return partial(masked_margins, windows=windows)
        return partial(doubly_masked_margins, windows=windows, ties=self.ties)

    def predict(self, images: Images, progress: Progress | None = None) -> Labels:
        """What the scores of cells decide."""
        check_images(self.model, images, progress)
        return self.decide(self.local_scores(images, progress).values, images)[0]

    def certify(
        self, images: Images, labels: Labels, threat: AnyThreat, progress: Progress | None = None
    ) -> Certificates:
        """An image is certified if the label wins whatever the cells that a placement touches give to whom."""
        check_inputs(self.model, images, labels, progress)
        check_fit(threat, images)
        patch, patches = self._patch_and_count(threat)
        touched = self.touched(patch, images)
        scores = self.local_scores(images, progress, with_probe=True)
        check_labels(labels, scores.values.shape[1])
        (predictions, totals), placements = self.decide(scores.values, images), None
        is_right, margins_of = predictions == labels, self.margins_of(images)
        if patches == 1:
            proven = proven_placements(margins_of, scores, labels, touched, self.ties)
            placements = proven & is_right[:, None]
            certified = placements.all(dim=1)
        else:
            certified = is_right & proven_for_several(margins_of, scores, labels, touched, self.ties, patches)
        ballots = Ballots(totals.long(), totals.long())
        return Certificates(certified, predictions, labels, placements=placements, ballots=ballots)

    def _patch_and_count(self, threat: AnyThreat) -> tuple[Patch, int]:
        return patch_and_count(
            threat,
            f"{type(self).__name__} certifies against patches, got {threat}: pixels anywhere can touch every vote",
            hint="give patchcert.Patch(5), or use patchcert.RandomAblation",
        )

    @classmethod
    def contradiction(cls, columns: Columns, meta: Mapping[str, Any]) -> str:
        """The prediction of each stored row follows from its votes, of which none is negative; with double masking it
        leads for one window at least."""
        settings, votes, predictions = meta["classifier"], columns["votes"], columns["prediction"]
        if settings.get("aggregation") == "double-masked":
            own = votes[np.arange(len(votes)), predictions.clip(0)]
            is_right = (predictions == ABSTAINED) | ((predictions >= 0) & (own > 0))
            if settings["ties"] == "lowest":  # every window votes
                is_right &= (predictions >= 0) & (votes.sum(axis=1) == votes[:1].sum())
        else:
            found = winners(torch.from_numpy(votes.astype(np.float64)), settings["ties"])
            is_right = found.numpy() == predictions
        row = first_row(~is_right | (votes < 0).any(axis=1))
        return "" if row is None else f"the prediction of row {row} does not follow from its votes"


_SPREAD = 8.0
"""How far the classes of what is left over are apart where an attack looks at it, on average over windows."""


@final
class SoftVotes(nn.Module):
    """What an attack differentiates in place of votes: `logits` gives those of every cell, by the `model`."""

    def __init__(
        self, votes: VoteClassifier, model: nn.Module, logits: Callable[[Images], CellScores]
    ) -> None:
        super().__init__()
        self.votes, self.model, self.logits = votes, model, logits
        self.training = model.training

    def forward(self, images: Images) -> Annotated[Tensor, "n k"]:
        """The mean over cells; a masked sum's without the window that gives a class most. Of double masking the mean
        softmax of what each window, and two of them, leave over, in logarithms."""
        scores = soften(self.logits(images), self.votes.score_kind)
        if self.votes.aggregation != "double-masked":
            return self.votes.totals(scores, images) / scores.shape[2]
        windows = self.votes.windows(images)
        hidden = torch.cat([windows, windows | windows.roll(max(1, len(windows) // 2), 0)])
        left_over = scores @ (~hidden).to(scores).T
        # Classes are as far apart as makes a softmax neither flat nor without a gradient, whatever unit scores have.
        spread = (left_over.amax(dim=1) - left_over.amin(dim=1)).mean(dim=1).detach()
        scaled = left_over * (_SPREAD / spread.clamp(min=1e-6))[:, None, None]
        return scaled.log_softmax(dim=1).logsumexp(dim=2) - math.log(len(hidden))


def soften(logits: CellScores, kind: ScoreKind) -> CellScores:
    """Scores near those of the kind that have a gradient everywhere, where votes and limits have none."""
    if kind == "positive":
        return F.softplus(logits)
    if kind == "logits":
        return logits - logits.amin(dim=1, keepdim=True)
    if kind in ("clipped", "heaviside"):
        return ((4 * logits - 2) if kind == "clipped" else logits).sigmoid()
    return logits.softmax(dim=1)
