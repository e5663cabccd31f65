"""How much is computed at once: chunk sizes from a memory budget in bytes."""

import torch
from torch import Tensor

from patchcert.bounds import Network
from patchcert.bounds.operations import Convolution
from patchcert.bounds.sparse import FirstLayer
from patchcert.threats import Patch, SparsePixels


def default_budget(device: torch.device) -> int:
    """Bytes for intermediate results: a twelfth of a GPU's memory; on a CPU as many as make products large."""
    if device.type != "cuda":
        return 2**26
    return torch.cuda.get_device_properties(device).total_memory // 12


def default_image_budget(device: torch.device) -> int:
    """Bytes for the clean pass of all images that are swept together."""
    return default_budget(device) if device.type == "cuda" else 2**28


_ENOUGH_IMAGES = 32
"""So many rows make a product on a CPU efficient; more images would leave room for fewer placements."""


def image_numbers(network: Network, images: Tensor, unfolded: bool) -> int:
    """Numbers alive per image in a dense interval pass; `unfolded` where convolutions are written as products."""
    with torch.no_grad():
        values = network.values(images[:1])
    most = max(value.numel() for value in values)
    columns = 0
    if unfolded:
        columns = max(
            (
                step.operation.weight()[0].numel() * values[position + 1][0, 0].numel()
                for position, step in enumerate(network.steps)
                if isinstance(step.operation, Convolution)
            ),
            default=0,
        )
    return 8 * most + 2 * columns


def images_within(
    network: Network, images: Tensor, threat: Patch | SparsePixels, classes: int, budget: int
) -> int:
    """How many images are certified together: so many that their clean pass and margins fit; at least one."""
    numbers = image_numbers(network, images, unfolded=True)
    if isinstance(threat, SparsePixels):
        numbers += 2 * sparse_numbers(network, images)
    else:
        numbers += 4 * classes * len(threat.placements(images.shape[-2], images.shape[-1]))
    most = max(1, budget // (16 * numbers))
    return min(most, _ENOUGH_IMAGES) if isinstance(threat, Patch) and not images.is_cuda else most


def rows_within(network: Network, images: Tensor, budget: int, batch: int, unfolded: bool = False) -> int:
    """How many boxes per image fit the budget when `batch` images are bounded densely at once; at least one."""
    return max(
        1, budget // (images.element_size() * image_numbers(network, images, unfolded) * max(batch, 1))
    )


def sparse_numbers(network: Network, images: Tensor) -> int:
    """Numbers per image in the tight sparse bound: one for each neuron of the first layer and pixel it sees."""
    layer = FirstLayer.of(network.steps)
    weight = layer.operation.weight()
    with torch.no_grad():
        neurons = network.values(images[:1])[layer.position + 1][0].numel()
    return neurons * weight[0].numel() // images.shape[1]
