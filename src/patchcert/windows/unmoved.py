"""Channels that no placement moves: the layer after them need not look at them.

Training on bounds shuts many units of a wide network for good: whatever the patch, they are 0, as they are on the clean
image. Differences are then exactly 0 in the whole channel, and so is what a sum has of it.
"""

from torch import Tensor

from patchcert.windows.windows import Windows

_FEWEST_CHANNELS = 16


def moved_channels(state: Windows) -> Tensor | None:
    """The channels in which some window differs from the clean image; None where nearly all do.

    Where a single window shows as much already, the others are not looked at.
    """
    if not _may_pay(state) or _are_nearly_all(_is_moved(state.map(lambda part: part[:1, :1]))):
        return None
    is_moved = _is_moved(state)
    if _are_nearly_all(is_moved):
        return None
    moved = is_moved.nonzero().flatten()
    return moved if len(moved) else moved.new_zeros(1)


def _is_moved(state: Windows) -> Tensor:
    """Which channels (channels,) some window moves or widens."""
    first, second = ((part != 0).flatten(0, -2).any(dim=0) for part in (state.deviation, state.radius))
    return first | second


def _are_nearly_all(is_moved: Tensor) -> bool:
    return 4 * int(is_moved.sum()) > 3 * len(is_moved)


def only(channels: Tensor, state: Windows) -> Windows:
    """The windows with these channels alone."""
    return state.map(lambda part: part.index_select(-1, channels))


def _may_pay(state: Windows) -> bool:
    """On a CPU sums keep their terms, so that the bounds of an image do not depend on the others computed with it."""
    return state.deviation.is_cuda and state.deviation.shape[-1] >= _FEWEST_CHANNELS
