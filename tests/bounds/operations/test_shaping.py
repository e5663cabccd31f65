"""Values that are picked keep their bounds."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from boxes import OUTWARD, box_around
from patchcert.bounds import trace
from patchcert.errors import UnsupportedLayer
from patchcert.testing.conformance import seeded
from strategies import seeds
from written_models import model_of


@given(seeds(), st.sampled_from(["chunk", "split", "index"]))
def test_picked_values_have_the_bounds_they_had(seed, by):
    takes = {
        "chunk": lambda x: x.chunk(2, dim=1)[1],
        "split": lambda x: x.split((1, 2), dim=-1)[-1],
        "index": lambda x: x[:, 1, 1:],
    }
    box = box_around(torch.rand(2, 4, 3, 3, generator=seeded(seed), dtype=torch.float64), seed)
    network = trace(model_of(lambda model, x: takes[by](x)))
    bounds = network.bounds(box, rounding=OUTWARD)
    assert torch.equal(bounds.lower, takes[by](box.lower))
    assert torch.equal(bounds.upper, takes[by](box.upper))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda model, x: x.chunk(2)[0], "are split along the batch"),
        (lambda model, x: x.transpose(-4, 1), "the batch must stay the first"),
        (lambda model, x: F.pad(x.flatten(1), (0, 0, 1, -1)), "are padded along the batch"),
    ],
)
def test_what_moves_values_from_image_to_image_is_refused(forward, message):
    with pytest.raises(UnsupportedLayer, match=message):
        trace(model_of(forward)).values(torch.rand(2, 3, 2, 2))
