"""Image folders: one sub-folder per class, or a `labels.csv` with the columns `file` and `label`.

An image is decoded when it is needed: its shorter side is brought to size / 0.875 and the centre is cut out.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from patchcert.data.split import Dataset, Split
from patchcert.errors import DataError

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_CROP_SHARE = 0.875
_LAYOUT_HINT = (
    "expected sub-folders named after the classes with images in them, or a labels.csv with the columns "
    "file,label; either at the top or below train/ and test/ (or val/)."
)


@dataclass(frozen=True, slots=True)
class ImageShape:
    """What every image of a folder is brought to."""

    channels: int = 3
    height: int = 224
    width: int = 224


@dataclass(frozen=True, slots=True)
class _Listing:
    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]


class FolderSplit(Split):
    """A split whose images are decoded when they are first asked for; a part of it decodes only that part."""

    def __init__(self, paths: tuple[Path, ...], labels: Tensor, shape: ImageShape) -> None:
        object.__setattr__(self, "paths", paths)
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "shape", shape)

    paths: tuple[Path, ...]
    shape: ImageShape

    @cached_property
    def images(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All images as uint8 (n, c, h, w)."""
        images = torch.empty(
            len(self.paths), self.shape.channels, self.shape.height, self.shape.width, dtype=torch.uint8
        )
        for index, path in enumerate(self.paths):
            images[index] = decode(path, self.shape)
        return images

    def __getitem__(self, index: slice | Tensor) -> Split:
        chosen = torch.arange(len(self))[index if isinstance(index, slice) else index.cpu()]
        paths = tuple(self.paths[number] for number in chosen.tolist())
        return FolderSplit(paths, self.labels[chosen], self.shape)


def read_folder(path: Path, shape: ImageShape) -> Dataset:
    """The data set of a folder. Where there are no train/ and test/ all images are test images."""
    if not path.is_dir():
        raise DataError(f"there is no image folder {path}", hint=_LAYOUT_HINT)
    test_folder = next((path / name for name in ("test", "val") if (path / name).is_dir()), None)
    if test_folder is None or not (path / "train").is_dir():
        test = _list_images(path)
        train = _Listing((), (), test.classes)
    else:
        train, test = _list_images(path / "train"), _list_images(test_folder)
        if train.classes != test.classes:
            raise DataError(
                f"{path / 'train'} and {test_folder} do not hold the same classes", hint=_LAYOUT_HINT
            )
    return Dataset(
        name=f"folder:{path}",
        train=FolderSplit(train.paths, torch.tensor(train.labels, dtype=torch.int64), shape),
        test=FolderSplit(test.paths, torch.tensor(test.labels, dtype=torch.int64), shape),
        classes=test.classes,
        mean=(0.0,) * shape.channels,
        std=(1.0,) * shape.channels,
    )


_MANY_BITS = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
"""Modes that Pillow would clip to 255, not scale."""


def decode(path: Path, shape: ImageShape) -> Tensor:
    """One image as uint8 (c, h, w). An image that already has the wanted size is taken as it is."""
    try:
        with Image.open(path) as image:
            if image.mode in _MANY_BITS:
                raise DataError(
                    f"{path} has pixels of mode {image.mode}, which do not fit into 8 bits",
                    hint="convert it to 8 bits per channel.",
                )
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


def _list_images(folder: Path) -> _Listing:
    read: Callable[[Path], _Listing] = _from_csv if (folder / "labels.csv").is_file() else _from_subfolders
    listing = read(folder)
    if not listing.paths:
        raise DataError(f"{folder} holds no images", hint=_LAYOUT_HINT)
    return listing


def _from_subfolders(folder: Path) -> _Listing:
    classes = tuple(sorted(child.name for child in folder.iterdir() if child.is_dir()))
    found = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in _SUFFIXES
    ]
    return _Listing(tuple(path for path, _ in found), tuple(label for _, label in found), classes)


def _from_csv(folder: Path) -> _Listing:
    """Whole numbers are taken as labels; other labels are class names and numbered in sorted order."""
    table = folder / "labels.csv"
    with table.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    if not rows or not {"file", "label"} <= set(rows[0]):
        raise DataError(f"{table} has no rows or lacks the columns file,label", hint=_LAYOUT_HINT)
    paths = tuple(_resolve(folder, row["file"], table) for row in rows)
    if all(row["label"].isdecimal() for row in rows):
        labels = tuple(int(row["label"]) for row in rows)
        names = {label: row.get("name") or str(label) for label, row in zip(labels, rows, strict=True)}
        classes = tuple(names.get(label, str(label)) for label in range(max(labels) + 1))
    else:
        classes = tuple(sorted({row["label"] for row in rows}))
        labels = tuple(classes.index(row["label"]) for row in rows)
    return _Listing(paths, labels, classes)


def _resolve(folder: Path, name: str, table: Path) -> Path:
    for path in (folder / name, folder / "images" / name):
        if path.is_file():
            return path
    raise DataError(f"{table} names {name}, which is neither in {folder} nor in {folder / 'images'}")
