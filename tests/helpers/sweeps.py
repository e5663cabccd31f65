"""Margins by the sweep over windows alone, without the checks of a proof."""

import copy

import torch

from patchcert.bounds import NEAREST, precise_arithmetic, trace
from patchcert.windows.passes import clean_pass, exact_clean_pass
from patchcert.windows.sweep import covering_sweep


def swept(model, images, labels, patch, epsilon=1.0, rounding=NEAREST, budget=2**22):
    """The margins at all placements, on the device and in the type of the images."""
    network = trace(model)
    sweep = covering_sweep(network, images, patch, budget)
    assert sweep is not None
    with torch.no_grad(), precise_arithmetic():
        if rounding.is_outward:
            clean = exact_clean_pass(trace(copy.deepcopy(model).double()), images, labels, images.dtype)
        else:
            clean = clean_pass(network, images, labels)
        return sweep.margins(clean, labels, epsilon, rounding)
