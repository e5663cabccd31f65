"""A repeated proof is held against the card image by image."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import patchcert as pc
from patchcert.certificates import IntervalBounds
from patchcert.data import load_dataset
from patchcert.evidence import Certification, Selection, Subject
from patchcert.zoo.recheck import differences, why_not_comparable

NAME = "mnist-mini-2x2-mlp"


@pytest.fixture
def card(zoo):
    return zoo.card(NAME)


@pytest.fixture
def found(zoo, card):
    """A proof of the first test images."""
    model, place = zoo.load(NAME), torch.device("cpu")
    selection = Selection("mnist-mini", limit=120)
    subject = Subject(
        IntervalBounds(model), card.weights_sha256, load_dataset("mnist-mini"), selection, place
    )
    return Certification(subject, card.threat).run()


def changed(found, **columns):
    return replace(found, columns={**found.columns, **columns})


def test_the_same_proof_matches(card, found):
    assert 0 < found.certified < 120
    assert why_not_comparable(card, found) == ""
    assert differences(card, found) == ()


def test_images_are_compared_wherever_they_stand(card, found):
    some = replace(found, columns={name: column[7:40:3] for name, column in found.columns.items()})
    assert differences(card, some) == ()


def test_a_verdict_that_differs_is_named_with_its_margin(card, found):
    verdicts = found.columns["certified"].copy()
    at = int(np.flatnonzero(verdicts)[3])
    verdicts[at] = False
    (line,) = differences(card, changed(found, certified=verdicts))
    assert f"{found.certified - 1} of 120 images are certified, on the card {found.certified}" in line
    assert f"unequal are {at} (least margin +" in line
    bare = {name: column for name, column in found.columns.items() if name != "margin"}
    (line,) = differences(card, replace(found, columns=bare | {"certified": verdicts}))
    assert line.endswith(f"unequal are {at}")


def test_predictions_that_differ_are_named(card, found):
    label, prediction = found.columns["label"], found.columns["prediction"]
    wrong = np.where(prediction == label, (label + 1) % 10, label)
    lines = differences(card, changed(found, prediction=wrong))
    assert "are predicted rightly, on the card" in lines[0]
    assert "and 115 more" in lines[0]


def test_other_data_files_and_too_many_images_are_named(card, found):
    data = {**found.meta["data"], "sha256": {}}
    elsewhere = replace(found, meta={**found.meta, "data": data})
    assert differences(card, elsewhere) == ("the data files differ from those of the card: mnist_mini.npz",)
    few = replace(card.proof, images=0, right=0, certified=0, right_images="", certified_images="")
    (line,) = differences(replace(card, proof=few), found)
    assert line == "there are 120 images, on the card 0"


INTERVALS = {"name": "IntervalBounds", "dtype": "float32"}
OTHER_KIND = "the card's proof is by IntervalBounds(dtype=float32)"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"threat": pc.Patch(3)}, "the card is about Patch(2x2 square, everywhere)"),
        ({"selection": Selection("mnist-mini", "train")}, "the card is about the test images of mnist-mini"),
        ({"selection": Selection("mnist")}, "the card is about the test images of mnist-mini"),
        ({"classifier": INTERVALS | {"dtype": "float64"}}, OTHER_KIND),
        ({"classifier": {"name": "RandomAblation", "retained": 45}}, OTHER_KIND),
        ({"classifier": INTERVALS | {"memory_budget": 2**30, "verdicts_only": True}}, ""),
    ],
)
def test_other_questions_are_not_compared(card, found, changes, reason):
    question = replace(found.question, **changes)
    asked = replace(found, meta={**found.meta, **question.to_dict()})
    assert why_not_comparable(card, asked) == reason
