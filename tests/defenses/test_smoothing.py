import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchcert.defenses import Defended, LocalGradientSmoothing
from patchcert.defenses.smoothing import normalised_gradient
from patchcert.errors import InvalidInput
from patchcert.testing.conformance import seeded


def smoothed_by_loops(image, window, overlap, threshold, smoothing):
    """The specification, pixel by pixel, for one image (c, h, w)."""
    channels, height, width = image.shape
    size = torch.zeros(height, width, dtype=image.dtype)
    for row in range(height):
        for column in range(width):
            total = 1e-12
            for channel in range(channels):
                here = image[channel, row, column]
                if column + 1 < width:
                    total += (image[channel, row, column + 1] - here) ** 2
                if row + 1 < height:
                    total += (image[channel, row + 1, column] - here) ** 2
            size[row, column] = math.sqrt(total)
    gradient = (size - size.min()) / (size.max() - size.min() + 1e-7)
    covered = torch.zeros(height, width, dtype=torch.bool)
    stride = window - overlap
    tops = range(0, max(height - window, 0) + stride, stride)
    lefts = range(0, max(width - window, 0) + stride, stride)
    for top in tops:
        for left in lefts:
            block = gradient[top : top + window, left : left + window]
            if block.sum() / window**2 > threshold:
                covered[top : top + window, left : left + window] = True
    return image * (1 - (smoothing * gradient * covered).clamp(0, 1))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 3),
    st.integers(3, 9),
    st.integers(3, 9),
    st.integers(1, 5),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.2, 0.35, 0.5]),
    st.sampled_from([0.0, 1.0, 2.3]),
    st.integers(0, 1000),
)
def test_equals_the_specification_pixel_by_pixel(
    channels, height, width, window, overlap, threshold, smoothing, seed
):
    overlap = min(overlap, window - 1)
    images = torch.rand(2, channels, height, width, generator=seeded(seed), dtype=torch.float64)
    images[1] *= 0.3  # minimum and maximum are taken per image, not per batch
    result = LocalGradientSmoothing(window, overlap, threshold, smoothing)(images)
    for image, smooth in zip(images, result, strict=True):
        expected = smoothed_by_loops(image, window, overlap, threshold, smoothing)
        torch.testing.assert_close(smooth, expected)


@pytest.mark.parametrize("size", [(8, 8), (7, 11), (15, 15), (16, 31), (3, 5)])
def test_windows_cover_every_border_pixel(size):
    gradient = torch.ones(1, 1, *size)
    assert LocalGradientSmoothing(window=7, overlap=2, threshold=0.01).covered(gradient).all()


def test_imagenet_settings_are_the_originals():
    defense = LocalGradientSmoothing.imagenet()
    assert (defense.window, defense.overlap, defense.threshold, defense.smoothing) == (15, 5, 0.1, 2.3)
    assert "window=15" in repr(defense)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_gradient_is_finite_on_constant_images(value):
    defense = LocalGradientSmoothing(4, 1, 0.0, 2.3)
    for surrogate in defense.surrogates():
        images = torch.full((2, 3, 9, 9), value, requires_grad=True)
        surrogate(images).sum().backward()
        assert images.grad is not None
        assert images.grad.isfinite().all()


def test_gradient_is_exact_where_the_windows_do_not_change():
    defense = LocalGradientSmoothing(3, 1, 0.1, 0.7)
    images = torch.rand(2, 2, 6, 6, generator=seeded(1), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(defense, (images,))


def test_surrogates_have_the_defenses_values_bit_for_bit():
    defense = LocalGradientSmoothing(4, 2, 0.1, 5.0)
    images = torch.rand(8, 3, 12, 12, generator=seeded(2))
    for surrogate in defense.surrogates():
        assert torch.equal(surrogate(images), defense(images))


def test_second_surrogate_sees_past_the_saturated_clip():
    defense = LocalGradientSmoothing(2, 0, 0.0, 50.0)
    images = torch.rand(1, 1, 8, 8, generator=seeded(3), requires_grad=True)
    assert (defense(images) == 0).float().mean() > 0.5
    exact, past_clip = (
        torch.autograd.grad(surrogate(images).sum(), images)[0] for surrogate in defense.surrogates()
    )
    assert (exact == 0).sum() > (past_clip == 0).sum()


def test_normalised_gradient_spans_zero_to_one():
    gradient = normalised_gradient(torch.rand(5, 3, 10, 10, generator=seeded(4)))
    torch.testing.assert_close(gradient.amin(dim=(1, 2, 3)), torch.zeros(5))
    torch.testing.assert_close(gradient.amax(dim=(1, 2, 3)), torch.ones(5))


def test_defended_model_is_the_model_after_the_defense():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3)).eval()
    defense = LocalGradientSmoothing(3, 1, 0.05, 2.0)
    defended = Defended(defense, model)
    images = torch.rand(4, 1, 6, 6, generator=seeded(5))
    assert torch.equal(defended(images), model(defense(images)))
    assert not defended.training
    assert [torch.equal(surrogate(images), defended(images)) for surrogate in defended.surrogates()] == [
        True
    ] * 2


@pytest.mark.parametrize(
    ("window", "overlap", "threshold", "smoothing", "message"),
    [
        (0, 0, 0.1, 1.0, "window >= 1 and 0 <= overlap < window, got window 0, overlap 0"),
        (3, 3, 0.1, 1.0, "got window 3, overlap 3"),
        (3, -1, 0.1, 1.0, "got window 3, overlap -1"),
        (3, 1, 1.5, 1.0, r"threshold in \[0, 1\] and a factor >= 0, got 1.5 and 1.0"),
        (3, 1, 0.1, -2.0, "got 0.1 and -2.0"),
        (3, 1, 0.1, math.nan, "got 0.1 and nan"),
    ],
)
def test_impossible_settings_are_refused(window, overlap, threshold, smoothing, message):
    with pytest.raises(InvalidInput, match=message):
        LocalGradientSmoothing(window, overlap, threshold, smoothing)


def test_a_loud_patch_keeps_the_rest_of_the_image_from_being_smoothed():
    images = 0.5 + 0.15 * torch.rand(4, 3, 32, 32, generator=seeded(0))
    patched = images.clone()
    patched[:, :, :8, :8] = torch.randint(2, (4, 3, 8, 8), generator=seeded(1)).float()
    defense = LocalGradientSmoothing(window=8, overlap=4, threshold=0.1, smoothing=2.3)
    quiet, loud = ((defense(each) - each).abs()[:, :, 12:, 12:].mean() for each in (images, patched))
    assert loud < 0.5 * quiet
