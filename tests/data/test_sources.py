import struct

import numpy as np
import pytest
import torch

from patchcert.data.sources import decode_cifar, decode_idx, decode_idx_pair
from patchcert.errors import DataError


def encode(array):
    return (
        struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    )


def test_an_idx_file_gives_back_its_array():
    array = np.random.default_rng(0).integers(0, 256, (3, 4, 5))
    assert torch.equal(decode_idx(encode(array), "file"), torch.from_numpy(array).to(torch.uint8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0", "file is cut short: 2 bytes"),
        (b"\0\0\x08\x03\0\0", "file is cut short: 6 bytes"),
        (b"\x1f\x8b\x08\x00", "file is no IDX file of bytes: it starts with 0x1f8b0800"),
        (b"\0\0\x0d\x01", "no IDX file of bytes"),
        (encode(np.zeros((3, 4)))[:-1], "file is damaged: 3x4 values take 24 bytes, the file has 23"),
        (encode(np.zeros((3, 4))) + b"\0", "file is damaged: 3x4 values take 24 bytes, the file has 25"),
    ],
)
def test_damaged_idx_files_say_what_is_wrong(content, message):
    with pytest.raises(DataError, match=message):
        decode_idx(content, "file")


def test_images_and_labels_must_be_equally_many():
    with pytest.raises(DataError, match=r"training images have shape \(3, 4, 4\) and labels \(2,\)"):
        decode_idx_pair(encode(np.zeros((3, 4, 4))), encode(np.zeros(2)), "training")


def test_cifar_records_keep_channels_rows_and_columns():
    image = np.arange(3072) % 251
    content = np.hstack([[7], image]).astype(np.uint8).tobytes()
    images, labels = decode_cifar(content, "file", 1)
    assert labels.tolist() == [7]
    assert torch.equal(images[0], torch.from_numpy(image.reshape(3, 32, 32)).to(torch.uint8))


def test_of_two_labels_the_fine_one_counts():
    content = np.hstack([[3, 42], np.zeros(3072)]).astype(np.uint8).tobytes()
    assert decode_cifar(content, "file", 2)[1].tolist() == [42]


@pytest.mark.parametrize("content", [b"", bytes(2 * 3073 - 1)])
def test_a_cut_cifar_file_is_refused(content):
    with pytest.raises(
        DataError, match=f"file is damaged: {len(content)} bytes are not a whole number of 3073-byte"
    ):
        decode_cifar(content, "file", 1)
