import numpy as np
import pytest
import torch
from torch import fx, nn

import patchcert as pc
from patchcert.bounds import trace
from patchcert.errors import ModelError, UnsupportedLayer
from patchcert.models import ModelSpec, Normalize, build


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


@pytest.mark.parametrize(
    "mean", [0.13, (0.13,), [0.13], np.array([0.13]), torch.tensor(0.13, dtype=torch.float64)]
)
def test_one_number_is_the_statistic_of_all_channels(mean):
    layer, images = Normalize(mean, 0.31), torch.rand(2, 3, 4, 4)
    assert layer.mean.shape == layer.std.shape == (1, 1, 1)
    torch.testing.assert_close(layer(images), (images - 0.13) / 0.31)


def test_what_is_no_number_is_refused():
    with pytest.raises(
        ModelError, match="the mean of Normalize must be a number for each channel, got 'mnist'"
    ):
        Normalize("mnist", 0.3)
    with pytest.raises(ModelError, match="the std of Normalize must be a number for each channel, got None"):
        Normalize(0.1, None)


@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 2, 4, 4), (2, 4, 4, 4), (4, 4)])
def test_images_of_other_channels_are_refused_and_not_broadcast(shape):
    with pytest.raises(
        ModelError, match=r"Normalize has the statistics of 3 channels, got images of shape \("
    ):
        Normalize((0.5,) * 3, (0.2,) * 3)(torch.rand(shape))


def test_normalize_is_traced_with_its_check():
    model = nn.Sequential(Normalize((0.5,) * 3, (0.2,) * 3), nn.Conv2d(3, 2, 1))
    traced, images = fx.symbolic_trace(model), torch.rand(2, 3, 4, 4)
    assert torch.equal(traced(images), model(images))
    with pytest.raises(ModelError, match="the statistics of 3 channels"):
        traced(images[:, :1])
    with pytest.raises(UnsupportedLayer, match="a Normalize layer has been taken apart by torch.fx"):
        trace(traced)


def test_normalize_is_one_graph_without_a_break():
    model, images = Normalize((0.5,) * 3, (0.2,) * 3), torch.rand(2, 3, 4, 4)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(images), model(images))


def test_images_as_they_are_have_neither_logits_nor_bounds():
    model = build(ModelSpec("cnn2_ablation", 1, 8, 8, hidden=4), torch.Generator().manual_seed(0))
    images = torch.rand(2, 1, 8, 8)
    with pytest.raises(ModelError, match="takes ablated images, encoded in 2 channels, got 1 channels"):
        model(images)
    with pytest.raises(
        UnsupportedLayer, match=r"layer 'ablated' \(AblatedImages\): its network votes"
    ) as caught:
        pc.certify(model, images, torch.tensor([0, 1]), pc.Patch(2))
    assert "RandomAblation" in caught.value.hint
