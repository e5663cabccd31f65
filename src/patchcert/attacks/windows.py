"""The attacked network on the windows that a patch can reach: the rest of every layer is as on the clean image.

Chains of convolutions, linear layers and ReLUs are followed. Between two ReLUs a layer is linear, so that what
lies outside the window is a constant of the ascent: `constant = clean output - product of the clean window`.
A step of the ascent then costs a few products of small matrices, whatever the size of the image. Windows are
drawn back to multiples of the network's strides, so that the same matrices serve all placements.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from patchcert.attacks.views import ImageViews, View, Views, stamp_cells, stamp_offsets
from patchcert.attacks.window_plan import Part, Product, Spread, WindowPlan
from patchcert.bounds import trace
from patchcert.bounds.geometry import NotCovered
from patchcert.errors import PatchcertError
from patchcert.threats import Patch

logger = logging.getLogger(__name__)

_PROBES = 16
_TOLERANCE = 1e-2
_CACHE = 2**31


def patch_views(model: nn.Module, images: Tensor, patch: Patch) -> Views:
    """Windows where they follow the network, else whole images."""
    plain = ImageViews(model, images, patch)
    try:
        plan = WindowPlan.of(trace(model), images, patch)
        views = WindowViews(plan, images, patch)
        views.check_against(plain)
    except (NotCovered, PatchcertError) as reason:
        logger.debug("the attack goes by whole images: %s", reason)
        return plain
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
        """The layer for some of the climbers."""
        return replace(
            self, parts=tuple(part.keep(index) for part in self.parts), constant=self.constant[index]
        )


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

    cells: Tensor
    layers: tuple[Layer, ...]

    @property
    def is_exact(self) -> bool:
        return False

    def logits(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = layer(values)
        return values

    def keep(self, index: Tensor) -> "WindowView":
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
    def at(self, owner: Tensor, corners: Tensor) -> WindowView:
        """The view of ascents on these images with patches at the corners."""
        cells = stamp_cells(self.patch, corners, self.images.shape[1:])
        clean = self.images.flatten(1)[owner[:, None], cells]
        maps, rows = self._clean(owner)
        base = self.plan.drawn_back(corners)
        start = self._start(corners - base)
        layers = []
        for number, stage in enumerate(self.plan.stages):
            parts = stage.placed(base, start if number == 0 else None)
            before = stage.window_of(maps[number], rows, base)
            layers.append(Layer(parts, before - linear(parts, clean, None), stage.rectified))
            clean = before.relu()
        return WindowView(cells, tuple(layers))

    @torch.no_grad()
    def check_against(self, plain: ImageViews) -> None:
        """Refuses a network whose windows do not give what the model gives, at a few random members."""
        generator = torch.Generator().manual_seed(0)
        corners = self.patch.placements(*self.images.shape[2:]).corners.to(self.images.device)
        owner = torch.arange(min(_PROBES, len(self.images)), device=self.images.device)
        drawn = corners[torch.randint(len(corners), (len(owner),), generator=generator).to(corners.device)]
        view, exact = self.at(owner, drawn), plain.at(owner, drawn)
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
