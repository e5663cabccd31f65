"""Blocks of placements are bounded by the hull of their members, fast and slow alike."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from patchcert.bounds import Interval, trace
from patchcert.errors import InvalidInput, InvalidThreat
from patchcert.models import ModelSpec, Normalize, build
from patchcert.testing.conformance import seeded
from patchcert.testing.networks import ResidualBlock, randomise
from patchcert.threats import Patch, shapes
from patchcert.train.strategies import PooledPlacements
from patchcert.train.strategies.placements import PlacedPatch
from patchcert.train.strategies.pooled import PooledPatch
from patchcert.train.strategy import Batch
from small_trainings import dense_margins, gradient, make_batch, make_model, worst_margins

CLASSES = 4


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["mlp", "cnn"]),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.lists(st.integers(1, 4), min_size=1, max_size=2),
    st.floats(0, 1),
    st.integers(0, 2**16),
)
def test_pooled_margins_never_exceed_those_of_all_placements(kind, size, blocks, epsilon, seed):
    blocks = tuple(blocks) if kind == "cnn" else tuple(blocks[:1])
    model = make_model(kind, seed=seed).double()
    network, batch = trace(model), make_batch(2, seed=seed, dtype=torch.float64)
    found = worst_margins(PooledPlacements(blocks=blocks), model, Patch(size), batch, epsilon)
    everywhere = dense_margins(network, batch, Patch(size), epsilon).amin(dim=1)
    assert (found <= everywhere + 1e-9).all()


def test_blocks_of_one_lose_nothing_and_large_blocks_lose_something():
    model = make_model("cnn").double()
    network, batch = trace(model), make_batch(dtype=torch.float64)
    everywhere = dense_margins(network, batch, Patch(2), 1.0).amin(dim=1)
    single = worst_margins(PooledPlacements(blocks=(1, 1)), model, Patch(2), batch, 1.0)
    merged = worst_margins(PooledPlacements(blocks=(4,)), model, Patch(2), batch, 1.0)
    torch.testing.assert_close(single, everywhere)
    assert (merged < everywhere - 1e-3).any()


def test_pooled_bounds_contain_every_member_of_their_block():
    """Merging by hand: the block's box is the hull of its members' pre-activation boxes."""
    model = make_model("cnn").double()
    network, batch, threat = trace(model), make_batch(1, dtype=torch.float64), Patch((3, 4))
    placements = threat.placements(8, 8)
    boxes = threat.boxes(batch.images, placements.corners, 1.0).flatten(0, 1)
    bounds = network.intervals(boxes)[1]
    grid = torch.arange(len(placements)).view(placements.rows, placements.columns)
    margins = []
    for top in range(0, placements.rows, 2):
        for left in range(0, placements.columns, 2):
            members = grid[top : top + 2, left : left + 2].flatten()
            hull = Interval(bounds.lower[members].amin(0)[None], bounds.upper[members].amax(0)[None])
            margins.append(network.margins(hull, batch.labels, start=1))
    found = worst_margins(PooledPlacements(), model, threat, batch, 1.0)
    torch.testing.assert_close(found, torch.cat(margins).amin(dim=0, keepdim=True))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["mlp", "cnn", "strided", "pooled"]),
    st.sampled_from([Patch(1), Patch(3), Patch(5), Patch((2, 4)), Patch((4, 3)), Patch(shapes.diamond(5))]),
    st.lists(st.integers(1, 3), min_size=1, max_size=2),
    st.sampled_from([1.0, 0.3, torch.tensor(0.8, dtype=torch.float64)]),
    st.integers(0, 2**16),
)
def test_pooling_on_windows_has_the_margins_and_gradients_of_the_dense_way(
    kind, patch, blocks, epsilon, seed
):
    blocks = tuple(blocks[:1]) if kind == "mlp" else tuple(blocks)
    assume(math.prod(blocks) <= 9 - max(patch.height, patch.width))
    model = DEEPER[kind](seed) if kind in DEEPER else make_model(kind, seed=seed).double()
    batch, pooled = make_batch(3, seed=seed, dtype=torch.float64), pooled_patch(model, patch, blocks)
    assert pooled.windows(batch.images) is not None
    fast = pooled.worst_case(batch, epsilon, seeded()).margins
    dense = pooled.dense_worst_case(batch, epsilon).margins
    torch.testing.assert_close(fast, dense, rtol=1e-9, atol=1e-9)
    ours, plain = (gradient(model, margins, batch.labels)[1] for margins in (fast, dense))
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-8)


def pooled_patch(model, threat, blocks, memory_budget=None):
    return PooledPatch(PlacedPatch(trace(model), threat), blocks, memory_budget)


def _strided(seed):
    """As the paper's cnn4: strides, padding, a normalisation before the first layer."""
    layers = [
        nn.Conv2d(1, 3, 3, 1, 1), nn.ReLU(), nn.Conv2d(3, 4, 4, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 4, 2, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 4),
    ]  # fmt: skip
    model = nn.Sequential(Normalize((0.4,), (0.3,)), *layers)
    return randomise(model, torch.Generator().manual_seed(seed)).double()


def _pooled(seed):
    """A max pooling and another function than ReLU between the layers that are merged after."""
    layers = [
        nn.Conv2d(1, 3, 3, 1, 1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3, 1, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 4),
    ]  # fmt: skip
    return randomise(nn.Sequential(*layers), torch.Generator().manual_seed(seed)).double()


DEEPER = {"strided": _strided, "pooled": _pooled}


def test_pooling_takes_the_dense_way_where_a_block_is_larger_than_the_image_allows():
    batch, pooled = (
        make_batch(2, dtype=torch.float64),
        pooled_patch(make_model("cnn").double(), Patch(6), (4,)),
    )
    assert pooled.windows(batch.images) is None
    found = pooled.worst_case(batch, 1.0, seeded()).margins
    torch.testing.assert_close(found, pooled.dense_worst_case(batch, 1.0).margins)


def test_pooling_takes_the_dense_way_past_branches_and_says_so(caplog):
    inner = ResidualBlock(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()), nn.Identity())
    layers = [nn.Conv2d(1, 3, 3, 1, 1), nn.ReLU(), inner, nn.Flatten(), nn.Linear(3 * 64, CLASSES)]
    model = randomise(nn.Sequential(*layers), seeded()).double()
    batch, pooled = make_batch(2, dtype=torch.float64), pooled_patch(model, Patch(3), (2,))
    with caplog.at_level("DEBUG", logger="patchcert"):
        found = pooled.worst_case(batch, 1.0, seeded()).margins
    assert "the dense path takes over" in caplog.text
    assert "branches" in caplog.text
    torch.testing.assert_close(found, pooled.dense_worst_case(batch, 1.0).margins)


def test_pooling_in_small_parts_changes_neither_margins_nor_gradients():
    model, batch = make_model("cnn").double(), make_batch(5, dtype=torch.float64)
    results = []
    for budget in (1, 2**40):
        pooled = pooled_patch(model, Patch(3), (2, 2), budget)
        for margins in (
            pooled.worst_case(batch, 0.7, seeded()).margins,
            pooled.dense_worst_case(batch, 0.7).margins,
        ):
            results.append((margins, gradient(model, margins, batch.labels)[1]))
    for result in results[1:]:
        torch.testing.assert_close(results[0], result)


def test_pooling_needs_a_full_grid_and_enough_layers():
    model, batch = make_model("mlp"), make_batch()
    with pytest.raises(InvalidThreat, match="full grid of placements to merge, but .* allows only 4 of 36"):
        worst_margins(PooledPlacements(), model, Patch(3, "corners"), batch, 1.0)
    with pytest.raises(InvalidInput, match="pooling after 2 layers needs a network with more than 2"):
        worst_margins(PooledPlacements(blocks=(2, 2)), model, Patch(3), batch, 1.0)


def written_out(model, image, label, side, epsilon, blocks):
    """The paper's pooling as it is specified, with a box for every placement and loops over blocks: before the
    activation, the largest upper and least lower bounds of each g x g placements, then on with one box for each."""
    boxes = {}
    for top, left in itertools.product(*(range(size - side + 1) for size in image.shape[1:])):
        lower, upper = image.clone(), image.clone()
        patch = (slice(None), slice(top, top + side), slice(left, left + side))
        lower[patch], upper[patch] = (
            (image[patch] - epsilon).clamp(min=0),
            (image[patch] + epsilon).clamp(max=1),
        )
        boxes[top, left] = (lower[None], upper[None])
    *layers, last = [layer for layer in model if isinstance(layer, nn.Conv2d | nn.Linear)]
    for number, layer in enumerate(layers):
        boxes = {place: affine_bounds(layer, *box) for place, box in boxes.items()}
        if number < len(blocks):
            merged = {}
            for (row, column), (lower, upper) in boxes.items():
                block = (row // blocks[number], column // blocks[number])
                least, largest = merged.get(block, (lower, upper))
                merged[block] = (torch.minimum(least, lower), torch.maximum(largest, upper))
            boxes = merged
        boxes = {place: (lower.relu(), upper.relu()) for place, (lower, upper) in boxes.items()}
    rows, offset = last.weight[label] - last.weight, last.bias[label] - last.bias
    margins = [
        rows @ (upper + lower)[0] / 2 - rows.abs() @ (upper - lower)[0] / 2 + offset
        for lower, upper in boxes.values()
    ]
    return torch.stack(margins).amin(dim=0)


def affine_bounds(layer, lower, upper):
    centre, radius = (upper + lower) / 2, (upper - lower) / 2
    if isinstance(layer, nn.Linear):
        centre, radius = centre.flatten(1), radius.flatten(1)
        middle, spread = F.linear(centre, layer.weight, layer.bias), F.linear(radius, layer.weight.abs())
    else:
        middle = F.conv2d(centre, layer.weight, layer.bias, layer.stride, layer.padding)
        spread = F.conv2d(radius, layer.weight.abs(), None, layer.stride, layer.padding)
    return middle - spread, middle + spread


@pytest.mark.parametrize("blocks", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize(("side", "epsilon"), [(2, 1.0), (5, 1.0), (5, 0.3)])
def test_pooling_is_what_the_paper_specifies(blocks, side, epsilon):
    model = randomise(build(ModelSpec("cnn4", 1, 12, 12), seeded()), seeded(side)).double()
    images, labels = torch.rand(2, 1, 12, 12, generator=seeded(1)).double(), torch.tensor([3, 0])
    pooled = PooledPatch(PlacedPatch(trace(model), Patch(side)), blocks)
    with torch.no_grad():
        found = pooled.worst_case(Batch(images, labels), epsilon, seeded()).margins
        for image, label, margins in zip(images, labels, found, strict=True):
            torch.testing.assert_close(margins, written_out(model, image, label, side, epsilon, blocks))
