"""Data sets by name: where their files are, their bytes once their checksums are verified, and what these hold.

`mnist-mini` ships with the package: the first 600 images of each digit in the official training file of MNIST and the
first 100 of each in the official test file, in file order and stored without loss.
"""

import gzip
import hashlib
import os
import shlex
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from patchcert.data.folder import FOLDER, ImageShape, read_folder
from patchcert.data.sources import CLASS_NAMES_FILE, MNIST, SOURCES, Source, find_source
from patchcert.data.split import Dataset, Split
from patchcert.errors import DataError
from patchcert.files import sha256

MNIST_MINI, IMAGENET = "mnist-mini", "imagenet"
_MINI_FILE = Path(__file__).with_name("mnist_mini.npz")

RECORD = "SHA256SUMS"
"""Beside fetched files: the sums at the time of fetching, in the format of `sha256sum`."""


@dataclass(frozen=True, slots=True)
class Located:
    """The files of a source on this machine: one path per file, or one archive with all of them."""

    folder: Path
    paths: tuple[Path, ...]
    archive: Path | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """Bytes of a file, their SHA-256 sum, and whether that sum was compared with a known one."""

    content: bytes
    sha256: str
    is_verified: bool


def load_dataset(
    name: str, data_dir: str | Path | None = None, image_shape: ImageShape | None = None
) -> Dataset:
    """A data set whose files have their known checksums.

    `mnist`, `fashion-mnist`, `cifar10` and `cifar100` are searched in `data_dir` alone if it is given, else in
    $PATCHCERT_DATA and the user's cache. `mnist-mini` ships with the package. `folder:PATH` is an image folder,
    whose images are resized and cropped to `image_shape`, 3 channels of 224 x 224 by default; `imagenet` is that of the
    files which `find_imagenet` finds.
    """
    if name == MNIST_MINI:
        return load_mnist_mini()
    if name == IMAGENET:
        return load_imagenet_images(data_dir)
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
    classes = source.classes or tuple(contents[CLASS_NAMES_FILE].decode().split())
    labels = torch.cat([train.labels, test.labels])
    if (labels >= len(classes)).any():
        raise DataError(
            f"the files of {source.name} are damaged: label {labels.max()} where labels are 0 to {len(classes) - 1}"
        )
    return Dataset(
        name=source.name,
        train=train,
        test=test,
        classes=classes,
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


def cache_folder() -> Path:
    """Where fetched data go by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "patchcert"


def data_folders(data_dir: str | Path | None = None) -> tuple[Path, ...]:
    """The places that are searched, in order: the given folder alone, else $PATCHCERT_DATA and the user's cache."""
    if data_dir:
        return (Path(data_dir).expanduser(),)
    shared = os.environ.get("PATCHCERT_DATA")
    return (Path(shared).expanduser(), cache_folder()) if shared else (cache_folder(),)


def load_imagenet_images(data_dir: str | Path | None = None) -> Dataset:
    """The validation images of ImageNet that its labels.csv lists, in 224 x 224 pixels."""
    folder = find_imagenet(data_dir)
    found = read_folder(folder, ImageShape(), IMAGENET)
    return replace(found, checksums={**found.checksums, "labels.csv": sha256(folder / "labels.csv")})


def find_imagenet(data_dir: str | Path | None = None) -> Path:
    """The first folder with ImageNet's labels.csv, among those where data are looked for."""
    folders = [root / inner for root in data_folders(data_dir) for inner in ("imagenet", ".")]
    for folder in folders:
        if (folder / "labels.csv").is_file():
            return folder.resolve()
    looked = ", ".join(str(root) for root in data_folders(data_dir))
    raise DataError(
        f"no ImageNet folder with labels.csv found; looked in {looked}",
        hint="put images/, labels.csv and the networks' .safetensors files into DIR/imagenet "
        "and pass --data-dir DIR or set PATCHCERT_DATA=DIR",
    )


def locate(source: Source, data_dir: str | Path | None = None) -> Located:
    """The first complete set of files; failing that, an error says what is missing and how to get it."""
    roots, incomplete = data_folders(data_dir), list[str]()
    for root in roots:
        for folder in (*(root / name for name in source.folders), root):
            found = [_present(folder, name) for name in source.files]
            if all(found):
                return Located(folder, tuple(path for path in found if path))
            missing = [name for name, path in zip(source.files, found, strict=True) if path is None]
            if len(missing) < len(found):
                incomplete.append(f"{folder} lacks {', '.join(missing)}")
            if source.archive and (folder / source.archive).is_file():
                return Located(folder, (), folder / source.archive)
    option = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir else ""
    target = roots[0] if source.archive else roots[0] / source.folders[0]
    problem = incomplete or [f"looked in {', '.join(str(root) for root in roots)}"]
    raise DataError(
        f"the files of {source.name} are not there: {'; '.join(problem)}",
        hint=f"run `patchcert data fetch {source.name}{option}`, or download {', '.join(source.published)} from "
        f"{source.mirrors[0]} into {target}; data elsewhere are found with --data-dir or $PATCHCERT_DATA.",
    )


def read(source: Source, located: Located) -> dict[str, Checked]:
    """The bytes of every file, unpacked, none of which differs from its known sum."""
    if located.archive is not None:
        return read_archive(source, located.archive)
    return {name: _read_file(source, path) for name, path in zip(source.files, located.paths, strict=True)}


def _read_file(source: Source, path: Path) -> Checked:
    """The bytes of one file, unpacked; its sum is compared with the published or else the recorded one."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    actual = hashlib.sha256(content).hexdigest()
    expected = source.sums.get(path.name) or recorded_sums(path.parent).get(path.name)
    _compare(source, path, actual, expected)
    try:
        unpacked = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(source, path, f"it cannot be unpacked ({error})") from error
    return Checked(unpacked, actual, expected is not None)


def read_archive(source: Source, path: Path) -> dict[str, Checked]:
    """The files of a source out of its tar archive, whose own sum is checked first; nothing is written."""
    published = source.sums.get(path.name)
    _compare(source, path, sha256(path), published)
    try:
        with tarfile.open(path, "r:gz") as archive:
            contents = _members(archive, source.files)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise _damaged(source, path, f"it cannot be unpacked ({error})") from error
    missing = [name for name in source.files if name not in contents]
    if missing:
        raise _damaged(source, path, f"it lacks {', '.join(missing)}")
    checked = {
        name: Checked(contents[name], hashlib.sha256(contents[name]).hexdigest(), published is not None)
        for name in source.files
    }
    for name, file in checked.items():
        _compare(source, path / name, file.sha256, source.sums.get(name))
    return checked


def recorded_sums(folder: Path) -> dict[str, str]:
    """The sums that were written down when the files of a folder were fetched."""
    record = folder / RECORD
    if not record.is_file():
        return {}
    lines = (line.partition(" ") for line in record.read_text().splitlines())
    return {name.strip().lstrip("*"): digest for digest, _, name in lines if name}


def _present(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _members(archive: tarfile.TarFile, names: Iterable[str]) -> dict[str, bytes]:
    wanted = set(names)
    contents: dict[str, bytes] = {}
    for member in archive:
        name = Path(member.name).name
        stream = archive.extractfile(member) if member.isfile() and name in wanted else None
        if stream is not None:
            contents[name] = stream.read()
    return contents


def _compare(source: Source, path: Path, actual: str, expected: str | None) -> None:
    if expected is not None and actual != expected:
        raise _damaged(source, path, f"its SHA-256 is {actual}, not {expected}")


def _damaged(source: Source, path: Path, how: str) -> DataError:
    return DataError(
        f"{path} is damaged or no file of {source.name}: {how}",
        hint=f"delete it and run `patchcert data fetch {source.name}`, with the same --data-dir if you gave one.",
    )
