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
from patchcert.models import ModelSpec, Normalize
from patchcert.testing.blocks import ResidualBlock, randomise
from patchcert.threats import Patch, SparsePixels, shapes
from patchcert.train.strategies import (
    AllPlacements,
    GuidedPlacements,
    Natural,
    PooledPlacements,
    RandomPlacements,
    SparseChanges,
)
from patchcert.train.strategies.placements import PlacedPatch
from patchcert.train.strategies.pooled import PooledPatch
from patchcert.train.strategy import Batch, Subject, derived_seed, is_robust, margin_loss
from patchcert.train.unet import build_unet

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


def bind(strategy, model, threat, windows=None):
    return strategy.bind(Subject(model, ModelSpec("mlp", 1, 8, 8, CLASSES), threat, windows=windows))


def worst_margins(strategy, model, threat, batch, epsilon, windows=None):
    return bind(strategy, model, threat, windows).worst_case(batch, epsilon, seeded()).margins


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
    fast = worst_margins(AllPlacements(), model, threat, batch, size)
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
        worst_margins(RandomPlacements(placements=5), model, Patch(3), batch, 1.0, windows)
        for windows in (None, torch.bfloat16)
    )
    assert rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).norm() <= 0.02 * exact.norm()
    slope, rough = (gradient(model, margins, batch.labels)[1] for margins in (exact, rounded))
    assert (slope - rough).norm() <= 0.05 * slope.norm()


def test_a_plain_number_for_epsilon_means_the_same_as_a_tensor():
    batch, objective = make_batch(), bind(AllPlacements(), make_model("cnn"), Patch(3))
    by_number = objective.worst_case(batch, 1.0, seeded()).margins
    by_tensor = objective.worst_case(batch, torch.tensor(1.0), seeded()).margins
    torch.testing.assert_close(by_number, by_tensor)


@pytest.mark.parametrize("make", [AllPlacements, PooledPlacements])
def test_the_search_and_the_pass_with_a_gradient_share_one_clean_pass(make, monkeypatch):
    model, batch, passes = make_model("cnn"), make_batch(), []
    objective = bind(make(), model, Patch(3))
    objective.worst_case(batch, 1.0, seeded())
    kind = type(objective.network)
    values = kind.values
    monkeypatch.setattr(
        kind, "values", lambda network, images: passes.append(len(images)) or values(network, images)
    )
    objective.worst_case(batch, 1.0, seeded())
    assert passes == [len(batch)]


def test_natural_training_is_plain_cross_entropy():
    model, batch = make_model("cnn"), make_batch()
    margins = worst_margins(Natural(), model, Patch(3), batch, torch.tensor(1.0))
    loss = margin_loss(margins, batch.labels, len(batch))
    torch.testing.assert_close(loss, F.cross_entropy(model(batch.images), batch.labels))
    assert torch.equal(is_robust(margins, batch.labels), model(batch.images).argmax(1) == batch.labels)


def test_random_placements_lie_between_one_and_all():
    model, batch, threat = make_model("cnn"), make_batch(), Patch((2, 3))
    everywhere = dense_margins(trace(model), batch, threat, 1.0)
    found = worst_margins(RandomPlacements(placements=5), model, threat, batch, torch.tensor(1.0))
    assert (found >= everywhere.amin(dim=1) - 1e-6).all()
    assert (found <= everywhere.amax(dim=1) + 1e-6).all()
    many = worst_margins(RandomPlacements(placements=600), model, threat, batch, torch.tensor(1.0))
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
    strategy = GuidedPlacements(inverse_temperature=1e6)
    objective = strategy.guided_by(helper, PlacedPatch(network, threat))
    worst = objective.worst_case(batch, torch.tensor(1.0), seeded())
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
    chosen = GuidedPlacements(per_class=2, inverse_temperature=1.0).draw(guesses, seeded())
    assert chosen.shape == (20000, 2)
    assert (chosen[:, 0] != chosen[:, 1]).all()
    first = GuidedPlacements(per_class=1).draw(guesses, seeded())
    shares = torch.bincount(first.flatten(), minlength=3) / 20000
    torch.testing.assert_close(shares, (-guesses[0, 0]).softmax(0), atol=0.015, rtol=0)


def test_the_helper_learns_from_its_own_error_alone():
    model = make_model("cnn")
    helper = build_unet(1, CLASSES, 2, seeded())
    batch, patch = make_batch(4), PlacedPatch(trace(model), Patch((3, 2)))
    objective = GuidedPlacements(per_class=2).guided_by(helper, patch)
    worst = objective.worst_case(batch, torch.tensor(0.5), seeded())
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
    first = network.steps[0].name
    placements = threat.placements(8, 8)
    boxes = threat.boxes(batch.images, placements.corners, 1.0).flatten(0, 1)
    bounds = network.bounds(boxes, until=first)
    grid = torch.arange(len(placements)).view(placements.rows, placements.columns)
    margins = []
    for top in range(0, placements.rows, 2):
        for left in range(0, placements.columns, 2):
            members = grid[top : top + 2, left : left + 2].flatten()
            hull = Interval(bounds.lower[members].amin(0)[None], bounds.upper[members].amax(0)[None])
            margins.append(network.margins(hull, batch.labels, after=first))
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


@pytest.mark.parametrize("bound", ["tight", "per-pixel", "per-value"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_sparse_training_uses_the_bound_it_is_given(kind, bound):
    model, batch = make_model(kind, 2), make_batch(3, 2)
    wanted = trace(model).sparse_margins(batch.images, batch.labels, 3, bound, 0.4)
    for strategy, threat in (
        (SparseChanges(bound=bound), SparsePixels(3)),
        (SparseChanges(), SparsePixels(3, bound)),
    ):
        margins = worst_margins(strategy, model, threat, batch, torch.tensor(0.4))
        torch.testing.assert_close(margins, wanted)
        assert gradient(model, margins, batch.labels)[1].abs().sum() > 0


SHARED = {
    "natural": (Natural(), Patch(3)),
    "all": (AllPlacements(), Patch(3)),
    "random": (RandomPlacements(placements=3), Patch(3)),
    "guided": (GuidedPlacements(width=2), Patch(3)),
    "pooled": (PooledPlacements(), Patch(3)),
    "sparse": (SparseChanges(), SparsePixels(2)),
}


@pytest.mark.parametrize("kind", SHARED)
def test_shares_of_a_batch_add_up_to_the_whole(kind):
    model, batch, epsilon = make_model("cnn"), make_batch(5), torch.tensor(0.8)
    whole, *parts = [
        bind(SHARED[kind][0], model, SHARED[kind][1]).worst_case(
            Batch(batch.images, batch.labels, rows), epsilon, seeded(3)
        )
        for rows in (slice(None), slice(0, 2), slice(2, 5))
    ]
    torch.testing.assert_close(torch.cat([part.margins for part in parts]), whole.margins)
    if whole.helper_loss is not None:
        torch.testing.assert_close(sum(part.helper_loss for part in parts), whole.helper_loss)


@pytest.mark.parametrize("kind", [kind for kind in SHARED if kind != "natural"])
def test_a_threat_of_the_other_kind_is_refused(kind):
    strategy, threat = SHARED[kind]
    other = Patch(3) if isinstance(threat, SparsePixels) else SparsePixels(2)
    with pytest.raises(InvalidThreat, match="trained against, but the threat is"):
        bind(strategy, make_model("cnn"), other)


def test_seeds_for_different_purposes_differ():
    seeds = {derived_seed(1, "order", 0), derived_seed(1, "order", 1), derived_seed(1, "draws", 0)}
    assert len(seeds | {derived_seed(2, "order", 0)}) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_nan_margins_are_not_robust():
    margins = torch.tensor([[0.0, 1.0], [0.0, float("nan")], [0.0, 0.0]])
    assert is_robust(margins, torch.zeros(3, dtype=torch.long)).tolist() == [True, False, False]
