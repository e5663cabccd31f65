"""Physical sizes: a patch in the pixels of a camera, and what it becomes where images are resized for a network."""

from fractions import Fraction
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor

from patchcert.errors import InvalidInput, InvalidThreat
from patchcert.threats.patch import Patch
from patchcert.threats.threat import as_pair

Mode = Literal["nearest", "nearest-exact", "bilinear", "area"]
"""Filters of `torch.nn.functional.interpolate` whose results are means: they stay in [0, 1]."""

Sight = Annotated[Tensor, "after before"]
"""True where a pixel after resizing may look at one before it, along one side."""


def resized_patch(
    patch: Patch, camera: tuple[int, int], image: tuple[int, int], mode: Mode, antialias: bool = False
) -> Patch:
    """The patch, in pixels of resized images, that covers all that `patch` does to the camera's.

    `camera` and `image` are (height, width) before and after; `mode` and `antialias` are those of
    `torch.nn.functional.interpolate` with `size=image` and its other settings left alone. Wherever `patch` lies in the
    camera's image, the resized image changes only under the stamp of the result at one of its placements. So a proof
    against the result is one against `patch`, if resized images are clamped to [0, 1]: antialiased means of white may
    round to more. The result is a rectangle, as large as the most pixels that any placement reaches; of a stamp with
    gaps the bounding box counts.
    """
    _check_filter(mode, antialias)
    if not isinstance(patch, Patch):
        raise InvalidThreat(
            f"one patch is resized at a time, got {patch!r}",
            hint="several patches are Patches(resized_patch(patch, ...), count)",
        )
    before, after = _size("camera", camera), _size("image", image)
    if antialias and after[1] == 1 and after[0] != before[0]:
        raise InvalidInput(
            f"PyTorch mixes up the rows of antialiased images of one column, got camera={camera} and image={image}",
            hint="resize to two columns or more, or without antialias",
        )
    corners = patch.placements(*before).corners
    found = [
        _spans(sight(before[axis], after[axis], mode, antialias), size)
        for axis, size in enumerate((patch.height, patch.width))
    ]
    lasts = torch.stack([last[corners[:, axis]] for axis, (_, last) in enumerate(found)], dim=1)
    firsts = torch.stack([first[corners[:, axis]] for axis, (first, _) in enumerate(found)], dim=1)
    is_seen = (lasts >= firsts).all(dim=1)
    if not bool(is_seen.any()):
        raise InvalidThreat(
            f"{patch} is never seen: no pixel of {after[0]}x{after[1]} looks at one that it covers",
            hint="this filter skips pixels; resize with antialias=True, or mode='area'",
        )
    firsts, lasts = firsts[is_seen], lasts[is_seen]
    height, width = (lasts - firsts + 1).amax(dim=0).tolist()
    fitting = torch.tensor([after[0] - height, after[1] - width])
    allowed = torch.zeros((after[0] - height + 1, after[1] - width + 1), dtype=torch.bool)
    allowed[tuple(torch.minimum(firsts, fitting).T)] = True
    return Patch((height, width), "everywhere" if bool(allowed.all()) else allowed)


def sight(before: int, after: int, mode: Mode, antialias: bool = False) -> Sight:
    """Which of `before` pixels each of `after` pixels may look at, where a side is resized.

    Pixel d has its centre at (d + 1/2) before / after. A bilinear filter looks at the pixels whose centres are nearer
    than its reach: 1, or before / after if it is larger and antialiased. An area filter looks at pixels that share more
    than a point with the pixel's own, and the nearest one at the pixel in which its centre, or its left edge, lies.
    """
    scale = before / after
    source, target = torch.arange(before).double(), torch.arange(after).double()[:, None]
    if mode == "area":
        # In whole numbers, as PyTorch does: from floor(d before / after) until before ceil((d + 1) before / after).
        start, end = target.long() * before // after, -(-(target.long() + 1) * before // after)
        return (source >= start) & (source < end)
    # PyTorch rounds the scale and a product and a difference of numbers of at most `before` to float32, each by a
    # 2^-24th: 2^-20 of `before` is more than four times as much. Where nothing is rounded, nothing is added.
    leeway = 0.0 if _is_exact(before, after, antialias) else before * 2.0**-20
    if mode == "bilinear":
        reach = max(scale, 1.0) if antialias else 1.0
        distance = (source + 0.5 - (target + 0.5) * scale).abs()
        return distance <= reach + leeway if leeway else distance < reach
    position = (target + (0.5 if mode == "nearest-exact" else 0.0)) * scale - source
    return (position >= -leeway) & (position < 1 + leeway)


def _is_exact(before: int, after: int, antialias: bool) -> bool:
    """Whether all that float32 computes of positions are multiples of a power of two, few enough to be exact.

    An antialiased filter also divides by the scale.
    """
    scale = Fraction(before, after)
    parts = [scale.denominator, scale.numerator if antialias else 1]
    return all(part & (part - 1) == 0 for part in parts) and 4 * before * max(parts) < 2**24


def _spans(seen: Sight, size: int) -> tuple[Annotated[Tensor, "starts"], Annotated[Tensor, "starts"]]:
    """The first and the last pixel that look at `size` neighbours from each start; the last is -1 where none do."""
    running = torch.nn.functional.pad(seen.int().cumsum(dim=1), (1, 0))
    looks = running[:, size:] - running[:, :-size] > 0
    last = len(seen) - 1 - looks.flip(0).int().argmax(dim=0)
    return looks.int().argmax(dim=0), last.where(looks.any(dim=0), -1)


def _check_filter(mode: str, antialias: bool) -> None:
    if mode not in get_args(Mode):
        raise InvalidInput(
            f"what a patch reaches through the filter {mode!r} is not known",
            hint=f"known are {', '.join(get_args(Mode))}; a bicubic one overshoots, and leaves [0, 1]",
        )
    if antialias and mode != "bilinear":
        raise InvalidInput(f"the filter {mode!r} has no antialias", hint="leave it out, as PyTorch does")


def _size(name: str, size: object) -> tuple[int, int]:
    whole = as_pair(size)
    if whole is None or min(whole) < 1:
        raise InvalidInput(
            f"{name} must be (height, width) in whole numbers of at least 1, got {size!r}",
            hint="give camera=(480, 640) and image=(224, 224)",
        )
    return whole
