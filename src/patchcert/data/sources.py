"""The data sets that can be read: their official files, where they are published, their checksums and formats.

IDX, of MNIST and its relatives, is a big-endian header, then one byte per value; the binary version of CIFAR is one or
two label bytes per image, then 3 x 32 x 32 bytes.
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from patchcert.data.split import Split
from patchcert.errors import DataError, did_you_mean
from patchcert.tensors import Labels

Contents = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Source:
    """A data set as published.

    `files` are what is read, each as it is, packed as `.gz`, or in `archive`, a compressed tar file that holds all of
    them; `sums` are the SHA-256 sums known of any. `decode` makes the training and the test set of what is in the
    files; `classes` are empty where a file of class names says them.
    """

    name: str
    folders: tuple[str, ...]
    files: tuple[str, ...]
    sums: Mapping[str, str]
    mirrors: tuple[str, ...]
    decode: Callable[[Contents], tuple[Split, Split]]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    archive: str | None = None

    @property
    def published(self) -> tuple[str, ...]:
        """The names under which the mirrors hold the files."""
        return (self.archive,) if self.archive else tuple(f"{name}.gz" for name in self.files)


_IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_CIFAR10_BATCHES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CLASS_NAMES_FILE = "fine_label_names.txt"
_UNSIGNED_BYTE = 8
_CIFAR_PIXELS = 3 * 32 * 32


def decode_idx(content: bytes, where: str) -> Tensor:
    """The array of an IDX file of bytes; `where` names the file in errors."""
    if len(content) < 4:
        raise DataError(f"{where} is cut short: {len(content)} bytes hold no IDX header")
    zero, kind, dimensions = struct.unpack(">HBB", content[:4])
    if zero != 0 or kind != _UNSIGNED_BYTE or dimensions == 0:
        raise DataError(f"{where} is no IDX file of bytes: it starts with 0x{content[:4].hex()}")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"{where} is cut short: {len(content)} bytes hold no IDX header")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    expected = start + math.prod(shape)
    if len(content) != expected:
        size = "x".join(str(length) for length in shape)
        raise DataError(
            f"{where} is damaged: {size} values take {expected} bytes, the file has {len(content)}"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).reshape(shape)


def decode_idx_pair(images: bytes, labels: bytes, where: str) -> tuple[Annotated[Tensor, "n 1 h w"], Labels]:
    """Images as bytes and labels as int64, of equal number."""
    pixels = decode_idx(images, f"{where} images")
    targets = decode_idx(labels, f"{where} labels")
    if pixels.dim() != 3 or targets.dim() != 1 or len(pixels) != len(targets):
        raise DataError(
            f"{where} images have shape {tuple(pixels.shape)} and labels {tuple(targets.shape)}; "
            "expected (n, height, width) and (n,)"
        )
    return pixels.unsqueeze(1), targets.long()


def decode_cifar(
    content: bytes, where: str, label_bytes: int
) -> tuple[Annotated[Tensor, "n 3 32 32"], Labels]:
    """Images as bytes and labels as int64; of several label bytes the last, finest one counts."""
    record = label_bytes + _CIFAR_PIXELS
    if not content or len(content) % record:
        raise DataError(
            f"{where} is damaged: {len(content)} bytes are not a whole number of {record}-byte CIFAR records"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, record)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32).contiguous(), records[:, label_bytes - 1].long()


def _decode_idx(contents: Contents) -> tuple[Split, Split]:
    train_images, train_labels, test_images, test_labels = (contents[name] for name in _IDX_FILES)
    train = Split(*decode_idx_pair(train_images, train_labels, "training"))
    test = Split(*decode_idx_pair(test_images, test_labels, "test"))
    return train, test


def _decode_cifar10(contents: Contents) -> tuple[Split, Split]:
    batches = [decode_cifar(contents[name], name, 1) for name in _CIFAR10_BATCHES]
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    test = Split(*decode_cifar(contents["test_batch.bin"], "test_batch.bin", 1))
    return Split(images, labels), test


def _decode_cifar100(contents: Contents) -> tuple[Split, Split]:
    train = Split(*decode_cifar(contents["train.bin"], "train.bin", 2))
    return train, Split(*decode_cifar(contents["test.bin"], "test.bin", 2))


MNIST = Source(
    name="mnist",
    folders=("mnist", "MNIST/raw"),
    files=_IDX_FILES,
    sums={
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    decode=_decode_idx,
    classes=tuple("0123456789"),
    mean=(0.0,),
    std=(1.0,),
)

FASHION_MNIST = Source(
    name="fashion-mnist",
    folders=("fashion-mnist", "FashionMNIST/raw"),
    files=_IDX_FILES,
    sums={
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
    mirrors=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    ),
    decode=_decode_idx,
    classes=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    mean=(0.0,),
    std=(1.0,),
)

CIFAR10 = Source(
    name="cifar10",
    folders=("cifar-10-batches-bin", "cifar10"),
    files=(*_CIFAR10_BATCHES, "test_batch.bin"),
    sums={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
    decode=_decode_cifar10,
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
    archive="cifar-10-binary.tar.gz",
)

# The sums of the single files are not published: `fetch` checks the archive and records them.
CIFAR100 = Source(
    name="cifar100",
    folders=("cifar-100-binary", "cifar100"),
    files=("train.bin", "test.bin", CLASS_NAMES_FILE),
    sums={"cifar-100-binary.tar.gz": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"},
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
    decode=_decode_cifar100,
    classes=(),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    archive="cifar-100-binary.tar.gz",
)

SOURCES: Mapping[str, Source] = {source.name: source for source in (MNIST, FASHION_MNIST, CIFAR10, CIFAR100)}

OFFICIAL_TEST_IMAGES = 10_000
"""In each of these data sets."""


def count_test_images(name: str, sums: Mapping[str, str]) -> int | None:
    """How many test images there are in files with these sums, where they are known to be the published ones."""
    known = SOURCES[name].sums.values() if name in SOURCES else ()
    return OFFICIAL_TEST_IMAGES if sums and set(sums.values()) <= {*known} else None


def find_source(name: str) -> Source:
    """The published data set of that name; the refusal of an unknown one names the nearest and all others."""
    if name in SOURCES:
        return SOURCES[name]
    raise DataError(
        f"there is no data set named {name!r}; known: {', '.join(SOURCES)}, mnist-mini, folder:PATH",
        hint=did_you_mean(name, SOURCES),
    )
