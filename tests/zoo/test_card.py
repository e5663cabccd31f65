"""Cards hold together, and read back to what was written."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from patchcert.errors import ModelError
from patchcert.zoo import Card
from patchcert.zoo.card import AttackCount, ProofCount, pack_marks, unpack_marks

CLASSIFIER = {"name": "IntervalBounds", "dtype": "float32"}


@given(arrays.arrays(bool, st.integers(0, 70)))
def test_marks_read_back(marks):
    assert np.array_equal(unpack_marks(pack_marks(marks), len(marks)), marks)


@pytest.mark.parametrize("text", ["AAAA", "not base 64!"])
def test_marks_of_another_length_or_alphabet_are_refused(text):
    with pytest.raises(ModelError, match="the card"):
        unpack_marks(text, 8)


def test_a_card_reads_back_from_json(zoo):
    card = zoo.card(zoo.names()[0])
    assert Card.from_dict(json.loads(json.dumps(card.to_dict()))) == card


def test_a_card_that_names_a_dtype_alone_is_of_interval_bounds(zoo):
    card = zoo.card(zoo.names()[0])
    plain = card.to_dict()
    assert plain["proof"].pop("classifier") == CLASSIFIER
    plain["proof"]["dtype"] = "float32"
    assert Card.from_dict(plain) == card


@pytest.mark.parametrize(
    ("right", "certified", "message"),
    [
        (3, 2, "the card counts 3 images, but marks 2"),
        (2, 3, "the card counts 3 images, but marks 2"),
    ],
)
def test_counts_that_are_not_those_of_the_marks_are_refused(right, certified, message):
    marks = pack_marks(np.array([True, True, False, False]))
    with pytest.raises(ModelError, match=message):
        ProofCount(4, right, certified, CLASSIFIER, "cpu", "", marks, marks)


def test_a_certified_image_must_be_right():
    right, certified = (pack_marks(np.array(marks)) for marks in ([True, False], [False, True]))
    with pytest.raises(ModelError, match="certified that it does not mark as right"):
        ProofCount(2, 1, 1, CLASSIFIER, "cpu", "", right, certified)


@pytest.mark.parametrize("part", [None, "proof", "training"])
def test_unknown_and_missing_keys_are_named(zoo, part):
    plain = zoo.card(zoo.names()[0]).to_dict()
    table = plain if part is None else plain[part]
    table.pop(next(iter(table)))
    table["stars"] = 5
    with pytest.raises(ModelError, match=r"unknown keys \['stars'\] and lacks \['"):
        Card.from_dict(plain)


@pytest.mark.parametrize(("images", "withstood", "certified"), [(0, 0, 0), (5, 6, 2), (5, 4, 6), (5, -1, 0)])
def test_more_images_than_were_attacked_cannot_have_withstood_or_be_certified(images, withstood, certified):
    with pytest.raises(ModelError, match=f"counts {withstood} and {certified} of {images} attacked images"):
        AttackCount(images, withstood, certified, False, "patchcert attack", {}, "cpu")
