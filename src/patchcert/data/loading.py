"""Data sets by name."""

from collections.abc import Mapping
from pathlib import Path

from patchcert.data import embedded
from patchcert.data.files import Checked, locate, read
from patchcert.data.folder import FOLDER, ImageShape, read_folder
from patchcert.data.sources import CLASS_NAMES, Source, find_source
from patchcert.data.split import Dataset
from patchcert.errors import DataError


def load_dataset(
    name: str, data_dir: str | Path | None = None, image_shape: ImageShape | None = None
) -> Dataset:
    """A data set whose files have the sums they should have.

    `mnist`, `fashion-mnist`, `cifar10` and `cifar100` are searched in `data_dir` alone if it is given, else in
    $PATCHCERT_DATA and the user's cache. `mnist-mini` ships with the package. `folder:PATH` is an image folder,
    whose images are brought to `image_shape`: 3 channels of 224 x 224 unless told otherwise.
    """
    if name == embedded.NAME:
        return embedded.load()
    if name.startswith(FOLDER):
        return read_folder(Path(name.removeprefix(FOLDER)).expanduser(), image_shape or ImageShape(), name)
    return load_source(find_source(name), data_dir)


def load_source(source: Source, data_dir: str | Path | None = None) -> Dataset:
    """A published data set from its files."""
    return assemble(source, read(source, locate(source, data_dir)))


def assemble(source: Source, checked: Mapping[str, Checked]) -> Dataset:
    """A published data set from the bytes of its files."""
    decoded = source.decode({file: part.content for file, part in checked.items()})
    return Dataset(
        name=source.name,
        train=decoded.train,
        test=decoded.test,
        classes=decoded.classes,
        mean=source.mean,
        std=source.std,
        checksums={file: part.sha256 for file, part in checked.items()},
    )


def class_names(name: str) -> tuple[str, ...] | None:
    """What the labels of a data set mean, as far as that can be told without reading its images."""
    if name == embedded.NAME:
        return embedded.CLASSES
    if not name.startswith(FOLDER):
        return CLASS_NAMES.get(name)
    try:
        return load_dataset(name).classes
    except DataError:
        return None
