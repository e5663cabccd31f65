"""Training for votes: a base model on parts of images, or local scores at the placement that is weakest for them."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from patchcert.bounds.network import zero_at_label
from patchcert.certificates.band_votes import Orientation, Views, band_views, block_views, encode_visible
from patchcert.certificates.local_votes import LocalScores, local_sight, trace_local
from patchcert.certificates.vote_classifier import soften
from patchcert.certificates.votes import (
    LARGEST,
    UNLIMITED,
    Aggregation,
    Windows,
    masked_totals,
    maximal,
    sum_totals,
    touched_cells,
)
from patchcert.errors import PatchcertError, SpecError, at_least
from patchcert.tensors import Images, Labels, Margins
from patchcert.threats import Patch
from patchcert.train.strategy import (
    Batch,
    Forward,
    Objective,
    Scalar,
    Strategy,
    Subject,
    TrainedThreat,
    WholeModel,
    WorstCase,
    check_takes,
    logit_margins,
)

Draw = Literal["image", "batch"]
"""Whether every image shows a part of its own, or all images of a batch show the same."""


class _Parts(Strategy):
    """Plain cross entropy on one random part of each image, whatever epsilon is."""

    __slots__ = ()
    has_bounds: ClassVar = False
    has_epsilon: ClassVar = False
    draw: Draw
    bfloat16: bool
    compiled: bool

    @abstractmethod
    def views(self, height: int, width: int) -> Views:
        """The parts of an image, all equally likely."""

    def bind(self, subject: Subject) -> Objective:
        """The margins of one part of each image, by the model in training mode."""
        spec = subject.model_spec
        views = self.views(spec.height, spec.width).to(subject.device)
        hint = 'set model.name = "resnet18_parts" or "cnn2_parts", and model.normalise = false'
        check_takes(subject, spec.channels + 1, "parts of images", hint)
        forward = Forward.of(subject, self.bfloat16, self.compiled)

        def worst_case(batch: Batch, epsilon: float | Tensor, generator: Generator) -> WorstCase:
            count = len(batch) if self.draw == "image" else 1
            drawn = torch.randint(len(views), (count,), generator=generator, device=generator.device)
            chosen = drawn[batch.rows] if self.draw == "image" else drawn
            logits = forward.logits(encode_visible(batch.own_images, views[chosen]))
            return WorstCase(logit_margins(logits, batch.own_labels))

        return Objective(forward.network, worst_case)


@final
@dataclass(frozen=True, slots=True)
class Bands(_Parts):
    """Plain cross entropy on a random band of `width` columns, rows, or either, for `patchcert.BandVotes`.

    Every image shows a band of its own, or a batch shares one (`draw`). `bfloat16` and `compiled` are as for `masked`.
    """

    kind: Literal["bands"] = "bands"
    width: int = 4
    orientation: Orientation = "column"
    wrap: bool = True
    draw: Draw = "image"
    bfloat16: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        at_least(1, "width", self.width)

    def views(self, height: int, width: int) -> Views:
        return band_views((height, width), self.width, self.orientation, self.wrap)

    def learned_method(self, threat: TrainedThreat) -> tuple[str, dict[str, Any]]:
        return "bands", {"width": self.width, "orientation": self.orientation, "wrap": self.wrap}


@final
@dataclass(frozen=True, slots=True)
class Blocks(_Parts):
    """Plain cross entropy on a random block of `size` x `size` pixels, for `patchcert.BlockVotes`; else as `bands`."""

    kind: Literal["blocks"] = "blocks"
    size: int = 12
    wrap: bool = True
    draw: Draw = "image"
    bfloat16: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        at_least(1, "size", self.size)

    def views(self, height: int, width: int) -> Views:
        return block_views((height, width), self.size, self.wrap)

    def learned_method(self, threat: TrainedThreat) -> tuple[str, dict[str, Any]]:
        return "blocks", {"size": self.size, "wrap": self.wrap}


@final
@dataclass(frozen=True, slots=True)
class LocalMargins(Strategy):
    """The margins of `patchcert.LocalVotes` at the weakest of all placements; of all that touched cells can do, a patch
    does the share epsilon.

    Margins are those of the mean local score, times `scale`. Scores have the gradients of smooth ones (`soften`). A
    masked sum is trained on a bound that is cheaper than its certificate and never above it: the label loses the
    weightiest window as it is, also where it overlaps the patch. With double masking the margin against each class is
    that behind the two windows that leave least of it. While epsilon grows to 1, the mean cross entropy of
    single cells, as if each were a classifier of its own, is added with a weight that falls from `alone` to 0.
    `bfloat16` and `compiled` are as for `masked`.
    """

    has_bounds: ClassVar = False
    kind: Literal["local-votes"] = "local-votes"
    aggregation: Aggregation = "sum"
    scores: LocalScores = "one-hot"
    scale: float = 10.0
    alone: float = 0.0
    bfloat16: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise SpecError(f"scale is {self.scale}; expected above 0")
        if not 0 <= self.alone < math.inf:
            raise SpecError(f"alone is {self.alone}; expected a weight of at least 0")
        if self.aggregation == "sum" and self.scores in UNLIMITED:
            raise SpecError(
                f"scores is {self.scores!r}, but a sum of scores without upper limit cannot be certified",
                hint='set strategy.aggregation = "double-masked", or other scores',
            )

    def bind(self, subject: Subject) -> Objective:
        """The margins at the weakest placement, by the model in training mode."""
        windows = self.windows(subject, subject.patch)
        left_out = unions_of_two(windows) if self.aggregation == "double-masked" else windows
        forward = Forward.of(subject, self.bfloat16, self.compiled)

        def worst_case(batch: Batch, epsilon: float | Tensor, generator: Generator) -> WorstCase:
            logits = forward.logits(batch.own_images)
            margins = weakest_margins(
                self, trained_scores(logits, self.scores), batch.own_labels, left_out, epsilon
            )
            margins = margins * (self.scale / windows.shape[1])
            if self.alone == 0 or (isinstance(epsilon, float) and epsilon == 1):
                return WorstCase(margins)
            weight = self.alone * (1 - epsilon) / len(batch)
            return WorstCase(margins, weight * cell_loss(logits, batch.own_labels))

        clean = WholeModel((), _Totals(self, forward, windows))
        return Objective(clean, worst_case)

    def learned_method(self, threat: TrainedThreat) -> tuple[str, dict[str, Any]]:
        """With the masks of the patch that was trained against, if any."""
        settings: dict[str, Any] = {"aggregation": self.aggregation, "scores": self.scores}
        if self.aggregation != "sum":
            assert isinstance(threat, Patch)
            settings["masked"] = (threat.height, threat.width)
        return "local-votes", settings

    def windows(self, subject: Subject, threat: Patch) -> Windows:
        """The cells that the patch can touch, without those of placements that touch fewer than another."""
        return touched_windows(
            subject, threat if self.aggregation == "sum" else Patch((threat.height, threat.width))
        )


def trained_scores(logits: Annotated[Tensor, "n k _ _"], kind: LocalScores) -> Annotated[Tensor, "n k _"]:
    """The scores as they are deployed, up to rounding to units, with a gradient."""
    logits = logits.flatten(2)
    soft = soften(logits, kind)
    if kind in ("softmax", "logits"):
        return soft
    if kind == "one-hot":
        hard = torch.zeros_like(soft).scatter(1, logits.argmax(dim=1, keepdim=True), 1.0)
    elif kind == "heaviside":
        hard = (logits > 0).to(soft)
    else:
        hard = logits.clamp(0, 1 if kind == "clipped" else LARGEST)
    return soft + (hard - soft).detach()


def cell_loss(logits: Annotated[Tensor, "n k _ _"], labels: Labels) -> Scalar:
    """The mean cross entropy of an image's cells, summed over images."""
    cells = logits.flatten(2)
    repeated = labels[:, None].expand(-1, cells.shape[2])
    return F.cross_entropy(cells, repeated, reduction="sum") / cells.shape[2]


def touched_windows(subject: Subject, threat: Patch) -> Windows:
    """The cells of a map that the patch can touch, without those of placements that touch fewer than another."""
    spec = subject.model_spec
    blank = torch.zeros(1, spec.channels, spec.height, spec.width, device=subject.device)
    try:
        seen = local_sight(trace_local(subject.model.eval(), spec.image_shape), spec.height, spec.width)
    except PatchcertError as error:
        raise SpecError(
            f"the model {spec.name!r} has no local scores: {error.message}", hint=error.hint
        ) from error
    return maximal(touched_cells(threat, seen, blank))


def unions_of_two(windows: Windows) -> Windows:
    """What any two windows hold together, each window with itself among them."""
    first, second = torch.triu_indices(len(windows), len(windows), device=windows.device)
    return windows[first] | windows[second]


def weakest_margins(
    strategy: LocalMargins,
    scores: Annotated[Tensor, "n k cells"],
    labels: Labels,
    left_out: Windows,
    epsilon: float | Tensor = 1.0,
) -> Margins:
    """The least margins over all placements, 0 at the label: one minimum over sums of windows, or of unions of two.

    A placement that touches only some of the cells of another is never weaker, so windows that are inside another do
    not matter. With epsilon 0 they are the margins of the clean image.
    """
    masks, totals = left_out.to(scores), scores.sum(dim=2, keepdim=True)
    inside = scores @ masks.T  # n k windows
    if strategy.aggregation == "double-masked":
        kept = reached = totals - epsilon * inside
    elif strategy.aggregation == "sum":
        kept, reached = totals - epsilon * inside, totals + epsilon * (masks.sum(dim=1) - inside)
    else:
        heaviest = inside.amax(dim=2, keepdim=True)
        kept, reached = totals - heaviest - epsilon * inside, totals - torch.lerp(heaviest, inside, epsilon)
    own = kept.gather(1, labels[:, None, None].expand(-1, 1, kept.shape[2]))
    return zero_at_label((own - reached).amin(dim=2), labels)


@final
class _Totals(nn.Module):
    """The logits of clean images that a loss may look at: their mean local scores, times the strategy's scale."""

    def __init__(self, strategy: LocalMargins, forward: Forward, windows: Windows) -> None:
        super().__init__()
        self.strategy, self.run, self.windows = strategy, forward, windows
        self.model = forward.network.model

    def forward(self, images: Images) -> Annotated[Tensor, "n k"]:
        scores = trained_scores(self.run.logits(images), self.strategy.scores)
        is_masked = self.strategy.aggregation == "masked-sum"
        totals = masked_totals(scores, self.windows) if is_masked else sum_totals(scores)
        return totals * (self.strategy.scale / scores.shape[2])
