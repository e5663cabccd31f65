from importlib import resources

import torch

from patchcert.data import Split, embedded, load_dataset


def test_the_embedded_set_is_balanced_small_and_real():
    dataset = load_dataset("mnist-mini")
    assert dataset.train.labels.bincount().tolist() == [600] * 10
    assert dataset.test.labels.bincount().tolist() == [100] * 10
    assert dataset.train.images.shape[1:] == (1, 28, 28)
    assert dataset.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert len(resources.files(embedded).joinpath("mnist_mini.npz").read_bytes()) < 2_000_000
    assert dataset.checksums == {"mnist_mini.npz": embedded.checksum()}


def test_the_first_of_each_class_keep_their_order():
    labels = torch.tensor([1, 0, 1, 1, 0, 2])
    images = torch.arange(6, dtype=torch.uint8).reshape(6, 1, 1, 1)
    chosen = embedded.first_of_each_class(Split(images, labels), 2)
    assert chosen.images.flatten().tolist() == [0, 1, 2, 4, 5]
    assert chosen.labels.tolist() == [1, 0, 1, 0, 2]


def test_the_embedded_images_are_those_of_the_full_set(real_data, tmp_path):
    mnist, mini = load_dataset("mnist", real_data), load_dataset("mnist-mini")
    for full, part, count in ((mnist.train, mini.train, 600), (mnist.test, mini.test, 100)):
        expected = embedded.first_of_each_class(full, count)
        assert torch.equal(expected.images, part.images)
        assert torch.equal(expected.labels, part.labels)
    embedded.write(mnist, tmp_path / "again.npz")
    assert (tmp_path / "again.npz").stat().st_size < 2_000_000
