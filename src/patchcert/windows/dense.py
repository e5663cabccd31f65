"""The slow, obvious way: one whole image per placement. The fast engine is held equal to it, and falls back on it."""

import torch
from torch import Tensor

from patchcert.bounds import NEAREST, Network, Rounding
from patchcert.threats import Patch
from patchcert.windows.memory import rows_within


def dense_margins(
    network: Network,
    images: Tensor,
    labels: Tensor,
    threat: Patch,
    corners: Tensor,
    epsilon: float | Tensor = 1.0,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """Margins (n, p, classes) with the patch at each of the corners (p, 2)."""
    boxes = threat.boxes(images, corners, epsilon).flatten(0, 1)
    repeated = labels.repeat_interleave(len(corners))
    return network.margins(boxes, repeated, rounding=rounding).unflatten(0, (len(images), len(corners)))


def reference_margins(
    network: Network, images: Tensor, labels: Tensor, threat: Patch, epsilon: float = 1.0
) -> Tensor:
    """Margins (n, placements, classes), one placement after the other, nothing shared and nothing clever."""
    placements = threat.placements(images.shape[-2], images.shape[-1])
    corners = placements.corners.to(images.device)
    single = [dense_margins(network, images, labels, threat, corner[None], epsilon) for corner in corners]
    return torch.cat(single, dim=1)


def dense_weakest(
    network: Network, images: Tensor, labels: Tensor, threat: Patch, epsilon: float | Tensor, budget: int
) -> Tensor:
    """The same search where windows do not cover the network: whole images, a few placements at a time."""
    corners = threat.placements(images.shape[-2], images.shape[-1]).corners.to(images.device)
    size = rows_within(network, images, budget, len(images))
    least, worst = None, None
    for start in range(0, len(corners), size):
        margins = dense_margins(network, images, labels, threat, corners[start : start + size], epsilon)
        values, position = margins.min(dim=1)
        if least is None or worst is None:
            least, worst = values, position + start
        else:
            lower = values < least
            least, worst = least.where(~lower, values), worst.where(~lower, position + start)
    assert worst is not None
    return worst
