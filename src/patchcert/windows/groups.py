"""Groups of placements whose windows are alike, and their pass through the network."""

from dataclasses import dataclass
from typing import Annotated, final

import numpy as np
import torch
from torch import Tensor

from patchcert.bounds.geometry import FeatureMap, Window
from patchcert.tensors import Corners
from patchcert.threats import Placements
from patchcert.windows.layout import Layout
from patchcert.windows.passes import (
    Columns,
    OnWindows,
    Outside,
    Part,
    SharedByPasses,
    WindowPass,
    common_steps,
)
from patchcert.windows.products import product

_LARGE_WINDOW = 2**20
"""The number of weights under a window from which a CPU reads them in place instead of gathering them."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of the feature map that each placement's window covers, as flat indices.

    `signed` is -1 for cells outside the map; `index` has some cell of the map there, and `outside` says which they
    are: None where no window sticks out. `spans` are the rows of the window that lie in the map, from and to, the
    columns likewise, and the row and column of the map at which the window begins.
    """

    index: Annotated[Tensor, "p cells"]
    signed: Annotated[Tensor, "p cells"]
    outside: Annotated[Tensor, "p 1 h w 1"] | None
    spans: Annotated[Tensor, "p 6"]

    def slice(self, start: int, stop: int) -> "Cells":
        """The cells of some of the placements."""
        outside = None if self.outside is None else self.outside[start:stop]
        return Cells(self.index[start:stop], self.signed[start:stop], outside, self.spans[start:stop])


def cells(window: Window, shifts: np.ndarray, area: FeatureMap, device: torch.device) -> Cells:
    """The cells of the window on the map when it is shifted by these numbers of image pixels (p, 2)."""
    rows = _axis_cells(window.top, window.height, shifts[:, 0], window.row_step)
    columns = _axis_cells(window.left, window.width, shifts[:, 1], window.column_step)
    rows_inside, columns_inside = (rows >= 0) & (rows < area.height), (columns >= 0) & (columns < area.width)
    inside = rows_inside[:, :, None] & columns_inside[:, None, :]
    flat = np.where(inside, rows[:, :, None] * area.width + columns[:, None, :], -1).astype(np.int32)
    signed = torch.from_numpy(flat).to(device)
    outside = None if inside.all() else (signed < 0)[:, None, :, :, None]
    signed = signed.flatten(1)
    spans = np.stack([*_span(rows_inside), *_span(columns_inside), rows[:, 0], columns[:, 0]], axis=1)
    spans = torch.from_numpy(spans.astype(np.int32)).to(device)
    return Cells(signed.clamp(min=0).long(), signed, outside, spans)


def _span(inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the run of true flags in each row (p, extent) begins and ends, each (p,)."""
    first = inside.argmax(axis=1)
    return first, first + inside.sum(axis=1)


def _axis_cells(origin: int, extent: int, shifts: np.ndarray, step: int) -> np.ndarray:
    return (origin + shifts // step)[:, None] + np.arange(extent)


@dataclass(frozen=True, slots=True)
class Group:
    """Placements whose windows differ by whole cells on every feature map, so that one geometry serves them all.

    `cells` are those of the windows; `surroundings`, for a step that goes by its interval bound, those that its
    output window looks at.
    """

    members: Annotated[Tensor, "p"]
    windows: tuple[Window | None, ...]
    cells: tuple[Cells | None, ...]
    surroundings: tuple[Cells | None, ...]

    def __len__(self) -> int:
        return len(self.members)


def groups(layout: Layout, placements: Placements, device: torch.device) -> list[Group]:
    """All placements, grouped by their alignment to the strides of the network."""
    windows = layout.windows(Window(0, 0, placements.height, placements.width))
    row_step, column_step = common_steps(windows)
    corners = placements.corners.cpu()
    alignment = (corners[:, 0] % row_step) * column_step + corners[:, 1] % column_step
    return [
        _group(layout, placements, corners, (alignment == value).nonzero().flatten(), device)
        for value in alignment.unique().tolist()
    ]


def _group(
    layout: Layout, placements: Placements, corners: Corners, members: Tensor, device: torch.device
) -> Group:
    first = corners[members[0]]
    windows = layout.windows(Window(int(first[0]), int(first[1]), placements.height, placements.width))
    shifts = (corners[members] - first).numpy()
    made: dict[tuple[Window, FeatureMap], Cells] = {}

    def covered(window: Window | None, area: FeatureMap | None) -> Cells | None:
        if window is None or area is None:
            return None
        if (window, area) not in made:
            made[window, area] = cells(window, shifts, area, device)
        return made[window, area]

    around = []
    for position, step in enumerate(layout.network.steps):
        around.append(covered(layout.seen(position, windows), layout.maps[step.inputs[0]]))
    inner = [covered(window, area) for window, area in zip(windows, layout.maps, strict=True)]
    return Group(members.to(device), windows, tuple(inner), tuple(around))


@final
class GroupPass(WindowPass):
    """A slice of one group: the same placements for every image, aligned alike to the strides of the network."""

    def __init__(self, shared: SharedByPasses, group: Group, start: int, stop: int) -> None:
        self.shared, self.windows = shared, group.windows
        self.group, self.start, self.stop = group, start, stop

    def cells(self, index: int) -> Cells | None:
        """The cells of the windows on value `index`."""
        cells = self.group.cells[index]
        return None if cells is None else cells.slice(self.start, self.stop)

    def signed_cells(self, index: int) -> Annotated[Tensor, "p cells"] | None:
        cells = self.cells(index)
        return None if cells is None else cells.signed

    def spans(self, index: int) -> Annotated[Tensor, "p 6"] | None:
        cells = self.cells(index)
        return None if cells is None else cells.spans

    def outside(self, index: int) -> Outside | None:
        cells = self.cells(index)
        return None if cells is None else cells.outside

    def clean_windows(self, index: int) -> OnWindows | Annotated[Tensor, "n features"]:
        cells = self.cells(index)
        if cells is None:
            return self.clean.values[index].flatten(1)
        window = self.window(index)
        return self._gather(index, cells.index).unflatten(2, (window.height, window.width))

    def surroundings(self, position: int, height: int, width: int) -> OnWindows:
        cells = self.group.surroundings[position]
        assert cells is not None
        chosen = cells.slice(self.start, self.stop)
        values = self._gather(self.steps[position].inputs[0], chosen.index).unflatten(2, (height, width))
        if chosen.outside is None:
            return values
        return values.masked_fill(chosen.outside, self.steps[position].operation.padding)

    def flat_product(self, part: Part, columns: Columns, index: int) -> Annotated[Tensor, "p _ out"]:
        cells, window = self.cells(index), self.window(index)
        assert cells is not None
        if not part.is_cuda and cells.index.shape[1] * columns[0].numel() >= _LARGE_WINDOW:
            rows = cells.signed.view(-1, window.height, window.width).numpy()
            return torch.stack(
                [self._by_rows(part[min(one, len(part) - 1)], columns, rows[one]) for one in range(len(rows))]
            )
        chosen = columns.index_select(0, cells.index.flatten()).reshape(
            len(cells.index), -1, columns.shape[2]
        )
        return product(part.flatten(2), chosen, self.rounding)

    def _by_rows(
        self, part: Annotated[Tensor, "n h w c"], columns: Columns, cells: np.ndarray
    ) -> Annotated[Tensor, "n out"]:
        """One placement's window times its weights, row by row: those of a row lie side by side."""
        total = part.new_zeros(len(part), columns.shape[2])
        for row, places in enumerate(cells):
            inside = np.flatnonzero(places >= 0)
            if len(inside):
                first, count = int(inside[0]), len(inside)
                weights = columns[int(places[first]) :][:count].flatten(0, 1)
                total += product(part[:, row, first : first + count].flatten(1), weights, self.rounding)
        return total

    def _gather(self, index: int, cells: Annotated[Tensor, "p cells"]) -> Annotated[Tensor, "p n cells c"]:
        places = self.clean.places(index, self.layout)
        return places.index_select(1, cells.flatten()).unflatten(1, cells.shape).transpose(0, 1)
