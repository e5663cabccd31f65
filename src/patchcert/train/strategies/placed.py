"""Worst-case margins over a few placements per image: the differentiable half of every patch strategy."""

from torch import Tensor

from patchcert.bounds import Interval, Network
from patchcert.threats import Patch


class PlacedPatch:
    """A patch with its allowed corners kept on the device of the images."""

    def __init__(self, threat: Patch) -> None:
        self.threat = threat
        self._corners: dict[tuple[object, ...], Tensor] = {}

    def corners(self, images: Tensor) -> Tensor:
        """All allowed corners (p, 2), copied to the device once, so that later steps do not wait."""
        key = (images.device, *images.shape[2:])
        if key not in self._corners:
            placements = self.threat.placements(images.shape[2], images.shape[3])
            self._corners[key] = placements.corners.to(images.device)
        return self._corners[key]

    def margins(
        self, network: Network, images: Tensor, labels: Tensor, chosen: Tensor, epsilon: float | Tensor
    ) -> Tensor:
        """Margins (n, k, classes) at the chosen placements (n, k), indices into the allowed corners."""
        boxes = self.threat.boxes(images, self.corners(images)[chosen], epsilon)
        flat = Interval(boxes.lower.flatten(0, 1), boxes.upper.flatten(0, 1))
        repeated = labels.unsqueeze(1).expand_as(chosen).flatten()
        return network.margins(flat, repeated).unflatten(0, tuple(chosen.shape))
