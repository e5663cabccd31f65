"""Small networks and images that the tests of several modules share."""

import copy

import pytest
import torch
from torch import nn

from patchcert.testing.networks import ResidualBlock, randomise

SHAPE = (2, 9, 7)
MODELS = {
    "linear": [nn.Flatten(), nn.Linear(126, 3)],
    "hidden": [nn.Flatten(), nn.Linear(126, 8), nn.ReLU(), nn.Linear(8, 3)],
    "strided": [
        nn.Conv2d(2, 3, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(3, 4, (2, 3), (1, 2)),
        nn.Tanh(),
        nn.Flatten(),
        nn.LazyLinear(3),
    ],
    "pooled": [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.MaxPool2d(2, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(3),
    ],
    "residual": [
        ResidualBlock(
            nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU()), nn.Identity()
        ),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2, 3),
    ],
}


@pytest.fixture(params=MODELS)
def small_model(request):
    """One of the networks in float64, with random weights."""
    model = copy.deepcopy(nn.Sequential(*MODELS[request.param]))
    model(torch.rand(2, *SHAPE))
    return randomise(model, torch.Generator().manual_seed(0)).double()


@pytest.fixture
def small_batch():
    """Images and labels for the networks."""
    images = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return images, torch.arange(3)
