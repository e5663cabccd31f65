"""De-randomised smoothing (Levine and Feizi 2020): a base model votes on bands or blocks of an image, one at a time."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal, final, get_args

import numpy as np
import torch
from torch import Tensor, nn

from patchcert.certificates.batches import FixedBatches, MeanVote, Precision, check_counts, copies_at_once
from patchcert.certificates.checks import check_inputs, check_labels, check_some, weight_dtype
from patchcert.certificates.classifier import AnyThreat, Columns, first_row
from patchcert.certificates.vote_classifier import SoftVotes, VoteClassifier
from patchcert.certificates.votes import (
    Aggregation,
    ScoreKind,
    Scores,
    Ties,
    Touched,
    cell_scores,
    is_won_by_count,
    sum_totals,
    touched_cells,
    winners,
)
from patchcert.errors import InvalidInput
from patchcert.progress import Progress
from patchcert.tensors import Images, Labels
from patchcert.threats import Patch, threat_from_dict

Orientation = Literal["column", "row", "both"]
PartScores = Literal["votes", "softmax", "logits"]
Views = Annotated[Tensor, "cells h w"]
"""True on the pixels that each vote sees."""


def encode_visible(images: Images, views: Annotated[Tensor, "_ h w"]) -> Annotated[Tensor, "n _ h w"]:
    """The images with 0 in place of hidden pixels, and a last channel that is 1 where a pixel is seen and else 0."""
    seen = views[:, None].expand(len(images), -1, -1, -1)
    return torch.cat([images.where(seen, 0.0), seen.to(images)], dim=1)


def band_views(
    image: tuple[int, int], extent: int, orientation: Orientation, wrap: bool, stride: int = 1
) -> Views:
    """Bands of columns, of rows, or of both, in images of a height and width."""
    height, width = image
    found = []
    if orientation in ("column", "both"):
        columns = _spans("width", extent, width, stride, wrap, "columns")
        found.append(columns[:, None, :].expand(-1, height, -1))
    if orientation in ("row", "both"):
        rows = _spans("width", extent, height, stride, wrap, "rows")
        found.append(rows[:, :, None].expand(-1, -1, width))
    return torch.cat(found)


def block_views(image: tuple[int, int], extent: int, wrap: bool, stride: int = 1) -> Views:
    """Square blocks in images of a height and width."""
    rows = _spans("size", extent, image[0], stride, wrap, "rows")
    columns = _spans("size", extent, image[1], stride, wrap, "columns")
    return (rows[:, None, :, None] & columns[None, :, None, :]).flatten(0, 1)


def _spans(
    setting: str, extent: int, length: int, stride: int, wrap: bool, what: str
) -> Annotated[Tensor, "_ length"]:
    """True on what each part covers along a side; all of a part lies inside unless it wraps."""
    if extent >= length:
        raise InvalidInput(
            f"{setting}={extent} in images of {length} {what}: every vote would see the whole image, and every patch "
            "would touch all votes",
            hint=f"choose {setting} below {length}",
        )
    first = torch.arange(0, length if wrap else length - extent + 1, stride)
    found = (torch.arange(length) - first[:, None]) % length < extent
    if not bool(found.any(dim=0).all()):
        unseen = (~found.any(dim=0)).nonzero().flatten().tolist()
        raise InvalidInput(
            f"{setting}={extent} at a stride of {stride} leaves {what} {unseen} of {length} unseen by every vote",
            hint=f"choose a stride of at most {setting}, one that divides {length - extent}, or wrap=True",
        )
    return found


@dataclass(frozen=True, kw_only=True)
class PartVotes(VoteClassifier):
    """Votes of a base model on parts of the image, of which it sees one at a time; most votes win.

    The base model takes one channel more than the image has: `encode_visible`. It votes for the class of its largest
    logit or, with a `threshold`, for every class whose softmax reaches it. Logits that are NaN or infinite vote
    for nothing. Which votes a patch can change is looked up for each placement, exactly and for any stamp: those that
    see one of its pixels. A vote counts towards a proof only if it stays the same when every logit moves by half of
    `slack` times the image's largest: the largest logit must lead by more than the slack.

    With `aggregation="double-masked"` and `masked`, the side of the patch, double masking of parts decides instead
    (`VoteClassifier` says how). It also takes `scores` that say more than votes: the softmax of a part, or by how much
    a logit exceeds the part's least.
    """

    wrap: bool = True
    stride: int = 1
    threshold: float | None = None
    aggregation: Aggregation = "sum"
    scores: PartScores = "votes"
    masked: int | tuple[int, int] | None = None
    ties: Ties = "lowest"
    precision: Precision = "float32"
    slack: float | None = None
    batch_size: int = 512
    optional: ClassVar[tuple[str, ...]] = ("aggregation", "scores", "masked")

    def __post_init__(self) -> None:
        if self.scores not in get_args(PartScores):
            raise InvalidInput(
                f"scores is {self.scores!r}; expected one of {', '.join(get_args(PartScores))}"
            )
        super().__post_init__()
        check_counts(stride=self.stride)
        if self.scores != "votes" and (self.aggregation == "sum" or self.threshold is not None):
            raise InvalidInput(
                f"scores is {self.scores!r} with aggregation={self.aggregation!r} and threshold={self.threshold}: a "
                "sum counts votes, and thresholds make votes",
                hint="give aggregation='double-masked', masked=5 for patches of 5x5, and no threshold; or no scores",
            )
        if self.threshold is not None and not (isinstance(self.threshold, Real) and 0 < self.threshold < 1):
            raise InvalidInput(
                f"threshold is {self.threshold!r}; a vote asks for a softmax of more than 0 and less than 1",
                hint="0.2 to 0.4 are usual; None votes for the largest logit alone",
            )

    @property
    def score_kind(self) -> ScoreKind:
        if self.scores != "votes":
            return self.scores
        return "one-hot" if self.threshold is None else "threshold"

    @abstractmethod
    def views(self, height: int, width: int) -> Views:
        """The pixels that each vote sees; all pixels are seen by some vote."""

    def certified_by_count(self, images: Images, labels: Labels, threat: AnyThreat) -> Annotated[Tensor, "n"]:
        """What the classical count of touched votes proves, which is never more than `certify` does."""
        check_inputs(self.model, images, labels)
        if self.aggregation != "sum":
            raise InvalidInput(
                f"votes are not counted with aggregation={self.aggregation!r}",
                hint="use certify, or a sum of votes",
            )
        patch, patches = self._patch_and_count(threat)
        touched, scores = self.touched(patch, images), self.local_scores(images)
        check_labels(labels, scores.values.shape[1])
        right = winners(sum_totals(scores.values), self.ties) == labels
        return right & is_won_by_count(scores, labels, touched, self.ties, patches)

    def touched(self, threat: Patch, images: Images) -> Touched:
        """Which votes see a pixel that the patch covers, at each of its placements."""
        height, width = images.shape[2:]
        return touched_cells(threat, self.views(height, width).flatten(1).T, images)

    @torch.no_grad()
    def local_scores(
        self, images: Images, progress: Progress | None = None, with_probe: bool = False
    ) -> Scores:
        """The votes on every image; with a probe of whether they depend on each other."""
        check_some(images)
        images = images.to(weight_dtype(self.model, images.dtype))
        views = self.views(*images.shape[2:]).to(images.device)
        each, found = len(views), list[Tensor]()
        with self.prepared(images, partial(self._batches, images, views), with_probe) as (base, _):
            if with_probe:
                numbers = torch.arange(base.size, device=images.device)
                owner = numbers // each % len(images)
                sample = encode_visible(images[owner], views[numbers % each])
                base.check_company(sample, self.needed_lead / 4, owner)
            # All views of the first image, then those of the next, in batches of one shape.
            for rows in torch.arange(len(images) * each, device=images.device).split(base.size):
                found.append(base.logits(encode_visible(images[rows // each], views[rows % each])))
                if progress is not None:
                    progress((int(rows[-1]) + 1) / each, len(images))
        logits = torch.cat(found).unflatten(0, (len(images), each))
        return cell_scores(logits.mT, self.score_kind, self.needed_lead, self.threshold)

    def images_per_block(self, device: torch.device) -> int | None:
        """As many as a few seconds serve."""
        return 32 if device.type == "cpu" else 1024

    def passes(self, height: int, width: int) -> int | None:
        """One for each part."""
        return len(self.views(height, width))

    @classmethod
    def contradiction(cls, columns: Columns, meta: Mapping[str, Any]) -> str:
        """No class has more votes than there are parts, nor all together where each part has one; and a certified image
        leads by what it must at least.

        With a and b votes of the label and of another class among the touched parts I, a proof needs L >= |I| + a - b
        of the lead L at each of P placements. A part adds 1 for itself, 1 for a vote of the label and -1 for one of the
        other, so 0 at least, as often as it is touched. If that is d times or more for all N, P L >= d (N + L).
        """
        settings, (channels, height, width) = meta["classifier"], meta["data"]["image"]
        described = cls.described(nn.Identity(), settings)
        if described.aggregation != "sum":
            return super().contradiction(columns, meta)
        patch, _ = described._patch_and_count(threat_from_dict(meta["threat"]))
        touched = described.touched(patch, torch.zeros(1, channels, height, width))
        (places, parts), least = touched.shape, int(touched.sum(dim=0).min())
        votes, rows = columns["votes"].astype(np.int64), np.arange(len(columns["label"]))
        cast = votes.max(axis=1) if settings["threshold"] is not None else votes.sum(axis=1)
        others = votes.copy()
        others[rows, columns["label"]] = -1
        leads = votes[rows, columns["label"]] - others.max(axis=1)
        row = first_row((cast > parts) | (columns["certified"] & (leads * places < least * (parts + leads))))
        unfit = (
            ""
            if row is None
            else f"row {row} has {cast[row]} votes of {parts} parts and a lead of {leads[row]}"
        )
        return super().contradiction(columns, meta) or unfit

    def surrogate(self) -> nn.Module:
        """The mean of the base model's softmax over all parts, in logarithms, or `SoftVotes` of what windows leave."""

        def copies(images: Images) -> Iterator[Tensor]:
            for view in self.views(*images.shape[2:]).to(images.device):
                yield encode_visible(images, view[None])

        if self.aggregation == "sum":
            return MeanVote(self.model, copies, self.precision)
        return SoftVotes(
            self, self.model, lambda images: torch.stack([self.model(each) for each in copies(images)], dim=2)
        )

    def _batches(self, images: Images, views: Views) -> FixedBatches:
        shown = encode_visible(images[:1], views[:1])
        size = copies_at_once(self.model, shown, self.batch_size, self.precision)
        return FixedBatches(self.model, shown, size, self.precision)


@final
@dataclass(frozen=True)
class BandVotes(PartVotes):
    """Votes on bands: `width` neighbouring columns, rows, or one vote on each of both (`PartVotes` says more).

    A band begins at every `stride`-th column. With `wrap` one may begin at the right border and go on at the left one,
    so that every column is seen equally often; without, all bands lie inside the image.
    """

    model: nn.Module
    width: int = 4
    orientation: Orientation = "column"

    def __post_init__(self) -> None:
        if self.orientation not in ("column", "row", "both"):
            raise InvalidInput(
                f"orientation is {self.orientation!r}; expected 'column', 'row' or 'both'",
                hint="CIFAR-10 is usually certified by columns",
            )
        super().__post_init__()
        check_counts(width=self.width)

    def views(self, height: int, width: int) -> Views:
        return band_views((height, width), self.width, self.orientation, self.wrap, self.stride)


@final
@dataclass(frozen=True)
class BlockVotes(PartVotes):
    """Votes on blocks of `size` x `size` pixels, which begin at every `stride`-th row and column.

    With `wrap` a block may go on at the opposite border; `PartVotes` says more.
    """

    model: nn.Module
    size: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(size=self.size)

    def views(self, height: int, width: int) -> Views:
        return block_views((height, width), self.size, self.wrap, self.stride)
