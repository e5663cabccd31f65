"""The slow, obvious way: one whole image per placement. The fast engine is held equal to it, and falls back on it."""

import torch
from torch import Tensor

from patchcert.bounds import NEAREST, Network, Rounding
from patchcert.threats import Patch


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
