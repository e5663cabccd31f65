"""Adversarial patches: any stamp of pixels, moved as a whole to one allowed placement."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, final

import torch
from torch import Generator, Tensor

from patchcert.bounds import Interval
from patchcert.errors import InvalidInput, InvalidThreat
from patchcert.tensors import Images, PerImage
from patchcert.threats import shapes
from patchcert.threats.placements import (
    Named,
    PlacementRule,
    Placements,
    PlacementsLike,
    read_rule,
    stamp_masks,
)
from patchcert.threats.shapes import Rows, Stamp, StampLike, from_rows, read_stamp, sums_under, to_rows, trim
from patchcert.threats.sparse import SparsePixels
from patchcert.threats.threat import (
    Plain,
    check_images,
    check_pair,
    gains,
    is_valid,
    random_filling,
    without_nan,
)


@final
@dataclass(frozen=True, init=False, repr=False)
class Patch:
    """All images that differ from the clean one only under the stamp, at one allowed placement.

    The stamp is a side, a (height, width) pair or a boolean mask; all channels of a covered pixel may take
    any values in [0, 1]. A mask whose outer rows or columns are empty is cut to its bounding box, so that a
    placement is always the top-left corner of the covered pixels' bounding box; such a mask is refused
    together with a list or map of placements, whose meaning would shift.
    """

    rows: Rows
    rule: PlacementRule

    def __init__(self, stamp: StampLike, placements: PlacementsLike | Plain = "everywhere") -> None:
        given = read_stamp(stamp)
        trimmed = trim(given)
        rule = read_rule(placements)
        if trimmed.shape != given.shape and not isinstance(rule, Named):
            raise InvalidThreat(
                f"the stamp of shape {tuple(given.shape)} has empty outer rows or columns, so it is unclear "
                "which pixel the given placements are the top-left corner of",
                hint="cut the stamp to the bounding box of its pixels",
            )
        object.__setattr__(self, "rows", to_rows(trimmed))
        object.__setattr__(self, "rule", rule)

    def __repr__(self) -> str:
        return f"Patch({shapes.describe(self.stamp)}, {self.rule})"

    @property
    def stamp(self) -> Stamp:
        """True on the pixels that the patch covers; a copy, which may be changed."""
        return self._stamp_on(torch.device("cpu")).clone()

    @property
    def height(self) -> int:
        """Rows of the stamp's bounding box."""
        return len(self.rows)

    @property
    def width(self) -> int:
        """Columns of the stamp's bounding box."""
        return len(self.rows[0])

    @cached_property
    def pixels(self) -> int:
        """How many pixels the patch covers."""
        return "".join(self.rows).count("#")

    @property
    def is_solid(self) -> bool:
        """Whether the patch covers its whole bounding box."""
        return self.pixels == self.height * self.width

    def placements(self, height: int, width: int) -> Placements:
        """The allowed placements in images of this size, in row-major order; an empty set is an error.

        The corners are a copy: nothing that is done to them changes the patch.
        """
        if (height, width) not in self._placements:
            rows, columns = height - self.height + 1, width - self.width + 1
            if rows < 1 or columns < 1:
                raise InvalidThreat(
                    f"the patch of {self.height}x{self.width} does not fit into images of {height}x{width}",
                    hint="use a smaller patch or larger images",
                )
            corners = self.rule.corners(rows, columns, (height, width))
            self._placements[height, width] = Placements(corners, self.height, self.width, height, width)
        found = self._placements[height, width]
        return replace(found, corners=found.corners.clone())

    def boxes(
        self,
        images: Images,
        corners: Annotated[Tensor, "p 2"] | Annotated[Tensor, "n p 2"],
        epsilon: float | Tensor = 1.0,
    ) -> Interval:
        """The box (n, p, c, h, w) of every image at every corner: x +- epsilon within [0, 1] on the stamp.

        Corners (p, 2) serve all images alike. They must come from `placements`: their values are not checked,
        as that would stall the device on every training step.
        """
        check_images(images)
        per_image = corners.ndim == 3 and len(corners) == len(images)
        if corners.shape[-1:] != (2,) or not (corners.ndim == 2 or per_image):
            raise InvalidInput(
                f"corners must have shape (p, 2) or ({len(images)}, p, 2), got {tuple(corners.shape)}",
                hint="take them from `Patch.placements(height, width).corners`",
            )
        mask = self._masks(images, corners).unsqueeze(-3)
        lower = torch.where(mask, (images - epsilon).clamp(min=0)[:, None], images[:, None])
        upper = torch.where(mask, (images + epsilon).clamp(max=1)[:, None], images[:, None])
        return Interval(lower, upper)

    def contains(self, clean: Images, changed: Images) -> PerImage:
        """True where all differences lie under the stamp at one placement and all pixels in [0, 1].

        The comparison is exact, and an image with a NaN is never contained.
        """
        check_pair(clean, changed)
        different = (clean != changed).any(dim=1).int()
        covered = self.sums(different)
        everything = different.flatten(1).sum(dim=1, keepdim=True)
        return (covered == everything).any(dim=1) & is_valid(clean, changed)

    def sample(self, images: Images, generator: Generator) -> Images:
        """One random member per image: a uniform placement, filled with uniform noise or zeros and ones."""
        check_images(images)
        placements = self.placements(images.shape[2], images.shape[3])
        corners = placements.sample((len(images),), generator).to(images.device)
        return torch.where(self._masks(images, corners)[:, None], random_filling(images, generator), images)

    def project(self, clean: Images, changed: Images) -> Images:
        """The member nearest to each changed image: the placement that saves most distance, clamped.

        Members are returned as they are; NaN counts as unchanged.
        """
        check_pair(clean, changed)
        changed = without_nan(clean, changed)
        kept = self.sums(gains(clean, changed).sum(dim=1))
        placements = self.placements(clean.shape[2], clean.shape[3])
        corners = placements.corners.to(clean.device)[kept.argmax(dim=1)]
        nearest = torch.where(self._masks(clean, corners)[:, None], changed.clamp(0, 1), clean)
        member = self.contains(clean, changed)[:, None, None, None]
        return torch.where(member, changed, nearest)

    def to_dict(self) -> dict[str, Plain]:
        """The patch in plain types, from which `Patch.from_dict` builds an equal one."""
        stamp: Plain = f"{self.height}x{self.width}" if self.is_solid else list(self.rows)
        return {"kind": "patch", "stamp": stamp, "placements": self.rule.to_plain()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Plain]) -> "Patch":
        """The patch that `to_dict` wrote; 'stamp' may also be any text that `shapes.parse` reads."""
        unknown = set(plain) - {"kind", "stamp", "placements"}
        if unknown or plain.get("kind", "patch") != "patch" or "stamp" not in plain:
            raise InvalidThreat(
                f"a patch is a table with kind = 'patch', stamp and placements, got {dict(plain)!r}",
                hint="write for example stamp = '5x5' and placements = 'everywhere'",
            )
        stamp = plain["stamp"]
        read = from_rows(list(map(str, stamp))) if isinstance(stamp, list) else shapes.parse(str(stamp))
        return cls(read, plain.get("placements", "everywhere"))

    def sums(self, values: Annotated[Tensor, "n h w"]) -> Annotated[Tensor, "n p"]:
        """The sums of the values under the stamp at every allowed placement."""
        placements = self.placements(values.shape[1], values.shape[2])
        sums = sums_under(self.stamp, values).flatten(1)
        return sums if placements.complete else sums[:, placements.flat.to(values.device)]

    @cached_property
    def _placements(self) -> dict[tuple[int, int], Placements]:
        return {}

    @cached_property
    def _stamps(self) -> dict[torch.device, Tensor]:
        return {}

    def _stamp_on(self, device: torch.device) -> Stamp:
        """The stamp on a device, copied there once so that later calls do not wait for the host."""
        if device not in self._stamps:
            self._stamps[device] = from_rows(self.rows).to(device)
        return self._stamps[device]

    def _masks(self, images: Images, corners: Annotated[Tensor, "... 2"]) -> Annotated[Tensor, "... h w"]:
        """True under the stamp at each of the corners."""
        stamp = None if self.is_solid else self._stamp_on(images.device)
        box = (self.height, self.width)
        return stamp_masks(stamp, box, corners.to(images.device), (images.shape[2], images.shape[3]))


_KINDS: dict[str, type[Patch] | type[SparsePixels]] = {"patch": Patch, "sparse": SparsePixels}


def threat_from_dict(plain: Mapping[str, Plain]) -> Patch | SparsePixels:
    """The threat, of whatever kind, whose `to_dict` is the given table."""
    kind = plain.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidThreat(f"unknown kind of threat {kind!r}", hint=f"choose one of {', '.join(_KINDS)}")
    return _KINDS[kind].from_dict(plain)
