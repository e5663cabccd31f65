"""Varied images are the same images moved, mirrored, turned or recoloured, in the stated measure."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchcert.data.augmentation import random_colours, random_crop, random_flip, random_turns, random_warps
from patchcert.errors import InvalidInput
from patchcert.testing.conformance import seeded


def numbered(count, channels, height, width):
    """Images whose pixels are all different and none is zero."""
    return torch.arange(1, count * channels * height * width + 1).reshape(count, channels, height, width)


@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_a_crop_is_a_shift_of_the_whole_image(count, channels, height, width, padding, seed):
    images = numbered(count, channels, height, width)
    cropped = random_crop(images, padding, seeded(seed))
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    for image, result in zip(padded, cropped, strict=True):
        shifts = (
            image[:, top : top + height, left : left + width]
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
        )
        assert any(torch.equal(result, shift) for shift in shifts)


def test_every_shift_happens_equally_often():
    images = torch.zeros(5000, 1, 5, 5)
    images[:, 0, 2, 2] = 1
    hits = random_crop(images, 2, seeded(0)).sum(dim=(0, 1))
    assert hits.min() > 140
    assert hits.max() < 260


def test_half_of_the_images_are_mirrored_and_none_otherwise_changed():
    images = numbered(1000, 2, 3, 4)
    flipped = random_flip(images, seeded(0))
    is_mirrored = (flipped == images.flip(-1)).all(dim=(1, 2, 3))
    is_same = (flipped == images).all(dim=(1, 2, 3))
    assert (is_mirrored ^ is_same).all()
    assert 440 < is_mirrored.sum() < 560


def test_the_same_generator_state_gives_the_same_images():
    images = numbered(10, 1, 4, 4)
    assert torch.equal(random_crop(images, 2, seeded(1)), random_crop(images, 2, seeded(1)))
    assert torch.equal(random_flip(images, seeded(1)), random_flip(images, seeded(1)))


def test_bytes_stay_bytes():
    images = torch.full((2, 1, 3, 3), 200, dtype=torch.uint8)
    assert random_flip(random_crop(images, 1, seeded(0)), seeded(0)).dtype == torch.uint8


def test_a_negative_padding_is_refused():
    with pytest.raises(InvalidInput, match="padding of at least 0, got -1"):
        random_crop(torch.zeros(1, 1, 2, 2), -1, seeded(0))


def test_half_of_the_images_are_turned_and_the_others_stay():
    images = torch.rand(1000, 1, 9, 7, generator=seeded(0))
    turned = random_turns(images, 20.0, 0.2, seeded(1))
    is_same = ((turned - images).abs() < 1e-5).all(dim=(1, 2, 3))
    assert 440 < is_same.sum() < 560
    assert turned.min() >= 0
    assert turned.max() <= 1


def test_a_turn_keeps_the_shape_of_things_on_images_that_are_not_square():
    images = torch.zeros(400, 1, 21, 41)
    images[:, :, 8:13, 18:23] = 1
    turned = random_turns(images, 45.0, 0.0, seeded(0))
    assert (turned.sum(dim=(1, 2, 3)) - 25).abs().max() < 1.5


def test_half_of_the_images_are_warped_and_the_others_stay():
    images = torch.rand(1000, 1, 9, 7, generator=seeded(0))
    warped = random_warps(images, 2.0, seeded(1))
    is_same = ((warped - images).abs() < 1e-5).all(dim=(1, 2, 3))
    assert 440 < is_same.sum() < 560
    assert warped.min() >= 0
    assert warped.max() <= 1


@pytest.mark.parametrize(("height", "width"), [(21, 41), (28, 28)])
def test_a_warp_moves_things_by_the_stated_pixels_at_most_along_both_axes(height: int, width: int):
    rows, columns = (torch.arange(size, dtype=torch.float32) for size in (height, width))
    images = torch.stack([rows[:, None].expand(-1, width), columns.expand(height, -1)])[None].expand(
        2000, -1, -1, -1
    )
    inside = (..., slice(5, height - 5), slice(5, width - 5))
    moved = (random_warps(images, 2.0, seeded(0)) - images)[inside].abs()
    assert 1.5 < moved[:, 0].max() < 2 + 1e-4
    assert 1.5 < moved[:, 1].max() < 2 + 1e-4


def test_colours_stay_within_the_stated_factors_and_in_range():
    images = torch.full((2000, 3, 2, 2), 0.5)
    changed = random_colours(images, 0.2, seeded(0))
    assert changed.min() >= 0.4 - 1e-6
    assert changed.max() <= 0.6 + 1e-6
    assert changed.std() > 0.02
    wild = random_colours(torch.rand(200, 3, 4, 4, generator=seeded(1)), 0.9, seeded(2))
    assert wild.min() >= 0
    assert wild.max() <= 1


def test_colours_of_grey_images_change_in_brightness_and_contrast_alone():
    images = torch.rand(50, 1, 4, 4, generator=seeded(0)).expand(-1, 3, -1, -1)
    changed = random_colours(images, 0.3, seeded(1))
    assert (changed - changed[:, :1]).abs().max() < 1e-6
    assert not torch.allclose(changed, images)
