"""What an ascent may change, and what the model says of it: the values of a few cells of each image."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor, nn

from patchcert.threats import Patch


class View(ABC):
    """Ascents (m) seen through the values (m, v) of the cells that each may change, all within [0, 1]."""

    cells: Tensor
    """Where the values lie (m, v) in the flattened image."""

    @property
    @abstractmethod
    def is_exact(self) -> bool:
        """Whether `logits` are those of the model itself, and not the same but for rounding."""

    @abstractmethod
    def logits(self, values: Tensor) -> Tensor:
        """What the model says of the images with these values, with a gradient."""

    @abstractmethod
    def keep(self, index: Tensor) -> "View":
        """The view of the ascents of these indices."""


class Views(Protocol):
    """Makes the view of ascents on the images `owner` (m,) at the corners (m, 2)."""

    def at(self, owner: Tensor, corners: Tensor) -> View: ...


@final
@dataclass(frozen=True, eq=False)
class ImageView(View):
    """The whole image with the values in it, shown to the model: for any model whatever."""

    model: nn.Module
    clean: Tensor
    cells: Tensor

    @property
    def is_exact(self) -> bool:
        return True

    def logits(self, values: Tensor) -> Tensor:
        return self.model(put(self.clean, self.cells, values))

    def keep(self, index: Tensor) -> "ImageView":
        return ImageView(self.model, self.clean[index], self.cells[index])


@final
@dataclass(frozen=True, eq=False)
class ImageViews:
    """Whole images for every ascent."""

    model: nn.Module
    images: Tensor
    patch: Patch

    def at(self, owner: Tensor, corners: Tensor) -> ImageView:
        """The images of these ascents, with a patch at the corners."""
        return ImageView(
            self.model, self.images[owner], stamp_cells(self.patch, corners, self.images.shape[1:])
        )


def put(images: Tensor, cells: Tensor, values: Tensor) -> Tensor:
    """The images with the given values at the cells (m, v), everything else to the bit as it was."""
    return images.flatten(1).scatter(1, cells, values).view_as(images)


def stamp_offsets(patch: Patch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns (pixels,) of the patch's pixels within its bounding box."""
    rows, columns = patch.stamp.nonzero().to(device).unbind(dim=1)
    return rows, columns


def stamp_cells(patch: Patch, corners: Tensor, shape: torch.Size) -> Tensor:
    """The cells (m, channels * pixels), channel by channel, under the patch at the corners (m, 2)."""
    channels, height, width = shape
    rows, columns = stamp_offsets(patch, corners.device)
    pixels = (corners[:, :1] + rows) * width + corners[:, 1:] + columns
    starts = torch.arange(channels, device=corners.device) * (height * width)
    return (starts[:, None] + pixels[:, None]).flatten(1)
