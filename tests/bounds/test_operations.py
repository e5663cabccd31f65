"""Every rule contains what it must, is tight where it can be, and is missed when it is wrong."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from boxes import OUTWARD, box_around, contains, networks_with_boxes, points_of
from patchcert.bounds import Interval, Rounding, trace
from patchcert.bounds.network import Network
from patchcert.bounds.operations import Add, Affine, Convolution, Linear, Monotone, Operation
from patchcert.testing.conformance import seeded
from patchcert.testing.networks import randomise
from strategies import seeds


@given(networks_with_boxes(), seeds())
def test_no_point_of_the_box_leaves_the_bounds(case, seed):
    model, box = case
    with torch.no_grad():
        bounds = trace(model).intervals(box, OUTWARD)[-1]
        nearest = trace(model).bounds(box)
        for point in points_of(box, seed):
            assert contains(bounds, Interval.point(model(point)), 1e-12)
            assert contains(nearest, Interval.point(model(point)), 1e-9)


@given(networks_with_boxes(), seeds())
def test_no_point_of_the_box_is_below_the_margins(case, seed):
    model, box = case
    labels = model(box.centre).argmax(dim=1)
    with torch.no_grad():
        margins = trace(model).margins(box, labels, rounding=OUTWARD)
        assert (margins.gather(1, labels[:, None]) == 0).all()
        for point in points_of(box, seed):
            logits = model(point)
            assert (margins <= logits.gather(1, labels[:, None]) - logits + 1e-12).all()


@given(networks_with_boxes(), seeds())
def test_a_larger_box_has_wider_bounds(case, seed):
    model, box = case
    shrink = torch.rand(2, *box.shape, generator=seeded(seed), dtype=torch.float64) * 0.5
    inner = Interval(box.lower + shrink[0] * 2 * box.radius, box.upper - shrink[1] * 2 * box.radius)
    network = trace(model)
    for outside, inside in zip(network.intervals(box), network.intervals(inner), strict=True):
        assert contains(outside, inside, 1e-9)


@given(networks_with_boxes())
def test_a_single_point_gives_the_forward_pass(case):
    model, box = case
    with torch.no_grad():
        logits, network = model(box.centre), trace(model)
        point = Interval.point(box.centre)
        for bounds in (network.bounds(point), network.bounds(point, rounding=OUTWARD)):
            torch.testing.assert_close(bounds.lower, logits, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(bounds.upper, logits, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(network.values(box.centre)[-1], logits, rtol=1e-9, atol=1e-9)


@given(networks_with_boxes())
def test_outward_bounds_hold_the_nearest_ones_and_are_hardly_wider(case):
    model, box = case
    single = copy.deepcopy(model).float()
    narrow = Interval(box.lower.float(), box.upper.float())
    with torch.no_grad():
        exact = trace(model).bounds(Interval(narrow.lower.double(), narrow.upper.double()))
        rounded = trace(single).bounds(narrow, rounding=Rounding.outward(torch.float32))
    assert contains(Interval(rounded.lower.double(), rounded.upper.double()), exact)
    scale = exact.lower.abs().amax() + exact.upper.abs().amax() + 1
    assert float((exact.lower - rounded.lower).max() / scale) < 1e-3


def mutated(network, change):
    """The network with each of its operations replaced by what `change` makes of it."""
    return Network(tuple(replace(step, operation=change(step.operation)) for step in network.steps))


@dataclass(frozen=True)
class UpperOnly(Operation):
    """Forgets the function on the lower side."""

    honest: Monotone

    def forward(self, *inputs):
        return self.honest.forward(*inputs)

    def interval(self, *inputs, rounding):
        return Interval(inputs[0].lower, self.honest.function(inputs[0].upper))


@dataclass(frozen=True)
class OtherRadius(Affine):
    """Sends the centre through the honest operation, and the radius through another map."""

    honest: Affine
    radius: Callable

    def map(self, value, precise):
        return self.honest.map(value, precise)

    def absolute_map(self, value, precise):
        return self.radius(value, precise)

    def offset(self, like):
        return self.honest.offset(like)

    def roundings(self, value):
        return self.honest.roundings(value)


def forgets_padding(layer):
    """Lets the radius reach into the padding: bounds no longer fit the forward pass of a zero border."""
    top, bottom, left, right = layer.geometry.padding

    def radius(value, precise):
        grown = F.pad(value, (left, right, top, bottom), mode="replicate")
        return layer.unpadded().absolute_map(grown, precise)

    return OtherRadius(layer, radius)


MUTANTS = {
    "radius through W": (Linear, lambda layer: OtherRadius(layer, layer.map)),
    "monotone function on the upper side only": (Monotone, UpperOnly),
    "radius in the padding": (Convolution, forgets_padding),
}


def test_operations_have_no_subclasses():
    """What windows and kernels know of an operation would be taken for that of its subclass."""
    with pytest.raises(TypeError, match="Sum extends Add, a final class: extend Operation instead"):
        type("Sum", (Add,), {})


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_neither_sound_nor_tight(name):
    kind, change = MUTANTS[name]
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    model, images = randomise(model, seeded(0)).double(), torch.rand(4, 1, 4, 4, generator=seeded(1)).double()
    box, network = box_around(images, 3), trace(model)
    mutant = mutated(
        network, lambda operation: change(operation) if isinstance(operation, kind) else operation
    )
    honest, wrong = network.intervals(box)[1:], mutant.intervals(box)[1:]
    position = next(i for i, step in enumerate(network.steps) if isinstance(step.operation, kind))
    before = box if position == 0 else honest[position - 1]
    operation = network.steps[position].operation
    reached = [operation.forward(point) for point in points_of(before, 0, 40)]
    sound = all(contains(wrong[position], Interval.point(point), 1e-9) for point in reached)
    tight = contains(honest[position], wrong[position], 1e-9)
    assert not (sound and tight)
    assert all(contains(honest[position], Interval.point(point), 1e-9) for point in reached)


@given(networks_with_boxes(residual=False), st.data())
def test_bounds_can_start_from_any_layer(case, data):
    model, box = case
    network = trace(model)
    labels = torch.zeros(len(box.lower), dtype=torch.long)
    start = data.draw(st.integers(0, len(network.steps)))
    halfway = network.intervals(box)[start]
    whole, continued = network.margins(box, labels), network.margins(halfway, labels, start)
    if start < len(network.steps):
        torch.testing.assert_close(continued, whole)
    assert (continued <= whole + 1e-9).all()


@pytest.mark.parametrize(
    "layer",
    [
        nn.ReLU(),
        nn.ReLU6(),
        nn.Hardtanh(),
        nn.LeakyReLU(0.2),
        nn.ELU(),
        nn.SELU(),
        nn.Sigmoid(),
        nn.Tanh(),
        nn.Hardsigmoid(),
        nn.LogSigmoid(),
        nn.Softsign(),
        nn.CELU(),
        nn.Softplus(),
        nn.GELU(),
        nn.GELU("tanh"),
        nn.SiLU(),
        nn.Hardswish(),
        nn.ZeroPad2d(1),
        nn.AdaptiveMaxPool2d(3),
        nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(16, 2, 3),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.BatchNorm2d(16).eval(),
        nn.Conv2d(16, 2, 1),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_nan_is_never_lost(layer, memory):
    """A NaN that became a number would be certified."""
    value = torch.zeros(2, 16, 4, 4)
    value[0, :, 1, 1] = torch.nan
    value = value.contiguous(memory_format=memory)
    for rounding in (Rounding.outward(torch.float32), Rounding(0.0, 0.0)):
        bounds = trace(nn.Sequential(layer)).bounds(Interval.point(value), rounding=rounding)
        assert bounds.lower[0].isnan().any()
        assert bounds.upper[0].isnan().any()
        assert not bounds.lower[1].isnan().any()


class Branches(nn.Module):
    """What two branches make of one image, put together by a function."""

    def __init__(self, together, *branches):
        super().__init__()
        self.together, self.branches = together, nn.ModuleList(branches)

    def forward(self, images):
        return self.together(*(branch(images) for branch in self.branches))


def squeezed():
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Conv2d(2, 4, 1), nn.SiLU(), nn.Conv2d(4, 2, 1), nn.Sigmoid()
    )


NEW = {
    "cat": lambda: Branches(lambda a, b: torch.cat([a, b], 1), nn.Conv2d(2, 3, 3, padding=1), nn.Identity()),
    "cat by keywords": lambda: Branches(
        lambda a, b: torch.cat(tensors=(a, b), dim=-3), nn.Conv2d(2, 3, 3, padding=1), nn.ReLU()
    ),
    "cat of rows": lambda: Branches(lambda a, b: torch.cat([a, b], 2), nn.MaxPool2d((2, 1)), nn.Identity()),
    "squeeze-excite": lambda: Branches(lambda a, b: a * b, nn.Conv2d(2, 2, 3, padding=1), squeezed()),
    "expanded": lambda: Branches(lambda a, b: a.mul(b.expand_as(a)), nn.Conv2d(2, 2, 3), squeezed()),
    "product": lambda: Branches(torch.mul, nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)),
    "permute": lambda: Branches(lambda a: a.permute(0, 3, 1, 2).transpose(2, 3), nn.Conv2d(2, 2, 3)),
    "zero pad": lambda: nn.Sequential(nn.ZeroPad2d((1, 0, 2, -1)), nn.Conv2d(2, 2, 3)),
    "largest of parts": lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.AdaptiveMaxPool2d((3, 2))),
    "upsample": lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2, 2, 3)),
    "upsample to a size": lambda: nn.Sequential(nn.Upsample((5, 9)), nn.Conv2d(2, 2, 3)),
    "transposed": lambda: nn.ConvTranspose2d(2, 4, (3, 2), (2, 3), (1, 0), (1, 1), 2, dilation=2),
    "transposed, no bias": lambda: nn.ConvTranspose2d(2, 3, 3, 1, 2, bias=False),
    "sync batch norm": lambda: nn.Sequential(nn.SyncBatchNorm(2), nn.ReLU()),
    "celu": lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.CELU(0.5)),
    "silu": lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.SiLU()),
    "hardswish": lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.Hardswish()),
}


FUNCTIONS_OF_MAPS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu function": lambda x: F.silu(x),
    "hardswish function": lambda x: F.hardswish(x),
    "celu function": lambda x: F.celu(x, 0.5),
    "softplus": lambda x: F.softplus(x, beta=2.0),
    "largest of parts by a function": lambda x: F.adaptive_max_pool2d(x, (3, 2)),
    "enlarged": lambda x: F.interpolate(x, scale_factor=1.5),
    "enlarged to a size": lambda x: F.interpolate(x, size=(7, 8), mode="nearest"),
    "padded": lambda x: F.pad(F.pad(x, (1, 2)), (0, 1, 2, -1), "constant", 0),
    "turned": lambda x: x.transpose(-1, 2),
    "multiplied in place": lambda x: torch.relu(x).mul_(torch.sigmoid(x)),
}


def made(name, seed, dtype=torch.float64):
    first = (
        Branches(FUNCTIONS_OF_MAPS[name], nn.Conv2d(2, 2, 3)) if name in FUNCTIONS_OF_MAPS else NEW[name]()
    )
    model = nn.Sequential(first, nn.Flatten(), nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    model(torch.rand(1, 2, 6, 5))
    return randomise(model, seeded(seed)).to(dtype)


@pytest.mark.parametrize("name", [*NEW, *FUNCTIONS_OF_MAPS])
@given(seeds())
@settings(max_examples=8)
def test_new_operations_hold_all_points_and_one_point_is_the_forward_pass(name, seed):
    model = made(name, seed)
    images = torch.rand(2, 2, 6, 5, generator=seeded(seed), dtype=torch.float64)
    box, network = box_around(images, seed), trace(model, (2, 6, 5))
    single = copy.deepcopy(model).float()
    narrow = Interval(box.lower.float(), box.upper.float())
    with torch.no_grad():
        bounds = network.bounds(box, rounding=OUTWARD)
        exact = network.bounds(Interval(narrow.lower.double(), narrow.upper.double()))
        rounded = trace(single, (2, 6, 5)).bounds(narrow, rounding=Rounding.outward(torch.float32))
        for point in points_of(box, seed):
            assert contains(bounds, Interval.point(model(point)), 1e-12)
        for rounding in (OUTWARD, Rounding(0.0, 0.0)):
            point = network.bounds(Interval.point(images), rounding=rounding)
            torch.testing.assert_close(point.lower, model(images), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(point.upper, model(images), rtol=1e-9, atol=1e-9)
    assert contains(Interval(rounded.lower.double(), rounded.upper.double()), exact)
    assert float((exact.lower - rounded.lower).max()) < 1e-3 * (1 + float(exact.lower.abs().max()))
