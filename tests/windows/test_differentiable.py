"""A few placements of each image's own have the margins and the gradient of the dense way."""

import pytest
import torch
from torch import nn

from patchcert.bounds import Interval, trace
from patchcert.threats import Patch, shapes
from patchcert.windows import covering_placements

PATCHES = [Patch(2), Patch(shapes.diamond(5)), Patch((1, 3), "corners")]


def with_gradient(model, margins):
    """The margins, and the gradient of a weighted sum of them in all parameters."""
    weights = torch.randn(margins.shape, generator=torch.Generator().manual_seed(2), dtype=margins.dtype)
    gradients = torch.autograd.grad((margins * weights).sum(), list(model.parameters()))
    return margins.detach(), gradients


def dense_choice(network, images, labels, patch, corners, epsilon):
    boxes = patch.boxes(images, corners, epsilon)
    flat = Interval(boxes.lower.flatten(0, 1), boxes.upper.flatten(0, 1))
    return network.margins(flat, labels.repeat_interleave(corners.shape[1])).unflatten(0, corners.shape[:2])


@pytest.mark.parametrize("epsilon", [1.0, 0.3], ids=str)
@pytest.mark.parametrize("patch", PATCHES, ids=str)
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_placements_have_the_margins_and_gradient_of_whole_boxes(
    small_model, small_batch, dtype, patch, epsilon
):
    model, network, (images, labels) = small_model, trace(small_model), small_batch
    found = patch.placements(*images.shape[2:])
    corners = found.sample((len(images), 4), torch.Generator().manual_seed(3))
    windows = covering_placements(network, images, patch)
    assert windows is not None
    margins, gradient = with_gradient(model, windows.margins(images, labels, corners, epsilon, dtype=dtype))
    expected, slow = with_gradient(model, dense_choice(network, images, labels, patch, corners, epsilon))
    torch.testing.assert_close(margins, expected, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(gradient, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_one_class_for_each_placement_gives_its_margin(small_model, small_batch, seed):
    network, (images, labels) = trace(small_model), small_batch
    generator = torch.Generator().manual_seed(seed)
    corners = PATCHES[0].placements(*images.shape[2:]).sample((len(images), 5), generator)
    classes = torch.randint(3, (len(images), 5), generator=generator)
    windows = covering_placements(network, images, PATCHES[0])
    with torch.no_grad():
        every = windows.margins(images, labels, corners, 1.0)
        chosen = windows.margins(images, labels, corners, 1.0, classes)
    torch.testing.assert_close(chosen, every.gather(2, classes.unsqueeze(2)).squeeze(2))


def test_networks_without_windows_have_no_placements(small_batch):
    model = nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.LazyLinear(3))
    images, _ = small_batch
    model(images.float())
    assert covering_placements(trace(model.double()), images, Patch(2)) is None
