"""What all kinds of proof have in common."""

import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import patchcert as pc
from patchcert.errors import InvalidInput

MODEL = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()


@pytest.mark.parametrize(
    "classifier",
    [
        pc.IntervalBounds(MODEL),
        pc.IntervalBounds(MODEL, torch.float64, memory_budget=2**20),
        pc.DoubleMasking(MODEL, pc.Patch((1, 2), "corners"), masks=(3, 2), fill=(0.2,), mirrored=True),
        pc.MaskedDetection(MODEL, pc.Patches(pc.Patch(2)), threshold=0.25, precision="tf32"),
        pc.BandVotes(MODEL, width=3, threshold=0.3),
        pc.BlockVotes(MODEL, size=2, wrap=False),
        pc.LocalVotes(MODEL, aggregation="masked-sum", scores="positive", masked=(2, 3)),
        pc.RandomAblation(MODEL, retained=4, seed=None),
    ],
    ids=lambda classifier: type(classifier).__name__,
)
def test_a_classifier_is_made_again_from_what_it_says_of_itself(classifier):
    stored = json.loads(json.dumps(classifier.describe()))
    again = type(classifier).described(MODEL, stored)
    assert again.describe() == classifier.describe()
    assert again.model is MODEL


@dataclass(frozen=True)
class OfYourOwn(pc.Classifier):
    model: nn.Module
    fast: bool = False

    def predict(self, images, progress=None):
        return self.model(images).argmax(dim=1)

    def certify(self, images, labels, threat, progress=None):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda value: pc.IntervalBounds(MODEL, verdicts_only=value), "verdicts_only"),
        (lambda value: pc.DoubleMasking(MODEL, pc.Patch(1), mirrored=value), "mirrored"),
        (lambda value: pc.MaskedDetection(MODEL, pc.Patch(1), compiled=value), "compiled"),
        (lambda value: pc.BlockVotes(MODEL, wrap=value), "wrap"),
        (lambda value: pc.LocalVotes(MODEL, mirrored=value), "mirrored"),
        (lambda value: OfYourOwn(MODEL, value), "fast"),
    ],
)
@pytest.mark.parametrize("value", ["no", 0, None])
def test_a_switch_is_on_or_off(make, name, value):
    with pytest.raises(InvalidInput, match=f"{name} is {value!r}; expected True or False"):
        make(value)
    make(True)
