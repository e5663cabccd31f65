"""The IDX format of MNIST and its relatives: a big-endian header, then one byte per value."""

import math
import struct

import torch
from torch import Tensor

from patchcert.errors import DataError

_UNSIGNED_BYTE = 8


def decode(content: bytes, where: str) -> Tensor:
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


def decode_pair(images: bytes, labels: bytes, where: str) -> tuple[Tensor, Tensor]:
    """Images as (n, 1, h, w) and labels as int64, of equal number."""
    pixels = decode(images, f"{where} images")
    targets = decode(labels, f"{where} labels")
    if pixels.dim() != 3 or targets.dim() != 1 or len(pixels) != len(targets):
        raise DataError(
            f"{where} images have shape {tuple(pixels.shape)} and labels {tuple(targets.shape)}; "
            "expected (n, height, width) and (n,)"
        )
    return pixels.unsqueeze(1), targets.long()
