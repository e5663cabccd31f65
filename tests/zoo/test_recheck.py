"""A proof computed anew is held against the card image by image."""

from dataclasses import replace

import pytest
import torch

import patchcert as pc
from patchcert.data import load_dataset
from patchcert.zoo.recheck import differences, why_not_comparable

NAME = "mnist-mini-2x2-mlp"


@pytest.fixture
def card(zoo):
    return zoo.card(NAME)


@pytest.fixture
def images():
    return load_dataset("mnist-mini").test.take(120)


@pytest.fixture
def found(zoo, card, images):
    return pc.certify(zoo.load(NAME), images.floats(), images.labels, card.threat)


def test_the_same_proof_matches(card, found):
    assert 0 < int(found.certified.sum()) < 120
    assert differences(card, found, card.data_sha256) == ()


def test_a_verdict_that_differs_is_named_with_its_margin(card, found):
    at = int(torch.nonzero(found.certified)[3])
    changed = found.certified.clone()
    changed[at] = False
    (line,) = differences(card, replace(found, certified=changed), card.data_sha256)
    count = int(found.certified.sum())
    assert f"{count - 1} of 120 images are certified, on the card {count}" in line
    assert f"unequal are {at} (least margin +" in line


def test_predictions_that_differ_are_named(card, found):
    right = found.predictions == found.labels
    wrong = torch.where(right, (found.labels + 1) % 10, found.labels)
    lines = differences(card, replace(found, predictions=wrong), card.data_sha256)
    assert "are predicted rightly, on the card" in lines[0]
    assert "and 115 more" in lines[0]


def test_other_data_files_and_too_many_images_are_named(card, found):
    assert differences(card, found, {}) == ("the data files differ from those of the card: mnist_mini.npz",)
    few = replace(card.proof, images=0, right=0, certified=0, right_images="", certified_images="")
    (line,) = differences(replace(card, proof=few), found, card.data_sha256)
    assert line == "there are 120 images, on the card 0"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"threat": pc.Patch(3)}, "the card is about Patch(2x2 square, everywhere)"),
        ({"split": "train"}, "the card is about the test images of mnist-mini"),
        ({"data": "mnist"}, "the card is about the test images of mnist-mini"),
        ({"dtype": "float64"}, "the card's proof is in float32"),
    ],
)
def test_other_questions_are_not_compared(card, changes, reason):
    asked = {"threat": card.threat, "data": "mnist-mini", "split": "test", "dtype": "float32"} | changes
    assert why_not_comparable(card, **asked) == reason
