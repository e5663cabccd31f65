"""Every strategy gives the margins it claims, with the right gradient, however a batch is shared."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Generator, nn

from patchcert.bounds import Interval, trace
from patchcert.errors import InvalidInput, InvalidThreat
from patchcert.models import Normalize
from patchcert.testing.networks import ResidualBlock, randomise
from patchcert.threats import Patch, SparsePixels, shapes
from patchcert.train.strategies import (
    AllPlacements,
    GuidedPlacements,
    Natural,
    PooledPlacements,
    RandomPlacements,
    SparseChanges,
)
from patchcert.train.strategy import Batch, is_robust, margin_loss
from patchcert.train.unet import MarginUNet, build_unet, enlarged

CLASSES = 4


def seeded(seed=0):
    return Generator().manual_seed(seed)


def make_model(kind, channels=1, side=8, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "mlp":
            return nn.Sequential(
                nn.Flatten(), nn.Linear(channels * side * side, 12), nn.ReLU(), nn.Linear(12, CLASSES)
            ).eval()
        return nn.Sequential(
            nn.Conv2d(channels, 3, 3, 1, 1),
            nn.ReLU(),
            nn.Conv2d(3, 4, 4, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * (side // 2) ** 2, 10),
            nn.ReLU(),
            nn.Linear(10, CLASSES),
        ).eval()


def make_batch(count=3, channels=1, side=8, seed=0, dtype=torch.float32):
    generator = seeded(seed)
    images = torch.rand(count, channels, side, side, generator=generator, dtype=dtype)
    return Batch(images, torch.randint(CLASSES, (count,), generator=generator))


def dense_margins(network, batch, threat, epsilon):
    """Margins (n, p, classes) at every placement, one ordinary differentiable pass for each."""
    corners = threat.placements(*batch.images.shape[2:]).corners
    maps = []
    for corner in corners:
        box = threat.boxes(batch.images, corner[None], epsilon)
        maps.append(network.margins(Interval(box.lower[:, 0], box.upper[:, 0]), batch.labels))
    return torch.stack(maps, dim=1)


def gradient(model, margins, labels):
    loss = margin_loss(margins, labels, len(labels))
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), torch.cat([part.flatten() for part in parts])


THREATS = [
    Patch(3),
    Patch((2, 4)),
    Patch(shapes.diamond(4)),
    Patch((4, 2), placements="corners"),
    Patch(2, placements=[(0, 1), (3, 5), (6, 6)]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize(("kind", "channels", "epsilon"), [("mlp", 1, 0.3), ("cnn", 2, 1.0), ("cnn", 1, 0.6)])
def test_all_placements_has_the_loss_and_gradient_of_a_pass_over_every_placement(
    kind, channels, epsilon, threat, dtype
):
    model = make_model(kind, channels).to(dtype)
    network, batch = trace(model), make_batch(4, channels, dtype=dtype)
    size = torch.tensor(epsilon, dtype=dtype)
    fast = AllPlacements(threat).worst_case(network, batch, size, seeded()).margins
    slow = dense_margins(network, batch, threat, size).amin(dim=1)
    assert fast.shape == (4, CLASSES)
    loss, slope = gradient(model, fast, batch.labels)
    wanted_loss, wanted_slope = gradient(model, slow, batch.labels)
    assert abs(loss - wanted_loss) <= 1e-5 * wanted_loss
    assert (slope - wanted_slope).norm() <= 1e-5 * wanted_slope.norm()
    assert torch.equal(fast.gather(1, batch.labels[:, None]), torch.zeros(4, 1, dtype=dtype))


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_windows_of_few_digits_change_margins_and_gradient_little(kind):
    model, batch = make_model(kind), make_batch(4)
    exact, rounded = (
        RandomPlacements(Patch(3), 5, windows).worst_case(trace(model), batch, 1.0, seeded()).margins
        for windows in (None, torch.bfloat16)
    )
    assert rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).norm() <= 0.02 * exact.norm()
    slope, rough = (gradient(model, margins, batch.labels)[1] for margins in (exact, rounded))
    assert (slope - rough).norm() <= 0.05 * slope.norm()


def test_a_plain_number_for_epsilon_means_the_same_as_a_tensor():
    network, batch, strategy = trace(make_model("cnn")), make_batch(), AllPlacements(Patch(3))
    by_number = strategy.worst_case(network, batch, 1.0, seeded()).margins
    by_tensor = strategy.worst_case(network, batch, torch.tensor(1.0), seeded()).margins
    torch.testing.assert_close(by_number, by_tensor)


@pytest.mark.parametrize("make", [AllPlacements, PooledPlacements])
def test_the_search_and_the_pass_with_a_gradient_share_one_clean_pass(make, monkeypatch):
    model, batch, passes = make_model("cnn"), make_batch(), []
    network, strategy = trace(model), make(Patch(3))
    strategy.worst_case(network, batch, 1.0, seeded())
    values = type(network).values
    monkeypatch.setattr(
        type(network), "values", lambda network, images: passes.append(len(images)) or values(network, images)
    )
    strategy.worst_case(network, batch, 1.0, seeded())
    assert passes == [len(batch)]


def test_natural_training_is_plain_cross_entropy():
    model, batch = make_model("cnn"), make_batch()
    worst = Natural().worst_case(trace(model), batch, torch.tensor(1.0), seeded())
    loss = margin_loss(worst.margins, batch.labels, len(batch))
    torch.testing.assert_close(loss, F.cross_entropy(model(batch.images), batch.labels))
    assert torch.equal(is_robust(worst.margins, batch.labels), model(batch.images).argmax(1) == batch.labels)


def test_random_placements_lie_between_one_and_all():
    network, batch, threat = trace(make_model("cnn")), make_batch(), Patch((2, 3))
    everywhere = dense_margins(network, batch, threat, 1.0)
    found = RandomPlacements(threat, 5).worst_case(network, batch, torch.tensor(1.0), seeded()).margins
    assert (found >= everywhere.amin(dim=1) - 1e-6).all()
    assert (found <= everywhere.amax(dim=1) + 1e-6).all()
    many = RandomPlacements(threat, 600).worst_case(network, batch, torch.tensor(1.0), seeded()).margins
    torch.testing.assert_close(many, everywhere.amin(dim=1))


class TrueMap(nn.Module):
    """Stands for a U-net that has learned the margins perfectly."""

    def __init__(self, network, labels, threat, sharpness=1.0):
        super().__init__()
        self.network, self.labels, self.threat, self.sharpness = network, labels, threat, sharpness

    def forward(self, images):
        found = dense_margins(self.network, Batch(images, self.labels), self.threat, 1.0).detach()
        placements = self.threat.placements(*images.shape[2:])
        guess = torch.full((len(images), CLASSES, *images.shape[2:]), 1e3)
        for number, (top, left) in enumerate(placements.corners.tolist()):
            guess[:, :, top, left] = found[:, number] * self.sharpness
        return guess


@pytest.mark.parametrize(
    "threat", [Patch(3), Patch((2, 5)), Patch((5, 2)), Patch((1, 6), "corners")], ids=str
)
def test_a_unet_that_knows_the_margins_picks_the_weakest_placements(threat):
    network, batch = trace(make_model("cnn")), make_batch(5)
    helper = TrueMap(network, batch.labels, threat)
    strategy = GuidedPlacements(threat, helper, inverse_temperature=1e6)
    worst = strategy.worst_case(network, batch, torch.tensor(1.0), seeded())
    true = dense_margins(network, batch, threat, 1.0)
    torch.testing.assert_close(worst.margins, true.amin(dim=1))
    assert worst.helper_loss is not None
    assert worst.helper_loss < 1e-10
    corners = threat.placements(8, 8).corners
    guesses = helper(batch.images)[:, :, corners[:, 0], corners[:, 1]]
    chosen = strategy.draw(guesses, seeded())
    others = torch.ones(5, CLASSES, dtype=torch.bool).scatter(1, batch.labels[:, None], False)
    assert torch.equal(chosen[others], true.argmin(dim=1)[others])


def test_guided_draws_follow_the_softmax_and_never_repeat_within_a_class():
    guesses = torch.tensor([0.0, 1.0, 2.0]).expand(20000, 1, 3)
    strategy = GuidedPlacements(Patch(3), nn.Identity(), per_class=2, inverse_temperature=1.0)
    chosen = strategy.draw(guesses, seeded())
    assert chosen.shape == (20000, 2)
    assert (chosen[:, 0] != chosen[:, 1]).all()
    first = GuidedPlacements(Patch(3), nn.Identity(), per_class=1).draw(guesses, seeded())
    shares = torch.bincount(first.flatten(), minlength=3) / 20000
    torch.testing.assert_close(shares, (-guesses[0, 0]).softmax(0), atol=0.015, rtol=0)


def test_the_helper_learns_from_its_own_error_alone():
    model = make_model("cnn")
    helper = build_unet(1, CLASSES, 2, seeded())
    batch, strategy = make_batch(4), GuidedPlacements(Patch((3, 2)), helper, per_class=2)
    worst = strategy.worst_case(trace(model), batch, torch.tensor(0.5), seeded())
    loss = margin_loss(worst.margins, batch.labels, 4)
    assert all(
        g is None
        for g in torch.autograd.grad(loss, list(helper.parameters()), retain_graph=True, allow_unused=True)
    )
    assert worst.helper_loss is not None
    slopes = torch.autograd.grad(
        worst.helper_loss, list(model.parameters()), retain_graph=True, allow_unused=True
    )
    assert all(g is None for g in slopes)
    assert all(g.isfinite().all() for g in torch.autograd.grad(worst.helper_loss, list(helper.parameters())))


@pytest.mark.parametrize(("channels", "side", "width", "count"), [(1, 28, 6, 39_040), (3, 32, 10, 108_540)])
def test_the_unet_has_the_papers_size(channels, side, width, count):
    unet = MarginUNet(channels, 10, width)
    assert sum(parameter.numel() for parameter in unet.parameters()) == count
    assert unet(torch.rand(2, channels, side, side)).shape == (2, 10, side, side)


def test_the_unet_depends_on_its_generator_alone():
    one, same, other = (build_unet(1, 4, 2, seeded(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.head.weight, other.head.weight)


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
    found = PooledPlacements(Patch(size), blocks).worst_case(network, batch, epsilon, seeded()).margins
    everywhere = dense_margins(network, batch, Patch(size), epsilon).amin(dim=1)
    assert (found <= everywhere + 1e-9).all()


def test_blocks_of_one_lose_nothing_and_large_blocks_lose_something():
    model = make_model("cnn").double()
    network, batch = trace(model), make_batch(dtype=torch.float64)
    everywhere = dense_margins(network, batch, Patch(2), 1.0).amin(dim=1)
    single = PooledPlacements(Patch(2), (1, 1)).worst_case(network, batch, 1.0, seeded()).margins
    merged = PooledPlacements(Patch(2), (4,)).worst_case(network, batch, 1.0, seeded()).margins
    torch.testing.assert_close(single, everywhere)
    assert (merged < everywhere - 1e-3).any()


def test_pooled_bounds_contain_every_member_of_their_block():
    """PlacementBlocks by hand: the block's box is the hull of its members' pre-activation boxes."""
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
    found = PooledPlacements(threat, (2,)).worst_case(network, batch, 1.0, seeded()).margins
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
    batch, network = make_batch(3, seed=seed, dtype=torch.float64), trace(model)
    strategy = PooledPlacements(patch, blocks)
    assert strategy._cover(network, batch.images) is not None
    fast = strategy.worst_case(network, batch, epsilon, seeded()).margins
    dense = strategy.dense_worst_case(network, batch, epsilon).margins
    torch.testing.assert_close(fast, dense, rtol=1e-9, atol=1e-9)
    ours, plain = (gradient(model, margins, batch.labels)[1] for margins in (fast, dense))
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-8)


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
    network, batch = trace(make_model("cnn").double()), make_batch(2, dtype=torch.float64)
    strategy = PooledPlacements(Patch(6), (4,))
    assert strategy._cover(network, batch.images) is None
    found = strategy.worst_case(network, batch, 1.0, seeded()).margins
    torch.testing.assert_close(found, strategy.dense_worst_case(network, batch, 1.0).margins)


def test_pooling_takes_the_dense_way_past_branches_and_says_so(caplog):
    inner = ResidualBlock(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()), nn.Identity())
    layers = [nn.Conv2d(1, 3, 3, 1, 1), nn.ReLU(), inner, nn.Flatten(), nn.Linear(3 * 64, CLASSES)]
    model = randomise(nn.Sequential(*layers), seeded()).double()
    network, batch, strategy = trace(model), make_batch(2, dtype=torch.float64), PooledPlacements(Patch(3))
    with caplog.at_level("DEBUG", logger="patchcert"):
        found = strategy.worst_case(network, batch, 1.0, seeded()).margins
    assert "the dense path takes over" in caplog.text
    assert "branches" in caplog.text
    torch.testing.assert_close(found, strategy.dense_worst_case(network, batch, 1.0).margins)


def test_pooling_in_small_parts_changes_neither_margins_nor_gradients():
    model, batch = make_model("cnn").double(), make_batch(5, dtype=torch.float64)
    results = []
    for budget in (1, 2**40):
        strategy = PooledPlacements(Patch(3), (2, 2), memory_budget=budget)
        for margins in (
            strategy.worst_case(trace(model), batch, 0.7, seeded()).margins,
            strategy.dense_worst_case(trace(model), batch, 0.7).margins,
        ):
            results.append((margins, gradient(model, margins, batch.labels)[1]))
    for result in results[1:]:
        torch.testing.assert_close(results[0], result)


def test_pooling_needs_a_full_grid_and_enough_layers():
    network, batch = trace(make_model("mlp")), make_batch()
    with pytest.raises(InvalidThreat, match="full grid of placements to merge, but .* allows only 4 of 36"):
        PooledPlacements(Patch(3, "corners")).worst_case(network, batch, 1.0, seeded())
    with pytest.raises(InvalidInput, match="pooling after 2 layers needs a network with more than 2"):
        PooledPlacements(Patch(3), (2, 2)).worst_case(network, batch, 1.0, seeded())


@pytest.mark.parametrize("bound", ["tight", "per-pixel", "per-value"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_sparse_training_uses_the_bound_it_is_given(kind, bound):
    model, batch = make_model(kind, 2), make_batch(3, 2)
    network = trace(model)
    epsilon = torch.tensor(0.4)
    worst = SparseChanges(SparsePixels(3), bound).worst_case(network, batch, epsilon, seeded())
    torch.testing.assert_close(
        worst.margins, network.sparse_margins(batch.images, batch.labels, 3, bound, 0.4)
    )
    assert gradient(model, worst.margins, batch.labels)[1].abs().sum() > 0
    assert SparseChanges(SparsePixels(3, "per-pixel")).bound == "per-pixel"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Natural(),
        lambda: AllPlacements(Patch(3)),
        lambda: RandomPlacements(Patch(3), 3),
        lambda: GuidedPlacements(Patch(3), build_unet(1, CLASSES, 2, seeded())),
        lambda: PooledPlacements(Patch(3)),
        lambda: SparseChanges(SparsePixels(2)),
    ],
    ids=["natural", "all", "random", "guided", "pooled", "sparse"],
)
def test_shares_of_a_batch_add_up_to_the_whole(make):
    network, batch, epsilon = trace(make_model("cnn")), make_batch(5), torch.tensor(0.8)
    whole = make().worst_case(network, batch, epsilon, seeded(3))
    parts = [
        make().worst_case(network, Batch(batch.images, batch.labels, rows), epsilon, seeded(3))
        for rows in (slice(0, 2), slice(2, 5))
    ]
    torch.testing.assert_close(torch.cat([part.margins for part in parts]), whole.margins)
    if whole.helper_loss is not None:
        torch.testing.assert_close(sum(part.helper_loss for part in parts), whole.helper_loss)


def test_nan_margins_are_not_robust():
    margins = torch.tensor([[0.0, 1.0], [0.0, float("nan")], [0.0, 0.0]])
    assert is_robust(margins, torch.zeros(3, dtype=torch.long)).tolist() == [True, False, False]


@pytest.mark.parametrize(("size", "larger"), [((2, 3), (4, 7)), ((7, 7), (14, 14)), ((1, 2), (3, 2))])
def test_maps_are_enlarged_as_by_bilinear_interpolation(size, larger):
    maps = torch.rand(3, 2, *size, generator=seeded(), requires_grad=True)
    expected = torch.nn.functional.interpolate(maps, larger, mode="bilinear", align_corners=True)
    weights = torch.rand(expected.shape, generator=seeded())
    mine = enlarged(maps, *larger)
    torch.testing.assert_close(mine, expected)
    (gradient,) = torch.autograd.grad((mine * weights).sum(), maps)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), maps)
    torch.testing.assert_close(gradient, wanted)
