"""All placements, merged into blocks of neighbours so that few boxes go through the later layers."""

import logging
from dataclasses import dataclass
from typing import final

import torch
from torch import Generator, Tensor
from torch.utils.checkpoint import checkpoint

from patchcert.bounds import Interval, Network
from patchcert.bounds.geometry import NotCovered
from patchcert.bounds.operations import Convolution, Linear
from patchcert.bounds.rounding import NEAREST
from patchcert.errors import InvalidInput, InvalidThreat, UnsupportedLayer
from patchcert.threats import Patch, Placements
from patchcert.train.strategies.all_placements import worst_of_classes
from patchcert.train.strategies.placed import PlacedPatch
from patchcert.train.strategy import Batch, WorstCase
from patchcert.windows import DifferentiablePlacements, PlacementSweep
from patchcert.windows.blocks import PlacementBlocks
from patchcert.windows.layout import Layout
from patchcert.windows.search import search_budget, weakest

logger = logging.getLogger(__name__)


@final
class PooledPlacements:
    """Merges the pre-activation bounds of the first layers over blocks of g x g adjacent placements.

    `blocks` gives g for each of the first layers with weights: (2,) merges once, (2, 2) again after the
    second layer on the grid of blocks. A merged box contains all boxes it stands for, so margins can only
    fall. The last block of a row or column may be smaller.
    """

    helper = None
    is_capturable = True

    def __init__(
        self, threat: Patch, blocks: tuple[int, ...] = (2,), memory_budget: int | None = None
    ) -> None:
        self.patch = PlacedPatch(threat)
        self.blocks = blocks
        self.memory_budget = memory_budget
        self._windows: dict[tuple[object, ...], BlockWindows | None] = {}

    def worst_case(
        self, network: Network, batch: Batch, epsilon: float | Tensor, generator: Generator
    ) -> WorstCase:
        """The least margin per class over all merged boxes.

        As in training on all placements, a search without a gradient finds the weakest block of each class, and
        only these are passed with one.
        """
        windows = self._cover(network, batch.own_images)
        if windows is None:
            return self.dense_worst_case(network, batch, epsilon)
        images, labels = batch.own_images, batch.own_labels
        clean = windows.chosen.clean(images, labels)
        worst = weakest(windows.sweep, images, labels, epsilon, clean)
        return worst_of_classes(
            labels,
            worst,
            lambda blocks, classes: windows.chosen.margins(
                images, labels, windows.corners[blocks], epsilon, classes, clean=clean
            ),
        )

    def _cover(self, network: Network, images: Tensor) -> "BlockWindows | None":
        key = (id(network), images.device, images.dtype, *images.shape[1:])
        if key not in self._windows:
            layers = first_layers(network, len(self.blocks))
            budget = self.memory_budget or search_budget(images.device)
            self._windows = {
                key: BlockWindows.of(
                    network, images, self.patch.threat, self._grid(images), self.blocks, layers, budget
                )
            }
        return self._windows[key]

    def dense_worst_case(self, network: Network, batch: Batch, epsilon: float | Tensor) -> WorstCase:
        """The same the slow, obvious way: whole images; parts of a batch are redone for the gradient."""
        images, labels = batch.own_images, batch.own_labels
        placements = self._grid(images)
        size = self._images_at_once(images[0], len(placements))
        parts = zip(images.split(size), labels.split(size), strict=True)
        margins = [
            checkpoint(
                self._margins,
                network,
                *part,
                placements,
                epsilon,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for part in parts
        ]
        return WorstCase(torch.cat(margins))

    def _margins(
        self,
        network: Network,
        images: Tensor,
        labels: Tensor,
        placements: Placements,
        epsilon: float | Tensor,
    ) -> Tensor:
        """Margins (n, classes) of a few images."""
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

    def _grid(self, images: Tensor) -> Placements:
        placements = self.patch.threat.placements(images.shape[2], images.shape[3])
        if not placements.complete:
            raise InvalidThreat(
                f"pooled training needs a full grid of placements to merge, but {self.patch.threat} allows "
                f"only {len(placements)} of {placements.rows * placements.columns}",
                hint="allow placements everywhere, or use the strategy 'all'",
            )
        return placements

    def _images_at_once(self, image: Tensor, placements: int) -> int:
        """So many that bounds and gradients of the first layers keep within the budget, roughly."""
        each = 16 * placements * image.numel() * image.element_size()
        budget = self.memory_budget or (2**32 if image.is_cuda else 2**27)
        return max(1, budget // each)


@dataclass(frozen=True, slots=True)
class BlockWindows:
    """The windows of all blocks: to search them, and to bound a few with a gradient."""

    sweep: PlacementSweep
    chosen: DifferentiablePlacements
    corners: Tensor

    @staticmethod
    def of(
        network: Network,
        images: Tensor,
        threat: Patch,
        placements: Placements,
        blocks: tuple[int, ...],
        layers: list[int],
        memory_budget: int,
    ) -> "BlockWindows | None":
        """None where windows do not follow the network, or a block is larger than the image allows."""
        try:
            if any(step.inputs != (position,) for position, step in enumerate(network.steps)):
                raise NotCovered(
                    "bounds are merged along a plain chain of layers, and this network has branches"
                )
            with torch.no_grad():
                layout = Layout.of(network, network.values(images[:1]))
            merging = PlacementBlocks.of(layout, threat, placements, blocks, layers, images.device)
            sweep = PlacementSweep.of(network, images, threat, memory_budget, merging)
            chosen = DifferentiablePlacements.of(network, images, threat, merging)
        except NotCovered as reason:
            logger.debug("the dense path takes over: %s", reason)
            return None
        return BlockWindows(sweep, chosen, merging.corners)


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
