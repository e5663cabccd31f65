"""The true labels of the data that results are about, which ship with the package, so that evidence can be held to
them where the images are not at hand."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from patchcert.data.sources import CIFAR10, MNIST, Source
from patchcert.data.split import Dataset
from patchcert.errors import DataError

_FOLDER = Path(__file__).with_name("labels")


@dataclass(frozen=True, slots=True)
class LabelFile:
    """Labels in the order of the images, two bytes each where there are more than 256 classes, else one.

    `sources` are SHA-256 sums of the published files that the labels were read from, any of which identifies the data;
    `sha256` is that of the file of labels.
    """

    name: str
    sources: frozenset[str]
    sha256: str
    bytes_each: int = 1

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return _FOLDER / f"{self.name}.bin"

    def read(self) -> Annotated[NDArray[np.int64], "n"]:
        """The labels; a file that was changed is refused."""
        content = self.path.read_bytes()
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise DataError(f"the labels in {self.path} were changed", hint="install patchcert again")
        return np.frombuffer(content, _dtype(self.bytes_each)).astype(np.int64)


def _sums(source: Source, file: str) -> frozenset[str]:
    """Of a published file, as it is and packed."""
    return frozenset(source.sums[name] for name in (file, f"{file}.gz") if name in source.sums)


KNOWN = {
    "mnist": LabelFile(
        "mnist",
        _sums(MNIST, "t10k-labels-idx1-ubyte"),
        "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    ),
    "cifar10": LabelFile(
        "cifar10",
        _sums(CIFAR10, "test_batch.bin"),
        "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    ),
    "imagenet": LabelFile(
        "imagenet",
        frozenset({"294db7e5c324891bb104777c338eff4cdaf07070089ac47d13d3388ee6d8da5c"}),
        "22ad43f7e9234fb98eb4ee67190aa0bda1657db7b517874b5010e8e709f5047c",
        bytes_each=2,
    ),
}
"""By name of the data set. `patchcert data labels NAME --out FILE` made the files; `imagenet` are the 400 validation
images that the results attack."""


TRAINING = {
    "mnist": LabelFile(
        "mnist-train",
        _sums(MNIST, "train-labels-idx1-ubyte"),
        "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
    ),
    "cifar10": LabelFile(
        "cifar10-train",
        _sums(CIFAR10, "data_batch_5.bin"),
        "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    ),
}
"""Likewise of the training images, on the last of which trials choose: `patchcert data labels NAME --train`."""


def true_labels(name: str, split: str, sums: Mapping[str, str]) -> Annotated[NDArray[np.int64], "n"] | None:
    """The labels of a split, `test`, `train` or `validation:N`, of data whose files have these sums; None where the
    package does not have them."""
    kind, _, count = split.partition(":")
    file = label_files(kind).get(name)
    if file is None or not file.sources & set(sums.values()):
        return None
    labels = file.read()
    if split in ("test", "train"):
        return labels
    is_part = kind == "validation" and count.isdecimal() and 0 < int(count) < len(labels)
    return labels[-int(count) :] if is_part else None


def label_files(split: str) -> Mapping[str, LabelFile]:
    """Those that a split's labels are read from, by name of the data set."""
    return KNOWN if split == "test" else TRAINING


def packed_labels(dataset: Dataset, train: bool = False) -> bytes:
    """The labels of all test or training images, in the form that is shipped."""
    labels = (dataset.train if train else dataset.test).labels.numpy()
    return labels.astype(_dtype(1 if len(dataset.classes) <= 256 else 2)).tobytes()


def _dtype(bytes_each: int) -> np.dtype[np.integer]:
    return np.dtype("u1" if bytes_each == 1 else "<u2")
