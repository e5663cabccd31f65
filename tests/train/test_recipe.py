"""First weights and regularisers for bounds: what they are on examples computed by hand, and what is refused."""

import math

import pytest
import torch
from torch import Generator, nn

from patchcert.bounds import Interval, trace
from patchcert.errors import SpecError
from patchcert.threats import Patch, SparsePixels
from patchcert.train.recipe import (
    BoundSettings,
    Observation,
    balance_loss,
    initialise_for_intervals,
    tightness_loss,
)
from patchcert.train.spec import read_spec, write_spec
from patchcert.train.strategy import Batch


def box(lower, upper):
    return Interval(torch.tensor([lower]), torch.tensor([upper]))


def plain(depth=6, width=400):
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 5)).eval()


def test_weights_for_intervals_have_their_variance_and_keep_the_radius():
    model = plain()
    first = model[1].weight.clone()
    initialise_for_intervals(model, Generator().manual_seed(1))
    assert torch.equal(model[1].weight, first)
    assert float(model[3].weight.detach().std()) == pytest.approx(math.sqrt(2 * math.pi) / 400, rel=0.01)
    assert float(model[3].bias.detach().abs().sum()) == 0
    images = torch.rand(20, 1, 8, 8)
    boxes = trace(model).intervals(
        Patch(5).boxes(images, torch.tensor([[1, 2]])).map(lambda part: part[:, 0])
    )
    radii = [float(boxes[index].radius.detach().mean()) for index in range(2, len(boxes) - 1, 2)]
    assert all(0.7 < later / radii[0] < 1.4 for later in radii[1:])


def test_default_weights_widen_bounds_many_times():
    boxes = trace(plain()).intervals(Interval(torch.zeros(2, 1, 8, 8), torch.ones(2, 1, 8, 8)))
    assert float(boxes[-2].radius.detach().mean()) > 100 * float(boxes[2].radius.detach().mean())


def test_tightness_is_what_layers_widen_beyond_twice_the_first():
    first = box([0.0, -1.0, 5.0], [2.0, 1.0, 5.0])  # radii 1, 1 and one unit that is not reached
    assert float(tightness_loss([first])) == 0
    twice = box([0.0], [4.0])
    assert float(tightness_loss([first, twice])) == 0
    eight = box([-8.0, 1.0], [8.0, 1.0])
    assert float(tightness_loss([first, twice, eight])) == pytest.approx((1 - 2 / 8) / 2)


def test_balance_compares_units_that_are_always_on_and_always_off():
    even = box([1.0, -3.0], [3.0, -1.0])  # centres 2 and -2
    assert float(balance_loss([even])) == 0
    uneven = box(
        [1.0, 3.0, -2.0, -1.0, 7.0], [3.0, 5.0, -1.0, 1.0, 7.0]
    )  # centres 2, 4, -1.5, 0; one unreached
    # Sums are 6 and 1.5; squares about the mean 1.125 are 0.875^2 + 2.875^2 and 2.625^2.
    sizes, squares = 1.5 / 6, 2.625**2 / (0.875**2 + 2.875**2)
    wanted = (0.5 - sizes) / 0.5 + max(0.5 - squares, 0) / 0.5
    assert float(balance_loss([uneven])) == pytest.approx(wanted)
    assert float(balance_loss([uneven, even])) == pytest.approx(wanted / 2)
    only_on = box([1.0, 1.0], [2.0, 4.0])
    assert float(balance_loss([only_on])) == pytest.approx(2.0)


def test_regularisers_have_gradients_that_are_finite_even_where_nothing_is_reached():
    model = plain(2, 10)
    settings = BoundSettings(tightness=0.5, relu_balance=0.5)
    observation = Observation.of(trace(model), Patch(3), settings, regularises=True)
    batch = Batch(torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.long))
    for epsilon in (0.0, 1e-6, 0.5):
        added = observation(batch, torch.tensor(epsilon), Generator().manual_seed(0))
        gradients = torch.autograd.grad(added, list(model.parameters()), materialize_grads=True)
        assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.abs().sum() > 0 for gradient in gradients)
    at_the_end = observation(batch, torch.tensor(1.0), Generator().manual_seed(0))
    assert float(at_the_end.detach()) == 0


def test_networks_without_batch_norms_and_regularisers_are_not_observed():
    assert Observation.of(trace(plain(1, 4)), Patch(3), BoundSettings(), regularises=True) is None


def test_what_has_no_boxes_is_refused():
    network, settings = trace(plain(1, 4)), BoundSettings(tightness=0.5)
    with pytest.raises(SpecError, match="those of a patch's boxes, but the threat is"):
        Observation.of(network, SparsePixels(2), settings, regularises=True)
    linear = trace(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval())
    with pytest.raises(SpecError, match="look at ReLUs, but the model has none"):
        Observation.of(linear, Patch(3), settings, regularises=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["bounds.tightness=-1.0"], "tightness is -1.0; expected a weight of at least 0"),
        (["bounds.statistics=median"], "median"),
        (["strategy.kind=natural", "bounds.relu_balance=0.5"], "'natural' does not train on bounds"),
        (["strategy.kind=masked", "bounds.initialisation=interval"], "'masked' does not train on bounds"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        read_spec("paper-mnist", changes)


def test_settings_are_written_read_and_part_of_the_fingerprint_only_where_they_are_set():
    plainly, set_out = read_spec("paper-mnist"), read_spec("paper-mnist", ["bounds.statistics=both"])
    assert plainly.fingerprint() == set_out.fingerprint() == "5a578e75e96719c6"
    changed = read_spec("paper-mnist", ["bounds.initialisation=interval", "bounds.tightness=0.5"])
    assert changed.fingerprint() != plainly.fingerprint()
    assert "[bounds]" in write_spec(changed)
