import numpy as np
import pytest
import torch

from patchcert.data import Dataset, Split
from patchcert.errors import DataError, InvalidInput


def split(count=10):
    images = (
        torch.arange(count * 12, dtype=torch.int64).remainder(256).to(torch.uint8).reshape(count, 3, 2, 2)
    )
    return Split(images, torch.arange(count))


def dataset(count=10):
    return Dataset("some", split(count), split(4), ("a", "b"), (0.0,), (1.0,))


def test_floats_are_the_nearest_to_value_over_255():
    every_value = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    floats = Split(every_value, torch.zeros(1, dtype=torch.int64)).floats()
    expected = (np.arange(256, dtype=np.float64) / 255).astype(np.float32)
    assert floats.dtype == torch.float32
    assert np.array_equal(floats.flatten().numpy(), expected)
    assert floats.min() == 0
    assert floats.max() == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_floats_are_the_same_on_cuda():
    every_value = Split(torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16), torch.zeros(1).long())
    assert torch.equal(every_value.to("cuda").floats().cpu(), every_value.floats())


def test_parts_keep_images_and_labels_together():
    part = split()[2:5]
    assert part.labels.tolist() == [2, 3, 4]
    assert torch.equal(part.images, split().images[2:5])
    assert split()[torch.tensor([7, 1])].labels.tolist() == [7, 1]
    assert len(split().take(3)) == 3
    assert len(split().take(300)) == 10
    with pytest.raises(
        InvalidInput, match="take was asked for -1 images; expected a whole number of at least 0"
    ):
        split().take(-1)


def test_the_validation_set_is_the_last_images():
    train, validation = dataset().split_validation(3)
    assert train.labels.tolist() == list(range(7))
    assert validation.labels.tolist() == [7, 8, 9]


@pytest.mark.parametrize("count", [0, -1, 10, 11])
def test_a_validation_set_leaves_something_to_train_on(count):
    with pytest.raises(InvalidInput, match=f"some's 10 training images; got {count}"):
        dataset().split_validation(count)


def test_splits_have_names():
    assert len(dataset().split("train")) == 10
    assert len(dataset().split("test")) == 4
    with pytest.raises(DataError, match="no split named 'validation'"):
        dataset().split("validation")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 1, 2, 2), torch.zeros(2).long(), "must be uint8"),
        (torch.zeros(2, 2, 2).byte(), torch.zeros(2).long(), r"got torch.uint8 of shape \(2, 2, 2\)"),
        (torch.zeros(2, 1, 2, 2).byte(), torch.zeros(3).long(), r"int64 of shape \(2,\)"),
        (torch.zeros(2, 1, 2, 2).byte(), torch.zeros(2), "got torch.float32"),
    ],
)
def test_what_is_no_split_is_refused(images, labels, message):
    with pytest.raises(InvalidInput, match=message):
        Split(images, labels)


def test_what_is_printed_of_data_is_short():
    assert repr(split()) == "Split(10 images of 3x2x2)"
    assert repr(dataset()) == "Dataset('some', 10 training and 4 test images of 3x2x2, 2 classes: a, b)"
    many = Dataset("many", split(), split(), tuple(map(str, range(1000))), (0.0,), (1.0,))
    assert repr(many).endswith("1000 classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...)")
