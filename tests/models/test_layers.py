import pytest
import torch

from patchcert.errors import ModelError
from patchcert.models import Normalize


def test_normalize_centres_and_scales_each_channel():
    layer = Normalize((0.5, 0.25), (0.5, 0.125))
    output = layer(torch.tensor([1.0, 0.5]).reshape(1, 2, 1, 1).expand(3, 2, 4, 4))
    assert torch.equal(output, torch.tensor([1.0, 2.0]).reshape(1, 2, 1, 1).expand(3, 2, 4, 4))


def test_normalize_moves_and_prints_with_its_values():
    layer = Normalize((0.5,), (0.25,)).to(torch.float64)
    assert layer.mean.dtype == layer.std.dtype == torch.float64
    assert repr(layer) == "Normalize(mean=[0.5], std=[0.25])"


@pytest.mark.parametrize("std", [(0.0,), (-1.0,), (float("nan"),)])
def test_normalize_refuses_a_deviation_that_is_not_positive(std):
    with pytest.raises(ModelError, match="positive standard deviations, got"):
        Normalize((0.5,), std)


@pytest.mark.parametrize(("mean", "std"), [((), ()), ((0.1, 0.2), (1.0,))])
def test_normalize_refuses_unequal_channels(mean, std):
    with pytest.raises(ModelError, match="one mean and one std per channel"):
        Normalize(mean, std)
