import dataclasses
import gzip

import pytest
import torch

from patchcert.data.files import (
    cache_folder,
    data_folders,
    find_imagenet,
    load_dataset,
    load_source,
    locate,
    read,
)
from patchcert.errors import DataError


def test_a_given_folder_is_searched_alone_and_others_in_order(monkeypatch, tmp_path):
    monkeypatch.setenv("PATCHCERT_DATA", str(tmp_path / "shared"))
    assert data_folders(tmp_path / "own") == (tmp_path / "own",)
    assert data_folders() == (tmp_path / "shared", cache_folder())
    monkeypatch.delenv("PATCHCERT_DATA")
    assert data_folders() == (cache_folder(),)


def test_the_cache_is_where_the_desktop_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "patchcert"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "patchcert"


@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "."])
def test_usual_folders_are_found(tmp_path, write_mnist, mnist_source, place):
    folder = write_mnist(tmp_path / place)
    assert locate(mnist_source, tmp_path).folder == folder


def test_the_first_complete_folder_wins(monkeypatch, tmp_path, write_mnist, mnist_source):
    incomplete = write_mnist(tmp_path / "shared" / "mnist")
    (incomplete / "t10k-labels-idx1-ubyte.gz").unlink()
    complete = write_mnist(tmp_path / "cache" / "patchcert" / "mnist")
    monkeypatch.setenv("PATCHCERT_DATA", str(tmp_path / "shared"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert locate(mnist_source).folder == complete


def test_a_given_folder_without_the_files_is_an_error_though_others_have_them(
    monkeypatch, tmp_path, write_mnist, mnist_source
):
    write_mnist(tmp_path / "shared" / "mnist")
    monkeypatch.setenv("PATCHCERT_DATA", str(tmp_path / "shared"))
    with pytest.raises(DataError, match=f"looked in {tmp_path / 'shraed'}"):
        locate(mnist_source, tmp_path / "shraed")


@pytest.mark.parametrize("packed", [True, False])
def test_idx_sets_are_read_packed_or_plain(tmp_path, write_mnist, mnist_source, packed):
    write_mnist(tmp_path / "mnist", packed)
    dataset = load_source(mnist_source, tmp_path)
    assert dataset.name == "mnist"
    assert dataset.train.images.shape == (20, 1, 6, 5)
    assert dataset.test.labels.tolist() == list(range(10))
    assert dataset.classes == tuple("0123456789")
    assert sorted(dataset.checksums) == sorted(mnist_source.files)


def test_missing_data_say_where_was_looked_and_what_to_do(tmp_path):
    with pytest.raises(DataError, match=f"the files of mnist are not there: looked in {tmp_path}") as caught:
        load_dataset("mnist", tmp_path)
    assert f"run `patchcert data fetch mnist --data-dir {tmp_path}`" in caught.value.hint
    assert f"into {tmp_path / 'mnist'}" in caught.value.hint


def test_a_missing_file_is_named(tmp_path, write_mnist, mnist_source):
    folder = write_mnist(tmp_path / "mnist")
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=f"{folder} lacks t10k-labels-idx1-ubyte"):
        load_source(mnist_source, tmp_path)


def test_one_changed_byte_is_found(tmp_path, write_mnist, mnist_source):
    path = write_mnist(tmp_path / "mnist") / "train-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is damaged .* its SHA-256 is") as caught:
        load_source(mnist_source, tmp_path)
    assert (
        caught.value.hint
        == "delete it and run `patchcert data fetch mnist`, with the same --data-dir if you gave one."
    )


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: b"<html>not found</html>"])
def test_a_file_without_known_sum_that_cannot_be_unpacked_is_found(
    tmp_path, write_mnist, mnist_source, damage
):
    path = write_mnist(tmp_path / "mnist") / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is damaged .* cannot be unpacked"):
        load_source(dataclasses.replace(mnist_source, sums={}), tmp_path)


def test_an_impossible_label_is_refused(tmp_path, write_mnist, mnist_source):
    folder = write_mnist(tmp_path / "mnist", packed=False)
    path = folder / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + bytes([12]))
    with pytest.raises(DataError, match="files of mnist are damaged: label 12 where labels are 0 to 9"):
        load_source(mnist_source, tmp_path)


def test_recorded_sums_are_compared_where_none_is_published(tmp_path, cifar100_files, cifar100_source):
    for name, content in cifar100_files.items():
        (tmp_path / name).write_bytes(content)
    assert not any(
        file.is_verified for file in read(cifar100_source, locate(cifar100_source, tmp_path)).values()
    )
    (tmp_path / "SHA256SUMS").write_text(f"\nno record\nnothing\n{'0' * 64}  train.bin\n")
    with pytest.raises(DataError, match=f"train.bin is damaged .* not {'0' * 64}"):
        load_source(cifar100_source, tmp_path)


def test_cifar10_is_read_from_its_folder(tmp_path, cifar10_files, cifar10_source):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name, content in cifar10_files.items():
        (folder / name).write_bytes(content)
    dataset = load_source(cifar10_source, tmp_path)
    assert dataset.train.images.shape == (15, 3, 32, 32)
    assert dataset.train.labels[3] == cifar10_files["data_batch_2.bin"][0]
    assert len(dataset.test) == 3
    assert dataset.classes[3] == "cat"


def test_cifar10_is_read_from_its_archive(tmp_path, cifar10_archive, cifar10_files, cifar10_source):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(cifar10_archive)
    dataset = load_source(cifar10_source, tmp_path)
    first = torch.frombuffer(bytearray(cifar10_files["data_batch_1.bin"][1:3073]), dtype=torch.uint8)
    assert torch.equal(dataset.train.images[0].flatten(), first)


def test_cifar100_has_fine_labels_and_names(tmp_path, cifar100_archive, cifar100_files, cifar100_source):
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(cifar100_archive)
    dataset = load_source(cifar100_source, tmp_path)
    assert dataset.train.labels[0] == cifar100_files["train.bin"][1]
    assert len(dataset.classes) == 100


def test_a_cut_archive_is_found(tmp_path, cifar10_archive, cifar10_source):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(cifar10_archive[:-100])
    with pytest.raises(DataError, match=r"cifar-10-binary.tar.gz is damaged .* its SHA-256"):
        load_source(cifar10_source, tmp_path)
    unknown = {name: cifar10_source.sums[name] for name in cifar10_source.files}
    with pytest.raises(DataError, match=r"cifar-10-binary.tar.gz is damaged .* (cannot be unpacked|lacks)"):
        load_source(dataclasses.replace(cifar10_source, sums=unknown), tmp_path)


def test_an_archive_of_something_else_is_found(tmp_path, cifar10_source):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(bytes(10240)))
    unknown = {name: cifar10_source.sums[name] for name in cifar10_source.files}
    with pytest.raises(DataError, match="it lacks data_batch_1.bin"):
        load_source(dataclasses.replace(cifar10_source, sums=unknown), tmp_path)


def test_imagenet_is_found_beneath_the_data_folder_or_the_message_names_where_it_was_looked_for(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("PATCHCERT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"no ImageNet folder with labels.csv found; looked in .*cache"):
        find_imagenet()
    (tmp_path / "imagenet").mkdir()
    (tmp_path / "imagenet" / "labels.csv").write_text("file,label\n")
    assert find_imagenet(tmp_path) == (tmp_path / "imagenet").resolve()
    monkeypatch.setenv("PATCHCERT_DATA", str(tmp_path / "imagenet"))
    assert find_imagenet() == (tmp_path / "imagenet").resolve()


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
