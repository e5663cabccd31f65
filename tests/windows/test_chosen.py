"""The weakest placements are found, and bounded with the gradient of the dense way."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from patchcert.bounds import Interval, trace
from patchcert.testing.networks import ResidualBlock, randomise
from patchcert.testing.strategies import cases, seeds
from patchcert.threats import Patch, shapes
from patchcert.windows import WeakestPlacements, covering_placements, dense_margins, reference_margins
from patchcert.windows.search import dense_worst

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


def built(name):
    model = copy.deepcopy(nn.Sequential(*MODELS[name]))
    model(torch.rand(2, *SHAPE))
    return randomise(model, torch.Generator().manual_seed(0)).double()


def batch(count=3):
    images = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return images, torch.arange(count) % 3


PATCHES = [Patch(2), Patch(shapes.diamond(5)), Patch((1, 3), "corners")]


@pytest.mark.parametrize("epsilon", [1.0, 0.4, torch.tensor(0.4, dtype=torch.float64)], ids=str)
@pytest.mark.parametrize("patch", PATCHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_weakest_placement_is_found_for_every_class(name, patch, epsilon):
    network, (images, labels) = trace(built(name)), batch()
    with torch.no_grad():
        margins = reference_margins(network, images, labels, patch, float(epsilon))
    for found in (
        WeakestPlacements(patch).find(network, images, labels, epsilon),
        dense_worst(network, images, labels, patch, epsilon, 2**16),
    ):
        reached = margins.gather(1, found[:, None]).squeeze(1)
        torch.testing.assert_close(reached, margins.amin(dim=1))


@given(cases(dtype=torch.float64), st.sampled_from([1.0, 0.5]))
def test_the_search_is_right_on_any_network(case, epsilon):
    network = trace(case.model)
    with torch.no_grad():
        margins = reference_margins(network, case.images, case.labels, case.threat, epsilon)
    found = WeakestPlacements(case.threat, 2**16).find(network, case.images, case.labels, epsilon)
    reached = margins.gather(1, found[:, None]).squeeze(1)
    torch.testing.assert_close(reached, margins.amin(dim=1), rtol=1e-9, atol=1e-9)


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
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_chosen_placements_have_the_margins_and_gradient_of_whole_boxes(dtype, name, patch, epsilon):
    model, (images, labels) = built(name), batch()
    network = trace(model)
    found = patch.placements(*SHAPE[1:])
    corners = found.sample((len(images), 4), torch.Generator().manual_seed(3))
    windows = covering_placements(network, images, patch)
    assert windows is not None
    margins, gradient = with_gradient(model, windows.margins(images, labels, corners, epsilon, dtype=dtype))
    expected, slow = with_gradient(model, dense_choice(network, images, labels, patch, corners, epsilon))
    torch.testing.assert_close(margins, expected, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(gradient, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@given(seeds(), st.sampled_from(sorted(MODELS)))
def test_one_class_for_each_placement_gives_its_margin(seed, name):
    model, (images, labels) = built(name), batch()
    network, generator = trace(model), torch.Generator().manual_seed(seed)
    corners = PATCHES[0].placements(*SHAPE[1:]).sample((len(images), 5), generator)
    classes = torch.randint(3, (len(images), 5), generator=generator)
    windows = covering_placements(network, images, PATCHES[0])
    with torch.no_grad():
        every = windows.margins(images, labels, corners, 1.0)
        chosen = windows.margins(images, labels, corners, 1.0, classes)
    torch.testing.assert_close(chosen, every.gather(2, classes.unsqueeze(2)).squeeze(2))


def test_networks_without_windows_have_no_chosen_placements():
    model = nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.LazyLinear(3))
    images, _ = batch()
    model(images.float())
    assert covering_placements(trace(model.double()), images, Patch(2)) is None


def test_dense_margins_are_those_of_their_corners():
    model, (images, labels) = built("strided"), batch()
    corners = torch.tensor([[0, 0], [3, 2], [7, 5]])
    with torch.no_grad():
        dense = dense_margins(trace(model), images, labels, Patch(2), corners)
        reference = reference_margins(trace(model), images, labels, Patch(2, corners.tolist()))
    torch.testing.assert_close(dense, reference)
