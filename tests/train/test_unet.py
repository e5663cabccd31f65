"""The U-net has its size and weights; its convolutions are those of the library, with their gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from patchcert.testing.conformance import seeded
from patchcert.train import unet
from patchcert.train.unet import MarginUNet, SmallConv2d, build_unet, enlarged

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LAYERS = {
    "stem": (3, 10, 7, 2, 3, 32, True),
    "full": (3, 10, 3, 1, 1, 32, True),
    "large": (20, 10, 3, 1, 1, 32, True),
    "wide": (30, 40, 3, 1, 1, 16, False),
    "deep": (60, 40, 3, 1, 1, 4, True),
    "tiny": (40, 40, 3, 1, 1, 2, False),
    "odd": (50, 20, 3, 1, 1, 7, True),
    "strided": (10, 20, 3, 2, 1, 8, False),
    "strided odd": (12, 24, 3, 2, 1, 7, False),
    "shortcut": (20, 40, 1, 2, 0, 7, False),
    "lateral": (10, 10, 1, 1, 0, 16, True),
    "even": (5, 7, (4, 2), 2, 1, 9, True),
    "most": (64, 64, 3, 1, 0, 5, True),
    "one": (1, 1, 2, 1, 0, 2, True),
}


def parts(name, device, batch=37):
    channels, width, kernel, stride, padding, side, has_bias = LAYERS[name]
    kernel = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, channels, side, side, generator=generator)
    weight = torch.randn(width, channels, *kernel, generator=generator)
    bias = torch.randn(width, generator=generator) if has_bias else None
    tensors = [None if part is None else part.to(device) for part in (images, weight, bias)]
    return tensors, (stride, padding)


def passed(function, tensors, settings, dtype=torch.float32):
    """The output, and the gradients of a sum of it with fixed weights."""
    own = [None if part is None else part.to(dtype).requires_grad_() for part in tensors]
    output = function(*own, *settings)
    slopes = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output.detach(), *torch.autograd.grad(output, [part for part in own if part is not None], slopes)]


def small_convolution(*arguments):
    from patchcert.train.unet_kernels import small_convolution

    return small_convolution(*arguments)


def worst(found, wanted):
    return max(
        float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize(("channels", "side", "width", "count"), [(1, 28, 6, 39_040), (3, 32, 10, 108_540)])
def test_the_unet_has_the_papers_size(channels, side, width, count):
    network = MarginUNet(channels, 10, width)
    assert sum(parameter.numel() for parameter in network.parameters()) == count
    assert network(torch.rand(2, channels, side, side)).shape == (2, 10, side, side)


def test_the_unet_depends_on_its_generator_alone():
    one, same, other = (build_unet(1, 4, 2, seeded(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.head.weight, other.head.weight)


@pytest.mark.parametrize(("size", "larger"), [((2, 3), (4, 7)), ((7, 7), (14, 14)), ((1, 2), (3, 2))])
def test_maps_are_enlarged_as_by_bilinear_interpolation(size, larger):
    maps = torch.rand(3, 2, *size, generator=seeded(), requires_grad=True)
    expected = F.interpolate(maps, larger, mode="bilinear", align_corners=True)
    weights = torch.rand(expected.shape, generator=seeded())
    mine = enlarged(maps, *larger)
    torch.testing.assert_close(mine, expected)
    (gradient,) = torch.autograd.grad((mine * weights).sum(), maps)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), maps)
    torch.testing.assert_close(gradient, wanted)


def test_on_a_cpu_the_layer_is_the_librarys():
    torch.manual_seed(0)
    small = SmallConv2d(3, 5, 3, 2, 1)
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 5, 3, 2, 1)
    images = torch.rand(2, 3, 7, 7)
    assert small.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(small(images), plain(images))
    assert small.double()(images.double()).dtype == torch.float64


def test_the_unet_has_the_weights_it_always_had(monkeypatch):
    torch.manual_seed(0)
    small = MarginUNet(3, 4, 2)
    monkeypatch.setattr(unet, "SmallConv2d", nn.Conv2d)
    torch.manual_seed(0)
    plain = MarginUNet(3, 4, 2)
    assert small.state_dict().keys() == plain.state_dict().keys()
    assert all(
        torch.equal(one, other) for one, other in zip(small.parameters(), plain.parameters(), strict=True)
    )
    images = torch.rand(2, 3, 16, 16)
    assert torch.equal(small(images), plain(images))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (SmallConv2d(4, 65, 3), (2, 4, 9, 9)),
        (SmallConv2d(4, 4, 3).double(), (2, 4, 9, 9)),
        (SmallConv2d(4, 8, 3, 1, 1), (2**14, 4, 128, 128)),
    ],
    ids=["many channels", "other weights", "many numbers"],
)
def test_the_kernels_are_not_asked_for_what_they_cannot_do(layer, shape, monkeypatch):
    monkeypatch.setattr(unet, "is_fused", lambda value: value.dtype == torch.float32)
    assert SmallConv2d(4, 4, 3, 1, 1)._is_small(torch.rand(2, 4, 9, 9))
    assert not layer._is_small(torch.empty(1).expand(shape))


CASES = [(name, "tf32", 4e-3) for name in LAYERS] + [
    (name, "tf32x3", 1e-5) for name in ("stem", "strided", "even")
]


@pytest.mark.parametrize(
    ("name", "precision", "tolerance"), [pytest.param(*case, marks=on_gpu) for case in CASES]
)
def test_the_kernels_are_a_convolution(name, precision, tolerance):
    for batch in (3, 37):
        tensors, settings = parts(name, "cuda", batch)
        found = passed(small_convolution, tensors, (*settings, precision))
        wanted = passed(F.conv2d, tensors, settings, torch.float64)
        assert worst(found, wanted) < tolerance


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in ("large", "tiny", "strided")])
def test_the_kernels_do_the_same_every_time_and_in_a_graph(name):
    tensors, settings = parts(name, "cuda")
    first, second = (passed(small_convolution, tensors, settings) for _ in range(2))
    own = [None if part is None else part.requires_grad_() for part in tensors]
    slopes = torch.randn(first[0].shape, generator=torch.Generator().manual_seed(1)).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = small_convolution(*own, *settings)
        third = [output, *torch.autograd.grad(output, [part for part in own if part is not None], slopes)]
    graph.replay()
    for one, other, recorded in zip(first, second, third, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, recorded)


SIZES = [pytest.param(*size, marks=on_gpu) for size in ((1, 28, 6), (3, 32, 10))]


@pytest.mark.parametrize(("channels", "side", "width"), SIZES)
def test_the_unet_is_nearly_the_same_with_and_without_kernels(channels, side, width, monkeypatch):
    torch.manual_seed(0)
    network = MarginUNet(channels, 10, width).cuda()
    images = torch.rand(16, channels, side, side).cuda()
    found = []
    for has_kernels in (True, False):
        monkeypatch.setattr(unet, "is_fused", lambda value, has_kernels=has_kernels: has_kernels)
        output = network(images)
        slopes = torch.autograd.grad(output.square().sum(), list(network.parameters()))
        found.append([output.detach(), *slopes])
    assert worst(found[0][:1], found[1][:1]) < 0.01
    largest = max(float(gradient.norm()) for gradient in found[1][1:])
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        assert float((one - other).norm()) < 0.01 * largest
