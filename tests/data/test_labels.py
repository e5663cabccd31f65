"""The true labels that ship with the package."""

import dataclasses

import numpy as np
import pytest

from patchcert.data import load_dataset
from patchcert.data.labels import KNOWN, packed_test_labels, true_test_labels
from patchcert.errors import DataError


@pytest.mark.parametrize(
    ("name", "count", "classes"), [("mnist", 10_000, 10), ("cifar10", 10_000, 10), ("imagenet", 400, 1000)]
)
def test_labels_are_known_by_the_sum_of_any_file_they_were_read_from(name, count, classes):
    for source in KNOWN[name].sources:
        labels = true_test_labels(name, {"some file": source, "other": "0" * 64})
        assert labels is not None
        assert len(labels) == count
        assert 0 <= labels.min() <= labels.max() < classes
    assert true_test_labels(name, {"some file": "0" * 64}) is None
    assert true_test_labels("folder:photos", {"some file": "0" * 64}) is None


def test_labels_that_were_changed_are_refused(monkeypatch):
    with pytest.raises(DataError, match="were changed"):
        dataclasses.replace(KNOWN["mnist"], sha256="0" * 64).read()


def test_labels_are_packed_as_they_ship():
    mini = load_dataset("mnist-mini")
    packed = np.frombuffer(packed_test_labels(mini), np.uint8)
    assert np.array_equal(packed, mini.test.labels.numpy())


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_shipped_labels_are_those_of_the_data(name, real_data):
    try:
        dataset = load_dataset(name, real_data)
    except DataError:
        pytest.skip(f"{name} is not here")
    assert packed_test_labels(dataset) == KNOWN[name].path.read_bytes()
