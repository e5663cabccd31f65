import pytest
import torch

from patchcert.data import load_dataset
from patchcert.errors import DataError


def test_the_embedded_set_is_balanced_small_and_real():
    dataset = load_dataset("mnist-mini")
    assert dataset.train.labels.bincount().tolist() == [600] * 10
    assert dataset.test.labels.bincount().tolist() == [100] * 10
    assert dataset.train.images.shape[1:] == (1, 28, 28)
    assert dataset.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert list(dataset.checksums) == ["mnist_mini.npz"]
    assert len(dataset.checksums["mnist_mini.npz"]) == 64


def first_of_each_class(split, count):
    """The first `count` images of each class, in the order they have in the file."""
    chosen = [(split.labels == label).nonzero().flatten()[:count] for label in range(10)]
    return split[torch.cat(chosen).sort().values]


def test_the_embedded_images_are_those_of_the_full_set(real_data):
    mnist, mini = load_dataset("mnist", real_data), load_dataset("mnist-mini")
    for full, part, count in ((mnist.train, mini.train, 600), (mnist.test, mini.test, 100)):
        expected = first_of_each_class(full, count)
        assert torch.equal(expected.images, part.images)
        assert torch.equal(expected.labels, part.labels)


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(DataError, match="no data set named 'cifar-10'; known: mnist, .*mnist-mini") as caught:
        load_dataset("cifar-10")
    assert caught.value.hint == "did you mean 'cifar10'?"


def test_the_official_mnist_is_read(real_data):
    dataset = load_dataset("mnist", real_data)
    assert dataset.train.images.shape == (60_000, 1, 28, 28)
    assert dataset.test.images.shape == (10_000, 1, 28, 28)
    assert dataset.train.labels[:5].tolist() == [5, 0, 4, 1, 9]


def test_the_official_cifar10_is_read(real_data):
    if not (real_data / "cifar-10-batches-bin").is_dir():
        pytest.skip("no official CIFAR-10 files beside the others")
    dataset = load_dataset("cifar10", real_data)
    assert dataset.train.images.shape == (50_000, 3, 32, 32)
    assert dataset.train.labels.bincount().tolist() == [5000] * 10
    assert dataset.test.labels[:5].tolist() == [3, 8, 8, 0, 6]
