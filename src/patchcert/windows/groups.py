"""Which cells the windows of placements cover, and groups of placements whose windows are alike."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from patchcert.bounds.geometry import FeatureMap, Window
from patchcert.threats import Placements
from patchcert.windows.layout import Layout


@dataclass(frozen=True, slots=True)
class Cells:
    """For each placement the cells (p, cells) of the feature map that its window covers, as flat indices.

    `signed` is -1 for cells outside the map; `index` has some cell of the map there, and `outside` (p, 1, h,
    w, 1) says which they are. It is None where no window sticks out. `spans` (p, 6) are the rows of the window
    that lie in the map, from and to, the columns likewise, and the row and column of the map it begins at.
    """

    index: Tensor
    signed: Tensor
    outside: Tensor | None
    spans: Tensor

    def slice(self, start: int, stop: int) -> "Cells":
        """The cells of some of the placements."""
        outside = None if self.outside is None else self.outside[start:stop]
        return Cells(self.index[start:stop], self.signed[start:stop], outside, self.spans[start:stop])


def cells(window: Window, shifts: np.ndarray, area: FeatureMap, device: torch.device) -> Cells:
    """The cells of the window moved by the given image-pixel shifts (p, 2) on the map."""
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
    """From where to where (p,) each row of flags (p, extent), which are true side by side, is true."""
    first = inside.argmax(axis=1)
    return first, first + inside.sum(axis=1)


def _axis_cells(origin: int, extent: int, shifts: np.ndarray, step: int) -> np.ndarray:
    return (origin + shifts // step)[:, None] + np.arange(extent)


@dataclass(frozen=True, slots=True)
class Group:
    """Placements whose windows differ by whole steps on every feature map, so that one geometry serves them
    all.

    `cells` are those of the windows; `surroundings`, for a step that goes by its interval bound, those that its
    output window looks at.
    """

    members: Tensor
    windows: tuple[Window | None, ...]
    cells: tuple[Cells | None, ...]
    surroundings: tuple[Cells | None, ...]

    def __len__(self) -> int:
        return len(self.members)


def groups(layout: Layout, placements: Placements, device: torch.device) -> list[Group]:
    """All placements, grouped by their alignment to the strides of the network."""
    windows = [
        window for window in layout.windows(Window(0, 0, placements.height, placements.width)) if window
    ]
    row_step = math.lcm(*(window.row_step for window in windows))
    column_step = math.lcm(*(window.column_step for window in windows))
    corners = placements.corners.cpu()
    alignment = (corners[:, 0] % row_step) * column_step + corners[:, 1] % column_step
    return [
        _group(layout, placements, corners, (alignment == value).nonzero().flatten(), device)
        for value in alignment.unique().tolist()
    ]


def _group(
    layout: Layout, placements: Placements, corners: Tensor, members: Tensor, device: torch.device
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
