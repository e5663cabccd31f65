"""Windows hold exactly what a patch can reach through a kernel."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from patchcert.bounds.geometry import Geometry, NotCovered, Window


@st.composite
def geometries(draw):
    kernel = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    stride = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    padding = tuple(draw(st.integers(0, 3)) for _ in range(4))
    dilation = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    return Geometry(kernel, stride, padding, dilation)


def touched(geometry, size, top, left, height, width):
    """Where a convolution of ones by ones answers to a rectangle of ones: the outputs that see it."""
    image = torch.zeros(1, 1, *size)
    image[..., top : top + height, left : left + width] = 1
    kernel = torch.ones(1, 1, *geometry.kernel)
    return F.conv2d(geometry.pad(image), kernel, None, geometry.stride, 0, geometry.dilation)[0, 0] > 0


@given(geometries(), st.integers(0, 7), st.integers(0, 7), st.integers(1, 4), st.integers(1, 4))
def test_a_window_holds_every_output_that_sees_it(geometry, top, left, height, width):
    size = (12, 12)
    try:
        window = Window(top, left, height, width).through(geometry)
    except NotCovered:
        assert geometry.stride != (1, 1)
        return
    seen = touched(geometry, size, top, left, height, width)
    rows, columns = seen.any(dim=1).nonzero().flatten(), seen.any(dim=0).nonzero().flatten()
    assert all(window.top <= row < window.top + window.height for row in rows.tolist())
    assert all(window.left <= column < window.left + window.width for column in columns.tolist())
    if geometry.dilation == (1, 1):
        inside = [
            (row, column)
            for row in range(window.top, window.top + window.height)
            for column in range(window.left, window.left + window.width)
            if 0 <= row < seen.shape[0] and 0 <= column < seen.shape[1]
        ]
        assert all(bool(seen[place]) for place in inside)
    assert (window.row_step, window.column_step) == geometry.stride


@given(geometries(), st.integers(2, 6), st.integers(2, 6), st.integers(1, 4), st.integers(1, 4))
def test_a_window_alone_gives_the_outputs_of_its_window(geometry, top, left, height, width):
    """The kernel on the window with its own padding is the kernel on the whole image, cut to the new
    window.
    """
    source = Window(top, left, height, width)
    try:
        target = source.through(geometry)
    except NotCovered:
        return
    image = torch.zeros(1, 1, 12, 12)
    generator = torch.Generator().manual_seed(0)
    image[..., top : top + height, left : left + width] = torch.rand(height, width, generator=generator)
    kernel = torch.rand(1, 1, *geometry.kernel, generator=generator)
    whole = F.conv2d(geometry.pad(image), kernel, None, geometry.stride, 0, geometry.dilation)[0, 0]
    local = source.local(geometry, target).pad(image[..., top : top + height, left : left + width])
    part = F.conv2d(local, kernel, None, geometry.stride, 0, geometry.dilation)[0, 0]
    assert part.shape == (target.height, target.width)
    for row in range(max(target.top, 0), min(target.top + target.height, whole.shape[0])):
        for column in range(max(target.left, 0), min(target.left + target.width, whole.shape[1])):
            assert part[row - target.top, column - target.left] == pytest.approx(float(whole[row, column]))
    seen = source.seen(geometry, target)
    assert (seen.height, seen.width) == local.shape[2:]


def test_a_sum_has_the_window_of_both():
    assert Window(1, 2, 3, 4).union(Window(-1, 3, 2, 5)) == Window(-1, 2, 5, 6)
    with pytest.raises(NotCovered, match="different strides"):
        Window(0, 0, 1, 1).union(Window(0, 0, 1, 1, 2, 2))
