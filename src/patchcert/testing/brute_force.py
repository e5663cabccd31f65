"""The members of a threat, one by one, on images so small that this is possible."""

import copy
from itertools import combinations, combinations_with_replacement
from typing import Annotated, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor, nn

from patchcert.tensors import Images, Margins
from patchcert.threats import AnyThreat, Patches, Placements, SparsePixels

ALL_FILLINGS = 8
RANDOM_FILLINGS = 64


@runtime_checkable
class PlacedThreat(Protocol):
    """A threat that moves a stamp over the image, as a patch does."""

    @property
    def stamp(self) -> Tensor:
        """True on the pixels it covers."""
        ...

    def placements(self, height: int, width: int) -> Placements:
        """Where the stamp may be."""
        ...


def placed_stamps(
    threat: PlacedThreat, shape: tuple[int, int, int]
) -> dict[tuple[int, int], Annotated[Tensor, "h w"]]:
    """True under the stamp at each placement in images of this (c, h, w) shape, by its corner."""
    placements = threat.placements(*shape[1:])
    corners = [(top, left) for top, left in placements.corners.tolist()]
    return dict(zip(corners, placements.masks(threat.stamp), strict=True))


def supports(threat: AnyThreat, channels: int, height: int, width: int) -> Annotated[Tensor, "m c h w"]:
    """True on the values that may change together: one row for each placement, or choice of placements or pixels."""
    if not isinstance(threat, SparsePixels):
        patch, count = (threat.patch, threat.count) if isinstance(threat, Patches) else (threat, 1)
        single = patch.placements(height, width).masks(patch.stamp)
        chosen = combinations_with_replacement(single, count)
        masks = torch.stack([torch.stack(masks).any(dim=0) for masks in chosen])
        return masks[:, None].expand(-1, channels, -1, -1)
    layers = channels if threat.unit == "channel value" else 1
    choices = torch.tensor(list(combinations(range(layers * height * width), threat.pixels)))
    chosen = torch.zeros(len(choices), layers * height * width, dtype=torch.bool)
    chosen.scatter_(1, choices, True)
    return chosen.view(-1, layers, height, width).expand(-1, channels, -1, -1)


def members(
    threat: AnyThreat, image: Annotated[Tensor, "c h w"], generator: Generator
) -> Annotated[Tensor, "m c h w"]:
    """Members of the threat around one image: every place, with extreme and random fillings.

    Where few values may change, all fillings with zeros and ones are there; otherwise many random ones, and
    always all zeros, all ones and uniform noise.
    """
    found = [image[None]]
    for support in supports(threat, *image.shape):
        values = int(support.sum())
        fillings = _fillings(values, generator).to(image.dtype)
        changed = image.expand(len(fillings), -1, -1, -1).clone()
        changed[:, support] = fillings
        found.append(changed)
    return torch.cat(found)


def reached_margins(model: nn.Module, images: Images, label: int) -> Margins:
    """logit[label] - logit[class], computed in double precision."""
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(images.double())
    return logits[:, label, None] - logits


def _fillings(values: int, generator: Generator) -> Annotated[Tensor, "fillings values"]:
    if values <= ALL_FILLINGS:
        numbers = torch.arange(2**values)[:, None]
        extreme = ((numbers >> torch.arange(values)) & 1).double()
    else:
        extreme = torch.rand(RANDOM_FILLINGS, values, generator=generator, dtype=torch.float64).round()
        extreme[0], extreme[1] = 0, 1
    noise = torch.rand(8, values, generator=generator, dtype=torch.float64)
    return torch.cat([extreme, noise])
