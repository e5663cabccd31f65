"""A small model and data set to certify, and a subject made of both."""

import pytest
import torch
from torch import nn

import patchcert as pc
from patchcert.data import Dataset, Split
from patchcert.evidence import Selection, Subject


@pytest.fixture
def model(generator):
    layers = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)).eval()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter[0].numel() ** 0.5)
    return layers


@pytest.fixture
def dataset(generator, model):
    images = torch.randint(0, 256, (20, 1, 6, 6), generator=generator, dtype=torch.uint8)
    labels = model(images / 255).argmax(dim=1)
    split = Split(images, labels)
    return Dataset("toy", split, split, tuple("abcd"), (0.0,), (1.0,), {"toy.bin": "1" * 64})


@pytest.fixture
def subject(model, dataset):
    return Subject(pc.IntervalBounds(model), "f" * 64, dataset, Selection("toy"), torch.device("cpu"))
