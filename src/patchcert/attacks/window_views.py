"""The attacked network on the windows that a patch can reach: the rest of every layer is as on the clean image.

Chains of convolutions, linear layers and ReLUs are followed. Between two ReLUs a layer is linear, so that what
lies outside the window is a constant of the ascent: `constant = clean output - product of the clean window`.
A step of the ascent then costs a few products of small matrices, whatever the size of the image. Windows are
drawn back to multiples of the network's strides, so that the same matrices serve all placements.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor, nn

from patchcert.attacks.views import ImageViews, View, stamp_cells, stamp_offsets
from patchcert.bounds import Network, trace
from patchcert.bounds.geometry import FeatureMap, Geometry, NotCovered, Window, convolve
from patchcert.bounds.network import Step
from patchcert.bounds.operations import ChannelScale, Convolution, Linear, Reshape, is_relu
from patchcert.errors import PatchcertError
from patchcert.tensors import Images
from patchcert.threats import Patch
from patchcert.windows.layout import Layout, is_worth_a_matrix, window_matrix
from patchcert.windows.passes import common_steps

logger = logging.getLogger(__name__)

_CLEAN_AT_ONCE = 1024
_PROBES = 16
# Sums in another order differ by far less than this, relative to the logits, in float32 and with TF32 too; a network
# that computes something else differs by more. The judge is asked about every success, so no result rests on it.
_TOLERANCE = 1e-2
_CACHE = 2**31
"""Bytes of clean results that are kept for all images."""

_OFF = 1e30
"""Less than minus this, a ReLU gives zero: so cells outside the map stay what zero padding takes them for."""


@final
@dataclass(frozen=True, eq=False)
class Product:
    """The same matrix (inputs, outputs) for all."""

    matrix: Tensor

    def __call__(self, values: Tensor) -> Tensor:
        return values @ self.matrix


@final
@dataclass(frozen=True, eq=False)
class Slide:
    """A convolution on windows (height, width, channels) too large for a matrix."""

    weight: Tensor
    geometry: Geometry
    groups: int
    shape: tuple[int, int, int]

    def __call__(self, values: Tensor) -> Tensor:
        maps = values.unflatten(1, self.shape).permute(0, 3, 1, 2)
        moved = convolve(maps, self.weight, self.geometry, self.groups, precise=False)
        return moved.permute(0, 2, 3, 1).flatten(1)


@final
@dataclass(frozen=True, eq=False)
class Spread:
    """The values put at each climber's own places (m, inputs) among `size`; zeros elsewhere."""

    index: Tensor
    size: int

    def __call__(self, values: Tensor) -> Tensor:
        return values.new_zeros(len(values), self.size).scatter_add(1, self.index, values)

    def then(self, other: "Spread") -> "Spread":
        """Both in one."""
        return Spread(other.index.gather(1, self.index), other.size)


Part = Product | Slide | Spread
"""A linear map of the values of all climbers."""


@final
@dataclass(frozen=True, eq=False)
class Stage:
    """From one ReLU, or the image, to the next, or the logits.

    `spread` is set where a map is flattened at the start of the stage: then each climber's window goes to its
    place in the whole map. `window` and `area` are those of the result; None where it has no places.
    """

    parts: tuple[Part, ...]
    index: int
    rectified: bool
    window: Window | None
    area: FeatureMap | None
    spread: tuple[Window, FeatureMap] | None

    def placed(self, base: Tensor, start: Spread | None) -> tuple[Part, ...]:
        """The parts for climbers whose windows are drawn back to `base` (m, 2)."""
        if self.spread is None:
            return self.parts if start is None else (start, *self.parts)
        window, area = self.spread
        places, _ = window_cells(window, area, base)
        channels = torch.arange(area.channels, device=base.device) * (area.height * area.width)
        spread = Spread((places[..., None] + channels).flatten(1), area.size)
        return (spread if start is None else start.then(spread), *self.parts)

    def by_places(self, value: Tensor) -> Tensor:
        return value.flatten(1) if self.window is None else value.flatten(2).transpose(1, 2).contiguous()

    def window_of(self, clean: Tensor, rows: Tensor, base: Tensor) -> Tensor:
        """The clean result (m, ...) on the windows, far below zero outside the map; `clean` as `WindowPlan.clean`."""
        if self.window is None or self.area is None:
            return clean[rows]
        places, outside = window_cells(self.window, self.area, base)
        return clean[rows[:, None], places].masked_fill(outside[..., None], -_OFF).flatten(1)


def window_cells(window: Window, area: FeatureMap, base: Tensor) -> tuple[Tensor, Tensor]:
    """Flat places (m, cells) of each climber's window on the map, and which of them are outside it."""
    rows = _axis_cells(window.top, window.height, base[:, 0], window.row_step)
    columns = _axis_cells(window.left, window.width, base[:, 1], window.column_step)
    beyond_rows, beyond_columns = (rows < 0) | (rows >= area.height), (columns < 0) | (columns >= area.width)
    outside = beyond_rows[:, :, None] | beyond_columns[:, None, :]
    inner_rows, inner_columns = rows.clamp(0, area.height - 1), columns.clamp(0, area.width - 1)
    return (inner_rows[:, :, None] * area.width + inner_columns[:, None, :]).flatten(1), outside.flatten(1)


def _axis_cells(origin: int, extent: int, base: Tensor, step: int) -> Tensor:
    starts = origin + torch.div(base, step, rounding_mode="floor")
    return starts[:, None] + torch.arange(extent, device=base.device)


@final
@dataclass(frozen=True, eq=False)
class WindowPlan:
    """The stages of a network for one patch and image size."""

    network: Network
    start: Window
    step: tuple[int, int]
    stages: tuple[Stage, ...]
    numbers: int
    """Of the clean results of one image."""

    @classmethod
    @torch.no_grad()
    def of(cls, network: Network, images: Tensor, patch: Patch) -> "WindowPlan":
        """Raises NotCovered where windows cannot follow the network."""
        values = network.values(images[:1])
        layout = Layout.of(network, values)
        rows, columns = common_steps(layout.windows(Window(0, 0, patch.height, patch.width)))
        start = Window(0, 0, patch.height + rows - 1, patch.width + columns - 1)
        stages = _Builder(layout, layout.windows(start)).stages()
        numbers = sum(values[stage.index][0].numel() for stage in stages)
        return cls(network, start, (rows, columns), stages, numbers)

    @torch.no_grad()
    def clean(self, images: Tensor) -> list[Tensor]:
        """The clean results of all stages, (n, places, channels) where they have places."""
        parts = []
        for part in images.split(_CLEAN_AT_ONCE):
            values = self.network.values(part)
            parts.append([stage.by_places(values[stage.index]) for stage in self.stages])
        return parts[0] if len(parts) == 1 else [torch.cat(same) for same in zip(*parts, strict=True)]


class _Builder:
    """Walks the steps of a network once and gathers what lies between its ReLUs."""

    def __init__(self, layout: Layout, windows: tuple[Window | None, ...]) -> None:
        self.layout, self.windows = layout, windows
        self.parts: list[Part] = []
        self.spread: tuple[Window, FeatureMap] | None = None
        self.scale: Tensor | None = None
        self.has_slid = False
        self.done: list[Stage] = []

    def stages(self) -> tuple[Stage, ...]:
        for position, step in enumerate(self.layout.network.steps):
            if step.inputs != (position,):
                raise NotCovered(f"layer '{step.name}' is not in a chain")
            self._follow(position, step)
        self._finish(len(self.layout.network.steps), rectified=False)
        return tuple(self.done)

    def _follow(self, position: int, step: Step) -> None:
        operation = step.operation
        if is_relu(operation):
            self._finish(position, rectified=True)
        elif isinstance(operation, ChannelScale):
            self._rescale(operation.scale(), position)
        elif isinstance(operation, Convolution):
            self._slide(operation, position)
        elif isinstance(operation, Linear):
            self._linear(operation, position)
        elif not isinstance(operation, Reshape):
            raise NotCovered(f"layer '{step.name}' is a {type(operation).__name__}")

    def _finish(self, index: int, rectified: bool) -> None:
        """A stage ends at value `index`, whose ReLU is next."""
        if not self.parts:
            raise NotCovered("a ReLU without a layer before it")
        window = self.windows[index]
        area = self.layout.maps[index] if window is not None else None
        self.done.append(Stage(tuple(self.parts), index, rectified, window, area, self.spread))
        self.parts, self.spread, self.has_slid = [], None, False

    def _rescale(self, scale: Tensor, position: int) -> None:
        """A scale is put into the layer before it or, at the start of a stage, into the layer after it."""
        if not self.parts:
            self.scale = scale if self.scale is None else self.scale * scale
            return
        last, window = self.parts[-1], self.windows[position]
        if isinstance(last, Product):
            cells = 1 if window is None else window.height * window.width
            self.parts[-1] = Product(last.matrix * scale.repeat(cells).to(last.matrix))
        elif isinstance(last, Slide):
            self.parts[-1] = replace(last, weight=last.weight * scale[:, None, None, None].to(last.weight))

    def _slide(self, operation: Convolution, position: int) -> None:
        """Zero padding looks at the map's own border, so what a convolution sees must come from a ReLU."""
        if self.has_slid:
            raise NotCovered("two convolutions without a ReLU between them")
        self.has_slid = True
        source, target = self.windows[position], self.windows[position + 1]
        area, geometry, groups = self.layout.maps[position], operation.geometry, operation.groups
        assert source is not None
        assert target is not None
        assert area is not None
        local = source.local(geometry, target)
        weight = self._scaled(operation.weight().detach(), groups)
        shape = (source.height, source.width, area.channels)
        if is_worth_a_matrix(math.prod(shape), weight[0].numel()):
            self.parts.append(Product(window_matrix(local, weight, groups, shape)))
        else:
            self.parts.append(Slide(weight, local, groups, shape))

    def _linear(self, operation: Linear, position: int) -> None:
        window, area, weight = self.windows[position], self.layout.maps[position], operation.weight().detach()
        if window is not None and area is not None:
            if self.has_slid:
                raise NotCovered("a convolution without a ReLU before the linear layer")
            self.spread = (window, area)
            weight = self._scaled(weight.unflatten(1, (area.channels, -1)), groups=1).flatten(1)
        elif self.scale is not None:
            weight = self._scaled(weight, groups=1)
        if self.parts and isinstance(last := self.parts[-1], Product):
            self.parts[-1] = Product(last.matrix @ weight.T)
        else:
            self.parts.append(Product(weight.T.contiguous()))

    def _scaled(self, weight: Tensor, groups: int) -> Tensor:
        """The weights (out, in, ...) with the scale before them put in."""
        if self.scale is None:
            return weight
        if groups > 1:
            raise NotCovered("a scale before a convolution in groups")
        scale, self.scale = self.scale.to(weight), None
        return weight * scale.reshape(-1, *[1] * (weight.dim() - 2))


def patch_views(model: nn.Module, images: Images, patch: Patch) -> "ImageViews | WindowViews":
    """Windows where they follow the network, else whole images."""
    whole = ImageViews(model, images, patch)
    try:
        plan = WindowPlan.of(trace(model), images, patch)
        views = WindowViews(plan, images, patch)
        views.check_against(whole)
    except (NotCovered, PatchcertError) as reason:
        logger.debug("the attack looks at whole images: %s", reason)
        return whole
    return views


@final
@dataclass(frozen=True, eq=False)
class Layer:
    """Linear parts with what all climbers add after them, and whether a ReLU follows."""

    parts: tuple[Part, ...]
    constant: Tensor
    rectified: bool

    def __call__(self, values: Tensor) -> Tensor:
        values = linear(self.parts, values, self.constant)
        return values.relu() if self.rectified else values

    def keep(self, index: Tensor) -> "Layer":
        """The layer for some of the climbers; only a spread differs between them."""
        parts = (replace(p, index=p.index[index]) if isinstance(p, Spread) else p for p in self.parts)
        return replace(self, parts=tuple(parts), constant=self.constant[index])


def linear(parts: Sequence[Part], values: Tensor, constant: Tensor | None) -> Tensor:
    """The values through all parts, plus the constant."""
    *first, last = parts
    for part in first:
        values = part(values)
    if isinstance(last, Product) and constant is not None:
        return torch.addmm(constant, values, last.matrix)
    values = last(values)
    return values if constant is None else values + constant


@final
@dataclass(frozen=True, eq=False)
class WindowView(View):
    """The layers of the network on each climber's windows."""

    is_exact: ClassVar[bool] = False

    cells: Annotated[Tensor, "m v"]
    layers: tuple[Layer, ...]

    def logits(self, values: Annotated[Tensor, "m v"]) -> Annotated[Tensor, "m k"]:
        for layer in self.layers:
            values = layer(values)
        return values

    def keep(self, index: Annotated[Tensor, "i"]) -> "WindowView":
        return WindowView(self.cells[index], tuple(layer.keep(index) for layer in self.layers))


@final
class WindowViews:
    """Windows of some images; what the network makes of the clean images is computed once if it is small."""

    def __init__(self, plan: WindowPlan, images: Tensor, patch: Patch) -> None:
        self.plan, self.images, self.patch = plan, images, patch
        self.rows, self.columns = stamp_offsets(patch, images.device)
        size = len(images) * plan.numbers * images.element_size()
        self.kept = plan.clean(images) if size <= _CACHE else None

    @torch.no_grad()
    def at(self, owner: Annotated[Tensor, "m"], corners: Annotated[Tensor, "m 2"]) -> WindowView:
        """The view of ascents on these images with patches at the corners."""
        cells = stamp_cells(self.patch, corners, self.images.shape[1:])
        clean = self.images.flatten(1)[owner[:, None], cells]
        maps, rows = self._clean(owner)
        step = torch.tensor(self.plan.step, device=corners.device)
        base = torch.div(corners, step, rounding_mode="floor") * step
        start = self._start(corners - base)
        layers = []
        for number, stage in enumerate(self.plan.stages):
            parts = stage.placed(base, start if number == 0 else None)
            before = stage.window_of(maps[number], rows, base)
            layers.append(Layer(parts, before - linear(parts, clean, None), stage.rectified))
            clean = before.relu()
        return WindowView(cells, tuple(layers))

    @torch.no_grad()
    def check_against(self, whole: ImageViews) -> None:
        """Refuse a network whose windows do not give what the model gives, at a few random members."""
        generator = torch.Generator().manual_seed(0)
        corners = self.patch.placements(*self.images.shape[2:]).corners.to(self.images.device)
        owner = torch.arange(min(_PROBES, len(self.images)), device=self.images.device)
        drawn = corners[torch.randint(len(corners), (len(owner),), generator=generator).to(corners.device)]
        view, exact = self.at(owner, drawn), whole.at(owner, drawn)
        values = torch.rand(view.cells.shape, generator=generator).to(self.images)
        mine, theirs = view.logits(values), exact.logits(values)
        if mine.shape != theirs.shape or not bool(
            ((mine - theirs).abs() <= _TOLERANCE * (1 + theirs.abs())).all()
        ):
            raise NotCovered("the traced network does not give what the model gives")

    def _start(self, offset: Tensor) -> Spread:
        """From the values to the window on the image, laid out (height, width, channels)."""
        channels, window = self.images.shape[1], self.plan.start
        pixels = (offset[:, :1] + self.rows) * window.width + offset[:, 1:] + self.columns
        index = pixels[:, None] * channels + torch.arange(channels, device=pixels.device)[:, None]
        return Spread(index.flatten(1), window.height * window.width * channels)

    def _clean(self, owner: Tensor) -> tuple[list[Tensor], Tensor]:
        """The clean maps before every ReLU, and which of their rows belong to the owners."""
        if self.kept is not None:
            return self.kept, owner
        chosen, rows = owner.unique(return_inverse=True)
        return self.plan.clean(self.images[chosen]), rows
