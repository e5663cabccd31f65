"""`mnist-mini`: 6,000 training and 1,000 test images of MNIST that ship with the package.

They are the first 600 images of each digit in the official training file and the first 100 of each in the
official test file, kept in file order and stored without loss. `first_of_each_class` makes them from the
full set; `write` stored them.
"""

import hashlib
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from patchcert.data.split import Dataset, Split
from patchcert.files import atomic_write

NAME = "mnist-mini"
CLASSES = tuple("0123456789")
TRAIN_PER_CLASS = 600
TEST_PER_CLASS = 100

_FILE = "mnist_mini.npz"


def load() -> Dataset:
    """The embedded data set, without network or data folder."""
    with resources.files(__name__).joinpath(_FILE).open("rb") as stream, np.load(stream) as arrays:
        tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    return Dataset(
        name=NAME,
        train=Split(tensors["train_images"], tensors["train_labels"].long()),
        test=Split(tensors["test_images"], tensors["test_labels"].long()),
        classes=CLASSES,
        mean=(0.0,),
        std=(1.0,),
        checksums={_FILE: checksum()},
    )


def checksum() -> str:
    """The SHA-256 sum of the embedded file."""
    return hashlib.sha256(resources.files(__name__).joinpath(_FILE).read_bytes()).hexdigest()


def first_of_each_class(split: Split, count: int) -> Split:
    """The first `count` images of each class, in the order they had."""
    classes = int(split.labels.max()) + 1
    chosen = [torch.nonzero(split.labels == label).flatten()[:count] for label in range(classes)]
    return split[torch.cat(chosen).sort().values]


def write(mnist: Dataset, path: Path) -> None:
    """Store the subset of the full MNIST as one compressed npz file."""
    train = first_of_each_class(mnist.train, TRAIN_PER_CLASS)
    test = first_of_each_class(mnist.test, TEST_PER_CLASS)
    with atomic_write(path) as stream:
        np.savez_compressed(
            stream,
            train_images=train.images.numpy(),
            train_labels=train.labels.numpy().astype(np.uint8),
            test_images=test.images.numpy(),
            test_labels=test.labels.numpy().astype(np.uint8),
        )
