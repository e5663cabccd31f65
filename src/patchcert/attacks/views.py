"""How an ascent looks at a model: which values it may change, and what the model makes of them.

Any model is looked at as whole images. Chains of convolutions, linear layers and ReLUs are followed on the windows that
a patch can reach: the rest of every layer is as on the clean image. Between two ReLUs a layer is linear, so that what
lies outside the window is a constant of the ascent: `constant = clean output - product of the clean window`. A step of
the ascent then costs a few products of small matrices, whatever the size of the image.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor, nn

from patchcert.attacks.base import Rows
from patchcert.bounds import trace
from patchcert.bounds.geometry import FeatureMap, Geometry, NotCovered, Window, convolve
from patchcert.bounds.network import Step
from patchcert.bounds.operations import ChannelScale, Convolution, Linear, Reshape, is_relu
from patchcert.errors import PatchcertError
from patchcert.tensors import Images
from patchcert.threats import Patch
from patchcert.threats.patch import stamp_cells, stamp_offsets
from patchcert.windows.layout import CommonWindows, Layout, common_steps, is_worth_a_matrix, window_matrix

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

PerAscent = Annotated[Tensor, "m"]
AscentCorners = Annotated[Tensor, "m 2"]
AscentImages = Annotated[Tensor, "m c h w"]
AscentLogits = Annotated[Tensor, "m k"]
OnCells = Annotated[Tensor, "m v"]
"""Of each ascent the cells that it may change, or the values there."""
Values = Annotated[Tensor, "m _"]
"""What each ascent has on its window, place by place and channel by channel, or as features."""
Bases = PerAscent
"""At which of the common bases the window of each ascent begins."""


class View(ABC):
    """Ascents (m) seen through the values (m, v) of the cells that each may change, all within [0, 1]."""

    cells: OnCells
    """Where the values lie in the flattened image."""

    is_exact: ClassVar[bool]
    """Whether `logits` are bit for bit those of the module looked at; otherwise they differ by rounding."""

    @abstractmethod
    def logits(self, values: OnCells) -> AscentLogits:
        """The logits of the images with these values, with a gradient."""

    @abstractmethod
    def keep(self, index: Rows) -> "View":
        """The view of the ascents of these indices."""


@final
@dataclass(frozen=True, eq=False)
class ImageView(View):
    """Whole images with the values in them: for any model whatever."""

    is_exact: ClassVar[bool] = True

    model: nn.Module
    clean: AscentImages
    cells: OnCells

    def logits(self, values: OnCells) -> AscentLogits:
        return self.model(put(self.clean, self.cells, values))

    def keep(self, index: Rows) -> "ImageView":
        return ImageView(self.model, self.clean[index], self.cells[index])


@final
@dataclass(frozen=True, eq=False)
class ImageViews:
    """Whole images for every ascent."""

    model: nn.Module
    images: Images
    patch: Patch

    def at(self, owner: PerAscent, corners: AscentCorners) -> ImageView:
        """The images of these ascents, with a patch at the corners."""
        cells = stamp_cells(self.patch, corners, self.images.shape[1:])
        return ImageView(self.model, self.images[owner], cells)


def put(images: AscentImages, cells: OnCells, values: OnCells) -> AscentImages:
    """The images with the given values at the cells, every other value bit for bit as it was."""
    return images.flatten(1).scatter(1, cells, values).view_as(images)


@final
@dataclass(frozen=True, eq=False)
class Scale:
    """Each value times a factor of its own."""

    factors: Annotated[Tensor, "values"]

    def __call__(self, values: Values) -> Values:
        return values * self.factors


@final
@dataclass(frozen=True, eq=False)
class Product:
    """The same matrix for all."""

    matrix: Annotated[Tensor, "inputs outputs"]

    def __call__(self, values: Values) -> Values:
        return values @ self.matrix


@final
@dataclass(frozen=True, eq=False)
class Slide:
    """A convolution on windows (height, width, channels) too large for a matrix."""

    weight: Tensor
    geometry: Geometry
    groups: int
    shape: tuple[int, int, int]

    def __call__(self, values: Values) -> Values:
        maps = values.unflatten(1, self.shape).permute(0, 3, 1, 2)
        moved = convolve(maps, self.weight, self.geometry, self.groups, precise=False)
        return moved.permute(0, 2, 3, 1).flatten(1)


@final
@dataclass(frozen=True, eq=False)
class Spread:
    """The values put at each ascent's own places among `size`; zeros elsewhere."""

    index: Annotated[Tensor, "m inputs"]
    size: int

    def __call__(self, values: Values) -> Values:
        return values.new_zeros(len(values), self.size).scatter_add(1, self.index, values)


Part = Scale | Product | Slide | Spread
"""A linear map of the values of all ascents."""


@final
@dataclass(frozen=True, eq=False)
class MapWindows:
    """Where windows lie on a map of the network. As a part it stands for the spread to the whole map, flattened."""

    window: Window
    area: FeatureMap
    places: Annotated[Tensor, "bases cells"]
    """Of the windows from every base, in the map; -1 outside."""

    def spread(self, base: Bases) -> Spread:
        """From windows to the whole map; outside it, windows must hold zeros."""
        places = self.places[base].clamp(min=0).long()
        channels = torch.arange(self.area.channels, device=base.device) * (self.area.height * self.area.width)
        return Spread((places[..., None] + channels).flatten(1), self.area.size)

    def gather(self, clean: Annotated[Tensor, "n places c"], rows: PerAscent, base: Bases) -> Values:
        """The clean value of each ascent's image on its window, far below zero outside the map."""
        places = self.places[base]
        chosen = clean[rows[:, None], places.clamp(min=0).long()]
        return chosen.masked_fill((places < 0)[..., None], -_OFF).flatten(1)


@final
@dataclass(frozen=True, eq=False)
class Stage:
    """From one ReLU, or the image, to the next, or the logits.

    The result is the network's value `index`, which is on windows, or has no places.
    """

    parts: tuple[Part | MapWindows, ...]
    index: int
    result: MapWindows | None

    def placed(self, base: Bases, start: Spread | None) -> tuple[Part, ...]:
        """The parts for ascents whose windows begin at these bases, after a spread at the start where there is one."""
        parts: list[Part] = [] if start is None else [start]
        for part in self.parts:
            parts.append(part.spread(base) if isinstance(part, MapWindows) else part)
        return tuple(parts)

    def by_places(self, value: Annotated[Tensor, "n ..."]) -> Tensor:
        return value.flatten(1) if self.result is None else value.flatten(2).transpose(1, 2).contiguous()


@final
@dataclass(frozen=True, eq=False)
class WindowPlan:
    """The stages of a network for one patch and image size; all but the last end in a ReLU."""

    common: CommonWindows
    stages: tuple[Stage, ...]
    numbers: int
    """Of the clean results of one image."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, images: Images, patch: Patch) -> "WindowPlan":
        """Raises NotCovered where windows cannot follow the network."""
        network = trace(model, images.shape[1:])
        values = network.values(images[:1])
        layout = Layout.of(network, values)
        step = common_steps(layout.windows(Window(0, 0, patch.height, patch.width)))
        extent = (patch.height + step[0] - 1, patch.width + step[1] - 1)
        common = CommonWindows.of(layout, step, extent, images.device)
        stages = tuple(_stages(common, images.dtype))
        return cls(common, stages, sum(values[stage.index][0].numel() for stage in stages))

    @torch.no_grad()
    def clean(self, images: Images) -> list[Tensor]:
        """The clean results of all stages, (n, places, channels) where they have places."""
        parts = []
        for part in images.split(_CLEAN_AT_ONCE):
            values = self.common.layout.network.values(part)
            parts.append([stage.by_places(values[stage.index]) for stage in self.stages])
        return parts[0] if len(parts) == 1 else [torch.cat(same) for same in zip(*parts, strict=True)]


def _stages(common: CommonWindows, dtype: torch.dtype) -> list[Stage]:
    stages, parts, steps = list[Stage](), list[Part | MapWindows](), common.layout.network.steps
    for position, step in enumerate(steps):
        source = _map_windows(common, position)
        if step.inputs != (position,):
            raise NotCovered(f"layer '{step.name}' is not in a chain")
        if is_relu(step.operation):
            stages.append(Stage(tuple(parts), position, source))
            parts = []
        # Beyond the map zeros are seen, which only a ReLU makes of what windows hold there.
        elif source and _looks_around(step) and not all(isinstance(part, Scale) for part in parts):
            raise NotCovered(f"there is no ReLU between layer '{step.name}' and the one before it")
        else:
            parts += _parts(step, source, common.windows[position + 1], dtype)
    return [*stages, Stage(tuple(parts), len(steps), None)]


def _map_windows(common: CommonWindows, index: int) -> MapWindows | None:
    window, area = common.windows[index], common.layout.maps[index]
    return MapWindows(window, area, common.cells(window, area)) if window and area else None


def _looks_around(step: Step) -> bool:
    return isinstance(step.operation, Convolution | Linear)


def _parts(
    step: Step, source: MapWindows | None, target: Window | None, dtype: torch.dtype
) -> list[Part | MapWindows]:
    """What a step does to windows on its input, or to features."""
    operation = step.operation
    if isinstance(operation, Linear):
        product = Product(operation.weight().detach().T.contiguous())
        return [source, product] if source else [product]
    if isinstance(operation, Convolution) and source and target:
        return [_slide(operation, source, target)]
    if isinstance(operation, ChannelScale):
        return [Scale(operation.scale().detach().to(dtype).repeat(source.places.shape[1] if source else 1))]
    if isinstance(operation, Reshape):
        return []
    raise NotCovered(f"layer '{step.name}' is a {type(operation).__name__}")


def _slide(operation: Convolution, source: MapWindows, target: Window) -> Part:
    local, weight = source.window.local(operation.geometry, target), operation.weight().detach()
    shape = (source.window.height, source.window.width, source.area.channels)
    if is_worth_a_matrix(math.prod(shape), weight[0].numel()):
        return Product(window_matrix(local, weight, operation.groups, shape))
    return Slide(weight, local, operation.groups, shape)


def patch_views(model: nn.Module, images: Images, patch: Patch) -> "ImageViews | WindowViews":
    """Windows where they follow the network, else whole images."""
    whole = ImageViews(model, images, patch)
    try:
        views = WindowViews(WindowPlan.of(model, images, patch), images, patch)
        views.check_against(whole)
    except (NotCovered, PatchcertError) as reason:
        logger.debug("the attack looks at whole images: %s", reason)
        return whole
    return views


@final
@dataclass(frozen=True, eq=False)
class Layer:
    """Linear parts with what all ascents add after them, and whether a ReLU follows."""

    parts: tuple[Part, ...]
    constant: Values
    rectified: bool

    def __call__(self, values: Values) -> Values:
        values = linear(self.parts, values, self.constant)
        return values.relu() if self.rectified else values

    def keep(self, index: Rows) -> "Layer":
        """The layer for some of the ascents; only a spread differs between them."""
        parts = (replace(p, index=p.index[index]) if isinstance(p, Spread) else p for p in self.parts)
        return replace(self, parts=tuple(parts), constant=self.constant[index])


def linear(parts: Sequence[Part], values: Values, constant: Values | None) -> Values:
    """The values through all parts, plus the constant."""
    for part in parts[:-1]:
        values = part(values)
    for part in parts[-1:]:
        if isinstance(part, Product) and constant is not None:
            return torch.addmm(constant, values, part.matrix)
        values = part(values)
    return values if constant is None else values + constant


@final
@dataclass(frozen=True, eq=False)
class WindowView(View):
    """The layers of the network on each ascent's windows."""

    is_exact: ClassVar[bool] = False

    cells: OnCells
    layers: tuple[Layer, ...]

    def logits(self, values: OnCells) -> AscentLogits:
        for layer in self.layers:
            values = layer(values)
        return values

    def keep(self, index: Rows) -> "WindowView":
        return WindowView(self.cells[index], tuple(layer.keep(index) for layer in self.layers))


@final
class WindowViews:
    """Windows of some images; what the network makes of the clean images is computed once if it is small."""

    def __init__(self, plan: WindowPlan, images: Images, patch: Patch) -> None:
        self.plan, self.images, self.patch = plan, images, patch
        size = len(images) * plan.numbers * images.element_size()
        self.kept = plan.clean(images) if size <= _CACHE else None

    @torch.no_grad()
    def at(self, owner: PerAscent, corners: AscentCorners) -> WindowView:
        """The view of ascents on these images with patches at the corners."""
        cells = stamp_cells(self.patch, corners, self.images.shape[1:])
        clean = self.images.flatten(1)[owner[:, None], cells]
        maps, rows = self._clean(owner)
        base, start = self.plan.common.base(*corners.unbind(dim=1)), self._start(corners)
        layers = []
        for stage, value in zip(self.plan.stages, maps, strict=True):
            parts = stage.placed(base, start)
            before = value[rows] if stage.result is None else stage.result.gather(value, rows, base)
            rectified = stage is not self.plan.stages[-1]
            layers.append(Layer(parts, before - linear(parts, clean, None), rectified))
            clean, start = before.relu(), None
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

    def _start(self, corners: AscentCorners) -> Spread:
        """From the values to the window on the image, laid out (height, width, channels)."""
        window, channels = self.plan.common.windows[0], self.images.shape[1]
        assert window is not None
        offset = corners % torch.tensor(self.plan.common.step, device=corners.device)
        rows, columns = stamp_offsets(self.patch, corners.device)
        pixels = (offset[:, :1] + rows) * window.width + offset[:, 1:] + columns
        index = pixels[:, None] * channels + torch.arange(channels, device=pixels.device)[:, None]
        return Spread(index.flatten(1), window.height * window.width * channels)

    def _clean(self, owner: PerAscent) -> tuple[list[Tensor], PerAscent]:
        """The clean maps before every ReLU, and which of their rows belong to the owners."""
        if self.kept is not None:
            return self.kept, owner
        chosen, rows = owner.unique(return_inverse=True)
        return self.plan.clean(self.images[chosen]), rows
