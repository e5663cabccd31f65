"""The two passes of all-patch training: the search for the weakest placements, which needs neither a gradient nor the
last digits, and margins with a gradient at those few, which may differ from image to image.

In the second pass windows are those of the sweep over all placements, except that every image has its own; one geometry
serves them all.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, final

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from patchcert.bounds import NEAREST, Network
from patchcert.bounds.geometry import FeatureMap, Window
from patchcert.bounds.rounding import fast_arithmetic
from patchcert.tensors import Epsilon, Images, Labels, PlacementMargins
from patchcert.threats import Patch
from patchcert.windows.blocks import PlacementBlocks
from patchcert.windows.dense import dense_placement_margins
from patchcert.windows.layout import CommonWindows, Layout, common_steps, covered_pixels
from patchcert.windows.passes import (
    Clean,
    Columns,
    OnWindows,
    Outside,
    Part,
    SharedByPasses,
    WindowPass,
    Windows,
    clean_pass,
    if_covered,
    repeated,
)
from patchcert.windows.rules import before_head
from patchcert.windows.sweep import PlacementSweep, covering_sweep, default_budget

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_TRAINING_BUDGET = 2**30
"""Training leaves the rest of the memory to the gradient and to other runs on the same device."""


class WeakestPlacements:
    """Finds, per image and class, the placement with the least margin; keeps its geometry between calls."""

    def __init__(self, threat: Patch, memory_budget: int | None = None) -> None:
        self.threat = threat
        self.memory_budget = memory_budget
        self._sweeps: dict[tuple, PlacementSweep | None] = {}

    @torch.no_grad()
    def find(
        self, network: Network, images: Images, labels: Labels, epsilon: Epsilon, clean: Clean | None = None
    ) -> Annotated[Tensor, "n k"]:
        """Indices into the threat's placements; `clean` is the clean pass where the caller has it."""
        return self.margins(network, images, labels, epsilon, clean).argmin(dim=1)

    @torch.no_grad()
    def margins(
        self, network: Network, images: Images, labels: Labels, epsilon: Epsilon, clean: Clean | None = None
    ) -> PlacementMargins:
        """The margins by which `find` ranks placements.

        Products may run in TF32 and windows in half precision, which is enough for that.
        """
        budget = self.memory_budget or search_budget(images.device)
        sweep = self._sweep(network, images, budget)
        if sweep is not None:
            return ranking_margins(sweep, images, labels, epsilon, clean)
        with fast_arithmetic():
            return dense_placement_margins(network, images, labels, self.threat, epsilon, budget)

    def _sweep(self, network: Network, images: Images, budget: int) -> PlacementSweep | None:
        key = (id(network), images.shape[1:], images.device, images.dtype, budget)
        if key not in self._sweeps:
            self._sweeps = {key: covering_sweep(network, images, self.threat, budget)}
        return self._sweeps[key]


def search_budget(device: torch.device) -> int:
    """The memory that a search may take by default."""
    return min(default_budget(device), _TRAINING_BUDGET)


@torch.no_grad()
def ranking_margins(
    sweep: PlacementSweep, images: Images, labels: Labels, epsilon: Epsilon, clean: Clean | None = None
) -> PlacementMargins:
    """Margins at all placements, by products in TF32 and windows in half precision where they can be used."""
    with fast_arithmetic():
        dtype = torch.float16 if sweep.takes_half_precision(images) else None
        if clean is None:
            clean = clean_pass(sweep.layout.network, images, labels)
        return sweep.margins(clean.detached(), labels, epsilon, dtype=dtype)


@dataclass(frozen=True, slots=True)
class DifferentiablePlacements:
    """The common geometry of all placements of one patch on one network and image size.

    `covered` says which pixels of a window the stamp covers at each offset from where the window begins. With `blocks`,
    these are the placements, and `covered` says it of each block's members.
    """

    common: CommonWindows
    covered: Annotated[Tensor, "_ members h w 1"]
    blocks: PlacementBlocks | None = None

    @staticmethod
    def of(
        network: Network, images: Images, threat: Patch, blocks: PlacementBlocks | None = None
    ) -> "DifferentiablePlacements":
        """Raises NotCovered where the network holds a step that windows cannot follow."""
        with torch.no_grad():
            layout = Layout.of(network, network.values(images[:1]))
        rows, columns = common_steps(layout.windows(Window(0, 0, threat.height, threat.width)))
        covered = (
            covered_pixels(threat, rows, columns).unsqueeze(1).to(images.device)
            if blocks is None
            else blocks.drawn_back(rows, columns)
        )
        extent = (covered.shape[2], covered.shape[3])
        common = CommonWindows.of(layout, (rows, columns), extent, images.device)
        return DifferentiablePlacements(common, covered, blocks)

    def margins(
        self,
        images: Images,
        labels: Labels,
        corners: Annotated[Tensor, "n p 2"],
        epsilon: Epsilon,
        classes: Annotated[Tensor, "n p"] | None = None,
        dtype: torch.dtype | None = None,
        clean: Clean | None = None,
    ) -> PlacementMargins | Annotated[Tensor, "n p"]:
        """Margins with the patch at each image's corners; with `classes` each against the one class given for it.

        `dtype` is that of the windows, by default the images'; the margins are the images' in any case. `clean` is
        the clean pass where the caller has it already.
        """
        clean = self.clean(images, labels, dtype) if clean is None else clean
        rows, columns = (corners[..., axis].T for axis in (0, 1))
        shared = SharedByPasses(self.common.layout, clean, NEAREST)
        sweep = _OwnPlacementsPass(shared, self.common, self.common.base(rows, columns))
        state, first = self._start(sweep, rows, columns, epsilon)
        if dtype is not None:
            state = state.map(lambda part: part.to(dtype))
        return _margins(sweep, before_head(sweep, state, first), labels, classes)

    def clean(self, images: Images, labels: Labels, dtype: torch.dtype | None = None) -> Clean:
        """The clean pass that windows of this type are differences from.

        Windows of fewer digits are for wide networks, whose clean pass is faster with the channels last, as
        windows are.
        """
        if dtype is not None:
            images = images.contiguous(memory_format=torch.channels_last)
        return clean_pass(self.common.layout.network, images, labels)

    def _start(
        self,
        sweep: "_OwnPlacementsPass",
        rows: Annotated[Tensor, "p n"],
        columns: Annotated[Tensor, "p n"],
        epsilon: Epsilon,
    ) -> tuple[Windows, int]:
        """Bounds at which the windows begin, and their value: the image, or the last on which blocks are merged."""
        box, blocks = Windows.within(epsilon, sweep.clean_windows(0)), self.blocks
        if blocks is None:
            down, right = self.common.step
            offset = rows % down * right + columns % right
            return box.masked(self.covered[offset.unsqueeze(1), 0]), 0
        members = torch.arange(self.covered.shape[1], device=rows.device).unsqueeze(1)
        state = box.masked(self.covered[blocks.index[rows, columns].unsqueeze(1), members])
        return blocks.merged(state, sweep.repeated), blocks.first


def covering_placements(network: Network, images: Images, threat: Patch) -> DifferentiablePlacements | None:
    """The placements of this patch on this network and image size, or None where only the dense way is left."""
    return if_covered(lambda: DifferentiablePlacements.of(network, images, threat))


@final
class _OwnPlacementsPass(WindowPass):
    """The same number of placements for every image, each image's own; `base` says at which base each begins."""

    has_gradient = True

    def __init__(self, shared: SharedByPasses, common: CommonWindows, base: Annotated[Tensor, "p n"]) -> None:
        self.shared, self.windows = shared, common.windows
        self.common, self.base = common, base
        self._cells: dict[tuple[Window, FeatureMap], Tensor] = {}

    def repeated(self, count: int) -> "_OwnPlacementsPass":
        """Each placement `count` times in a row."""
        return _OwnPlacementsPass(self.shared, self.common, repeated(self.base, count))

    def flat_product(self, part: Part, columns: Columns, index: int) -> Annotated[Tensor, "p _ out"]:
        if is_sparse(part, columns):
            part = part.expand(*self.base.shape, *part.shape[2:])
            return sparse_product(part, columns, self._inside(self.window(index), index))
        whole = self.flattened(part, index).flatten(0, 1)
        return (whole @ columns.flatten(0, 1)).unflatten(0, part.shape[:2])

    def flattened(self, part: Part, index: int) -> Annotated[Tensor, "p n features"]:
        """The whole map, place by place, with the window in it; cells outside hold zeros and add nothing."""
        area, window = self.layout.area(index), self.window(index)
        part = part.expand(*self.base.shape, *part.shape[2:])
        if self.is_fused:
            from patchcert.windows.kernels import placed

            shifts = self.common.shifts(window)[self.base]
            return placed(part, (area.height, area.width), (window.top, window.left), shifts).flatten(2)
        inside = self._inside(window, index)
        whole = part.new_zeros(*part.shape[:2], area.height * area.width, area.channels)
        where = inside.unsqueeze(-1).expand(*inside.shape, area.channels)
        return whole.scatter_add(2, where, part.flatten(2, 3)).flatten(2)

    def _gather(self, window: Window, index: int) -> OnWindows:
        inside = self._inside(window, index)
        places = self.clean.places(index, self.layout)
        where = inside.unsqueeze(-1).expand(*inside.shape, places.shape[-1])
        chosen = places.unsqueeze(0).expand(len(inside), *places.shape).gather(2, where)
        return chosen.unflatten(2, (window.height, window.width))

    def _inside(self, window: Window, index: int) -> Annotated[Tensor, "p n cells"]:
        """The cells of the window, some cell of the map for those outside."""
        return self._signed(window, index).clamp(min=0).long()

    def _outside(self, window: Window, index: int) -> Outside:
        return (self._signed(window, index) < 0).unflatten(2, (window.height, window.width)).unsqueeze(-1)

    def _signed(self, window: Window, index: int) -> Annotated[Tensor, "p n cells"]:
        area = self.layout.area(index)
        if (window, area) not in self._cells:
            self._cells[window, area] = self.common.cells(window, area)[self.base]
        return self._cells[window, area]


def _margins(
    sweep: _OwnPlacementsPass, state: Windows, labels: Labels, classes: Annotated[Tensor, "n p"] | None
) -> PlacementMargins | Annotated[Tensor, "n p"]:
    """The clean margins moved by the deviation and lowered by the radius."""
    head, index = sweep.layout.network.head, sweep.steps[-1].inputs[0]
    assert head is not None
    weight, area = head.weight(), sweep.layout.maps[index]
    deviation = state.deviation.to(weight.dtype)
    radius = state.radius.to(weight.dtype).expand_as(deviation)
    if area is not None:
        deviation, radius = (sweep.flattened(part, index) for part in (deviation, radius))
        weight = weight.unflatten(1, (area.channels, -1)).transpose(1, 2).flatten(1)
    deviation, radius, clean = deviation.transpose(0, 1), radius.transpose(0, 1), sweep.clean.margins
    if classes is not None:
        rows = _selector(labels, classes, len(weight)).to(weight.dtype) @ weight
        return clean.gather(1, classes) + (deviation * rows - radius * rows.abs()).sum(dim=2)
    scores = deviation @ weight.T
    pairs = (weight.unsqueeze(1) - weight).abs()
    spread = (radius @ pairs.flatten(0, 1).T).unflatten(2, pairs.shape[:2])
    own = labels.reshape(-1, 1, 1)
    spread = spread.gather(2, own.unsqueeze(-1).expand(*spread.shape[:2], 1, spread.shape[3])).squeeze(2)
    shift = scores.gather(2, own.expand(*scores.shape[:2], 1)) - scores
    return clean.unsqueeze(1) + shift - spread


def _selector(labels: Labels, classes: Annotated[Tensor, "n p"], count: int) -> Annotated[Tensor, "n p k"]:
    """Rows with 1 at the label and -1 at the class: times the weights, their exact difference."""
    numbers = torch.arange(count, device=labels.device)
    return (labels.reshape(-1, 1, 1) == numbers).int() - (classes.unsqueeze(-1) == numbers).int()


_SPARSE = 10
"""Rows are multiplied as sparse ones where at most one entry in this many is not zero."""


def is_sparse(part: Annotated[Tensor, "_ _ h w c"], columns: Annotated[Tensor, "places c out"]) -> bool:
    """Whether windows, which must be without a gradient, cover so few places that a CPU gains by skipping zeros."""
    entries = part.shape[2] * part.shape[3]
    return not part.requires_grad and part.device.type == "cpu" and entries * _SPARSE <= len(columns)


def sparse_product(
    part: Annotated[Tensor, "p n h w c"],
    columns: Annotated[Tensor, "places c out"],
    cells: Annotated[Tensor, "p n cells"],
) -> Annotated[Tensor, "p n out"]:
    """Windows at these cells of their maps times the weights; a cell that is named twice counts twice.

    The gradient is that of the weights.
    """
    from scipy.sparse import csr_array

    channels, width = part.shape[-1], part[0, 0].numel()
    entries = (cells.unsqueeze(-1) * channels + torch.arange(channels)).flatten().int()
    ends = torch.arange(0, entries.numel() + 1, width, dtype=torch.int32)
    shape = (len(ends) - 1, columns.shape[0] * channels)
    rows = csr_array((part.reshape(-1).numpy(), entries.numpy(), ends.numpy()), shape=shape)
    moved: Tensor = _SparseProduct.apply(rows, columns.flatten(0, 1))  # pyright: ignore[reportAssignmentType]
    return moved.unflatten(0, part.shape[:2])


class _SparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: "csr_array", matrix: Tensor) -> Tensor:
        ctx.rows = rows  # pyright: ignore[reportAttributeAccessIssue]
        return torch.from_numpy(rows @ matrix.numpy())

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, torch.from_numpy(ctx.rows.T @ gradient.numpy())  # pyright: ignore[reportAttributeAccessIssue]
