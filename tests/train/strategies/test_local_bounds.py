"""Clipped local features are trained on what interval bounds prove of them, in closed form."""

import json
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import patchcert as pc
from patchcert.bounds import trace
from patchcert.cli.app import run
from patchcert.errors import PatchcertError
from patchcert.models import ModelSpec, build
from patchcert.testing.conformance import seeded
from patchcert.threats import Patch
from patchcert.train.spec import read_spec
from patchcert.train.strategies import LocalBounds
from patchcert.train.strategies.local_bounds import weakest_margins
from patchcert.train.strategy import Batch, Subject, logit_margins
from patchcert.windows.dense import reference_margins

SPECS = (
    ModelSpec("bagnet_clipped", 1, 12, 12, 3, filters=4, depth=1, receptive_field=5, hidden=4),
    ModelSpec("bagnet_clipped", 1, 12, 12, 3, filters=8, depth=1, receptive_field=7, hidden=2),
)


def network(spec, gain=1.0):
    model = build(spec, seeded())
    with torch.no_grad():
        model.scores.weight *= gain
        model.scores.bias.fill_(0.5)
        model.logits.weight += 0.1 * torch.randn(model.logits.weight.shape, generator=seeded(1))
        model.logits.bias.copy_(torch.tensor([0.3, -0.2, 0.1]))
    return model


def make_batch():
    images = torch.rand(4, 1, 12, 12, generator=seeded(2))
    return Batch(images, torch.tensor([0, 1, 2, 0]))


def margins_of(model, spec, threat, batch, epsilon=1.0):
    objective = LocalBounds().bind(Subject(model, spec, threat))
    model.eval()
    return objective.worst_case(batch, epsilon, seeded()).margins


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"field-{spec.receptive_field}")
@pytest.mark.parametrize("threat", [Patch(3), Patch((2, 4)), Patch(3, placements="corners")])
@pytest.mark.parametrize("gain", [0.1, 3.0])
def test_what_is_trained_on_is_never_above_interval_bounds(spec, threat, gain):
    model, batch = network(spec, gain), make_batch()
    found = margins_of(model, spec, threat, batch)
    bounds = reference_margins(trace(model, spec.image_shape), batch.images, batch.labels, threat).amin(dim=1)
    assert (found <= bounds + 1e-5).all()


@pytest.mark.parametrize("threat", [Patch(3), Patch((2, 4))])
def test_where_a_patch_can_set_every_feature_that_sees_it_both_are_the_same(threat):
    steps = nn.Conv2d(1, 2, 1)
    with torch.no_grad():
        steps.weight.copy_(torch.tensor([1000.0, -1000.0])[:, None, None, None])
        steps.bias.copy_(torch.tensor([-500.0, 500.0]))
    model = nn.Sequential(steps, nn.Hardtanh(0, 1), nn.Flatten(), nn.Linear(288, 3)).eval()
    batch = make_batch()
    found = margins_of(model, SPECS[0], threat, batch)
    certified = pc.certify(model, batch.images, batch.labels, threat).margins
    assert torch.allclose(found, certified, atol=1e-4)


@given(st.integers(0, 999))
def test_a_margin_is_the_least_over_all_that_features_in_a_window_can_be(seed):
    generator = seeded(seed)
    windows = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]).bool()
    features = torch.rand(1, 2, 4, generator=generator)
    weights = torch.randn(3, 2, 4, generator=generator)
    labels = torch.randint(3, (1,), generator=generator)
    worst = torch.full((1, 3), torch.inf)
    for window in windows:
        for corner in product((0.0, 1.0), repeat=4):
            moved = features.clone()
            moved[0, :, window] = torch.tensor(corner).reshape(2, 2)
            logits = torch.einsum("ncp,kcp->nk", moved, weights)
            worst = torch.minimum(worst, logit_margins(logits, labels))
    assert torch.allclose(weakest_margins(features, weights, labels, windows), worst, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"field-{spec.receptive_field}")
def test_epsilon_leads_from_clean_margins_to_those_of_the_weakest_placement(spec):
    model, batch = network(spec), make_batch()
    found = [margins_of(model, spec, Patch(3), batch, share) for share in (0.0, 0.5, torch.tensor(1.0))]
    assert torch.allclose(found[0], logit_margins(model(batch.images), batch.labels), atol=1e-5)
    assert torch.allclose(found[1], (found[0] + found[2]) / 2, atol=1e-5)
    assert torch.equal(found[2], margins_of(model, spec, Patch(3), batch))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"field-{spec.receptive_field}")
def test_clean_logits_are_those_of_the_network_and_features_at_a_limit_still_learn(spec):
    model, batch = network(spec, gain=5.0), make_batch()
    objective = LocalBounds().bind(Subject(model, spec, Patch(3)))
    assert model.training
    model.eval()
    assert torch.allclose(objective.network.values(batch.images)[-1], model(batch.images), atol=1e-5)
    objective.worst_case(batch, 1.0, seeded()).margins.sum().backward()
    assert all(float(each.grad.abs().sum()) > 0 for each in (model.conv.weight, model.logits.weight))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(144, 3)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Hardtanh(-1, 1), nn.Flatten(), nn.Linear(200, 3)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Hardtanh(0, 1), nn.Flatten(), nn.ReLU()),
        nn.Conv2d(1, 3, 3),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Hardtanh(0, 1), nn.Flatten(), nn.Linear(200, 3, bias=False)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Hardtanh(0, 1), nn.Flatten(2), nn.Linear(100, 3)),
    ],
)
def test_other_networks_are_refused(model):
    with pytest.raises(PatchcertError, match="does not end with local features"):
        LocalBounds().bind(Subject(model, SPECS[0], Patch(3)))


def test_a_run_is_trained_and_certified_by_intervals(tmp_path, capsys):
    folder = str(tmp_path / "run")
    changes = [
        *("data.name=mnist-mini", "data.limit=16", "data.flip=false", "optimiser.batch_size=16"),
        *("schedule.epochs=2", "schedule.epsilon.natural_epochs=1", "schedule.epsilon.ramp_epochs=0"),
        *("strategy.bfloat16=false", "model.filters=4", "model.hidden=10"),
    ]
    words = [part for change in changes for part in ("--set", change)]
    assert run(["train", "clipped-cifar10-5x5", "--out", folder, *words]) == 0
    capsys.readouterr()
    assert run(["certify", folder, "--limit", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["classifier"]["name"] == "IntervalBounds"


@pytest.mark.parametrize("size", ["2x2", "5x5"])
def test_presets_are_specifications(size):
    spec = read_spec(f"clipped-cifar10-{size}")
    assert (str(spec.threat.height), spec.strategy.kind) == (size[0], "local-bounds")


def test_features_that_see_the_whole_image_are_refused_with_a_hint_that_helps():
    spec = ModelSpec("bagnet_clipped", 1, 8, 8, 3, filters=4, depth=4, receptive_field=21)
    with pytest.raises(PatchcertError, match="'bagnet_clipped' has no local scores") as error:
        LocalBounds().bind(Subject(build(spec), spec, Patch(2)))
    assert "fewer or smaller kernels" in error.value.hint


def test_settings_for_bounds_of_layers_are_refused():
    with pytest.raises(PatchcertError, match="'local-bounds' does not train on bounds of layers"):
        read_spec("clipped-cifar10-5x5", ["bounds.initialisation=interval"])
