"""What an exact solver finds of proven margins is their true minimum, and no stored proof is above it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import patchcert as pc
from scripts import load_script


@pytest.fixture(scope="module")
def exact():
    return load_script("exact_margins")


def layers(exact, seed, pixels=4, units=6):
    drawn = np.random.default_rng(seed)
    shapes = ((units, pixels), (units,), (3, units), (3,))
    return exact.Layers(*(drawn.normal(size=shape) for shape in shapes))


def margin(given, image, label, other):
    hidden = np.maximum(image @ given.weight.T + given.bias, 0)
    logits = hidden @ given.readout.T + given.offset
    return logits[..., label] - logits[..., other]


@pytest.mark.parametrize("seed", range(6))
def test_the_minimum_is_that_of_a_fine_grid(exact, seed):
    """A margin is linear between the lines on which units bend, so that a grid comes near its minimum from above."""
    given, image = layers(exact, seed), np.random.default_rng(seed + 100).random(4)
    program = exact.Program.of(given, image, np.array([True, False, True, False]))
    first, second = np.meshgrid(*[np.linspace(0, 1, 401)] * 2, indexing="ij")
    rest = np.full_like(first, image[1]), np.full_like(first, image[3])
    on_grid = np.stack([first, rest[0], second, rest[1]], axis=-1)
    for other in (1, 2):
        found, least = program.minimum(0, other), margin(given, on_grid, 0, other).min()
        assert found <= least + 1e-6
        steepest = np.abs(given.readout[0] - given.readout[other]) @ np.abs(given.weight).sum(axis=1)
        assert found >= least - steepest / 400


def test_no_stored_proof_is_above_the_exact_minimum(exact):
    found = json.loads(exact.FILE.read_text())
    columns = dict(zip(found["columns"], np.array(found["rows"]).T, strict=True))
    assert len(found["rows"]) == found["images"] == exact.COUNT
    assert (columns["exact"] > 0).all()
    assert (columns["proven"] <= columns["exact"] + exact.TOLERANCE).all()
    assert found["least_exact"] == columns["exact"].min()
    assert found["most_bend"] == columns["bend"].max()
    assert found["programs"] == 9 * found["images"]


def test_a_proof_that_is_too_good_is_noticed(exact):
    given, images = layers(exact, 0), np.random.default_rng(1).random((1, 2, 2))
    label = int(
        (np.maximum(given.weight @ images.ravel() + given.bias, 0) @ given.readout.T + given.offset).argmax()
    )

    columns = {name: np.zeros(1, dtype=np.int64) for name in ("index", "worst_top", "worst_left")}
    columns |= {"label": np.array([label]), "margin": np.array([1e6])}
    proof = SimpleNamespace(threat=pc.Patch(1), columns=columns)
    with pytest.raises(AssertionError, match="is proven for 1000000"):
        exact.exact_margin(given, images, proof, 0)
