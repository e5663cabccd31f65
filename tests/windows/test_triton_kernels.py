"""Kernels of half precision are their plain twins. Needs a CUDA device, or Triton's interpreter on a CPU."""

import copy
import importlib
import os

import numpy as np
import pytest
import torch
from torch import nn

from patchcert.bounds import NEAREST, precise_arithmetic, trace
from patchcert.bounds.geometry import FeatureMap, Geometry, Window, convolve
from patchcert.bounds.rounding import fast_arithmetic
from patchcert.models import Normalize
from patchcert.testing.conformance import seeded
from patchcert.testing.networks import randomise
from patchcert.threats import Patch
from patchcert.windows.passes import cells, clean_pass
from patchcert.windows.sweep import covering_sweep

pytest.importorskip("triton")
kernels = importlib.import_module("patchcert.windows.kernels")

HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
IMAGES, AREA = 5, FeatureMap(0, 7, 6)
SHIFTS = np.array([[0, 0], [0, 4], [2, 2], [8, 6]])
"""Of image pixels, on a map of stride 2: the first and the last window stick out over its border."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HAS_CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="no CUDA device and no interpreter"
    ),
]


def random_parts(window, channels, generator):
    """Deviations no larger than their radii, both of half precision and zero outside the map; and the cells."""
    covered = cells(window, SHIFTS, AREA, DEVICE)
    size = (len(SHIFTS), IMAGES, window.height, window.width, channels)
    radius = torch.rand(size, generator=generator).to(DEVICE)
    deviation = (torch.rand(size, generator=generator).to(DEVICE) * 2 - 1) * radius
    assert covered.outside is not None
    parts = tuple(part.masked_fill(covered.outside, 0.0).half() for part in (deviation, radius))
    return parts, covered


GEOMETRIES = {
    "plain": Geometry((3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    "strided": Geometry((3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),
    "uneven": Geometry((2, 4), (1, 2), (0, 2, 3, 1), (1, 1)),
    "single": Geometry((1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),
}


@pytest.mark.parametrize(
    ("name", "channels", "outputs"),
    [("plain", 64, 128), ("strided", 32, 32), ("uneven", 96, 64), ("single", 32, 256)],
)
def test_a_convolution_with_relu_is_both_in_turn(name, channels, outputs):
    geometry, generator = GEOMETRIES[name], seeded()
    source = Window(-1, -2, 4, 3, 2, 2)
    target = source.through(geometry)
    parts, covered = random_parts(source, channels, generator)
    area = FeatureMap(outputs, *geometry.output_size(AREA.height, AREA.width))
    new = cells(target, SHIFTS, area, DEVICE)
    clean = torch.randn(IMAGES, area.height * area.width, outputs, generator=generator).to(DEVICE)
    weight = torch.randn(outputs, channels, *geometry.kernel, generator=generator).to(DEVICE).half()
    taps = weight.permute(2, 3, 1, 0).flatten(0, 1).contiguous()
    top, bottom, left, right = source.local(geometry, target).padding
    local = Geometry(geometry.kernel, geometry.stride, (top, bottom, left, right), geometry.dilation)
    found = kernels.slid_relu(parts, taps, local, clean, new.signed, covered.spans)

    def slid(part, weight):
        maps = part.double().flatten(0, 1).permute(0, 3, 1, 2)
        moved = convolve(maps, weight.double(), local, 1, precise=True)
        return moved.permute(0, 2, 3, 1).unflatten(0, part.shape[:2])

    before = clean[:, new.index].transpose(0, 1).unflatten(2, (target.height, target.width)).double()
    moved, spread = slid(parts[0], weight), slid(parts[1], weight.abs())
    lower, upper = torch.relu(before + moved - spread), torch.relu(before + moved + spread)
    wanted = (lower + upper) / 2 - torch.relu(before), (upper - lower) / 2
    for ours, plain in zip(found, wanted, strict=True):
        plain = plain if new.outside is None else plain.masked_fill(new.outside, 0.0)
        torch.testing.assert_close(ours.double(), plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))


@pytest.mark.parametrize(("channels", "outputs"), [(32, 64), (64, 512), (96, 32)])
def test_windows_times_the_weights_under_them_are_two_products(channels, outputs):
    generator = seeded()
    parts, covered = random_parts(Window(-1, -2, 4, 3, 2, 2), channels, generator)
    weight = torch.randn(AREA.height * AREA.width, channels, outputs, generator=generator).to(DEVICE).half()
    found = kernels.window_products(parts, (weight, weight.abs()), AREA.width, covered.spans)
    for ours, part, factor in zip(found, parts, (weight, weight.abs()), strict=True):
        plain = part.double().flatten(2) @ factor.double()[covered.index].flatten(1, 2)
        torch.testing.assert_close(ours.double(), plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))


def broad():
    """Every layer but the first and the last has enough channels for the kernels."""
    layers = [
        Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.25]),
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(64, 32, (2, 3), 1, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 6, 64),
        nn.ReLU(),
        nn.Linear(64, 5),
    ]
    return randomise(nn.Sequential(*copy.deepcopy(layers)), seeded(), gain=0.7)


@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("budget", [2**20, 2**26])
def test_a_search_with_kernels_of_half_precision_has_nearly_the_exact_margins(budget, monkeypatch):
    network, taken = trace(broad().cuda()), []
    images = torch.rand(6, 3, 12, 11, generator=seeded(1)).cuda()
    labels = torch.arange(6).cuda() % 5
    sweep = covering_sweep(network, images, Patch(2), budget)
    assert sweep is not None
    assert sweep.takes_half_precision(images)
    for name in ("slid_relu", "window_products"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *parts, kernel=kernel, name=name: taken.append(name) or kernel(*parts)
        )
    with torch.no_grad(), fast_arithmetic():
        found = sweep.margins(clean_pass(network, images, labels), labels, dtype=torch.float16)
    assert taken.count("slid_relu") == 2 * taken.count("window_products") > 0
    with torch.no_grad(), precise_arithmetic():
        exact = sweep.margins(clean_pass(network, images, labels), labels, rounding=NEAREST)
    assert float((found - exact).abs().max() / exact.abs().max()) < 3e-3
