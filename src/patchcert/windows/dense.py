"""The slow, obvious way: one whole image per placement. The windows are held equal to it, and fall back on it."""

from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds import NEAREST, Network, Rounding
from patchcert.bounds.linear import linear_margins
from patchcert.bounds.network import zero_at_label
from patchcert.tensors import Corners, Epsilon, Images, Labels, PlacementMargins
from patchcert.threats import Patch, Patches
from patchcert.windows.sweep import rows_within


def dense_margins(
    network: Network,
    images: Images,
    labels: Labels,
    threat: Patch | Patches,
    corners: Annotated[Tensor, "p ... 2"],
    epsilon: Epsilon = 1.0,
    rounding: Rounding = NEAREST,
) -> PlacementMargins:
    """Margins with the patch at each of the corners, or with several patches at each set of corners."""
    boxes = threat.boxes(images, corners, epsilon).flatten(0, 1)
    repeated = labels.repeat_interleave(len(corners))
    return network.margins(boxes, repeated, rounding=rounding).unflatten(0, (len(images), len(corners)))


def dense_linear_margins(
    network: Network,
    images: Images,
    labels: Labels,
    threat: Patch,
    corners: Corners,
    rounding: Rounding = NEAREST,
) -> PlacementMargins:
    """Margins by linear bounds, of all classes, with the patch at each of the corners."""
    boxes = threat.boxes(images, corners).flatten(0, 1)
    repeated = labels.repeat_interleave(len(corners))
    classes = network.values(images[:1])[-1].shape[1]
    targets = torch.arange(classes, device=images.device).expand(len(repeated), -1)
    margins = linear_margins(network, boxes, repeated, targets, classes, rounding)
    return zero_at_label(margins, repeated).unflatten(0, (len(images), len(corners)))


def reference_margins(
    network: Network, images: Images, labels: Labels, threat: Patch, epsilon: float = 1.0
) -> PlacementMargins:
    """Margins at all placements, one after the other, nothing shared and nothing clever."""
    placements = threat.placements(images.shape[-2], images.shape[-1])
    corners = placements.corners.to(images.device)
    single = [dense_margins(network, images, labels, threat, corner[None], epsilon) for corner in corners]
    return torch.cat(single, dim=1)


def dense_placement_margins(
    network: Network, images: Images, labels: Labels, threat: Patch, epsilon: Epsilon, budget: int
) -> PlacementMargins:
    """Margins at all placements, a few of them at a time."""
    corners = threat.placements(images.shape[-2], images.shape[-1]).corners.to(images.device)
    parts = corners.split(rows_within(network, images, budget))
    return torch.cat([dense_margins(network, images, labels, threat, part, epsilon) for part in parts], dim=1)
