import pytest
import torch
from torch import nn

import patchcert as pc
from patchcert.certificates.explaining import Width, blown_up, widths
from patchcert.testing.networks import linear


def test_widths_are_those_of_the_bounds_that_one_patch_gives():
    """The patch covers the middle one of three pixels, of which the second unit alone sees enough to change sign."""
    first = linear(torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 1.0, 1.0]]), [0.0, -0.5, 0.5])
    model = nn.Sequential(nn.Flatten(), first, nn.ReLU(), linear(torch.eye(2, 3), [0.0, 0.0])).eval()
    images = torch.tensor([0.5, 0.5, 1.0]).reshape(1, 1, 1, 3)
    before, logits = widths(model, images, pc.Patch(1))
    assert before.name == "before '2'"
    assert before.reached == pytest.approx(2 / 3)
    assert before.undecided == 0.5
    assert before.width == pytest.approx(1.5 / 1.0)  # bounds 2 and 1 wide, values 0.5, 0.5 and 2 large
    assert logits.name == "the logits"
    assert logits.reached == 0.5
    assert logits.width == pytest.approx(1.5 / 0.5)
    assert str(logits) == "the logits: 50% reached, 3 times as wide, 0% unstable"
    assert [Width("", 1, width, 1).times for width in (0.6471, 632.4, 4283.0, 2e7)] == [
        "0.647",
        "632",
        "4,283",
        "2e+07",
    ]


@pytest.mark.parametrize(
    ("sizes", "place"), [([1, 20, 5, 30, 40], 3), ([20, 30], 0), ([50, 2], None), ([1, 11], 1)]
)
def test_bounds_have_blown_up_from_where_they_stay_wide(sizes, place):
    found = [Width(str(number), 1.0, size, 1.0) for number, size in enumerate(sizes)]
    assert blown_up(found) is (None if place is None else found[place])
