import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from patchcert.defenses import Defended, DigitalWatermarking
from patchcert.defenses.watermarking import (
    at_least_quantile,
    densest_window,
    guided_backpropagation,
    opened,
    saliency,
)
from patchcert.errors import InvalidInput, ModelError
from patchcert.testing.conformance import seeded


def small_network(channels: int = 2, size: int = 8, classes: int = 4) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(channels, 5, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(5 * size * size, 7),
            nn.ReLU(),
            nn.Linear(7, classes),
        ).eval()


def hooks_on(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules())


def test_plain_saliency_of_a_linear_model_is_its_weight():
    model = nn.Sequential(nn.Flatten(), nn.Linear(2 * 9, 3))
    images = torch.rand(6, 2, 3, 3, generator=seeded(0))
    predicted = model(images).argmax(dim=1)
    expected = model[1].weight[predicted].reshape(6, 2, 3, 3).abs().amax(dim=1)
    torch.testing.assert_close(saliency(model, images, "gradient"), expected)


def test_guided_saliency_passes_only_positive_gradients_through_relus():
    first, second = nn.Linear(4, 6), nn.Linear(6, 3)
    model = nn.Sequential(nn.Flatten(), first, nn.ReLU(), second)
    images = torch.rand(10, 1, 2, 2, generator=seeded(1))
    predicted = model(images).argmax(dim=1)
    is_on = (first(images.flatten(1)) > 0).float()
    expected = ((second.weight[predicted].clamp(min=0) * is_on) @ first.weight).abs().reshape(10, 2, 2)
    torch.testing.assert_close(saliency(model, images, "guided"), expected)
    assert not torch.allclose(saliency(model, images, "gradient"), expected)


def test_loss_gradient_is_the_gradient_of_the_cross_entropy_at_the_prediction():
    model = small_network()
    images = torch.rand(3, 2, 8, 8, generator=seeded(2), requires_grad=True)
    logits = model(images)
    loss = torch.nn.functional.cross_entropy(logits, logits.argmax(dim=1), reduction="sum")
    expected = torch.autograd.grad(loss, images)[0].abs().amax(dim=1)
    torch.testing.assert_close(saliency(model, images, "loss-gradient"), expected)


@pytest.mark.parametrize("kind", ["guided", "gradient", "loss-gradient"])
def test_saliency_of_a_batch_is_the_saliency_of_each_image(kind):
    model = small_network()
    images = torch.rand(5, 2, 8, 8, generator=seeded(3))
    each = torch.cat([saliency(model, image[None], kind) for image in images])
    torch.testing.assert_close(saliency(model, images, kind), each)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_saliency_needs_no_gradient_mode_and_leaves_no_hook(mode):
    model = small_network()
    images = torch.rand(2, 2, 8, 8, generator=seeded(4))
    expected = saliency(model, images, "guided")
    with mode():
        changed = DigitalWatermarking(model, window=3)(images.clone())
        torch.testing.assert_close(saliency(model, images.clone(), "guided"), expected)
    assert changed.shape == images.shape
    assert hooks_on(model) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_hooks_are_removed_when_the_model_fails():
    model = small_network()
    with pytest.raises(RuntimeError):
        saliency(model, torch.rand(1, 1, 8, 8), "guided")
    assert hooks_on(model) == 0


def test_guided_saliency_refuses_a_model_without_relu_modules():
    with (
        pytest.raises(ModelError, match="guided saliency needs ReLU modules, but Linear has none"),
        guided_backpropagation(nn.Linear(1, 1)),
    ):
        pass


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 40), st.floats(0, 1), st.integers(0, 100))
def test_quantile_mask_is_numpys_quantile(size, quantile, seed):
    values = torch.randint(0, 12, (2, 1, size), generator=seeded(seed)).double()
    mask = at_least_quantile(values, quantile)
    for row, kept in zip(values, mask, strict=True):
        assert np.array_equal(kept.numpy(), row.numpy() >= np.quantile(row.numpy(), quantile) - 1e-6)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3), st.integers(0, 1000), st.sampled_from([0.5, 0.7, 0.9]))
def test_opening_keeps_the_union_of_the_squares_that_fit(side, seed, density):
    mask = torch.rand(1, 6, 7, generator=seeded(seed)) < density
    expected = torch.zeros_like(mask)
    for top in range(6 - side + 1):
        for left in range(7 - side + 1):
            if mask[0, top : top + side, left : left + side].all():
                expected[0, top : top + side, left : left + side] = True
    assert torch.equal(opened(mask, side), expected if expected.any() else mask)


def test_an_opening_that_empties_one_image_spares_it_alone():
    masks = torch.zeros(2, 5, 5, dtype=torch.bool)
    masks[0, 1:3, 1:3] = True
    masks[:, 4, 4] = True
    result = opened(masks, 2)
    assert int(result[0].sum()) == 4
    assert not result[0, 4, 4]
    assert torch.equal(result[1], masks[1])


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5), st.integers(0, 1000))
def test_densest_window_is_the_best_of_all_windows(side, seed):
    salient = torch.rand(2, 5, 6, generator=seeded(seed)) < 0.3
    strength = torch.rand(2, 5, 6, generator=seeded(seed + 1), dtype=torch.float64)
    top, left = densest_window(salient, strength, side)
    for index in range(2):
        scores = {
            (row, column): (
                int(salient[index, row : row + side, column : column + side].sum()),
                float(strength[index, row : row + side, column : column + side].sum()),
            )
            for row in range(5 - side + 1)
            for column in range(6 - side + 1)
        }
        chosen, best = scores[int(top[index]), int(left[index])], max(scores.values())
        assert chosen[0] == best[0]
        assert chosen[1] == pytest.approx(best[1])


def test_exactly_one_window_is_painted_and_the_rest_is_untouched():
    defense = DigitalWatermarking(small_network(), window=3, fill=(0.25, 0.75))
    images = torch.rand(6, 2, 8, 8, generator=seeded(5))
    region = defense.region(images)
    assert (region.flatten(1).sum(dim=1) == 9).all()
    painted = defense(images)
    assert torch.equal(painted.masked_select(~region), images.masked_select(~region))
    for channel, value in enumerate(defense.fill):
        assert (painted[:, channel][region[:, 0]] == value).all()


def test_ring_fill_is_the_mean_of_the_pixels_around_the_window():
    defense = DigitalWatermarking(small_network(), window=2, fill="ring")
    images = torch.rand(4, 2, 8, 8, generator=seeded(6))
    region, painted = defense.region(images)[:, 0], defense(images)
    for index in range(4):
        rows, columns = region[index].nonzero().T
        outer = torch.zeros(8, 8, dtype=torch.bool)
        top, left = int(rows.min()), int(columns.min())
        outer[max(top - 1, 0) : top + 3, max(left - 1, 0) : left + 3] = True
        ring = outer & ~region[index]
        for channel in range(2):
            colour = painted[index, channel][region[index]]
            torch.testing.assert_close(colour, images[index, channel][ring].mean().expand(4))


def test_finds_the_patch_that_drives_the_prediction():
    weight = torch.zeros(2, 10, 10)
    weight[1, 6:9, 2:5] = 1.0
    linear = nn.Linear(100, 2)
    with torch.no_grad():
        linear.weight.copy_(weight.flatten(1))
    model = nn.Sequential(nn.Flatten(), linear).eval()
    images = torch.zeros(1, 1, 10, 10)
    images[0, 0, 6:9, 2:5] = 1.0
    defense = DigitalWatermarking(model, window=3, quantile=0.95, saliency_kind="gradient")
    assert (defense(images) == 0).all()


def test_surrogate_gradient_is_the_models_gradient_at_the_painted_image():
    model = small_network()
    defense = DigitalWatermarking(model, window=3)
    (surrogate,) = Defended(defense, model).surrogates()
    images = torch.rand(4, 2, 8, 8, generator=seeded(7), requires_grad=True)
    through = torch.autograd.grad(surrogate(images).square().sum(), images)[0]
    painted = defense(images).detach().requires_grad_()
    direct = torch.autograd.grad(model(painted).square().sum(), painted)[0]
    torch.testing.assert_close(through, direct)
    assert torch.equal(defense.forward_as_identity(images), defense(images))


def test_imagenet_window_is_larger_than_the_patch_by_a_fifth():
    assert [DigitalWatermarking.imagenet(nn.ReLU(), patch).window for patch in (42, 52, 60)] == [50, 62, 72]


@pytest.mark.parametrize(
    ("settings_given", "message"),
    [
        ({"window": 0}, "window is 0; expected at least 1"),
        ({"window": 3, "opening": 0}, "opening is 0; expected at least 1"),
        ({"window": 3, "quantile": 1.2}, r"quantile must lie in \[0, 1\], got 1.2"),
        ({"window": 3, "saliency_kind": "best"}, "unknown saliency kind 'best'"),
        ({"window": 3, "fill": "grey"}, r"'ring' or values in \[0, 1\], got 'grey'"),
        ({"window": 3, "fill": (1.5,)}, r"got \(1.5,\)"),
    ],
)
def test_impossible_settings_are_refused(settings_given, message):
    with pytest.raises(InvalidInput, match=message):
        DigitalWatermarking(nn.ReLU(), **settings_given)


def test_a_window_or_colour_that_does_not_fit_the_images_is_refused():
    images = torch.rand(1, 2, 8, 8)
    with pytest.raises(InvalidInput, match="window of 9 does not fit into images of 8x8"):
        DigitalWatermarking(small_network(), window=9)(images)
    with pytest.raises(InvalidInput, match="has 3 values but the images have 2 channels"):
        DigitalWatermarking(small_network(), window=3, fill=(0.1, 0.2, 0.3))(images)
