"""The dense way at some corners is the reference at these placements."""

import torch

from patchcert.bounds import trace
from patchcert.threats import Patch
from patchcert.windows.dense import dense_margins, reference_margins


def test_margins_are_those_of_their_corners(small_model, small_batch):
    network, (images, labels) = trace(small_model), small_batch
    corners = torch.tensor([[0, 0], [3, 2], [7, 5]])
    with torch.no_grad():
        dense = dense_margins(network, images, labels, Patch(2), corners)
        reference = reference_margins(network, images, labels, Patch(2, corners.tolist()))
    torch.testing.assert_close(dense, reference)
