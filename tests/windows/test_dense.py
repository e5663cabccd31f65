"""The dense way at some corners is the reference at these placements."""

from itertools import product

import pytest
import torch
from torch import nn

from patchcert.bounds import trace
from patchcert.bounds.linear import SLOPES, reference_margin
from patchcert.testing.networks import randomise
from patchcert.threats import Patch
from patchcert.windows.dense import dense_linear_margins, dense_margins, reference_margins


def test_margins_are_those_of_their_corners(small_model, small_batch):
    network, (images, labels) = trace(small_model), small_batch
    corners = torch.tensor([[0, 0], [3, 2], [7, 5]])
    with torch.no_grad():
        dense = dense_margins(network, images, labels, Patch(2), corners)
        reference = reference_margins(network, images, labels, Patch(2, corners.tolist()))
    torch.testing.assert_close(dense, reference)


def test_linear_margins_are_those_of_single_boxes():
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(18, 5), nn.ReLU(), nn.Linear(5, 3)]
    network = trace(randomise(nn.Sequential(*layers), generator).double())
    images, labels = torch.rand(2, 1, 6, 6, generator=generator).double(), torch.tensor([0, 2])
    corners = torch.tensor([[0, 0], [3, 2]])
    with torch.no_grad():
        found = dense_linear_margins(network, images, labels, Patch(2), corners)
        boxes = Patch(2).boxes(images, corners)
        for image, place, target in product(range(2), range(2), range(3)):
            box = boxes.map(lambda part: part[image, place][None])  # noqa: B023 - used at once
            single = [reference_margin(network, box, int(labels[image]), target, slope) for slope in SLOPES]
            assert found[image, place, target] == pytest.approx(max(single), rel=1e-9, abs=1e-9)
