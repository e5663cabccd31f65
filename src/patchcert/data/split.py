"""Images with their labels, as tensors that live where they are used."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from patchcert.errors import DataError, InvalidInput
from patchcert.tensors import Images, Labels

_SHOWN = 10


@dataclass(frozen=True, eq=False)
class Split:
    """Images as uint8 and labels as int64, in the order of their files."""

    images: Images
    labels: Labels

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4:
            raise InvalidInput(
                f"images of a Split must be uint8 of shape (n, c, h, w), "
                f"got {self.images.dtype} of shape {tuple(self.images.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise InvalidInput(
                f"labels of a Split must be int64 of shape ({len(self.images)},), "
                f"got {self.labels.dtype} of shape {tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} images of {_by(self.image_size)})"

    @property
    def image_size(self) -> tuple[int, int, int]:
        """Channels, height and width of every image; nothing is decoded to know them."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def __getitem__(self, index: slice | Tensor) -> "Split":
        return Split(self.images[index], self.labels[index])

    def take(self, count: int) -> "Split":
        """The first `count` images; all of them if there are fewer."""
        if type(count) is not int or count < 0:
            raise InvalidInput(f"take was asked for {count!r} images; expected a whole number of at least 0")
        return self[:count]

    def to(self, device: torch.device | str) -> "Split":
        """The same images and labels on a device."""
        return Split(self.images.to(device), self.labels.to(device))

    def floats(self) -> Images:
        """Each pixel as the float32 nearest to value / 255, the same on every device."""
        # A division by a Python number becomes a product with 1/255 on CUDA, which rounds differently.
        scale = torch.tensor(255.0, device=self.images.device)
        return self.images.to(torch.float32) / scale


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test set, what their labels mean, and the sums of the files they were read from.

    `mean` and `std` are those published for it; 0 and 1 mean that its images are taken as they are.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    checksums: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name!r}, {len(self.train)} training and {len(self.test)} test images "
            f"of {_by(self.test.image_size)}, {shown_classes(self.classes)})"
        )

    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation per channel, in [0, 1], that a model for these images normalises with."""
        return self.mean, self.std

    def split_validation(self, count: int = 5000) -> tuple[Split, Split]:
        """The training set without its last `count` images, and those, for every choice made in training."""
        if not 0 < count < len(self.train):
            raise InvalidInput(
                f"a validation set must leave something of {self.name}'s {len(self.train)} training images; "
                f"got {count}"
            )
        kept = len(self.train) - count
        return self.train[:kept], self.train[kept:]

    def split(self, name: str) -> Split:
        """`train`, `test`, or `validation:N`, the last N training images, by name."""
        kind, _, count = name.partition(":")
        if kind == "validation" and count.isdecimal():
            return self.split_validation(int(count))[1]
        if name not in ("train", "test"):
            raise DataError(f"there is no split named {name!r}; expected 'train', 'test' or 'validation:N'")
        return self.train if name == "train" else self.test


def shown_classes(classes: Sequence[str]) -> str:
    """How many classes there are and the names of the first, for one line of text."""
    shown = ", ".join(classes[:_SHOWN])
    return f"{len(classes)} classes: {shown}{', ...' if len(classes) > _SHOWN else ''}"


def _by(lengths: Sequence[int]) -> str:
    return "x".join(map(str, lengths))
