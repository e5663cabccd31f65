"""Linear bounds of many images with the patch at each placement, on what it moves there."""

from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds import NEAREST, Interval, Network, Rounding
from patchcert.bounds.linear import best_bound, margin_forms
from patchcert.bounds.network import zero_at_label
from patchcert.bounds.restriction import Restriction
from patchcert.tensors import Corners, Images, Labels, PlacementMargins
from patchcert.threats import Patch
from patchcert.threats.patch import stamp_cells
from patchcert.windows.dense import dense_linear_margins
from patchcert.windows.sweep import default_budget


def linear_placement_margins(
    network: Network,
    images: Images,
    labels: Labels,
    threat: Patch,
    corners: Corners,
    rounding: Rounding = NEAREST,
) -> PlacementMargins:
    """Margins of all classes by linear bounds, with the patch at each of the corners, one corner after the other.

    Where a placement has no restriction, whole images are bounded.
    """
    count = images_at_once(network, images)
    parts = [
        _Part(network, some, owners, rounding)
        for some, owners in zip(images.split(count), labels.split(count), strict=True)
    ]
    margins = []
    for corner in corners:
        found = Restriction.of(network, images, stamp_cells(threat, corner[None], images.shape[1:])[0])
        if found is None:
            margins.append(
                dense_linear_margins(network, images, labels, threat, corner[None], rounding)[:, 0]
            )
        else:
            margins.append(torch.cat([part.margins(found, threat, corner) for part in parts]))
    return torch.stack(margins, dim=1)


def images_at_once(network: Network, images: Images) -> int:
    """On a CPU so few that forms of some hundred units stay in its caches. A GPU takes 20 to 30 ms for the 1,600
    small operations of one placement, however many images there are: as many as its memory holds forms of."""
    if not images.is_cuda:
        return 128
    with torch.no_grad():
        values = network.values(images[:1])
    forms = values[-1].numel() * max(value.numel() for value in values)
    room = default_budget(images.device) // (images.element_size() * _LIVE_COPIES * forms)
    return max(1, min(room, 2_048))


_LIVE_COPIES = 12


class _Part:
    """Some of the images, and what is the same for them at all placements."""

    def __init__(self, network: Network, images: Images, labels: Labels, rounding: Rounding) -> None:
        self.images, self.labels, self.rounding = images, labels, rounding
        self.clean = network.intervals(Interval.point(images), rounding)
        classes = self.clean[-1].shape[1]
        targets = torch.arange(classes, device=images.device).expand(len(images), -1)
        self.forms = margin_forms(labels, targets, classes, images.dtype)

    def margins(
        self, found: Restriction, threat: Patch, corner: Annotated[Tensor, "2"]
    ) -> Annotated[Tensor, "n k"]:
        box = found.box(threat.boxes(self.images, corner[None]).map(lambda part: part[:, 0]))
        small = found.network(self.clean, self.rounding)
        intervals = small.intervals(box, self.rounding)
        return zero_at_label(best_bound(small, intervals, self.forms, self.rounding), self.labels)
