"""Blocks of placements: which need their members one by one, and what passing these costs."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from patchcert.bounds import NEAREST, trace
from patchcert.bounds.geometry import NotCovered
from patchcert.models import Normalize
from patchcert.testing.networks import randomise
from patchcert.threats import Patch, shapes
from patchcert.windows.blocks import PlacementBlocks
from patchcert.windows.layout import Layout
from patchcert.windows.passes import clean_pass
from patchcert.windows.sweep import PlacementSweep
from patchcert.windows.training import DifferentiablePlacements

SIDE = 14
NETWORKS = {
    "convolutions": [
        Normalize((0.4,), (0.3,)), nn.Conv2d(1, 3, 3, 1, 1), nn.ReLU(), nn.Conv2d(3, 4, 4, 2, 1), nn.ReLU(),
        nn.Flatten(), nn.LazyLinear(4),
    ],
    "dilated": [
        nn.Conv2d(1, 2, 3, 1, 2, dilation=2), nn.ReLU(), nn.Conv2d(2, 2, 3, 1, 1), nn.Flatten(), nn.LazyLinear(4),
    ],
    "features": [nn.Flatten(), nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, 4)],
    "averages": [nn.AvgPool2d(2), nn.Conv2d(1, 2, 3, 1, 1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)],
}  # fmt: skip
LAYERS = {"convolutions": (1, 3), "dilated": (0, 2), "features": (1,), "averages": (1,)}
IMAGES = torch.rand(3, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 3])


def network_of(kind):
    model = copy.deepcopy(nn.Sequential(*NETWORKS[kind]))
    model(IMAGES)
    return trace(randomise(model, torch.Generator().manual_seed(1)))


def merging_of(network, patch, blocks, layers):
    with torch.no_grad():
        layout = Layout.of(network, network.values(IMAGES[:1]))
    return PlacementBlocks.of(layout, patch, patch.placements(SIDE, SIDE), blocks, layers, IMAGES.device)


@pytest.mark.parametrize(
    ("kind", "patch", "blocks", "left"),
    [
        ("convolutions", Patch(3), (2,), ()),
        ("convolutions", Patch(3), (4,), ()),
        ("convolutions", Patch(5), (2, 2), ()),
        ("convolutions", Patch(3), (2, 2), (2,)),
        ("convolutions", Patch(2), (2,), (2,)),
        ("convolutions", Patch((3, 2)), (2,), (2,)),
        ("convolutions", Patch(2), (2, 2), (2, 2)),
        ("convolutions", Patch(1), (1, 3), (3,)),
        ("convolutions", Patch(shapes.diamond(13)), (2,), (2,)),
        ("dilated", Patch(4), (2,), (2,)),
        ("dilated", Patch(5), (2,), ()),
        ("features", Patch(5), (2,), (2,)),
        ("averages", Patch(9), (2,), (2,)),
    ],
    ids=str,
)
def test_members_pass_one_by_one_only_where_a_cell_sees_more_than_one_of_them_holds(
    kind, patch, blocks, left
):
    assert merging_of(network_of(kind), patch, blocks, LAYERS[kind]).sides == left


@pytest.mark.parametrize("blocks", [(2,), (3,), (2, 2)])
def test_the_stamps_of_a_block_are_its_placements(blocks):
    merging = merging_of(network_of("features"), Patch((2, 3)), blocks, (1, 3))
    placed = torch.zeros(len(merging.corners), SIDE, SIDE, dtype=torch.bool)
    for number, (top, left) in enumerate(merging.corners.tolist()):
        height, width = merging.stamps.shape[2:4]
        members = merging.stamps[number, :, :, :, 0]
        assert (members.flatten(1).sum(dim=1) == 6).all()
        placed[number, top : top + height, left : left + width] = members.any(dim=0)
        assert merging.index[top, left] == number
    assert placed.any(dim=0).all()
    first = merging.stamps[0, :4, :, :, 0].any(dim=0)
    if blocks == (2, 2):
        assert first[:3, :4].all()
        assert first.sum() == 12


def test_larger_blocks_than_the_image_allows_are_not_covered():
    with pytest.raises(NotCovered, match="larger than the image allows"):
        merging_of(network_of("features"), Patch(12), (4,), (1,))


class Count(TorchDispatchMode):
    """Counts the operations that compute something."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        returned = function._schema.returns
        self.number += all(value.alias_info is None or value.alias_info.is_write for value in returned)
        return function(*arguments, **(keywords or {}))


def passes(network, blocks):
    """Operations per group in the search, and in the pass with a gradient."""
    merging = merging_of(network, Patch(2), blocks, LAYERS["convolutions"][: len(blocks)])
    assert merging.sides == blocks
    sweep = PlacementSweep.of(network, IMAGES, Patch(2), 2**30, merging)
    chosen = DifferentiablePlacements.of(network, IMAGES, Patch(2), merging)
    corners = merging.corners[:4].expand(len(IMAGES), 4, 2)
    chosen.margins(IMAGES, LABELS, corners, 0.5)
    with torch.no_grad():
        clean = clean_pass(network, IMAGES, LABELS)
        sweep.margins(clean, LABELS, 0.5)
        with Count() as search:
            sweep.margins(clean, LABELS, 0.5)
    with Count() as count:
        chosen.margins(IMAGES, LABELS, corners, 0.5).sum().backward()
    return search.number / len(sweep.groups), count.number


@pytest.mark.parametrize(("small", "large"), [((2,), (4,)), ((2, 2), (2, 3))])
def test_larger_blocks_take_no_more_operations(small, large):
    network = network_of("convolutions")
    fewest, most = passes(network, small), passes(network, large)
    assert most[0] <= 1.05 * fewest[0]
    assert most[1] <= 1.05 * fewest[1]


def test_chunks_of_the_search_leave_room_for_all_members():
    network, sizes = network_of("convolutions"), []
    for patch in (Patch(1), Patch(3)):
        merging = merging_of(network, patch, (2,), (1,))
        sweep = PlacementSweep.of(network, IMAGES, patch, 2**17, merging)
        sizes.append(sweep.placements_at_once(sweep.groups[0], len(IMAGES), NEAREST))
    by_members, by_union = sizes
    assert 0 < by_members < by_union
