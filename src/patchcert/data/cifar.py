"""The binary version of CIFAR: per image one or two label bytes, then 3 x 32 x 32 bytes."""

import torch
from torch import Tensor

from patchcert.errors import DataError

_PIXELS = 3 * 32 * 32


def decode(content: bytes, where: str, label_bytes: int, classes: int) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32) and labels (n,); of several label bytes the last, finest one counts."""
    record = label_bytes + _PIXELS
    if not content or len(content) % record:
        raise DataError(
            f"{where} is damaged: {len(content)} bytes are no whole number of {record}-byte CIFAR records"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, record)
    labels = records[:, label_bytes - 1].long()
    if int(labels.max()) >= classes:
        raise DataError(f"{where} is damaged: label {int(labels.max())} where labels are 0 to {classes - 1}")
    return records[:, label_bytes:].reshape(-1, 3, 32, 32).contiguous(), labels
