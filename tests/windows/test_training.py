"""The weakest placements are found, and a few of each image's own have the margins and gradient of the dense way."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from patchcert.bounds import Interval, trace
from patchcert.threats import Patch, shapes
from patchcert.windows import training
from patchcert.windows.dense import dense_placement_margins, reference_margins
from patchcert.windows.training import WeakestPlacements, covering_placements, is_sparse, sparse_product
from strategies import cases, seeds

PATCHES = [Patch(2), Patch(shapes.diamond(5)), Patch((1, 3), "corners")]


@pytest.mark.parametrize("epsilon", [1.0, 0.4, torch.tensor(0.4, dtype=torch.float64)], ids=str)
@pytest.mark.parametrize("patch", PATCHES, ids=str)
def test_the_weakest_placement_is_found_for_every_class(small_model, small_batch, patch, epsilon):
    network, (images, labels) = trace(small_model), small_batch
    with torch.no_grad():
        margins = reference_margins(network, images, labels, patch, float(epsilon))
    for found in (
        WeakestPlacements(patch).find(network, images, labels, epsilon),
        dense_placement_margins(network, images, labels, patch, epsilon, 2**16).argmin(dim=1),
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


def whole_product(part, columns, cells):
    whole = part.new_zeros(*part.shape[:2], *columns.shape[:2])
    where = cells.unsqueeze(-1).expand(*cells.shape, part.shape[-1])
    return whole.scatter_add(2, where, part.flatten(2, 3)).flatten(2) @ columns.flatten(0, 1)


@given(seeds(), st.sampled_from([torch.float32, torch.float64]), st.integers(1, 3), st.integers(1, 4))
def test_products_and_gradients_are_those_of_whole_rows(seed, dtype, channels, outputs):
    """Cells may come twice, as those do that stand for places outside the map."""
    generator = torch.Generator().manual_seed(seed)
    part = torch.randn(2, 3, 2, 3, channels, generator=generator, dtype=dtype)
    cells = torch.randint(7, (2, 3, 6), generator=generator)
    weights = torch.randn(7, channels, outputs, generator=generator, dtype=dtype)
    towards = torch.randn(2, 3, outputs, generator=generator, dtype=dtype)
    found, gradients = [], []
    for product in (sparse_product, whole_product):
        columns = weights.clone().requires_grad_()
        found.append(product(part, columns, cells))
        gradients.extend(torch.autograd.grad(found[-1], columns, towards))
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*gradients)


def test_rows_without_weights_before_them_and_few_entries_are_taken():
    few, many = torch.zeros(2, 3, 2, 2, 1), torch.zeros(2, 3, 2, 3, 1)
    columns = torch.zeros(40, 1, 5)
    assert is_sparse(few, columns)
    assert not is_sparse(many, columns)
    assert not is_sparse(few.clone().requires_grad_(), columns)
    assert not is_sparse(few.to("meta"), columns.to("meta"))


@pytest.mark.parametrize("first", [nn.Identity(), nn.Conv2d(1, 1, 3, padding=1)], ids=["pixels", "convolved"])
def test_only_a_first_linear_layer_takes_sparse_rows(monkeypatch, first):
    calls = []
    monkeypatch.setattr(training, "sparse_product", lambda *given: calls.append(1) or sparse_product(*given))
    model = nn.Sequential(first, nn.Flatten(), nn.Linear(196, 4), nn.ReLU(), nn.Linear(4, 3))
    images, corners = torch.rand(2, 1, 14, 14), torch.tensor([[[0, 0]], [[12, 12]]])
    placements = covering_placements(trace(model), images, Patch(2))
    assert placements is not None
    placements.margins(images, torch.tensor([0, 1]), corners, 1.0)
    assert len(calls) == (2 if isinstance(first, nn.Identity) else 0)
