import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchcert.errors import ModelError
from patchcert.models import ModelSpec

counts = st.integers(1, 300)


@st.composite
def specs(draw):
    channels = draw(st.integers(1, 4))
    normalised = draw(st.booleans())
    widths = tuple(draw(st.lists(counts, max_size=3)))
    return ModelSpec(
        name=draw(st.sampled_from(["mlp", "cnn4"])),
        channels=channels,
        height=draw(counts),
        width=draw(counts),
        classes=draw(counts),
        hidden=None if widths else draw(st.none() | counts),
        mean=(draw(st.floats(0, 1)),) * channels if normalised else (),
        std=(draw(st.floats(0.01, 1)),) * channels if normalised else (),
        widths=widths,
    )


@given(specs())
def test_a_description_survives_json(spec):
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_only_a_real_normalisation_needs_a_layer():
    assert not ModelSpec("mlp", 1, 28, 28).normalises
    assert not ModelSpec("mlp", 1, 28, 28, mean=(0.0,), std=(1.0,)).normalises
    assert ModelSpec("mlp", 1, 28, 28, mean=(0.0,), std=(0.5,)).normalises


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 0}, "ModelSpec.channels must be a whole number of at least 1, got 0"),
        ({"height": 2.0}, "ModelSpec.height must be a whole number"),
        ({"hidden": -1}, "ModelSpec.hidden must be"),
        ({"widths": (3, 0)}, "ModelSpec.widths must be a whole number of at least 1, got 0"),
        ({"widths": (3,), "hidden": 3}, "both say how wide"),
        ({"mean": (0.5,)}, "both be empty or hold one value for each of 1 channels, got 1 and 0"),
        ({"mean": (0.5,), "std": (0.0,)}, "std positive"),
    ],
)
def test_impossible_descriptions_are_refused(change, message):
    with pytest.raises(ModelError, match=message):
        ModelSpec(**{"name": "mlp", "channels": 1, "height": 28, "width": 28, **change})


def test_unknown_and_missing_keys_are_named():
    with pytest.raises(ModelError, match=r"unknown keys \['depth'\] and lacks \['height', 'width'\]"):
        ModelSpec.from_dict({"name": "mlp", "channels": 1, "depth": 3})
