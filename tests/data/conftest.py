"""Small files in the official formats, and sources that know their sums."""

import dataclasses
import gzip
import hashlib
import io
import struct
import tarfile

import numpy as np
import pytest

from hidden_data import no_other_data as no_other_data
from patchcert.data.sources import CIFAR10, CIFAR100, MNIST


def digest(content):
    return hashlib.sha256(content).hexdigest()


def idx(array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def idx_files():
    """The four files of a data set with 20 training and 10 test images of 6 x 5 pixels."""
    random = np.random.default_rng(0)
    return {
        "train-images-idx3-ubyte": idx(random.integers(0, 256, (20, 6, 5))),
        "train-labels-idx1-ubyte": idx(np.arange(20) % 10),
        "t10k-images-idx3-ubyte": idx(random.integers(0, 256, (10, 6, 5))),
        "t10k-labels-idx1-ubyte": idx(np.arange(10)),
    }


@pytest.fixture
def mnist_source(idx_files):
    """MNIST as it would be if its files were the small ones, packed."""
    sums = {f"{name}.gz": digest(gzip.compress(content, mtime=0)) for name, content in idx_files.items()}
    return dataclasses.replace(MNIST, sums=sums)


@pytest.fixture
def write_mnist(idx_files):
    def write(folder, packed=True):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in idx_files.items():
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
        return folder

    return write


def cifar_records(count, label_bytes, classes, seed):
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, (count, label_bytes))
    return np.hstack([labels, random.integers(0, 256, (count, 3072))]).astype(np.uint8).tobytes()


@pytest.fixture
def cifar10_files():
    return {name: cifar_records(3, 1, 10, seed) for seed, name in enumerate(CIFAR10.files)}


@pytest.fixture
def cifar100_files():
    names = "\n".join(f"class{number}" for number in range(100)) + "\n"
    return {
        "train.bin": cifar_records(4, 2, 100, 0),
        "test.bin": cifar_records(2, 2, 100, 1),
        "fine_label_names.txt": names.encode(),
    }


def packed(files, folder):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def cifar10_archive(cifar10_files):
    return packed(cifar10_files, "cifar-10-batches-bin")


@pytest.fixture
def cifar10_source(cifar10_files, cifar10_archive):
    sums = {name: digest(content) for name, content in cifar10_files.items()}
    return dataclasses.replace(CIFAR10, sums={**sums, CIFAR10.archive: digest(cifar10_archive)})


@pytest.fixture
def cifar100_archive(cifar100_files):
    return packed(cifar100_files, "cifar-100-binary")


@pytest.fixture
def cifar100_source(cifar100_archive):
    return dataclasses.replace(CIFAR100, sums={CIFAR100.archive: digest(cifar100_archive)})
