"""The true labels that ship with the package."""

import dataclasses

import numpy as np
import pytest

from patchcert.data import load_dataset
from patchcert.data.labels import KNOWN, TRAINING, packed_labels, true_labels
from patchcert.errors import DataError


@pytest.mark.parametrize(
    ("name", "count", "classes"), [("mnist", 10_000, 10), ("cifar10", 10_000, 10), ("imagenet", 400, 1000)]
)
def test_labels_are_known_by_the_sum_of_any_file_they_were_read_from(name, count, classes):
    for source in KNOWN[name].sources:
        labels = true_labels(name, "test", {"some file": source, "other": "0" * 64})
        assert labels is not None
        assert len(labels) == count
        assert 0 <= labels.min() <= labels.max() < classes
    assert true_labels(name, "test", {"some file": "0" * 64}) is None
    assert true_labels("folder:photos", "test", {"some file": "0" * 64}) is None


def test_published_files_of_labels_are_known_by_two_sums_where_they_are_also_packed():
    assert [len(KNOWN[name].sources) for name in ("mnist", "cifar10", "imagenet")] == [2, 1, 1]
    assert [len(TRAINING[name].sources) for name in ("mnist", "cifar10")] == [2, 1]


def test_labels_that_were_changed_are_refused():
    with pytest.raises(DataError, match="were changed"):
        dataclasses.replace(KNOWN["mnist"], sha256="0" * 64).read()


def test_labels_are_packed_as_they_ship():
    mini = load_dataset("mnist-mini")
    packed = np.frombuffer(packed_labels(mini), np.uint8)
    assert np.array_equal(packed, mini.test.labels.numpy())


@pytest.mark.parametrize(("name", "count"), [("mnist", 60_000), ("cifar10", 50_000)])
def test_labels_of_held_out_images_are_the_last_of_training(name, count):
    for source in TRAINING[name].sources:
        known = {"some file": source}
        whole = true_labels(name, "train", known)
        assert len(whole) == count
        assert np.array_equal(true_labels(name, "validation:5000", known), whole[-5000:])
        for none in ("validation:0", f"validation:{count}", "validation", "validation:few", "training"):
            assert true_labels(name, none, known) is None
    assert true_labels(name, "validation:5000", {"some file": "0" * 64}) is None
    assert true_labels("folder:photos", "train", {}) is None


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_shipped_labels_are_those_of_the_data(name, real_data):
    try:
        dataset = load_dataset(name, real_data)
    except DataError:
        pytest.skip(f"{name} is not here")
    assert packed_labels(dataset) == KNOWN[name].path.read_bytes()
    assert packed_labels(dataset, train=True) == TRAINING[name].path.read_bytes()
    sums = dict(dataset.checksums)
    for split in ("test", "train", "validation:5000"):
        assert np.array_equal(true_labels(name, split, sums), dataset.split(split).labels.numpy())
