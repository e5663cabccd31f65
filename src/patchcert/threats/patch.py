"""Adversarial patches: any stamp of pixels, moved as a whole to one allowed placement, or to several at once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Annotated, final

import torch
from torch import Generator, Tensor

from patchcert.bounds import Interval
from patchcert.errors import InvalidInput, InvalidThreat
from patchcert.tensors import Corners, Images, PerImage
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
        return _boxes(images, self.masks(images, corners), epsilon)

    def contains(self, clean: Images, changed: Images) -> PerImage:
        """True where all differences lie under the stamp at one placement and all pixels in [0, 1].

        The comparison is exact, down to the sign of a zero, and an image with a NaN is never contained.
        """
        check_pair(clean, changed)
        different = differences(clean, changed).any(dim=1).int()
        covered = self.sums(different)
        everything = different.flatten(1).sum(dim=1, keepdim=True)
        return (covered == everything).any(dim=1) & is_valid(clean, changed)

    def sample(self, images: Images, generator: Generator) -> Images:
        """One random member per image: a uniform placement, filled with uniform noise or zeros and ones."""
        check_images(images)
        placements = self.placements(images.shape[2], images.shape[3])
        corners = placements.sample((len(images),), generator).to(images.device)
        return torch.where(self.masks(images, corners)[:, None], random_filling(images, generator), images)

    def project(self, clean: Images, changed: Images) -> Images:
        """The member nearest to each changed image: the placement that saves most distance, clamped.

        Members are returned as they are; NaN counts as unchanged.
        """
        check_pair(clean, changed)
        changed = without_nan(clean, changed)
        kept = self.sums(gains(clean, changed).sum(dim=1))
        placements = self.placements(clean.shape[2], clean.shape[3])
        corners = placements.corners.to(clean.device)[kept.argmax(dim=1)]
        nearest = torch.where(self.masks(clean, corners)[:, None], changed.clamp(0, 1), clean)
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

    def masks(self, images: Images, corners: Annotated[Tensor, "... 2"]) -> Annotated[Tensor, "... h w"]:
        """True under the stamp at each of the corners, on images of this size and on their device."""
        stamp = None if self.is_solid else self._stamp_on(images.device)
        box = (self.height, self.width)
        return stamp_masks(stamp, box, corners.to(images.device), (images.shape[2], images.shape[3]))

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


@final
@dataclass(frozen=True, repr=False)
class Patches:
    """All images that differ from the clean one only under `count` copies of a patch, at any of its placements each.

    They may overlap, and each shows what it likes, also the clean image: fewer patches are members too.
    """

    patch: Patch
    count: int = 2

    def __post_init__(self) -> None:
        count = as_whole(self.count)
        if not isinstance(self.patch, Patch) or count is None or count < 2:
            raise InvalidThreat(
                f"several are a Patch and how many of it there are, at least 2, got {self.patch!r} and {self.count!r}",
                hint="give Patches(Patch(5), 2); one patch is Patch(5)",
            )
        object.__setattr__(self, "count", count)

    def __repr__(self) -> str:
        return f"Patches({self.count} times {shapes.describe(self.patch.stamp)}, {self.patch.rule})"

    @property
    def pixels(self) -> int:
        """How many pixels the patches cover where they do not overlap."""
        return self.count * self.patch.pixels

    def corners(self, height: int, width: int) -> Annotated[Tensor, "q _ 2"]:
        """The corners of every set of placements; too many of them are an error.

        Sets of `count` different placements suffice, or the set of all where there are no more: what patches reach
        that share a placement, others reach too.
        """
        corners = self.patch.placements(height, width).corners
        return corners[choices(len(corners), self.count)]

    def boxes(
        self, images: Images, corners: Annotated[Tensor, "q _ 2"], epsilon: float | Tensor = 1.0
    ) -> Interval:
        """The box (n, q, c, h, w) of every image at every set of corners: x +- epsilon within [0, 1] on the stamps."""
        check_images(images)
        masks = self.patch.masks(images, corners).any(dim=1)
        return _boxes(images, masks, epsilon)

    def contains(self, clean: Images, changed: Images) -> PerImage:
        """True where stamps at `count` placements cover all differences and all pixels lie in [0, 1], exactly."""
        check_pair(clean, changed)
        return self._cover(differences(clean, changed).any(dim=1), self.count) & is_valid(clean, changed)

    def sample(self, images: Images, generator: Generator) -> Images:
        """One random member per image: uniform placements, filled with uniform noise or zeros and ones."""
        check_images(images)
        placements = self.patch.placements(images.shape[2], images.shape[3])
        corners = placements.sample((len(images), self.count), generator)
        masks = self.patch.masks(images, corners).any(dim=1, keepdim=True)
        return torch.where(masks, random_filling(images, generator), images)

    def project(self, clean: Images, changed: Images) -> Images:
        """The member nearest to each changed image, by trying every set of placements; NaN counts as unchanged.

        Members are returned as they are.
        """
        check_pair(clean, changed)
        changed = without_nan(clean, changed)
        saved = gains(clean, changed).sum(dim=1)
        best, most = torch.zeros_like(saved, dtype=torch.bool), saved.new_full((len(clean),), -torch.inf)
        for corners in self.corners(clean.shape[2], clean.shape[3]).split(_SETS_AT_ONCE):
            masks = self.patch.masks(clean, corners).any(dim=1)
            kept, number = (saved.flatten(1) @ masks.flatten(1).to(saved).T).max(dim=1)
            best = torch.where((kept > most)[:, None, None], masks[number], best)
            most = torch.maximum(kept, most)
        nearest = torch.where(best[:, None], changed.clamp(0, 1), clean)
        member = self.contains(clean, changed)[:, None, None, None]
        return torch.where(member, changed, nearest)

    def to_dict(self) -> dict[str, Plain]:
        """The threat in plain types, from which `Patches.from_dict` builds an equal one."""
        return {**self.patch.to_dict(), "kind": "patches", "count": self.count}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Plain]) -> "Patches":
        """The threat that `to_dict` wrote."""
        if plain.get("kind", "patches") != "patches" or "count" not in plain:
            raise InvalidThreat(
                f"several patches are a table with kind = 'patches', stamp, placements and count, got {dict(plain)!r}",
                hint="write for example stamp = '5x5' and count = 2",
            )
        one = {name: value for name, value in plain.items() if name not in ("kind", "count")}
        return cls(Patch.from_dict(one), plain["count"])  # pyright: ignore[reportArgumentType]

    def _cover(self, different: Annotated[Tensor, "n h w"], count: int) -> PerImage:
        """Whether `count` patches can cover all that differs: one of them covers the first pixel that does."""
        everything = different.flatten(1).sum(dim=1)
        found = (self.patch.sums(different.int()) == everything[:, None]).any(dim=1)
        if count == 1:
            return found
        height, width = different.shape[1:]
        allowed = self.patch.placements(height, width)
        grid = torch.zeros(allowed.rows, allowed.columns, dtype=torch.bool)
        grid[allowed.corners[:, 0], allowed.corners[:, 1]] = True
        first = different.flatten(1).int().argmax(dim=1)
        pixel = torch.stack([first // width, first % width], dim=1)
        for offset in self.patch.stamp.nonzero():
            corners = pixel - offset.to(pixel.device)
            inside = ((corners >= 0) & (corners < corners.new_tensor(grid.shape))).all(dim=1)
            place = corners.clamp(min=0).minimum(corners.new_tensor(grid.shape) - 1)
            tried = ~found & inside & grid.to(pixel.device)[place[:, 0], place[:, 1]]
            rows = tried.nonzero().flatten()
            if len(rows):
                left = different[rows] & ~self.patch.masks(different[rows, None], corners[rows])
                found[rows] = self._cover(left, count - 1)
        return found


MOST_CHOICES = 2**20
"""Sets of placements that are looked at one by one."""
_SETS_AT_ONCE = 2**12


def patch_and_count(threat: object, refusal: str, hint: str) -> tuple[Patch, int]:
    """The patch of a threat, and how many there are of it at once; other threats are refused in these words."""
    if isinstance(threat, Patches):
        return threat.patch, threat.count
    if not isinstance(threat, Patch):
        raise InvalidThreat(refusal, hint=hint)
    return threat, 1


def choices(among: int, count: int) -> Annotated[Tensor, "q _"]:
    """Every set of `count` numbers below `among`, or the one set of all where there are no more."""
    count = min(count, among)
    total = math.comb(among, count)
    if total > MOST_CHOICES:
        raise InvalidThreat(
            f"{count} of {among:,} places can be chosen in {total:,} ways; at most {MOST_CHOICES:,} are looked at",
            hint="allow fewer placements, or prove it by masks: patchcert.DoubleMasking(model, threat)",
        )
    return torch.tensor(list(combinations(range(among), count)), device="cpu").view(total, count)


def stamp_offsets(
    patch: Patch, device: torch.device
) -> tuple[Annotated[Tensor, "pixels"], Annotated[Tensor, "pixels"]]:
    """Rows and columns of the patch's pixels within its bounding box."""
    rows, columns = patch.stamp.nonzero().to(device).unbind(dim=1)
    return rows, columns


def stamp_cells(patch: Patch, corners: Corners, shape: Sequence[int]) -> Annotated[Tensor, "p cells"]:
    """The numbers in a flattened image of the shape (c, h, w) of what the patch covers at each corner, in order."""
    channels, height, width = shape
    rows, columns = stamp_offsets(patch, corners.device)
    pixels = (corners[:, :1] + rows) * width + corners[:, 1:] + columns
    starts = torch.arange(channels, device=corners.device) * (height * width)
    return (starts[:, None] + pixels[:, None]).flatten(1)


def _boxes(images: Images, masks: Annotated[Tensor, "... h w"], epsilon: float | Tensor) -> Interval:
    """x +- epsilon within [0, 1] on the masks (p, h, w), or (n, p, h, w), of every image."""
    masks = masks.unsqueeze(-3)
    lower = torch.where(masks, (images - epsilon).clamp(min=0)[:, None], images[:, None])
    upper = torch.where(masks, (images + epsilon).clamp(max=1)[:, None], images[:, None])
    return Interval(lower, upper)


AnyThreat = Patch | Patches | SparsePixels
_KINDS: dict[str, type[AnyThreat]] = {"patch": Patch, "patches": Patches, "sparse": SparsePixels}


def threat_from_dict(plain: Mapping[str, Plain]) -> AnyThreat:
    """The threat, of whatever kind, whose `to_dict` is the given table."""
    kind = plain.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidThreat(f"unknown kind of threat {kind!r}", hint=f"choose one of {', '.join(_KINDS)}")
    return _KINDS[kind].from_dict(plain)
