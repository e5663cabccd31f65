"""Stored clean values are as close to the exact ones as their slack says."""

import torch

from patchcert.bounds import trace
from patchcert.windows import exact_clean_pass


def test_stored_values_are_within_their_slack(small_model, small_batch):
    """In float64 the exact value is known a billion times better than the float32 one is stored."""
    network, images, labels = trace(small_model), small_batch[0].float(), small_batch[1]
    with torch.no_grad():
        clean = exact_clean_pass(network, images, labels, torch.float32)
        exact = network.values(images.double())
    for value, truth, slack, largest in zip(clean.values, exact, clean.slack, clean.largest, strict=True):
        assert ((value.double() - truth).abs().flatten(1).amax(dim=1) <= slack.double() + 1e-14).all()
        assert (value.abs().flatten(1).amax(dim=1) <= largest).all()
    assert (clean.margins <= exact[-1].gather(1, labels[:, None]) - exact[-1]).all()
