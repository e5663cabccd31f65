"""Products of windows with weights are those of the convolution, or of the whole rows, that they stand for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from patchcert.bounds import trace
from patchcert.bounds.geometry import Geometry
from patchcert.threats import Patch
from patchcert.windows import covering_placements, differentiable
from patchcert.windows.products import ConvolutionMatrix, is_sparse, sparse_product, window_matrix
from strategies import seeds

GEOMETRIES = [
    (Geometry((3, 3), (1, 1), (1, 1, 1, 1), (1, 1)), 1),
    (Geometry((4, 2), (2, 3), (1, 2, 0, 3), (1, 1)), 2),
    (Geometry((2, 3), (1, 2), (-1, 0, 2, -1), (2, 1)), 1),
]


@pytest.mark.parametrize(("geometry", "groups"), GEOMETRIES, ids=str)
def test_the_matrix_and_its_gradient_are_those_of_the_convolution(geometry, groups):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4 // groups, *geometry.kernel, generator=generator, requires_grad=True)
    places = ConvolutionMatrix.of(geometry, weight, groups, (7, 9, 4))
    slow, ours = window_matrix(geometry, weight, groups, (7, 9, 4)), places.matrix(weight)
    assert torch.equal(ours, slow)
    weights = torch.randn(ours.shape, generator=generator)
    (expected,) = torch.autograd.grad((slow * weights).sum(), weight)
    (found,) = torch.autograd.grad((ours * weights).sum(), weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_weights_that_are_not_finite_stay_where_they_are():
    geometry, weight = GEOMETRIES[0][0], torch.full((1, 1, 3, 3), torch.inf)
    matrix = ConvolutionMatrix.of(geometry, weight, 1, (4, 4, 1)).matrix(weight)
    assert set(matrix.unique().tolist()) == {0.0, torch.inf}


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
    monkeypatch.setattr(
        differentiable, "sparse_product", lambda *given: calls.append(1) or sparse_product(*given)
    )
    model = nn.Sequential(first, nn.Flatten(), nn.Linear(196, 4), nn.ReLU(), nn.Linear(4, 3))
    images, corners = torch.rand(2, 1, 14, 14), torch.tensor([[[0, 0]], [[12, 12]]])
    placements = covering_placements(trace(model), images, Patch(2))
    assert placements is not None
    placements.margins(images, torch.tensor([0, 1]), corners, 1.0)
    assert len(calls) == (2 if isinstance(first, nn.Identity) else 0)
