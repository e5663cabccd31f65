"""Image folders: one sub-folder per class, or a `labels.csv` with the columns `file` and `label`.

An image is decoded when it is needed: its shorter side is resized to size / 0.875, and the centre is cropped.
"""

import csv
import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from patchcert.data.split import Dataset, Split
from patchcert.errors import DataError
from patchcert.files import sha256
from patchcert.tensors import Images, Labels

FOLDER = "folder:"
"""Begins the name of a data set that is an image folder."""

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_CROP_SHARE = 0.875
_MEASURED_AT_ONCE = 1024
_LAYOUT_HINT = (
    "expected sub-folders named after the classes with images in them, or a labels.csv with the columns "
    "file,label; either at the top or below train/ and test/ (or val/)."
)


@dataclass(frozen=True, slots=True)
class ImageShape:
    """The size to which every image of a folder is resized and cropped."""

    channels: int = 3
    height: int = 224
    width: int = 224


@dataclass(frozen=True, slots=True)
class _Listing:
    root: Path
    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]

    def split(self, shape: ImageShape) -> "FolderSplit":
        return FolderSplit(self.root, self.paths, torch.tensor(self.labels, dtype=torch.int64), shape)


class FolderSplit(Split):
    """A split whose images are decoded when they are first asked for; a part of it decodes only that part."""

    def __init__(self, root: Path, paths: tuple[Path, ...], labels: Labels, shape: ImageShape) -> None:
        object.__setattr__(self, "root", root)
        object.__setattr__(self, "paths", paths)
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "shape", shape)

    root: Path
    paths: tuple[Path, ...]
    shape: ImageShape

    @property
    def image_size(self) -> tuple[int, int, int]:
        """The size to which every image is resized and cropped."""
        return self.shape.channels, self.shape.height, self.shape.width

    @cached_property
    def images(self) -> Images:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All images as uint8."""
        images = torch.empty(len(self.paths), *self.image_size, dtype=torch.uint8)
        for index, path in enumerate(self.paths):
            images[index] = decode(path, self.shape)
        return images

    @cached_property
    def sha256(self) -> str:
        """One checksum over the names, labels and bytes of all files, in their order; none of them is decoded."""
        total = hashlib.sha256()
        for path, label in zip(self.paths, self.labels.tolist(), strict=True):
            name = Path(os.path.relpath(path, self.root)).as_posix()
            total.update(f"{_sum(path)} {label} {name}\n".encode(errors="surrogateescape"))
        return total.hexdigest()

    def __getitem__(self, index: slice | Tensor) -> Split:
        if "images" in vars(self):
            return super().__getitem__(index if isinstance(index, slice) else index.cpu())
        chosen = torch.arange(len(self))[index if isinstance(index, slice) else index.cpu()]
        paths = tuple(self.paths[number] for number in chosen.tolist())
        return FolderSplit(self.root, paths, self.labels[chosen], self.shape)


class FolderDataset(Dataset):
    """The data set of a folder, whose checksums and statistics are computed when they are first asked for."""

    def __init__(
        self,
        name: str,
        train: Split,
        test: Split,
        classes: tuple[str, ...],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        checksums: dict[str, str] | None = None,
    ) -> None:
        super().__init__(name, train, test, classes, mean, std, checksums or {})
        if checksums is None:
            vars(self).pop("checksums")

    @cached_property
    def checksums(self) -> dict[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """One checksum for each split that holds images."""
        splits = {"train": self.train, "test": self.test}
        return {
            name: split.sha256
            for name, split in splits.items()
            if isinstance(split, FolderSplit) and len(split)
        }

    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Measured on all training images as they are decoded, to four digits."""
        return measure(self.train.images) if len(self.train) else (self.mean, self.std)


def measure(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel in [0, 1], to four digits; a channel without deviation gets 1.

    Pixels are counted by value, so that the result does not depend on an order of summation.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    shares = torch.stack([_histogram(images[:, channel]) for channel in range(images.shape[1])])
    shares /= shares.sum(dim=1, keepdim=True)
    mean = shares @ values
    variance = (shares * (values - mean[:, None]) ** 2).sum(dim=1)
    deviations = [round(float(each), 4) or 1.0 for each in variance.sqrt()]
    return tuple(round(float(each), 4) for each in mean), tuple(deviations)


def _histogram(pixels: Tensor) -> Tensor:
    parts = pixels.split(_MEASURED_AT_ONCE)
    return torch.stack([part.flatten().bincount(minlength=256) for part in parts]).sum(dim=0).double()


def _sum(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def read_folder(path: Path, shape: ImageShape, name: str | None = None) -> Dataset:
    """The data set of a folder. Where there are no train/ and test/ all images are test images."""
    if not path.is_dir():
        raise DataError(f"there is no image folder {path}", hint=_LAYOUT_HINT)
    if shape.channels not in (1, 3):
        raise DataError(f"images of a folder have 1 or 3 channels, but {shape.channels} are asked for")
    test_folder = next((path / name for name in ("test", "val") if (path / name).is_dir()), None)
    if test_folder is None or not (path / "train").is_dir():
        alone = test_folder if test_folder is not None and not _read(path).paths else path
        test = _list_images(alone)
        train = _Listing(alone, (), (), test.classes)
    else:
        train, test = _list_images(path / "train"), _list_images(test_folder)
        if train.classes != test.classes:
            raise DataError(
                f"{path / 'train'} and {test_folder} do not hold the same classes", hint=_LAYOUT_HINT
            )
    return FolderDataset(
        name=name or f"{FOLDER}{path}",
        train=train.split(shape),
        test=test.split(shape),
        classes=test.classes,
        mean=(0.0,) * shape.channels,
        std=(1.0,) * shape.channels,
    )


_MANY_BITS = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
"""Modes that Pillow would clip to 255, not scale."""


def check_bits(path: Path, image: Image.Image) -> None:
    """Refuses an image of more than 8 bits."""
    if image.mode in _MANY_BITS:
        raise DataError(
            f"{path} has pixels of mode {image.mode}, which do not fit into 8 bits",
            hint="convert it to 8 bits per channel.",
        )


def decode(path: Path, shape: ImageShape) -> Annotated[Tensor, "c h w"]:
    """One image as uint8. An image that already has the wanted size is taken as it is."""
    try:
        with Image.open(path) as image:
            check_bits(path, image)
            pixels = _fit(image.convert("L" if shape.channels == 1 else "RGB"), shape.height, shape.width)
    except (OSError, UnidentifiedImageError, SyntaxError) as error:
        raise DataError(
            f"{path} cannot be read as an image: {error}", hint="delete or replace it."
        ) from error
    array = np.array(pixels, dtype=np.uint8).reshape(shape.height, shape.width, -1)
    return torch.from_numpy(array).permute(2, 0, 1)


def _fit(image: Image.Image, height: int, width: int) -> Image.Image:
    if image.size == (width, height):
        return image
    scale = max(height / image.height, width / image.width) / _CROP_SHARE
    resized = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
    if resized != image.size:
        image = image.resize(resized, Image.Resampling.BILINEAR)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def _read(folder: Path) -> _Listing:
    return _from_csv(folder) if (folder / "labels.csv").is_file() else _from_subfolders(folder)


def _list_images(folder: Path) -> _Listing:
    listing = _read(folder)
    if not listing.paths:
        raise DataError(f"{folder} holds no images", hint=_LAYOUT_HINT)
    return listing


def _from_subfolders(folder: Path) -> _Listing:
    """Folders whose names begin with a dot are those of programs, not classes."""
    classes = tuple(
        sorted(child.name for child in folder.iterdir() if child.is_dir() and child.name[0] != ".")
    )
    found = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in _SUFFIXES
    ]
    return _Listing(folder, tuple(path for path, _ in found), tuple(label for _, label in found), classes)


def _from_csv(folder: Path) -> _Listing:
    """Whole numbers are taken as labels; other labels are class names and numbered in sorted order."""
    table = folder / "labels.csv"
    try:
        with table.open(newline="", encoding="utf-8-sig") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} cannot be read: {error}", hint=_LAYOUT_HINT) from error
    if not rows or not {"file", "label"} <= set(rows[0]):
        raise DataError(f"{table} has no rows or lacks the columns file,label", hint=_LAYOUT_HINT)
    short = next((number for number, row in enumerate(rows, 2) if not row["file"] or not row["label"]), None)
    if short is not None:
        raise DataError(f"line {short} of {table} lacks a file or a label", hint=_LAYOUT_HINT)
    paths = tuple(_resolve(folder, row["file"], table) for row in rows)
    if all(row["label"].isdecimal() for row in rows):
        labels = tuple(int(row["label"]) for row in rows)
        names = {label: row.get("name") or str(label) for label, row in zip(labels, rows, strict=True)}
        classes = tuple(names.get(label, str(label)) for label in range(max(labels) + 1))
    elif odd := next((row["label"] for row in rows if _is_odd_number(row["label"])), None):
        raise DataError(
            f"{table} has the label {odd}, which is a number but not one of 0, 1, 2, ...",
            hint="write whole numbers from 0 on in all rows, or names of classes in all.",
        )
    else:
        classes = tuple(sorted({row["label"] for row in rows}))
        labels = tuple(classes.index(row["label"]) for row in rows)
    return _Listing(folder, paths, labels, classes)


def _is_odd_number(label: str) -> bool:
    """A number, but no label: one that a table of numbers was written with, or what stands for none."""
    try:
        float(label)
    except ValueError:
        return False
    return not label.isdecimal()


def _resolve(folder: Path, name: str, table: Path) -> Path:
    for path in (folder / name, folder / "images" / name):
        if path.is_file():
            return path
    raise DataError(f"{table} names {name}, which is neither in {folder} nor in {folder / 'images'}")
