"""All placements, merged into blocks of neighbours so that few boxes go through the later layers."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, final

import torch
from torch import Generator, Tensor
from torch.utils.checkpoint import checkpoint

from patchcert.bounds import Interval, Network
from patchcert.bounds.geometry import NotCovered
from patchcert.bounds.operations import Convolution, Linear
from patchcert.bounds.rounding import NEAREST
from patchcert.errors import InvalidInput, InvalidThreat, UnsupportedLayer
from patchcert.tensors import Corners, Images, Labels, Margins
from patchcert.threats import Placements
from patchcert.train.strategies.placements import PlacedPatch, in_class_order, other_classes
from patchcert.train.strategy import Batch, Objective, Strategy, Subject, WorstCase
from patchcert.windows.blocks import PlacementBlocks
from patchcert.windows.layout import Layout
from patchcert.windows.passes import if_covered
from patchcert.windows.sweep import PlacementSweep
from patchcert.windows.training import DifferentiablePlacements, ranking_margins, search_budget


@final
@dataclass(frozen=True, slots=True)
class PooledPlacements(Strategy):
    """All placements, merged into blocks of g x g adjacent ones before the activations of the first layers.

    `blocks` gives g for each of the first layers with weights: (2,) merges once, (2, 2) again after the
    second layer on the grid of blocks. A merged box contains all boxes it stands for, so margins can only
    fall. The last block of a row or column may be smaller.
    """

    kind: Literal["pooled"] = "pooled"
    blocks: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        if not self.blocks or min(self.blocks) < 1:
            raise InvalidInput(f"blocks are {list(self.blocks)}; expected at least one, each 1 or more")

    def bind(self, subject: Subject) -> Objective:
        """The least margin per class over all merged boxes."""
        pooled = PooledPatch(PlacedPatch.of(subject), self.blocks)
        return Objective(pooled.patch.network, pooled.worst_case)


class PooledPatch:
    """Worst-case margins of a network over blocks of placements; keeps its windows between steps."""

    def __init__(self, patch: PlacedPatch, blocks: tuple[int, ...], memory_budget: int | None = None) -> None:
        self.patch = patch
        self.blocks = blocks
        self.memory_budget = memory_budget
        self._windows: dict[tuple[object, ...], BlockWindows | None] = {}

    def worst_case(self, batch: Batch, epsilon: float | Tensor, generator: Generator) -> WorstCase:
        """The least margin per class over all merged boxes.

        As in training on all placements, a search without a gradient finds the weakest block of each class, and
        only these are passed with one.
        """
        images, labels = batch.own_images, batch.own_labels
        windows = self.windows(images)
        if windows is None:
            return self.dense_worst_case(batch, epsilon)
        clean = windows.chosen.clean(images, labels)
        worst = ranking_margins(windows.sweep, images, labels, epsilon, clean).argmin(dim=1)
        classes = other_classes(labels, worst.shape[1])
        corners = windows.corners[worst.gather(1, classes)]
        margins = windows.chosen.margins(images, labels, corners, epsilon, classes, clean=clean)
        return WorstCase(in_class_order(labels, margins))

    def windows(self, images: Images) -> "BlockWindows | None":
        """The windows of all blocks on such images; None where only the dense way is left."""
        key = (images.device, images.dtype, *images.shape[1:])
        if key not in self._windows:
            self._windows = {key: if_covered(lambda: self._block_windows(images))}
        return self._windows[key]

    def _block_windows(self, images: Images) -> "BlockWindows":
        """Raises NotCovered where windows do not follow the network, or a block is larger than the image allows."""
        network, threat, placements = self.patch.network, self.patch.threat, self._grid(images)
        layers = first_layers(network, len(self.blocks))
        if any(step.inputs != (position,) for position, step in enumerate(network.steps)):
            raise NotCovered("bounds are merged along a plain chain of layers, and this network has branches")
        with torch.no_grad():
            layout = Layout.of(network, network.values(images[:1]))
        blocks = PlacementBlocks.of(layout, threat, placements, self.blocks, layers, images.device)
        budget = self.memory_budget or search_budget(images.device)
        return BlockWindows(
            PlacementSweep.of(network, images, threat, budget, blocks),
            DifferentiablePlacements.of(network, images, threat, blocks),
            blocks.corners,
        )

    def dense_worst_case(self, batch: Batch, epsilon: float | Tensor) -> WorstCase:
        """The same the slow, obvious way: whole images; parts of a batch are redone for the gradient."""
        images, labels = batch.own_images, batch.own_labels
        placements = self._grid(images)
        size = self._images_at_once(images[0], len(placements))
        redone = partial(checkpoint, self._margins, use_reentrant=False, preserve_rng_state=False)
        parts = zip(images.split(size), labels.split(size), strict=True)
        return WorstCase(torch.cat([redone(*part, placements, epsilon) for part in parts]))

    def _margins(
        self, images: Images, labels: Labels, placements: Placements, epsilon: float | Tensor
    ) -> Margins:
        """The margins of a few images."""
        network = self.patch.network
        grid = (placements.rows, placements.columns)
        box = self.patch.threat.boxes(images, self.patch.corners(images), epsilon).flatten(0, 1)
        start = 0
        for position, block in zip(first_layers(network, len(self.blocks)), self.blocks, strict=True):
            box = _through(network, box, start, position + 1)
            box, grid = _merged(box, grid, block)
            start = position + 1
        boxes = grid[0] * grid[1]
        repeated = labels.unsqueeze(1).expand(-1, boxes).flatten()
        margins = network.margins(box, repeated, start)
        return margins.unflatten(0, (len(images), boxes)).amin(dim=1)

    def _grid(self, images: Images) -> Placements:
        placements = self.patch.threat.placements(images.shape[2], images.shape[3])
        if not placements.complete:
            raise InvalidThreat(
                f"pooled training needs a full grid of placements to merge, but {self.patch.threat} allows "
                f"only {len(placements)} of {placements.rows * placements.columns}",
                hint="allow placements everywhere, or use the strategy 'all'",
            )
        return placements

    def _images_at_once(self, image: Annotated[Tensor, "c h w"], placements: int) -> int:
        """As many images as keep bounds and gradients of the first layers within the budget, roughly."""
        each = 16 * placements * image.numel() * image.element_size()
        budget = self.memory_budget or (2**32 if image.is_cuda else 2**27)
        return max(1, budget // each)


@dataclass(frozen=True, slots=True)
class BlockWindows:
    """The windows of all blocks: to search them, and to bound a few with a gradient."""

    sweep: PlacementSweep
    chosen: DifferentiablePlacements
    corners: Corners


def first_layers(network: Network, count: int) -> list[int]:
    """Positions of the first layers with weights of their own; normalisation and pooling layers have none."""
    positions = [
        position
        for position, step in enumerate(network.steps)
        if isinstance(step.operation, Linear | Convolution)
    ]
    if len(positions) <= count:
        raise InvalidInput(
            f"pooling after {count} layers needs a network with more than {count}, not {len(positions)}",
            hint="give fewer blocks",
        )
    return positions[:count]


def _through(network: Network, box: Interval, start: int, stop: int) -> Interval:
    """The bounds of value `stop`, where the box bounds value `start`, along a plain chain of layers."""
    for position in range(start, stop):
        step = network.steps[position]
        if step.inputs != (position,):
            raise UnsupportedLayer(
                f"layer '{step.name}' joins two branches; pooled training needs a plain chain here"
            )
        box = step.operation.interval(box, rounding=NEAREST)
    return box


def _merged(box: Interval, grid: tuple[int, int], block: int) -> tuple[Interval, tuple[int, int]]:
    """Bounds of whole blocks (n * blocks, ...) from bounds of single placements (n * rows * columns, ...)."""
    rows, columns = (-(-size // block) for size in grid)
    lower = _blocks(box.lower, grid, block).amin(dim=(2, 4))
    upper = _blocks(box.upper, grid, block).amax(dim=(2, 4))
    return Interval(lower.flatten(0, 2), upper.flatten(0, 2)), (rows, columns)


def _blocks(values: Tensor, grid: tuple[int, int], block: int) -> Tensor:
    """(n, block rows, g, block columns, g, ...); where the grid ends in a block its last line is repeated."""
    values = values.unflatten(0, (-1, *grid))
    for dimension, size in ((1, grid[0]), (2, grid[1])):
        if size % block:
            whole = torch.arange(-(-size // block) * block, device=values.device).clamp(max=size - 1)
            values = values.index_select(dimension, whole)
    return values.unflatten(2, (-1, block)).unflatten(1, (-1, block))
