"""Data sets by name.

`mnist-mini` ships with the package: the first 600 images of each digit in the official training file of MNIST and the
first 100 of each in the official test file, in file order and stored without loss.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from patchcert.data.files import Checked, locate, read
from patchcert.data.folder import FOLDER, ImageShape, read_folder
from patchcert.data.sources import CLASS_NAMES_FILE, MNIST, SOURCES, Source, find_source
from patchcert.data.split import Dataset, Split
from patchcert.errors import DataError
from patchcert.files import sha256

MNIST_MINI = "mnist-mini"
_MINI_FILE = Path(__file__).with_name("mnist_mini.npz")


def load_dataset(
    name: str, data_dir: str | Path | None = None, image_shape: ImageShape | None = None
) -> Dataset:
    """A data set whose files have their known checksums.

    `mnist`, `fashion-mnist`, `cifar10` and `cifar100` are searched in `data_dir` alone if it is given, else in
    $PATCHCERT_DATA and the user's cache. `mnist-mini` ships with the package. `folder:PATH` is an image folder,
    whose images are resized and cropped to `image_shape`, 3 channels of 224 x 224 by default.
    """
    if name == MNIST_MINI:
        return load_mnist_mini()
    if name.startswith(FOLDER):
        return read_folder(Path(name.removeprefix(FOLDER)).expanduser(), image_shape or ImageShape(), name)
    return load_source(find_source(name), data_dir)


def load_source(source: Source, data_dir: str | Path | None = None) -> Dataset:
    """A published data set from its files."""
    return assemble(source, read(source, locate(source, data_dir)))


def assemble(source: Source, checked: Mapping[str, Checked]) -> Dataset:
    """A published data set from the bytes of its files."""
    contents = {file: part.content for file, part in checked.items()}
    train, test = source.decode(contents)
    return Dataset(
        name=source.name,
        train=train,
        test=test,
        classes=source.classes or tuple(contents[CLASS_NAMES_FILE].decode().split()),
        mean=source.mean,
        std=source.std,
        checksums={file: part.sha256 for file, part in checked.items()},
    )


def class_names(name: str) -> tuple[str, ...] | None:
    """What the labels of a data set mean, where that is known without reading its images."""
    if name == MNIST_MINI:
        return MNIST.classes
    if name in SOURCES:
        return SOURCES[name].classes or None
    try:
        return load_dataset(name).classes
    except DataError:
        return None


def load_mnist_mini() -> Dataset:
    """The data set that ships with the package: neither network nor data folder is needed."""
    with np.load(_MINI_FILE) as arrays:
        tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    return Dataset(
        name=MNIST_MINI,
        train=Split(tensors["train_images"], tensors["train_labels"].long()),
        test=Split(tensors["test_images"], tensors["test_labels"].long()),
        classes=MNIST.classes,
        mean=(0.0,),
        std=(1.0,),
        checksums={_MINI_FILE.name: sha256(_MINI_FILE)},
    )
