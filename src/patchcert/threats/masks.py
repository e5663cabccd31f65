"""Masks that hide patches: a set of them such that wherever the patch lies, one of them covers it."""

import math
from dataclasses import dataclass
from typing import Annotated, final

import torch
import torch.nn.functional as F
from torch import Tensor

from patchcert.errors import InvalidInput
from patchcert.threats.patch import Patch, Patches, choices, patch_and_count
from patchcert.threats.shapes import sums_under, to_rows
from patchcert.threats.threat import as_pair

MOST_MASKS = 4096
"""They make nearly 2^23 pairs; each pair is a forward pass for each image."""


@final
@dataclass(frozen=True, eq=False)
class MaskSet:
    """Masks, True on the pixels that they hide; none hides nothing or everything."""

    hidden: Annotated[Tensor, "m h w"]

    def __len__(self) -> int:
        return len(self.hidden)

    @property
    def pairs(self) -> Annotated[Tensor, "_ 2"]:
        """Every two different masks, by number, the lower first."""
        return torch.combinations(torch.arange(len(self)), 2)

    def covers(self, threat: Patch) -> Annotated[Tensor, "p m"]:
        """Which masks hide the whole patch at each of its placements in images of this size."""
        seen = (~self.hidden).int()
        return (threat.sums(seen) == 0).T

    def render(self) -> str:
        """Each mask as a drawing, '#' on hidden pixels."""
        return "\n\n".join("\n".join(to_rows(mask)) for mask in self.hidden)


def masks_covering(
    threat: Patch | Patches, height: int, width: int, masks: int | tuple[int, int] = 6
) -> MaskSet:
    """At most K x K masks, `masks` = K or (rows, columns), that cover the patch wherever it may lie.

    The distinct tops and lefts of the allowed placements are split into K runs of nearly equal length each. A mask is
    the union of all patches whose top is in one run and whose left is in one run, so that the set covers the threat by
    construction, whatever stamp and placements are. A square of side p anywhere in an n x n image gives squares of side
    ceil((n - p + 1) / K) + p - 1 at most. For several patches the masks are the unions of as many of these: each set of
    placements lies under one of them.
    """
    rows, columns = masks_per_axis(masks)
    patch, count = hidden_patch(threat)
    corners = patch.placements(height, width).corners
    rows, columns = (min(count, len(corners[:, axis].unique())) for axis, count in enumerate((rows, columns)))
    if rows * columns > MOST_MASKS:
        raise _too_many(rows * columns)
    number = _runs(corners[:, 0], rows) * columns + _runs(corners[:, 1], columns)
    starts = torch.zeros(rows * columns, height - patch.height + 1, width - patch.width + 1)
    starts[number, corners[:, 0], corners[:, 1]] = 1
    # A pixel is hidden by the patches that start where a turned stamp, its last corner at the pixel, lies.
    around = (patch.width - 1, patch.width - 1, patch.height - 1, patch.height - 1)
    hidden = sums_under(patch.stamp.flip(0, 1), F.pad(starts, around)) > 0
    hidden = _unions(hidden[hidden.flatten(1).any(dim=1)], count)
    if bool(hidden.flatten(1).all(dim=1).any()):
        raise InvalidInput(
            f"with masks={masks} a mask hides the whole image, and nothing is left to look at",
            hint="give more masks per axis: they are smaller, though never than the patch",
        )
    return MaskSet(hidden)


def hidden_patch(threat: object) -> tuple[Patch, int]:
    """The patch that masks hide, and how many there are of it at once."""
    return patch_and_count(
        threat,
        f"masks hide patches, got {threat!r}",
        hint="changed pixels that are scattered lie under no mask; give patchcert.Patch(5)",
    )


def masks_per_axis(masks: object) -> tuple[int, int]:
    """What `masks` says, K or (rows, columns), as (rows, columns)."""
    whole = as_pair(masks if isinstance(masks, tuple | list) else (masks, masks))
    if whole is None or min(whole) < 1:
        raise InvalidInput(
            f"masks is {masks!r}; expected a whole number of at least 1, or a pair (rows, columns)",
            hint="masks=6 makes 6 x 6 masks",
        )
    return whole


def _runs(values: Annotated[Tensor, "p"], count: int) -> Annotated[Tensor, "p"]:
    """For each value the number of its run, when the distinct ones are split into `count` of nearly equal length."""
    distinct, rank = values.unique(return_inverse=True)
    return rank * count // len(distinct)


def _unions(hidden: Annotated[Tensor, "m h w"], patches: int) -> Annotated[Tensor, "_ h w"]:
    """All unions of this many masks; patches that one mask hides are hidden by each union that has it."""
    if patches == 1:
        return hidden
    count = math.comb(len(hidden), min(patches, len(hidden)))
    if count > MOST_MASKS:
        raise _too_many(count)
    return hidden[choices(len(hidden), patches)].any(dim=1).unique(dim=0)


def _too_many(count: int) -> InvalidInput:
    return InvalidInput(
        f"{count:,} masks have {count * (count - 1) // 2:,} pairs, each a forward pass per image; the most is "
        f"{MOST_MASKS:,} masks",
        hint="give fewer masks per axis",
    )
