import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from attacked_models import normal
from patchcert.attacks import SparseAttack
from patchcert.errors import InvalidInput
from patchcert.testing.conformance import seeded
from patchcert.threats import Patch, SparsePixels


def model_of(layers, seed) -> nn.Sequential:
    return normal(nn.Sequential(*layers).double(), 0.4, seed)


def linear_model(seed=0) -> nn.Sequential:
    return model_of([nn.Flatten(), nn.Linear(3 * 25, 2)], seed)


def images_of(count=6, seed=0) -> torch.Tensor:
    return torch.rand(count, 3, 5, 5, generator=seeded(seed), dtype=torch.float64)


@pytest.mark.parametrize("bound", ["tight", "per-value"])
@pytest.mark.parametrize("pixels", [1, 3, 25])
def test_attains_the_exact_optimum_of_a_linear_model(bound, pixels):
    model, images, threat = linear_model(), images_of(), SparsePixels(pixels, bound)
    logits = model(images)
    labels = logits.argmax(dim=1)
    weight = model[1].weight.reshape(2, 3, 5, 5)
    direction = weight[1 - labels] - weight[labels]
    gain = torch.maximum(direction * (1 - images), -direction * images)
    units = gain.sum(dim=1).flatten(1) if bound == "tight" else gain.flatten(1)
    expected = -(logits.amax(dim=1) - logits.amin(dim=1)) + units.topk(pixels, dim=1).values.sum(dim=1)
    result = SparseAttack(20, 0.1, 1, selections=2, early_stop=False).run(model, images, labels, threat)
    torch.testing.assert_close(result.margins, expected)
    assert (result.placement == -1).all()


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 6), st.sampled_from(["tight", "per-value"]), st.integers(0, 1000))
def test_adversarial_images_stay_in_the_threat(pixels, bound, seed):
    model = model_of([nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)], seed)
    images, threat = images_of(4, seed), SparsePixels(pixels, bound)
    labels = model(images).argmax(dim=1)
    result = SparseAttack(8, 0.2, 3, selections=4, batch_size=5).run(model, images, labels, threat)
    assert threat.contains(images, result.adversarial).all()


def test_choosing_again_and_restarts_beat_one_choice_on_a_curved_model():
    layers = [nn.Flatten(), nn.Linear(75, 30), nn.ReLU(), nn.Linear(30, 3)]
    model, images, threat = model_of(layers, 1), images_of(40, 1), SparsePixels(2)
    labels = model(images).argmax(dim=1)
    settings_of_both = {"steps": 24, "early_stop": False}
    once = SparseAttack(restarts=1, selections=1, **settings_of_both).run(model, images, labels, threat)
    often = SparseAttack(restarts=6, selections=6, **settings_of_both).run(model, images, labels, threat)
    assert often.margins.mean() > once.margins.mean() + 0.01
    assert (often.margins >= once.margins - 1e-9).double().mean() > 0.8


def test_result_does_not_depend_on_batches_and_is_reproducible():
    model, images, threat = linear_model(2), images_of(), SparsePixels(2)
    labels = model(images).argmax(dim=1)
    results = [
        SparseAttack(6, 0.2, 4, selections=3, batch_size=size, early_stop=False).run(
            model, images, labels, threat, seeded(1)
        )
        for size in (1, 5, 100)
    ]
    for result in results[1:]:
        torch.testing.assert_close(result.margins, results[0].margins)


def test_steps_are_shared_between_selections():
    model, images = linear_model(), images_of(2)
    labels = model(images).argmax(dim=1)
    attack = SparseAttack(10, 0.1, 3, selections=4, early_stop=False)
    assert attack.run(model, images, labels, SparsePixels(1)).steps.tolist() == [30, 30]


def test_another_threat_and_impossible_settings_are_refused():
    model, images = linear_model(), images_of(2)
    labels = model(images).argmax(dim=1)
    with pytest.raises(InvalidInput, match=r"SparseAttack attacks with SparsePixels, got Patch\(2x2"):
        SparseAttack().run(model, images, labels, Patch(2))
    with pytest.raises(InvalidInput, match="selections is 0; expected a whole number of at least 1"):
        SparseAttack(selections=0)
    with pytest.raises(InvalidInput, match="restarts is 0"):
        SparseAttack(restarts=0)
