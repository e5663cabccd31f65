"""The official file formats: IDX of MNIST and its relatives, and the binary version of CIFAR.

IDX is a big-endian header, then one byte per value; CIFAR is one or two label bytes per image, then 3 x 32 x 32 bytes.
"""

import math
import struct
from typing import Annotated

import torch
from torch import Tensor

from patchcert.errors import DataError
from patchcert.tensors import Labels

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
    content: bytes, where: str, label_bytes: int, classes: int
) -> tuple[Annotated[Tensor, "n 3 32 32"], Labels]:
    """Images as bytes and labels as int64; of several label bytes the last, finest one counts."""
    record = label_bytes + _CIFAR_PIXELS
    if not content or len(content) % record:
        raise DataError(
            f"{where} is damaged: {len(content)} bytes are not a whole number of {record}-byte CIFAR records"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, record)
    labels = records[:, label_bytes - 1].long()
    if int(labels.max()) >= classes:
        raise DataError(f"{where} is damaged: label {int(labels.max())} where labels are 0 to {classes - 1}")
    return records[:, label_bytes:].reshape(-1, 3, 32, 32).contiguous(), labels
