"""In which order an attack tries the placements of a patch."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from patchcert.errors import InvalidInput
from patchcert.threats import Patch

PlacementMargins = Callable[[nn.Module, Tensor, Tensor, Patch], Tensor]
"""Lower bounds (n, placements, classes) of the label's lead, as `patchcert.placement_margins` gives them."""


def random_order(images: int, placements: int, generator: Generator) -> Tensor:
    """All placements (n, p) in an order of its own for every image, each order equally likely.

    Any number of first entries are uniform draws without replacement, so no placement is left out and none
    repeated before all have had their turn.
    """
    keys = torch.rand(images, placements, generator=generator, device=generator.device, dtype=torch.float64)
    return keys.argsort(dim=1)


def weakest_first(leads: Tensor) -> Tensor:
    """Placements (n, p) by falling lead (n, p) of the wrong classes."""
    return leads.argsort(dim=1, descending=True, stable=True)


def certificate_leads(margins: Tensor, labels: Tensor, placements: int) -> Tensor:
    """How far the certificate lets a wrong class lead (n, p): the least margin over them, negated."""
    if margins.ndim != 3 or margins.shape[:2] != (len(labels), placements):
        raise InvalidInput(
            f"placement margins must have the shape ({len(labels)}, {placements}, classes), "
            f"got {tuple(margins.shape)}",
            hint="give a function with the call and result of patchcert.placement_margins",
        )
    label = labels[:, None, None].expand(-1, placements, 1)
    return -margins.scatter(2, label, torch.inf).amin(dim=2)
