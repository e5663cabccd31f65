"""Worst-case margins over a few placements per image: the differentiable half of every patch strategy."""

import torch
from torch import Tensor

from patchcert.bounds import Interval, Network
from patchcert.threats import Patch
from patchcert.windows import Clean, DifferentiablePlacements, covering_placements


class PlacedPatch:
    """A patch with its allowed corners, and with its windows on the network it was last bounded on.

    Windows and corners stay on the device of the images, so that later steps do not wait for it. `dtype` is that
    of the windows, by default the images'; fewer digits are faster, and only training may have them.
    """

    def __init__(self, threat: Patch, dtype: torch.dtype | None = None) -> None:
        self.threat = threat
        self.dtype = dtype
        self._corners: dict[tuple[object, ...], Tensor] = {}
        self._windows: dict[tuple[object, ...], DifferentiablePlacements | None] = {}

    def corners(self, images: Tensor) -> Tensor:
        """All allowed corners (p, 2), copied to the device once."""
        key = (images.device, *images.shape[2:])
        if key not in self._corners:
            placements = self.threat.placements(images.shape[2], images.shape[3])
            self._corners[key] = placements.corners.to(images.device)
        return self._corners[key]

    def clean(self, network: Network, images: Tensor, labels: Tensor) -> Clean | None:
        """The clean pass, with a gradient, for all that windows are asked in one step; None where there are none."""
        windows = self._cover(network, images)
        return None if windows is None else windows.clean(images, labels, self.dtype)

    def margins(
        self, network: Network, images: Tensor, labels: Tensor, chosen: Tensor, epsilon: float | Tensor
    ) -> Tensor:
        """Margins (n, k, classes) at the chosen placements (n, k), indices into the allowed corners."""
        windows = self._cover(network, images)
        if windows is not None:
            return windows.margins(images, labels, self.corners(images)[chosen], epsilon, dtype=self.dtype)
        return self.dense_margins(network, images, labels, chosen, epsilon)

    def margins_against(
        self,
        network: Network,
        images: Tensor,
        labels: Tensor,
        chosen: Tensor,
        classes: Tensor,
        epsilon: float | Tensor,
        clean: Clean | None = None,
    ) -> Tensor:
        """Margins (n, k), each at its own placement and against its own class."""
        windows, corners = self._cover(network, images), self.corners(images)[chosen]
        if windows is not None:
            return windows.margins(images, labels, corners, epsilon, classes, self.dtype, clean)
        margins = self.dense_margins(network, images, labels, chosen, epsilon)
        return margins.gather(2, classes.unsqueeze(2)).squeeze(2)

    def dense_margins(
        self, network: Network, images: Tensor, labels: Tensor, chosen: Tensor, epsilon: float | Tensor
    ) -> Tensor:
        """The same margins the slow, obvious way: one whole image per placement."""
        boxes = self.threat.boxes(images, self.corners(images)[chosen], epsilon)
        flat = Interval(boxes.lower.flatten(0, 1), boxes.upper.flatten(0, 1))
        repeated = labels.unsqueeze(1).expand_as(chosen).flatten()
        return network.margins(flat, repeated).unflatten(0, tuple(chosen.shape))

    def _cover(self, network: Network, images: Tensor) -> DifferentiablePlacements | None:
        key = (id(network), images.device, images.dtype, *images.shape[1:])
        if key not in self._windows:
            self._windows = {key: covering_placements(network, images, self.threat)}
        return self._windows[key]
