"""How much is computed at once: chunk sizes from a memory budget in bytes."""

import torch

from patchcert.bounds import Network, Rounding
from patchcert.bounds.operations import Convolution, Linear
from patchcert.bounds.sparse import FirstLayer
from patchcert.tensors import Images
from patchcert.threats import Patch, SparsePixels
from patchcert.windows.affine import is_read_in_place
from patchcert.windows.blocks import PlacementBlocks
from patchcert.windows.groups import Group
from patchcert.windows.layout import Layout

_ENOUGH_IMAGES = 32
"""As many rows make a product on a CPU efficient; more images would leave room for fewer placements."""

_LIVE_COPIES, _LIVE_COPIES_FUSED = 12, 6
"""How many tensors of the size of the largest window are alive at once in a monotone layer."""

_SHARE_OF_PATCHES = 16
"""The patches themselves take this part of the memory that windows may take."""


def default_budget(device: torch.device) -> int:
    """Bytes for intermediate results: a twelfth of a GPU's memory; on a CPU as many as make products large."""
    if device.type != "cuda":
        return 2**26
    return torch.cuda.get_device_properties(device).total_memory // 12


def default_image_budget(device: torch.device) -> int:
    """Bytes for the clean pass of all images that are swept together."""
    return default_budget(device) if device.type == "cuda" else 2**28


def images_within(
    network: Network, images: Images, threat: Patch | SparsePixels, classes: int, budget: int
) -> int:
    """How many images are certified together, at least one: their clean pass and margins fit the budget."""
    numbers = _image_numbers(network, images, unfolded=True)
    if isinstance(threat, SparsePixels):
        numbers += 2 * _sparse_numbers(network, images)
    else:
        numbers += 4 * classes * len(threat.placements(images.shape[-2], images.shape[-1]))
    most = max(1, budget // (16 * numbers))
    return min(most, _ENOUGH_IMAGES) if isinstance(threat, Patch) and not images.is_cuda else most


def rows_within(network: Network, images: Images, budget: int, batch: int, unfolded: bool = False) -> int:
    """How many boxes of each image fit the budget when `batch` images are bounded densely at once; at least one."""
    numbers = _image_numbers(network, images, unfolded) * max(batch, 1)
    return max(1, budget // (images.element_size() * numbers))


def _image_numbers(network: Network, images: Images, unfolded: bool) -> int:
    """Numbers alive per image in a dense interval pass; `unfolded` where convolutions are written as products."""
    with torch.no_grad():
        values = network.values(images[:1])
    columns = [0]
    if unfolded:
        columns += [
            step.operation.weight()[0].numel() * values[position + 1][0, 0].numel()
            for position, step in enumerate(network.steps)
            if isinstance(step.operation, Convolution)
        ]
    return 8 * max(value.numel() for value in values) + 2 * max(columns)


def _sparse_numbers(network: Network, images: Images) -> int:
    """Numbers per image in the tight sparse bound: one for each neuron of the first layer and pixel it sees."""
    layer = FirstLayer.of(network.steps)
    weight = layer.operation.weight()
    with torch.no_grad():
        neurons = network.values(images[:1])[layer.position + 1][0].numel()
    return neurons * weight[0].numel() // images.shape[1]


def placements_within(
    budget: int,
    layout: Layout,
    group: Group,
    images: int,
    rounding: Rounding,
    blocks: PlacementBlocks | None,
    dtype: torch.dtype | None,
) -> int:
    """How many placements of the group are swept at once if the budget, here in numbers, is kept; at least one."""
    sizes, columns, unfolded = [1], 1, 0
    for position, step in enumerate(layout.network.steps):
        inputs, outputs = (_window_numbers(layout, group, index) for index in (step.inputs[0], position + 1))
        operation = step.operation
        if isinstance(operation, Linear):
            outputs = operation.weight().shape[0]
            if not is_read_in_place(operation.weight(), layout.maps[step.inputs[0]], dtype):
                columns = max(columns, inputs * outputs)
            if inputs and position == len(layout.network.steps) - 1:
                unfolded = max(unfolded, 2 * inputs * outputs)
        if isinstance(operation, Convolution) and rounding.is_outward:
            target = group.windows[position + 1]
            assert target is not None
            unfolded = max(unfolded, 2 * operation.weight()[0].numel() * target.height * target.width)
        sizes.append((1 if blocks is None else blocks.members(position)) * max(inputs, outputs))
    copies = _LIVE_COPIES_FUSED if group.members.is_cuda else _LIVE_COPIES
    by_state = budget // ((copies * max(sizes) + unfolded) * max(images, 1))
    return max(1, min(by_state, budget // (4 * columns), len(group)))


def patches_within(budget: int, layout: Layout, group: Group, images: int) -> int:
    """How many placements' patches fit their share of the budget, here in numbers."""
    numbers = _window_numbers(layout, group, 0) * max(images, 1)
    return budget // (_SHARE_OF_PATCHES * _LIVE_COPIES * numbers)


def _window_numbers(layout: Layout, group: Group, index: int) -> int:
    """Numbers in a window on value `index`; none where it has no places."""
    window, area = group.windows[index], layout.maps[index]
    return 0 if window is None or area is None else area.channels * window.height * window.width
