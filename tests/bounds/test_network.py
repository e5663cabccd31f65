"""Margins of whole networks: of one image alone as among others, and without a linear layer at the end."""

import pytest
import torch
from torch import nn

import patchcert as pc
from patchcert.bounds import Interval, trace

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
    """On a CPU, in float32, what is proven of an image does not depend on how many others are bounded with it."""
    images = torch.rand(9, 1, 8, 8, generator=generator)
    labels = model.eval()(images).argmax(dim=1)
    together = pc.certify(model, images, labels, threat).margins
    for at in range(len(images)):
        alone = pc.certify(model, images[at : at + 1], labels[at : at + 1], threat).margins
        assert alone.equal(together[at : at + 1])
    assert pc.certify(model, images, labels, threat, memory_budget=1).margins.equal(together)


def test_a_network_that_does_not_end_linearly_has_separate_margins():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU()).double()
    box, labels = (
        Interval(torch.zeros(1, 1, 2, 2).double(), torch.ones(1, 1, 2, 2).double()),
        torch.tensor([1]),
    )
    logits = trace(model).bounds(box)
    margins = trace(model).margins(box, labels)
    assert margins[0, 1] == 0
    torch.testing.assert_close(margins[0, 2], logits.lower[0, 1] - logits.upper[0, 2])
