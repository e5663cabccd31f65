"""No float32 margin is above the interval bound computed in fractions, however ill scaled the weights."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from exact import exact_matrix, fractions, ill_scaled
from patchcert.bounds import Interval, Rounding, precise_arithmetic, trace
from patchcert.bounds.operations import Add
from patchcert.certificates import certify, placement_margins
from patchcert.models import ModelSpec, build
from patchcert.threats import Patch, SparsePixels
from patchcert.windows.dense import dense_margins
from strategies import seeds


@dataclass
class Box:
    """An interval in fractions."""

    lower: np.ndarray
    upper: np.ndarray

    def through(self, weight, bias):
        """Exactly W x + b for a matrix W, on flat boxes."""
        positive, negative = np.where(weight > 0, weight, 0), np.where(weight < 0, weight, 0)
        lower = self.lower @ positive.T + self.upper @ negative.T + bias
        return Box(lower, self.upper @ positive.T + self.lower @ negative.T + bias)

    def clipped(self):
        return Box(np.maximum(self.lower, 0), np.maximum(self.upper, 0))


def exact_margins(model, images, label, patch):
    """Margins (n, placements, classes) in fractions: a box for each placement, the last layer merged."""
    corners = patch.placements(*images.shape[2:]).corners
    boxes = patch.boxes(images, corners)
    box = Box(fractions(boxes.lower.flatten(0, 1)), fractions(boxes.upper.flatten(0, 1)))
    *hidden, last = [layer for layer in model if not isinstance(layer, nn.Flatten)]
    for layer in hidden:
        if isinstance(layer, nn.ReLU):
            box = box.clipped()
        else:
            is_map = isinstance(layer, nn.Conv2d)
            weight, bias = (
                exact_matrix(layer, images.shape[1:])
                if is_map
                else (fractions(layer.weight), fractions(layer.bias))
            )
            box = Box(box.lower.reshape(len(box.lower), -1), box.upper.reshape(len(box.upper), -1))
            box = box.through(weight, bias)
    box = Box(box.lower.reshape(len(box.lower), -1), box.upper.reshape(len(box.upper), -1))
    weight, bias = fractions(last.weight), fractions(last.bias)
    margins = box.through(weight[label] - weight, bias[label] - bias).lower
    return margins.reshape(len(images), len(corners), -1)


KINDS = {
    "one layer": lambda: [nn.Flatten(), nn.Linear(12, 3)],
    "two layers": lambda: [nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3)],
    "convolution": lambda: [nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)],
    "strided convolution": lambda: [nn.Conv2d(1, 3, (2, 3), (1, 2)), nn.Flatten(), nn.Linear(9, 2)],
    "three layers": lambda: [
        nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2)
    ],
}  # fmt: skip
SHAPE = (1, 4, 3)


@torch.no_grad()
def ill_conditioned(kind, seed, spread, images):
    """A network whose sums nearly cancel against its large biases on the given images."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(*KINDS[kind]()).eval()
    value = images
    for layer in model:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.weight.copy_(ill_scaled(layer.weight.shape, generator, spread))
            layer.bias.zero_()
            typical = layer(value).transpose(0, 1).flatten(1).mean(dim=1)
            layer.bias.copy_(-typical + torch.randn(len(typical), generator=generator))
        value = layer(value)
    return model


def images_of(seed):
    images = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(seed))
    return torch.cat([images[:1], images[1:].round()])


def excess(margins, exact):
    """The largest margin minus the exact bound, and the largest loss, in units of the largest exact bound."""
    differences = (fractions(margins) - exact).flatten()
    scale = max(abs(value) for value in exact.flatten()) or Fraction(1)
    return max(differences), float(-min(differences) / scale)


@given(st.sampled_from(sorted(KINDS)), seeds(), st.sampled_from([0, 6, 14]))
def test_margins_never_exceed_the_exact_bound(kind, seed, spread):
    images, patch, label = images_of(seed), Patch((2, 1)), seed % 2
    model = ill_conditioned(kind, seed, spread, images)
    exact, labels = exact_margins(model, images, label, patch), torch.tensor([label, label])
    corners = patch.placements(*SHAPE[1:]).corners
    with torch.no_grad(), precise_arithmetic():
        ways = {
            "windows, float32": placement_margins(model, images, labels, patch),
            "windows, float64": placement_margins(model, images, labels, patch, dtype=torch.float64),
            "dense, float32": dense_margins(
                trace(model), images, labels, patch, corners, rounding=Rounding.outward(torch.float32)
            ),
        }
    for way, margins in ways.items():
        above, lost = excess(margins, exact)
        assert above <= 0, f"{way} is {float(above)} above the exact bound"
        assert lost < (0.1 if "32" in way else 1e-9), f"{way} loses {lost}"


@given(st.sampled_from(["one layer", "two layers", "convolution"]), seeds(), st.sampled_from([0, 14]))
def test_layers_never_leave_out_the_exact_bound(kind, seed, spread):
    images = images_of(seed)
    model = ill_conditioned(kind, seed, spread, images)
    box = Interval((images - 0.2).clamp(min=0), (images + 0.1).clamp(max=1))
    first = next(layer for layer in model if isinstance(layer, nn.Linear | nn.Conv2d))
    flat = Box(fractions(box.lower.flatten(1)), fractions(box.upper.flatten(1)))
    if isinstance(first, nn.Conv2d):
        exact = flat.through(*exact_matrix(first, SHAPE))
    else:
        exact = flat.through(fractions(first.weight), fractions(first.bias))
    with torch.no_grad(), precise_arithmetic():
        before_relu = trace(model).intervals(box, Rounding.outward(torch.float32))
    bounds = before_relu[1 if isinstance(first, nn.Conv2d) else 2]
    assert (fractions(bounds.lower.flatten(1)) <= exact.lower).all()
    assert (exact.upper <= fractions(bounds.upper.flatten(1))).all()


@torch.no_grad()
def vanishing_scale(first):
    """A batch norm that multiplies large values by 1e-46, which is 0 in float32; each logit is what is left of one.

    It is the first layer or, behind a convolution, one that windows pass.
    """
    norm, head = nn.BatchNorm2d(1, eps=0.0), nn.Linear(4, 2)
    norm.running_var.fill_(1e38)
    norm.weight.fill_(1e-27)
    enlarge = nn.Conv2d(1, 1, 1, bias=False)
    enlarge.weight.fill_(1e38)
    head.weight.copy_(torch.tensor([[1e8], [0.0]]).expand_as(head.weight))
    head.bias.zero_()
    rest = [nn.Flatten(), head]
    return nn.Sequential(*([norm, enlarge, *rest] if first else [enlarge, norm, *rest])).eval()


@pytest.mark.parametrize("threat", [Patch(2), Patch(1), SparsePixels(3), SparsePixels(3, "per-pixel")])
@pytest.mark.parametrize("first", [True, False])
def test_scales_too_small_for_float32_still_move_what_they_scale(threat, first):
    model, images, labels = vanishing_scale(first), torch.ones(1, 1, 2, 2), torch.tensor([0])
    changed = images.clone()
    changed.flatten()[: 4 if threat == Patch(2) else 1 if threat == Patch(1) else 3] = 0.0
    margin = certify(model, images, labels, threat).margins[0, 1]
    logits = model.double()(changed.double())[0]
    assert margin <= logits[0] - logits[1]


@pytest.mark.parametrize("name", ["mlp", "cnn2", "cnn4"])
def test_a_deployed_forward_pass_is_near_the_real_network(name, generator):
    """What the page on certificates says of the rounding that they do not cover."""
    model = build(ModelSpec(name, 1, 28, 28), generator)
    images = torch.rand(50, 1, 28, 28, generator=generator)
    with torch.no_grad():
        deployed, real = model(images), model.double()(images.double())
    assert 0 < (deployed - real).abs().max() < 1e-6 * real.abs().max()


def near_powers_of_two(seed, count):
    """Float32 numbers a few steps from a power of two, where the distance to the next number changes."""
    generator = torch.Generator().manual_seed(seed)
    powers = 2.0 ** torch.randint(-130, 20, (count,), generator=generator)
    steps = torch.randint(-3, 4, (count,), generator=generator)
    return (powers.view(torch.int32) + steps.int()).clamp(min=0).view(torch.float32)


@given(seeds())
def test_two_units_move_a_margin_past_its_rounding_at_every_power_of_two(seed):
    """Margins of separate logits pay for one difference with the least that suffices."""
    logits, label = near_powers_of_two(seed, 400).reshape(1, -1), torch.tensor([0])
    margins = trace(nn.Sequential(nn.Flatten(), nn.ReLU())).margins(
        Interval.point(logits), label, rounding=Rounding.outward(torch.float32)
    )
    exact = fractions(logits)[:, :1] - fractions(logits)
    assert (fractions(margins) <= exact).all()


@given(seeds())
def test_sums_of_branches_hold_the_exact_sum_at_every_power_of_two(seed):
    terms = [near_powers_of_two(seed + part, 400) * (1 - 2 * part) for part in (0, 1)]
    bounds = Add().interval(*map(Interval.point, terms), rounding=Rounding.outward(torch.float32))
    exact = fractions(terms[0]) + fractions(terms[1])
    assert (fractions(bounds.lower) <= exact).all()
    assert (exact <= fractions(bounds.upper)).all()


@given(st.floats(-1e30, 1e30), seeds())
def test_limits_hold_the_exact_limit_at_every_power_of_two(limit, seed):
    near = near_powers_of_two(seed, 1).double().item() * (1 + limit * 1e-38)
    for level in (limit, near, -near):
        below, above = torch.tensor([[-torch.inf]]), torch.tensor([[torch.inf]])
        layer = nn.Sequential(nn.Hardtanh(level, level + abs(level) + 1))
        lower = trace(layer).bounds(Interval.point(below), rounding=Rounding.outward(torch.float32)).lower
        upper = trace(layer).bounds(Interval.point(above), rounding=Rounding.outward(torch.float32)).upper
        assert Fraction(float(lower)) <= Fraction(level)
        assert Fraction(level + abs(level) + 1) <= Fraction(float(upper))
