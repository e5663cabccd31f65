import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchcert.data.augment import random_crop, random_flip
from patchcert.errors import InvalidInput


def numbered(count, channels, height, width):
    """Images whose pixels are all different and none is zero."""
    return torch.arange(1, count * channels * height * width + 1).reshape(count, channels, height, width)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


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
