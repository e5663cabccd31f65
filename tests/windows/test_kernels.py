"""Fused kernels are their plain twins, and CUDA certificates are those of the CPU. Needs a CUDA device."""

import copy
import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from patchcert.bounds import NEAREST, Rounding, precise_arithmetic, trace
from patchcert.bounds.geometry import Geometry, convolve
from patchcert.bounds.rounding import blocked_product, fast_arithmetic
from patchcert.certificates import certify, placement_margins
from patchcert.testing.networks import ResidualBlock, randomise
from patchcert.threats import Patch, shapes
from patchcert.windows import passes
from patchcert.windows.passes import Cells, clean_pass
from patchcert.windows.sweep import covering_sweep
from patchcert.windows.training import covering_placements
from sweeps import swept

pytest.importorskip("triton")
kernels = importlib.import_module("patchcert.windows.kernels")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MODELS = {
    "linear": [nn.Flatten(), nn.Linear(3 * 12 * 11, 5)],
    "hidden": [nn.Flatten(), nn.Linear(3 * 12 * 11, 40), nn.ReLU(), nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 5)],
    "deep": [
        nn.Conv2d(3, 5, 3, 1, 1), nn.ReLU(), nn.Conv2d(5, 7, 4, 2, 1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(30),
        nn.ReLU(), nn.Linear(30, 5),
    ],
    "strided": [
        nn.Conv2d(3, 5, 3, 1, 1), nn.ReLU(), nn.Conv2d(5, 7, 4, 2, 1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5),
    ],
    "wide": [
        nn.Conv2d(3, 70, 3, padding=1), nn.ReLU(), nn.Conv2d(70, 33, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.LazyLinear(5),
    ],
    "pooled": [
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.LazyLinear(5),
    ],
    "residual": [
        ResidualBlock(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()), nn.Identity()), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5),
    ],
    "dense way": [nn.MaxPool2d(2, ceil_mode=True), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)],
}  # fmt: skip
SHAPE = (3, 12, 11)


def built(name):
    model = copy.deepcopy(nn.Sequential(*MODELS[name]))
    model(torch.rand(2, *SHAPE))
    return randomise(model, torch.Generator().manual_seed(0), gain=0.7)


def batch(count=6):
    images = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(1))
    return images, torch.arange(count) % 5


def distance(margins, reference):
    return float((margins.double().cpu() - reference.double().cpu()).abs().max() / reference.abs().max())


def random_windows(places, radius_shape, generator):
    """Deviations no larger than their radii, as they are in a sweep, with clean values and slacks."""
    placements, images, height, width, channels = places
    clean = torch.randn(images, 30, channels, generator=generator).cuda()
    cells = torch.randint(-8, 30, (placements, height * width), generator=generator).clamp(min=-1)
    outside = (cells < 0).view(placements, 1, height, width, 1)
    signed = cells.int().cuda()
    radius = torch.rand(radius_shape, generator=generator).cuda()
    deviation = (torch.rand(places, generator=generator).cuda() * 2 - 1) * radius
    slack = tuple(torch.rand(images, generator=generator).cuda() * 1e-5 for _ in range(2))
    return clean, Cells(signed.clamp(min=0).long(), signed, outside.cuda(), signed), deviation, radius, slack


def plain_relu(deviation, radius, before, outside, factor, widen, slack):
    """What the kernel must compute, in float64."""
    deviation, radius, before = deviation.double(), radius.double().expand_as(deviation), before.double()
    shape = (1, -1, *[1] * (deviation.dim() - 2))
    first, second = (0.0, 0.0) if slack is None else (part.double().reshape(shape) for part in slack)
    radius = radius * factor + first
    lower, upper = torch.relu(before + deviation - radius), torch.relu(before + deviation + radius)
    is_open = (upper > 0) | (before > 0)
    moved, spread = (lower + upper) / 2 - torch.relu(before), (upper - lower) / 2 * widen + second * is_open
    if outside is not None:
        moved, spread = moved.masked_fill(outside, 0.0), spread.masked_fill(outside, 0.0)
    return moved, spread


@pytest.mark.parametrize("has_slack", [False, True])
@pytest.mark.parametrize("radius_shape", [(7, 3), (1, 3), (7, 1), (1, 1)])
@pytest.mark.parametrize("inner", [(1, 1, 1), (3, 2, 5), (5, 5, 64), (9, 9, 40)])
def test_the_kernel_on_windows_is_plain_relu(inner, radius_shape, has_slack):
    generator = torch.Generator().manual_seed(0)
    clean, cells, deviation, radius, slack = random_windows(
        (7, 3, *inner), (*radius_shape, *inner), generator
    )
    before = clean[:, cells.index].transpose(0, 1).unflatten(2, inner[:2])
    given_slack = slack if has_slack else None
    moved, spread = kernels.fused_relu(deviation, radius, clean, cells.signed, 1.001, 1.002, given_slack)
    expected = plain_relu(deviation, radius, before, cells.outside, 1.001, 1.002, given_slack)
    torch.testing.assert_close(moved.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(spread.double(), expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("has_slack", [False, True])
@pytest.mark.parametrize("radius_shape", [(7, 3), (7, 1)])
@pytest.mark.parametrize("features", [1, 10, 257, 3000])
def test_the_kernel_on_features_is_plain_relu(features, radius_shape, has_slack):
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(3, features, generator=generator).cuda()
    radius = torch.rand(*radius_shape, features, generator=generator).cuda()
    deviation = (torch.rand(7, 3, features, generator=generator).cuda() * 2 - 1) * radius
    slack = tuple(torch.rand(3, generator=generator).cuda() * 1e-5 for _ in range(2)) if has_slack else None
    moved, spread = kernels.fused_relu(deviation, radius, clean, None, 1.0, 1.0, slack)
    expected = plain_relu(deviation, radius, clean, None, 1.0, 1.0, slack)
    torch.testing.assert_close(moved.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(spread.double(), expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inner", [(1, 1, 1), (3, 2, 5), (5, 5, 64), (9, 9, 40), (257,)])
def test_the_kernel_with_a_gradient_is_plain_relu_with_its_gradient(inner):
    generator = torch.Generator().manual_seed(0)
    radius = torch.rand(7, 3, *inner, generator=generator).cuda()
    deviation = (torch.rand(7, 3, *inner, generator=generator).cuda() * 2 - 1) * radius
    if len(inner) == 1:
        cells, signed, places = None, torch.zeros(1).long(), torch.zeros(1).long()
        clean = torch.randn(3, *inner, generator=generator).cuda()
    else:
        signed = torch.randint(-8, 30, (7, 3, inner[0] * inner[1]), generator=generator).clamp(min=-1)
        cells, places = signed.int().cuda(), torch.arange(3).reshape(1, 3, 1)
        clean = torch.randn(3, 30, inner[2], generator=generator).cuda()
    found, wanted = ([part.clone().requires_grad_() for part in (deviation, radius, clean)] for _ in range(2))
    ours = kernels.differentiable_relu(*found, cells)
    before = wanted[2] if cells is None else wanted[2][places, signed.clamp(min=0)].view(7, 3, *inner)
    outside = None if cells is None else (cells < 0).view(7, 3, *inner[:2], 1)
    plain = plain_relu(wanted[0], wanted[1], before, outside, 1.0, 1.0, None)
    weights = [torch.randn(7, 3, *inner, generator=generator).cuda() for _ in range(2)]
    for weight in weights:
        weight[2:5] = 0
    torch.autograd.backward(ours, weights)
    torch.autograd.backward(plain, [weight.double() for weight in weights])
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [(1, 2, 0, 3), (-1, 2, 3, -2)])
@pytest.mark.parametrize("channels", [1, 5, 64, 100])
def test_placing_windows_is_padding_with_its_gradient(channels, padding, dtype):
    generator = torch.Generator().manual_seed(0)
    windows = torch.randn(7, 3, 6, 4, channels, generator=generator).to(dtype).cuda()
    top, bottom, left, right = padding
    found, wanted = windows.clone().requires_grad_(), windows.clone().requires_grad_()
    ours = kernels.placed(found, (6 + top + bottom, 4 + left + right), (top, left))
    plain = F.pad(wanted, (0, 0, left, right, top, bottom))
    weights = torch.randn(plain.shape, generator=generator).to(dtype).cuda()
    for value in (ours, plain):
        value.backward(weights)
    assert torch.equal(ours, plain)
    assert torch.equal(found.grad, wanted.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 5, 64])
def test_windows_are_placed_each_at_its_own_cell(channels, dtype):
    generator = torch.Generator().manual_seed(0)
    windows = torch.randn(7, 3, 4, 2, channels, generator=generator).to(dtype).cuda()
    shifts = torch.randint(-2, 6, (7, 3, 2), generator=generator).int().cuda()
    found = windows.clone().requires_grad_()
    ours = kernels.placed(found, (6, 8), (-1, 1), shifts)
    weights = torch.randn(ours.shape, generator=generator).to(dtype).cuda()
    ours.backward(weights)
    for one, other in itertools.product(range(7), range(3)):
        top, left = (int(shifts[one, other, axis]) + (-1, 1)[axis] for axis in (0, 1))
        around = (0, 0, left, 6 - left, top, 2 - top)
        assert torch.equal(ours[one, other], F.pad(windows[one, other], around))
        back = (0, 0, -left, left - 6, -top, top - 2)
        assert torch.equal(found.grad[one, other], F.pad(weights[one, other], back))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "dense way"])
def test_chosen_placements_have_the_same_gradient_with_and_without_kernels(name, monkeypatch):
    model = built(name).cuda()
    images, labels = (part.cuda() for part in batch())
    corners = torch.randint(0, 9, (len(images), 4, 2), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for has_kernels in (True, False):
        monkeypatch.setattr(passes, "is_fused", lambda value, has_kernels=has_kernels: has_kernels)
        placements = covering_placements(trace(model), images, Patch(3))
        assert placements is not None
        with precise_arithmetic():
            margins = placements.margins(images, labels, corners, torch.tensor(0.7, device="cuda"))
            found.append(
                [margins.detach(), *torch.autograd.grad(margins.square().sum(), list(model.parameters()))]
            )
    for ours, plain in zip(*found, strict=True):
        assert float((ours - plain).abs().max()) <= 1e-4 * float(plain.abs().max()) + 1e-6


@pytest.mark.parametrize("name", ["hidden", "deep", "wide"])
def test_windows_of_few_digits_have_nearly_the_same_margins_and_gradient(name):
    model = built(name).cuda()
    images, labels = (part.cuda() for part in batch())
    corners = torch.randint(0, 9, (len(images), 4, 2), generator=torch.Generator().manual_seed(0)).cuda()
    placements = covering_placements(trace(model), images, Patch(3))
    assert placements is not None
    found = []
    for dtype in (None, torch.bfloat16):
        with precise_arithmetic():
            margins = placements.margins(images, labels, corners, 1.0, dtype=dtype)
            found.append([margins.detach(), *torch.autograd.grad(margins.sum(), list(model.parameters()))])
    for exact, rounded in zip(*found, strict=True):
        assert rounded.dtype == torch.float32
        assert float((exact - rounded).norm()) <= 0.05 * float(exact.norm()) + 1e-6


@pytest.mark.parametrize("arithmetic", [precise_arithmetic, fast_arithmetic])
@pytest.mark.parametrize("has_slack", [False, True])
@pytest.mark.parametrize("radius_shape", [(37, 3), (37, 1), (1, 3)])
@pytest.mark.parametrize(("features", "classes"), [(1, 2), (10, 17), (255, 10), (512, 10)])
def test_the_kernel_of_the_last_layer_is_relu_and_two_products(
    features, classes, radius_shape, has_slack, arithmetic
):
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(3, features, generator=generator).cuda()
    weight = torch.randn(classes, features, generator=generator).cuda()
    labels = torch.randint(classes, (3,), generator=generator).cuda()
    radius = torch.rand(*radius_shape, features, generator=generator).cuda()
    deviation = (torch.rand(37, 3, features, generator=generator).cuda() * 2 - 1) * radius
    slack = tuple(torch.rand(3, generator=generator).cuda() * 1e-2 for _ in range(2)) if has_slack else None
    with arithmetic():
        shift, spread = kernels.fused_head(deviation, radius, clean, weight, labels, 1.01, 1.02, slack)
    moved, wide = plain_relu(deviation, radius, clean, None, 1.01, 1.02, slack)
    merged = (weight[labels].unsqueeze(2) - weight.T).double()
    scale = float((wide.transpose(0, 1) @ merged.abs()).max())
    tolerance = scale * (1e-6 if arithmetic is precise_arithmetic else 3e-3)
    torch.testing.assert_close(shift.double(), moved.transpose(0, 1) @ merged, rtol=0, atol=tolerance)
    torch.testing.assert_close(spread.double(), wide.transpose(0, 1) @ merged.abs(), rtol=0, atol=tolerance)


def test_the_kernel_keeps_nan():
    clean, radius = torch.zeros(1, 4, device="cuda"), torch.ones(1, 1, 4, device="cuda")
    deviation = torch.tensor([[[0.0, torch.nan, torch.inf, -1.0]]], device="cuda")
    moved, _ = kernels.fused_relu(deviation, radius, clean, None, 1.0, 1.0, None)
    assert moved[0, 0, 1].isnan()
    assert not moved[0, 0, 2].isfinite()


GEOMETRIES = [
    Geometry((3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    Geometry((4, 2), (2, 3), (1, 2, 0, 3), (1, 1)),
    Geometry((2, 3), (1, 2), (-1, 0, 2, -1), (2, 1)),
    Geometry((1, 1), (2, 2), (0, 0, 0, 0), (1, 1)),
]


@pytest.mark.parametrize("channels", [1, 5, 64, 100])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_rows_under_the_kernel_are_those_of_a_convolution(geometry, channels):
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(6, 7, 9, channels, generator=generator).cuda()
    weight = torch.randn(4, channels, *geometry.kernel, generator=generator).cuda()
    height, width = geometry.output_size(7, 9)
    with precise_arithmetic():
        rows = kernels.fused_rows(maps, geometry, height, width)
        ours = blocked_product(rows, weight.permute(2, 3, 1, 0).flatten(0, 2)).reshape(6, height, width, 4)
        plain = convolve(maps.permute(0, 3, 1, 2), weight, geometry, 1, precise=True).permute(0, 2, 3, 1)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rounding", [NEAREST, Rounding.outward(torch.float32)], ids=["nearest", "outward"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "dense way"])
def test_sweeps_are_the_same_with_and_without_kernels(name, rounding, monkeypatch):
    model = built(name).cuda()
    images, labels = (part.cuda() for part in batch())
    fused = swept(model, images, labels, Patch(3), rounding=rounding)
    assert passes.is_fused(images)
    monkeypatch.setattr(passes, "is_fused", lambda value: False)
    plain = swept(model, images, labels, Patch(3), rounding=rounding)
    assert distance(fused, plain) < 2e-6


@pytest.mark.parametrize("patch", [Patch(3), Patch(shapes.diamond(5)), Patch((2, 4), "corners")], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_cuda_margins_are_those_of_the_cpu_in_float64(name, patch):
    model, (images, labels) = built(name), batch()
    exact = placement_margins(model, images, labels, patch, dtype=torch.float64)
    model = model.cuda()
    margins = placement_margins(model, images.cuda(), labels.cuda(), patch)
    assert margins.is_cuda
    assert distance(margins, exact) < 3e-4
    assert bool((margins.double().cpu() <= exact + 1e-9 * exact.abs().max()).all())
    nearest = exact
    if name != "dense way":
        nearest = swept(model, images.cuda(), labels.cuda(), patch)
    assert distance(nearest, exact) < 1e-5
    double = placement_margins(model, images.cuda(), labels.cuda(), patch, dtype=torch.float64)
    assert distance(double, exact) < 1e-9


@pytest.mark.parametrize("name", MODELS)
def test_certificates_do_not_depend_on_memory(name):
    model = built(name).cuda()
    images, _ = batch(20)
    images = (images * torch.linspace(0.2, 1, 20)[:, None, None, None]).cuda()
    with torch.no_grad():
        labels = model(images).argmax(dim=1)
    whole = certify(model, images, labels, Patch(2))
    for budget in (2**16, 2**20, 2**24):
        parts = certify(model, images, labels, Patch(2), memory_budget=budget)
        assert torch.equal(parts.certified, whole.certified)
        assert distance(parts.margins, whole.margins) < 1e-5
        bare = certify(model, images, labels, Patch(2), memory_budget=budget, verdicts_only=True)
        assert torch.equal(bare.certified, whole.certified)


def test_shortcuts_of_the_process_do_not_reach_the_bounds():
    """TF32 would be wrong by a thousandth; with it allowed, margins are the same to the bit."""
    model = built("wide").cuda()
    images, labels = (part.cuda() for part in batch())
    before = placement_margins(model, images, labels, Patch(3))
    legacy = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            after = placement_margins(model, images, labels, Patch(3))
    finally:
        torch.set_float32_matmul_precision(legacy)
    assert torch.equal(before, after)


def swept_in_half(model, images, labels):
    network = trace(model)
    sweep = covering_sweep(network, images, Patch(3), 2**26)
    assert sweep is not None
    assert sweep.takes_half_precision(images)
    with torch.no_grad(), fast_arithmetic():
        return sweep.margins(clean_pass(network, images, labels), labels, dtype=torch.float16)


@pytest.mark.parametrize("name", ["hidden", "deep"])
def test_sweeps_of_half_precision_rank_placements_as_well_as_tf32(name):
    model = built(name).cuda()
    images, labels = (part.cuda() for part in batch())
    half = swept_in_half(model, images, labels)
    exact = swept(model, images, labels, Patch(3))
    assert half.dtype == torch.float32
    assert distance(half, exact) < 3e-3
    chosen = exact.gather(1, half.argmin(dim=1, keepdim=True))
    assert float((chosen - exact.amin(dim=1, keepdim=True)).max() / exact.abs().max()) < 3e-3


def test_sweeps_of_half_precision_do_not_overflow_into_nan():
    model = built("deep").cuda()
    with torch.no_grad():
        model[0].weight.mul_(1e4)
    images, labels = (part.cuda() for part in batch())
    assert bool(swept_in_half(model, images, labels).isfinite().all())


@pytest.mark.parametrize("name", ["linear", "strided", "pooled", "residual"])
def test_other_networks_are_not_swept_in_half_precision(name):
    images = batch()[0].cuda()
    sweep = covering_sweep(trace(built(name).cuda()), images, Patch(3), 2**26)
    assert sweep is not None
    assert not sweep.takes_half_precision(images)
