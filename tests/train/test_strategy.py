"""What holds for every strategy: shares of a batch add up, and threats of another kind are refused."""

import pytest
import torch
import torch.nn.functional as F

from patchcert.errors import InvalidThreat
from patchcert.testing.conformance import seeded
from patchcert.threats import Patch, SparsePixels
from patchcert.train.strategies import AllPlacements, Natural, PooledPlacements
from patchcert.train.strategy import Batch, derived_seed, is_robust, margin_loss
from small_trainings import STRATEGIES, bind, make_batch, make_model, worst_margins


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


@pytest.mark.parametrize("kind", STRATEGIES)
def test_shares_of_a_batch_add_up_to_the_whole(kind):
    model, batch, epsilon = make_model("cnn"), make_batch(5), torch.tensor(0.8)
    whole, *parts = [
        bind(STRATEGIES[kind][0], model, STRATEGIES[kind][1]).worst_case(
            Batch(batch.images, batch.labels, rows), epsilon, seeded(3)
        )
        for rows in (slice(None), slice(0, 2), slice(2, 5))
    ]
    torch.testing.assert_close(torch.cat([part.margins for part in parts]), whole.margins)
    if whole.further_loss is not None:
        torch.testing.assert_close(sum(part.further_loss for part in parts), whole.further_loss)


@pytest.mark.parametrize("kind", [kind for kind in STRATEGIES if kind != "natural"])
def test_a_threat_of_the_other_kind_is_refused(kind):
    strategy, threat = STRATEGIES[kind]
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


@pytest.mark.parametrize("focus", [0.3, 1.0])
def test_a_focused_loss_is_between_cross_entropy_and_the_share_that_is_lost(focus):
    margins = torch.tensor([[0.0, 4.0, 3.0], [-60.0, 0.0, -2.0]], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1])
    probability = (-margins).softmax(dim=1).gather(1, labels[:, None])
    loss = margin_loss(margins, labels, 2, focus=focus)
    assert torch.isclose(loss, ((1 - probability**focus) / focus).mean())
    assert (1 - probability).mean() <= loss <= margin_loss(margins, labels, 2)
    (gradient,) = torch.autograd.grad(loss, margins)
    assert gradient.isfinite().all()
    assert gradient[1].abs().max() < gradient[0].abs().max()


def test_a_small_focus_is_cross_entropy():
    margins, labels = torch.randn(6, 4, generator=seeded(2), dtype=torch.float64), torch.arange(6) % 4
    assert torch.isclose(
        margin_loss(margins, labels, 6, focus=1e-7), margin_loss(margins, labels, 6), rtol=1e-5
    )
