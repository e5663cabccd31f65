"""All, random and guided placements give the margins they claim, with the right gradient."""

import pytest
import torch
from torch import nn

from patchcert.bounds import trace
from patchcert.testing.conformance import seeded
from patchcert.threats import Patch, shapes
from patchcert.train.strategies import AllPlacements, GuidedPlacements, RandomPlacements
from patchcert.train.strategies.placements import PlacedPatch
from patchcert.train.strategy import Batch, margin_loss
from patchcert.train.unet import build_unet
from small_trainings import bind, dense_margins, gradient, make_batch, make_model, worst_margins

CLASSES = 4


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

    def __init__(self, network, labels, threat):
        super().__init__()
        self.network, self.labels, self.threat = network, labels, threat

    def forward(self, images):
        found = dense_margins(self.network, Batch(images, self.labels), self.threat, 1.0).detach()
        placements = self.threat.placements(*images.shape[2:])
        guess = torch.full((len(images), CLASSES, *images.shape[2:]), 1e3)
        for number, (top, left) in enumerate(placements.corners.tolist()):
            guess[:, :, top, left] = found[:, number]
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
    assert worst.further_loss is not None
    assert worst.further_loss < 1e-10
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
    assert worst.further_loss is not None
    slopes = torch.autograd.grad(
        worst.further_loss, list(model.parameters()), retain_graph=True, allow_unused=True
    )
    assert all(g is None for g in slopes)
    assert all(g.isfinite().all() for g in torch.autograd.grad(worst.further_loss, list(helper.parameters())))
