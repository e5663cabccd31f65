"""Votes of a network with small receptive fields: one pass gives a map of local scores, and their sum decides.

Sums of 0/1 scores are certified as BagCert does (Metzen and Yatsura 2021).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Annotated, ClassVar, Literal, cast, final, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.bounds import Interval, Network, Rounding, trace
from patchcert.bounds.geometry import FeatureMap, Geometry, NotCovered, Places
from patchcert.bounds.operations import Concatenate, Operation, Permute, Rescale, Reshape
from patchcert.bounds.rounding import precise_arithmetic, subnormals_kept
from patchcert.certificates.batches import FixedBatches, Precision, distances, largest, neighbours
from patchcert.certificates.checks import (
    check_foreign_rules,
    check_some,
    copy_of_type,
    float_weights,
    weight_dtype,
)
from patchcert.certificates.classifier import AnyThreat, Certificates
from patchcert.certificates.vote_classifier import SoftVotes, VoteClassifier
from patchcert.certificates.votes import (
    Aggregation,
    ScoreKind,
    Scores,
    Ties,
    Touched,
    bounded_margins,
    cell_scores,
    is_won,
    scores_between,
    touched_cells,
)
from patchcert.errors import InvalidInput, ModelError, UnsupportedLayer
from patchcert.progress import Progress
from patchcert.tensors import Images, Labels
from patchcert.threats import Patch

LocalScores = Literal["one-hot", "heaviside", "clipped", "softmax", "positive", "logits"]
Sight = Annotated[Tensor, "pixels rows columns"]
"""True where a cell of a map sees a pixel of the image; pixels row by row."""

_BOUNDED = ("heaviside", "clipped", "positive")
"""Scores that never fall with their own logit, and depend on no other."""
_EVERYTHING = "its receptive field is everything, so that every patch touches every local score"


def sight(network: Network, height: int, width: int, mirrored: bool = False) -> Sight:
    """Which cells of a network's last map see which pixels."""
    return reached_cells(network, torch.eye(height * width).unflatten(1, (height, width)), mirrored)


def reached_cells(
    network: Network, areas: Annotated[Tensor, "_ h w"], mirrored: bool = False
) -> Annotated[Tensor, "_ rows columns"]:
    """Which cells of a network's last map see a pixel of each area, read off its operations one by one.

    It is exact for the graph: a cell sees a pixel if some path of taps of kernels leads there, gaps of dilated and
    strided kernels left out. A weight of 0 on the way counts like any other. Where the network is also `mirrored`, a
    cell sees what it sees of the image and what the cell at the mirrored place sees of the mirror image.
    """
    if mirrored:
        return reached_cells(network, areas) | reached_cells(network, areas.flip(2)).flip(2)
    values = [areas[:, None]]
    for step in network.steps:
        inputs = [values[index] for index in step.inputs]
        if _moves_cells(step.operation):
            values.append(step.operation.forward(*inputs))
            continue
        area = FeatureMap.of(inputs[0].shape[1:])
        try:
            places = _places(step.operation, area)
        except NotCovered as error:
            raise UnsupportedLayer(
                f"layer '{step.name}': {error}, so that its receptive fields are unknown",
                hint="use convolutions, poolings and activations that act on a map",
            ) from None
        if places is Places.LOST or len({value.shape for value in inputs}) > 1:
            raise UnsupportedLayer(
                f"layer '{step.name}' ({type(step.operation).__name__}): {_EVERYTHING}",
                hint="local votes need a fully convolutional network that ends with a map of scores",
            )
        if isinstance(places, Geometry) and min(places.output_size(area.height, area.width)) < 1:
            raise ModelError(
                f"layer '{step.name}' does not take maps of {area.height}x{area.width}, smaller than its kernel",
                hint="use larger images, or smaller kernels and strides",
            )
        seen = reduce(torch.maximum, inputs)
        values.append(_through(places, seen) if isinstance(places, Geometry) else seen)
    return values[-1][:, 0].bool()


def _places(operation: Operation, area: FeatureMap) -> Geometry | Places:
    """What it does to places, where all that matters is what a cell sees: constants show it nothing."""
    if isinstance(operation, Reshape):
        return Places.LOST
    return Places.KEPT if isinstance(operation, Rescale) else operation.places(area)


def _moves_cells(operation: Operation) -> bool:
    """Whether it lays the cells of maps out in another order, or those of several side by side, and keeps channels."""
    if isinstance(operation, Permute):
        return operation.reorder(torch.empty(1, 2, 3, 4)).shape[1] == 2
    return isinstance(operation, Concatenate) and operation.dim in (2, 3, -1, -2)


def _through(geometry: Geometry, seen: Annotated[Tensor, "_ 1 _ _"]) -> Annotated[Tensor, "_ 1 _ _"]:
    if geometry == Geometry((1, 1)):
        return seen
    taps = seen.new_ones(1, 1, *geometry.kernel)
    # A count of taps, off by less than 1/2 whatever the kernel that sums them.
    return (F.conv2d(geometry.pad(seen), taps, None, geometry.stride, 0, geometry.dilation) > 0.5).to(seen)


def receptive_field(seen: Sight, height: int, width: int) -> tuple[int, int]:
    """Height and width of the largest box that one cell sees pixels in."""
    by_cell = seen.flatten(1).T.unflatten(1, (height, width))
    return _extent(by_cell.any(dim=2)), _extent(by_cell.any(dim=1))


def _extent(seen: Annotated[Tensor, "cells length"]) -> int:
    first = seen.int().argmax(dim=1)
    last = seen.shape[1] - 1 - seen.flip(1).int().argmax(dim=1)
    return int((last - first + 1).where(seen.any(dim=1), 0).max())


def trace_local(model: nn.Module, image_shape: Sequence[int]) -> Network:
    """The operations of a model on such images, each of which must have a rule."""
    try:
        return trace(model, image_shape)
    except UnsupportedLayer as error:
        raise UnsupportedLayer(
            f"{error.message}. For local votes an operation without a rule is taken for a global one, as GroupNorm, "
            f"attention and squeeze-and-excitation are: {_EVERYTHING}",
            hint="local votes need convolutions, poolings, batch norms in eval mode and activations alone",
        ) from error


def local_sight(network: Network, height: int, width: int, mirrored: bool = False) -> Sight:
    """`sight`, refused where an operation is global, a cell sees all pixels, or a pixel is not seen at all."""
    seen = sight(network, height, width, mirrored)
    rows, columns = receptive_field(seen, height, width)
    if bool(seen.all(dim=0).any()):
        raise ModelError(
            f"a local score sees all of the {height}x{width} image (receptive field {rows}x{columns}): every patch "
            "touches it, and nothing is local",
            hint="use fewer or smaller kernels and strides; 3 to 17 pixels are usual for images of 32",
        )
    if not bool(seen.flatten(1).any(dim=1).all()):
        unseen = int((~seen.flatten(1).any(dim=1)).int().argmax())
        raise ModelError(
            f"no local score sees the pixel at row {unseen // width}, column {unseen % width}: strides leave gaps",
            hint="use kernels at least as large as their strides, and padding where sizes do not divide",
        )
    return seen


@final
@dataclass(frozen=True)
class LocalVotes(VoteClassifier):
    """Classifies by the sum of local scores, each of which sees a small part of the image: one pass, and a few sums.

    The model takes images to a map (n, classes, rows, columns) of logits. Inside the classifier they become `scores`
    (`votes.ScoreKind`), which `aggregation` puts together (`VoteClassifier` says how). Which cells a placement touches
    is read off the traced graph, exactly and for any stamp.

    A cell that the patch does not touch counts towards a proof with the least score (or for other classes the most)
    that it has when every logit moves by half of `slack` times the image's largest.

    With `mirrored` the logits of a cell are the mean of those of the image and of the mirror image, at twice the cost.

    With `bounded` a placement that this leaves open is looked at again: what touched cells can give is then bounded by
    intervals, as in `IntervalBounds`, instead of by the least and the largest score there is. Both are proofs of the
    same sums, and the better one counts. It takes a pass of intervals for each image and open placement of one patch.
    """

    model: nn.Module
    aggregation: Aggregation = "sum"
    scores: LocalScores = "one-hot"
    masked: int | tuple[int, int] | None = None
    ties: Ties = "lowest"
    precision: Precision = "float32"
    slack: float | None = None
    bounded: bool = False
    mirrored: bool = False
    batch_size: int = 128
    of_proofs_alone: ClassVar[tuple[str, ...]] = ("slack", "bounded")
    optional: ClassVar[tuple[str, ...]] = ("bounded", "mirrored")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scores not in get_args(LocalScores):
            raise InvalidInput(
                f"scores is {self.scores!r}; expected one of {', '.join(get_args(LocalScores))}"
            )
        if self.bounded and self.mirrored:
            raise InvalidInput(
                "bounded=True with mirrored=True: intervals bound the scores of one pass, not the mean of two",
                hint="leave out one of them",
            )
        if self.bounded and self.aggregation == "double-masked":
            raise InvalidInput(
                "bounded=True with aggregation='double-masked', which does not ask what touched cells can give",
                hint="leave out bounded",
            )
        if self.bounded and (self.scores not in _BOUNDED or self.precision != "float32"):
            raise InvalidInput(
                f"bounded=True with scores={self.scores!r} in {self.precision}: intervals bound "
                f"{', '.join(_BOUNDED)} scores in float32",
                hint="leave out bounded, or choose scores='clipped' and precision='float32'",
            )

    @property
    def score_kind(self) -> ScoreKind:
        return self.scores

    def certify(
        self, images: Images, labels: Labels, threat: AnyThreat, progress: Progress | None = None
    ) -> Certificates:
        """As for all votes; with `bounded`, placements that are left open are looked at again."""
        found = super().certify(images, labels, threat, progress)
        if not self.bounded or not isinstance(threat, Patch) or found.placements is None:
            return found
        is_open = ~found.placements & (found.predictions == labels)[:, None]
        proven = found.placements | self._proven_by_bounds(images, labels, threat, is_open)
        return replace(found, certified=proven.all(dim=1), placements=proven)

    @torch.no_grad()
    def _proven_by_bounds(
        self, images: Images, labels: Labels, patch: Patch, is_open: Annotated[Tensor, "n p"]
    ) -> Annotated[Tensor, "n p"]:
        """Which of the open placements are proven by intervals of what touched cells can give."""
        self._check_type()
        network, scores = trace_local(self.model, images.shape[1:]), self.local_scores(images)
        exact = copy_of_type(self.model, torch.float64)
        check_foreign_rules(trace_local(exact, images.shape[1:]), images, patch)
        corners = patch.placements(*images.shape[2:]).corners.to(images.device)
        touched, windows = self.touched(patch, images), None if self.masked is None else self.windows(images)
        found = torch.zeros_like(is_open)
        for place in is_open.any(dim=0).nonzero().flatten().tolist():
            for rows in is_open[:, place].nonzero().flatten().split(self.batch_size):
                box = patch.boxes(images[rows], corners[place : place + 1]).map(lambda end: end[:, 0])
                bounded = self._bounded(network, box, scores.of(rows), touched[place])
                margins = bounded_margins(bounded, labels[rows], windows)
                found[rows, place] = is_won(margins, labels[rows], self.ties)
        return found

    def _check_type(self) -> None:
        """Weights of 16 bits are computed with in 16 bits, whatever the precision, and refused as it is."""
        short = {value.dtype for value in float_weights(self.model)} - {torch.float32, torch.float64}
        if short:
            raise InvalidInput(
                f"bounded=True with weights of {', '.join(map(str, short))}: intervals bound scores in float32",
                hint="leave out bounded, or convert the model with .float()",
            )

    def _bounded(
        self, network: Network, box: Interval, scores: Scores, cells: Annotated[Tensor, "cells"]
    ) -> Scores:
        """The scores with bounds over a box of images in the touched cells, and as they are in all others."""
        box = box.map(lambda end: end.to(weight_dtype(self.model, end.dtype)))
        with precise_arithmetic(), subnormals_kept():
            bounds = network.bounds(box, Rounding.outward(box.lower.dtype))
        lower, upper = bounds.lower.flatten(2), bounds.upper.flatten(2)
        least, largest = scores_between(lower, upper, self.scores, self.needed_lead, scores.most)
        if bool((((scores.values < least) | (scores.values > largest)) & cells).any()):
            raise ModelError(
                "local scores of clean images lie outside the bounds of what a patch can make of them",
                hint="the forward pass may round more coarsely than its weights; leave out bounded=True",
            )
        lower, upper = least.where(cells, scores.lower), largest.where(cells, scores.upper)
        return Scores(scores.values, lower, upper, scores.most)

    def touched(self, threat: Patch, images: Images) -> Touched:
        """Which cells, row by row, see a pixel that the patch covers, at each of its placements."""
        network, (height, width) = trace_local(self.model, images.shape[1:]), images.shape[2:]
        return touched_cells(threat, local_sight(network, height, width, self.mirrored), images)

    @torch.no_grad()
    def local_scores(
        self, images: Images, progress: Progress | None = None, with_probe: bool = False
    ) -> Scores:
        """The scores of every cell, row by row; with a probe of whether they depend on the batch."""
        check_some(images)
        images = images.to(weight_dtype(self.model, images.dtype))
        with self.prepared(images, partial(self._batches, images), with_probe) as (base, _):
            if with_probe:
                numbers = torch.arange(self.batch_size, device=images.device)
                base.check_company(images[numbers % len(images)], self.needed_lead / 4)
                network = trace_local(self.model, images.shape[1:])
                self._check_trace(network, images)
                self._check_sight(network, base, images)
                self._check_kernels(network, base, images)
            rows = []
            for start in range(0, len(images), self.batch_size):
                rows.append(base.logits(images[start : start + self.batch_size]))
                if progress is not None:
                    progress(min(start + self.batch_size, len(images)), len(images))
            return self._scores(cast("_FlatMaps", base.model).by_pass(torch.cat(rows)))

    def _batches(self, images: Images) -> FixedBatches:
        flat = _FlatMaps(self.model, self.mirrored)
        return FixedBatches(flat, images, self.batch_size, self.precision, by_place=True)

    def _scores(self, logits: Annotated[Tensor, "n passes k cells"]) -> Scores:
        """Those of the mean over passes, each of which rounds by a share of the largest logit of any."""
        sizes = logits.abs().where(logits.isfinite(), 0.0).amax(dim=(1, 2, 3))
        return cell_scores(
            logits.double().mean(dim=1), self.scores, self.needed_lead, sizes=sizes[:, None, None]
        )

    def images_per_block(self, device: torch.device) -> int | None:
        """Receptive fields are found once for each block, so that few large ones are best where passes are quick."""
        return 256 if device.type == "cpu" else 2048

    def images_at_once(self) -> int:
        """Those of a batch, whose shape is the same for one image."""
        return self.batch_size

    def passes(self, height: int, width: int) -> int | None:
        return 2 if self.mirrored else 1

    def surrogate(self) -> nn.Module:
        """`SoftVotes` of the mean logits of all passes."""
        flat = _FlatMaps(self.model, self.mirrored)
        return SoftVotes(self, flat, lambda images: flat.by_pass(flat(images)).mean(dim=1))

    @torch.no_grad()
    def _check_trace(self, network: Network, images: Images) -> None:
        """The model and its traced operations must say the same, on a few images and their negatives."""
        few = images[:_PROBED]
        probes = torch.cat([few, 1 - few])
        with precise_arithmetic():
            both = self.model(probes), network.values(probes)[-1]
        # What is not finite is level with itself alone, and widens no leeway.
        said, traced = (each.nan_to_num(0.0, 0.0, 0.0) for each in both)
        # Both are the same sums in other orders: 2^-10 of the largest is far more than float32 rounds, and for shorter
        # types 16 units in the last place are more than a few dozen layers do.
        leeway = max(2**-10, 16 * torch.finfo(said.dtype).eps) * said.abs().max()
        if said.shape != traced.shape or bool((said - traced).abs().max() > leeway):
            raise ModelError(
                f"the model {type(self.model).__name__} and its traced operations give different local scores",
                hint="the forward pass must be a function of the images alone, the same in every call",
            )

    def _check_sight(self, network: Network, base: FixedBatches, images: Images) -> None:
        """Cells that see nothing of what changes keep their numbers, up to half of what the slack pays for: on a few
        images of which one pixel, or a quarter, turns black or white."""
        height, width = images.shape[2:]
        areas = torch.zeros(2, height, width)
        areas[0, height // 2, width // 2] = areas[1, : (height + 1) // 2, : (width + 1) // 2] = 1
        few = images[: min(_PROBED, self.batch_size)]
        before = base.logits(few)
        for area, reached in zip(areas.to(few), reached_cells(network, areas, self.mirrored), strict=True):
            moved = distances(before, base.logits(torch.where(area > 0, (few < 0.5).to(few), few)))
            moved = moved.unflatten(1, (-1, reached.numel()))[:, :, ~reached.flatten().to(few.device)]
            if bool((moved.flatten(1) > self.needed_lead / 4 * largest(before)[:, None]).any()):
                raise ModelError(
                    f"local scores of the model {type(self.model).__name__} change where they see no changed pixel",
                    hint="mend the rule that was registered for a layer: its outputs see more than `places` says",
                )

    def _check_kernels(self, network: Network, base: FixedBatches, images: Images) -> None:
        """NaN at a pixel reaches only cells that see it.

        Kernels that compute several places together, by transforms, spread it to all of them. They would also spread
        what a patch makes of a hidden map, by a share of its size, which no slack that follows from the image pays for.
        Layers with rules from elsewhere are left to `_check_sight`: they may take NaN for another value.
        """
        if any(step.is_foreign for step in network.steps):
            return
        height, width = images.shape[2:]
        pixels = neighbours(height, width)[: self.batch_size]
        areas = F.one_hot(pixels, height * width).float().unflatten(1, (height, width))
        hidden = images[:1].masked_fill(areas[:, None].to(images.device) > 0, torch.nan)
        reached = reached_cells(network, areas, self.mirrored).flatten(1).to(images.device)
        spread = base.logits(hidden).isnan().unflatten(1, (-1, reached.shape[1])).any(dim=1)
        if bool((spread & ~reached).any()):
            raise ModelError(
                f"convolutions of the model {type(self.model).__name__} are computed several places at once here, by "
                "kernels that let a patch move local scores that do not see it",
                hint="try precision='float32', another device, or another version of PyTorch",
            )


_PROBED = 4


@final
class _FlatMaps(nn.Module):
    """A model of maps with one row of numbers for each image; where it is `mirrored`, those of the map of the mirror
    image, mirrored again, come after them."""

    def __init__(self, model: nn.Module, mirrored: bool) -> None:
        super().__init__()
        self.model, self.mirrored = model, mirrored
        self.classes = 0
        self.training = model.training

    def forward(self, images: Images) -> Annotated[Tensor, "n _"]:
        """The numbers of the map, class by class."""
        # First of the mirror image: a model may change the images that it is given.
        mirrored = [self._map(images.flip(3)).flip(3)] if self.mirrored else []
        return torch.cat([each.flatten(1) for each in (self._map(images), *mirrored)], dim=1)

    def _map(self, images: Images) -> Annotated[Tensor, "n k _ _"]:
        """What the model gives; anything but a map is refused."""
        logits = self.model(images)
        is_map = isinstance(logits, Tensor) and logits.dim() == 4 and len(logits) == len(images)
        if not is_map or logits.shape[1] < 2:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ModelError(
                f"local votes need a map of scores ({len(images)}, two classes or more, rows, columns), got {got}",
                hint="end the model with a 1x1 convolution to one channel for each class, without pooling",
            )
        self.classes = logits.shape[1]
        return logits

    def by_pass(self, rows: Annotated[Tensor, "n _"]) -> Annotated[Tensor, "n passes k cells"]:
        """The numbers of each image, by pass, class and cell."""
        return rows.unflatten(1, (2 if self.mirrored else 1, self.classes, -1))
