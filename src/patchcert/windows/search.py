"""The search for the weakest placement in all-patch training: no gradient, no need for the last digits."""

from typing import Annotated

import torch
from torch import Tensor

from patchcert.bounds import Network
from patchcert.bounds.rounding import fast_arithmetic
from patchcert.tensors import Images, Labels
from patchcert.threats import Patch
from patchcert.windows.clean import Clean, clean_pass
from patchcert.windows.dense import dense_weakest
from patchcert.windows.memory import default_budget
from patchcert.windows.sweep import PlacementSweep, covering_sweep

_TRAINING_BUDGET = 2**30
"""Training leaves the rest of the memory to the gradient and to other runs on the same device."""


class WeakestPlacements:
    """Finds, per image and class, the placement with the least margin; keeps its geometry between calls."""

    def __init__(self, threat: Patch, memory_budget: int | None = None) -> None:
        self.threat = threat
        self.memory_budget = memory_budget
        self._sweeps: dict[tuple, PlacementSweep | None] = {}

    @torch.no_grad()
    def find(
        self,
        network: Network,
        images: Images,
        labels: Labels,
        epsilon: float | Tensor,
        clean: Clean | None = None,
    ) -> Annotated[Tensor, "n k"]:
        """Indices into the threat's placements; `clean` is the clean pass where the caller has it.

        Products may run in TF32 and windows in half precision: both only rank placements.
        """
        budget = self.memory_budget or search_budget(images.device)
        sweep = self._sweep(network, images, budget)
        if sweep is not None:
            return weakest(sweep, images, labels, epsilon, clean)
        with fast_arithmetic():
            return dense_weakest(network, images, labels, self.threat, epsilon, budget)

    def _sweep(self, network: Network, images: Images, budget: int) -> PlacementSweep | None:
        key = (id(network), images.shape[1:], images.device, images.dtype, budget)
        if key not in self._sweeps:
            self._sweeps = {key: covering_sweep(network, images, self.threat, budget)}
        return self._sweeps[key]


def search_budget(device: torch.device) -> int:
    """The memory that a search may take by default."""
    return min(default_budget(device), _TRAINING_BUDGET)


@torch.no_grad()
def weakest(
    sweep: PlacementSweep,
    images: Images,
    labels: Labels,
    epsilon: float | Tensor,
    clean: Clean | None = None,
) -> Annotated[Tensor, "n k"]:
    """The placement of least margin, by products in TF32 and windows in half precision where they can be used."""
    with fast_arithmetic():
        dtype = torch.float16 if sweep.takes_half_precision(images) else None
        if clean is None:
            clean = clean_pass(sweep.layout.network, images, labels)
        return sweep.margins(clean.detached(), labels, epsilon, dtype=dtype).argmin(dim=1)
