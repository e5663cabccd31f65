"""On a CPU, in float32, what is proven of an image does not depend on how many others are bounded with it."""

import pytest
import torch
from torch import nn

import patchcert as pc

MLP = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 4))
POOLED = nn.Sequential(
    nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(16, 112), nn.ReLU(), nn.Linear(112, 4)
)
COLOUR = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))


@pytest.mark.parametrize(
    ("model", "threat"),
    [
        (MLP, pc.SparsePixels(1)),
        (MLP, pc.SparsePixels(3, "per-pixel")),
        (COLOUR, pc.SparsePixels(2)),
        (POOLED, pc.Patch(1, [(0, 0)])),
        (MLP, pc.Patch(2)),
        (COLOUR, pc.Patch(3)),
    ],
    ids=str,
)
def test_one_image_alone_has_the_margins_that_it_has_among_others(model, threat, generator):
    images = torch.rand(9, 1, 8, 8, generator=generator)
    labels = model.eval()(images).argmax(dim=1)
    together = pc.certify(model, images, labels, threat).margins
    for at in range(len(images)):
        alone = pc.certify(model, images[at : at + 1], labels[at : at + 1], threat).margins
        assert alone.equal(together[at : at + 1])
    assert pc.certify(model, images, labels, threat, memory_budget=1).margins.equal(together)
