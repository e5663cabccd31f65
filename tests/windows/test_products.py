"""A convolution's matrix on a window holds its weights where the convolution itself puts them."""

import pytest
import torch

from patchcert.bounds.geometry import Geometry
from patchcert.windows.products import ConvolutionMatrix, window_matrix

GEOMETRIES = [
    (Geometry((3, 3), (1, 1), (1, 1, 1, 1), (1, 1)), 1),
    (Geometry((4, 2), (2, 3), (1, 2, 0, 3), (1, 1)), 2),
    (Geometry((2, 3), (1, 2), (-1, 0, 2, -1), (2, 1)), 1),
]


@pytest.mark.parametrize(("geometry", "groups"), GEOMETRIES, ids=str)
def test_the_matrix_and_its_gradient_are_those_of_the_convolution(geometry, groups):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4 // groups, *geometry.kernel, generator=generator, requires_grad=True)
    taps = ConvolutionMatrix.of(geometry, weight, groups, (7, 9, 4))
    plain, ours = window_matrix(geometry, weight, groups, (7, 9, 4)), taps.matrix(weight)
    assert torch.equal(ours, plain)
    weights = torch.randn(ours.shape, generator=generator)
    (expected,) = torch.autograd.grad((plain * weights).sum(), weight)
    (found,) = torch.autograd.grad((ours * weights).sum(), weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_weights_that_are_not_finite_stay_where_they_are():
    geometry, weight = GEOMETRIES[0][0], torch.full((1, 1, 3, 3), torch.inf)
    matrix = ConvolutionMatrix.of(geometry, weight, 1, (4, 4, 1)).matrix(weight)
    assert set(matrix.unique().tolist()) == {0.0, torch.inf}
