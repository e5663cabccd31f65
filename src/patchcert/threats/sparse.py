"""Sparse changes: any K pixels, anywhere in the image."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, final, get_args

import torch
from torch import Generator, Tensor

from patchcert.bounds.sparse import SparseBound
from patchcert.errors import InvalidThreat
from patchcert.tensors import Images, PerImage
from patchcert.threats.threat import (
    Plain,
    as_whole,
    check_images,
    check_pair,
    differences,
    gains,
    is_valid,
    random_filling,
    without_nan,
)


@final
@dataclass(frozen=True)
class SparsePixels:
    """All images that differ from the clean one in at most `pixels` pixels, in all channels of each.

    `bound` names the first-layer bound that a certificate uses. "tight" is exact for each neuron and image,
    "per-pixel" is looser and independent of the image. "per-value" counts single channel values, not pixels:
    the threat then holds only the images with at most `pixels` changed channel values, for colour images a
    much smaller set.
    """

    pixels: int
    bound: SparseBound = "tight"

    def __post_init__(self) -> None:
        pixels = as_whole(self.pixels)
        if pixels is None or pixels < 1:
            raise InvalidThreat(
                f"sparse changes need a whole number of pixels of at least 1, got {self.pixels!r}",
                hint="give SparsePixels(4)",
            )
        object.__setattr__(self, "pixels", pixels)
        if self.bound not in get_args(SparseBound):
            raise InvalidThreat(
                f"unknown bound {self.bound!r} of sparse pixels",
                hint=f"choose one of {', '.join(get_args(SparseBound))}",
            )

    def __repr__(self) -> str:
        return f"SparsePixels({self._count}, {self.bound} bound)"

    @property
    def unit(self) -> Literal["pixel", "channel value"]:
        """What is counted."""
        return "channel value" if self.bound == "per-value" else "pixel"

    def contains(self, clean: Images, changed: Images) -> PerImage:
        """True where no more units differ than allowed and all pixels lie in [0, 1]; never with a NaN."""
        check_pair(clean, changed)
        self._check_fit(clean)
        different = self._units(differences(clean, changed).int())
        return ((different > 0).sum(dim=1) <= self.pixels) & is_valid(clean, changed)

    def sample(self, images: Images, generator: Generator) -> Images:
        """One random member per image: distinct places, filled with uniform noise or zeros and ones."""
        check_images(images)
        self._check_fit(images)
        keys = self._units(torch.rand(images.shape, generator=generator, device=generator.device))
        chosen = self._largest(keys.to(images.device), images)
        return torch.where(chosen, random_filling(images, generator), images)

    def project(self, clean: Images, changed: Images) -> Images:
        """The member nearest to each changed image: the units that save most distance, clamped to [0, 1].

        Members are returned as they are; NaN counts as unchanged.
        """
        check_pair(clean, changed)
        self._check_fit(clean)
        changed = without_nan(clean, changed)
        chosen = self._largest(self._units(gains(clean, changed)), clean)
        nearest = torch.where(chosen, changed.clamp(0, 1), clean)
        member = self.contains(clean, changed)[:, None, None, None]
        return torch.where(member, changed, nearest)

    def to_dict(self) -> dict[str, Plain]:
        """The threat in plain types, from which `SparsePixels.from_dict` builds an equal one."""
        return {"kind": "sparse", "pixels": self.pixels, "bound": self.bound}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Plain]) -> "SparsePixels":
        """The threat that `to_dict` wrote."""
        unknown = set(plain) - {"kind", "pixels", "bound"}
        if unknown or plain.get("kind", "sparse") != "sparse" or "pixels" not in plain:
            raise InvalidThreat(
                f"sparse pixels are a table with kind = 'sparse', pixels and bound, got {dict(plain)!r}",
                hint="write for example pixels = 4 and bound = 'tight'",
            )
        return cls(plain["pixels"], plain.get("bound", "tight"))  # pyright: ignore[reportArgumentType]

    @property
    def _count(self) -> str:
        return f"{self.pixels} {self.unit}{'s' if self.pixels > 1 else ''}"

    def _check_fit(self, images: Images) -> None:
        channels, height, width = images.shape[1:]
        if self.pixels > height * width * (channels if self.unit == "channel value" else 1):
            raise InvalidThreat(
                f"{self._count} do not fit into images of {height}x{width} with {channels} channels",
                hint="allow fewer",
            )

    def _units(self, values: Images) -> Annotated[Tensor, "n units"]:
        """The values summed over each counted unit."""
        return values.flatten(1) if self.unit == "channel value" else values.sum(dim=1).flatten(1)

    def _largest(
        self, scores: Annotated[Tensor, "n units"], images: Images
    ) -> Images | Annotated[Tensor, "n 1 h w"]:
        """True on the allowed number of units with the largest scores."""
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen.scatter_(1, scores.topk(self.pixels, dim=1).indices, True)
        return chosen.unflatten(1, (-1, *images.shape[2:]))
