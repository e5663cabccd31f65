"""Linear bounds lie below what outside computations of exported properties give, now and in what is stored."""

import json

import numpy as np
import pytest

from scripts import load_script

ROUNDED = 2e-6
"""What HiGHS and two stored numbers of six decimals can be off by."""


@pytest.fixture(scope="module")
def outside():
    return load_script("outside_bounds")


def stored(outside, name):
    """The columns of a stored comparison, by name."""
    found = json.loads(outside.FILE.read_text())["programs"][name]
    return found, dict(zip(found["columns"], np.array(found["rows"]).T, strict=True))


@pytest.mark.parametrize("name", ["mnist-1-pixel-mlp", "mnist-5x5-mlp"])
def test_no_stored_bound_is_above_its_program(outside, name):
    found, columns = stored(outside, name)
    assert len(found["rows"]) == found["properties"] == 50
    for kind in ("intervals", "three_slopes", "ascended", "crown", "alpha_crown"):
        assert (columns[kind] <= columns["program"] + ROUNDED).all()
    assert found["crown_apart"] < 1e-9
    assert (columns["intervals"] < columns["three_slopes"]).all()
    assert min(found["nearest"].values()) >= 0


def test_the_first_properties_are_what_is_stored(outside, tmp_path):
    """`compared` itself refuses bounds above their program."""
    _, columns = stored(outside, "mnist-1-pixel-mlp")
    found = outside.compared(outside.export("mnist-1-pixel-mlp", tmp_path, count=3))
    for name, *values in zip(found["columns"], *found["rows"], strict=True):
        if values[0] is not None:
            assert values == pytest.approx(columns[name][:3], rel=1e-5, abs=1e-5), name


def test_a_bound_that_is_too_good_is_noticed(outside, tmp_path, monkeypatch):
    honest = outside.our_bounds
    monkeypatch.setattr(
        outside, "our_bounds", lambda exported: {key: value + 20 for key, value in honest(exported).items()}
    )
    with pytest.raises(AssertionError, match="intervals is above its program"):
        outside.compared(outside.export("mnist-1-pixel-mlp", tmp_path, count=1))


def test_the_program_of_one_unit_is_the_triangle(outside):
    """On z in [-1, 3] a unit is at most the chord and at least max(0, z)."""
    layers = [(np.array([[4.0]]), np.array([-1.0])), (np.array([[-1.0], [1.0], [0.0]]), np.zeros(3))]
    margins = outside.program_margins(layers, np.zeros(1), np.ones(1), 0)
    assert margins == pytest.approx([-6.0, -3.0])
    slack = outside.program_margins(layers, np.zeros(1), np.ones(1), 1)
    assert slack == pytest.approx([0.0, 0.0])
