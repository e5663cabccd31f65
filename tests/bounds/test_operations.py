"""Every rule contains what it must, is tight where it can be, and is missed when it is wrong."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

import mpmath
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from patchcert.bounds import Interval, Rounding, trace
from patchcert.bounds.network import Network
from patchcert.bounds.operations import Add, Affine, Convolution, Linear, Monotone, Multiply, Operation
from patchcert.errors import UnsupportedLayer
from patchcert.models import Normalize
from patchcert.testing.networks import ResidualBlock, randomise
from strategies import image_batches, image_shapes, networks, seeds

OUTWARD = Rounding.outward(torch.float64)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def box_around(images, seed, reach=0.3):
    """A random box inside [0, 1] that holds the images; some sides are single points."""
    below, above = torch.rand(2, *images.shape, generator=seeded(seed), dtype=images.dtype) * reach
    return Interval((images - below.round(decimals=1)).clamp(min=0), (images + above).clamp(max=1))


def points_of(box, seed, count=6):
    """Corners and inner points of the box."""
    for index in range(count):
        mix = torch.rand(box.shape, generator=seeded(seed + index), dtype=box.lower.dtype)
        yield torch.lerp(box.lower, box.upper, mix if index % 2 else mix.round())


def contains(outer, inner, tolerance=0.0):
    below, above = (outer.lower <= inner.lower + tolerance), (inner.upper <= outer.upper + tolerance)
    return bool(below.all() and above.all())


@st.composite
def networks_with_boxes(draw, **options):
    shape = draw(image_shapes(7))
    network, images = draw(networks(shape, **options)), draw(image_batches(shape))
    return network, box_around(images, draw(seeds()))


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


@given(networks_with_boxes(), seeds())
def test_outward_bounds_hold_the_nearest_ones_and_are_hardly_wider(case, seed):
    model, box = case
    single = copy.deepcopy(model).float()
    narrow = Interval(box.lower.float(), box.upper.float())
    with torch.no_grad():
        exact = trace(model).bounds(Interval(narrow.lower.double(), narrow.upper.double()))
        rounded = trace(single).bounds(narrow, rounding=Rounding.outward(torch.float32))
    assert contains(Interval(rounded.lower.double(), rounded.upper.double()), exact)
    scale = exact.lower.abs().amax() + exact.upper.abs().amax() + 1
    assert float((exact.lower - rounded.lower).max() / scale) < 1e-3


def extreme_point(weight, box, row, upper=True):
    """The corner of the box at which one row of a linear map is largest."""
    takes_upper = (weight[row] > 0) == upper
    return torch.where(takes_upper, box.upper, box.lower)


@given(seeds(), st.integers(1, 12), st.integers(1, 5))
def test_one_linear_layer_attains_its_bounds(seed, inputs, outputs):
    layer = randomise(nn.Linear(inputs, outputs), seeded(seed)).double()
    box = box_around(torch.rand(1, inputs, generator=seeded(seed), dtype=torch.float64), seed)
    with torch.no_grad():
        bounds = trace(layer).bounds(box)
        for row in range(outputs):
            highest = layer(extreme_point(layer.weight, box, row))[0, row]
            lowest = layer(extreme_point(layer.weight, box, row, upper=False))[0, row]
            torch.testing.assert_close(bounds.upper[0, row], highest)
            torch.testing.assert_close(bounds.lower[0, row], lowest)


@given(seeds(), st.sampled_from([(3, 1, 1), (2, 2, 0), (3, 2, 2)]), st.sampled_from([1, 2]))
def test_one_convolution_attains_its_bounds(seed, geometry, dilation):
    kernel, stride, padding = geometry
    layer = nn.Conv2d(2, 3, (kernel, kernel), stride, padding, dilation)
    layer = randomise(layer, seeded(seed)).double()
    box = box_around(torch.rand(1, 2, 7, 6, generator=seeded(seed), dtype=torch.float64), seed)
    bounds = trace(layer).bounds(box)
    weights = torch.autograd.functional.jacobian(lambda image: layer(image)[0], box.centre)
    for place in [(0, 0, 0), (1, 1, 0), (2, -1, -1)]:
        rows = weights[place].flatten(1)
        flat = Interval(box.lower.flatten(1), box.upper.flatten(1))
        corner = extreme_point(rows, flat, 0).reshape(box.shape)
        torch.testing.assert_close(bounds.upper[0][place], layer(corner)[0][place])


@given(seeds(), st.integers(1, 8), st.integers(2, 5))
def test_merged_margins_are_attained_and_no_looser(seed, features, classes):
    layer = randomise(nn.Linear(features, classes), seeded(seed)).double()
    box = box_around(torch.rand(2, features, generator=seeded(seed), dtype=torch.float64), seed)
    labels = torch.tensor([0, classes - 1])
    with torch.no_grad():
        merged, logits = trace(layer).margins(box, labels), trace(layer).bounds(box)
        separate = logits.lower.gather(1, labels[:, None]) - logits.upper
        difference = layer.weight[labels][:, None] - layer.weight
        worst = torch.where(difference > 0, box.lower[:, None], box.upper[:, None])
        reached = (difference * worst).sum(dim=2) + layer.bias[labels][:, None] - layer.bias
    assert (merged >= separate - 1e-12).all()
    torch.testing.assert_close(merged, reached)


def test_normalisation_and_batch_norm_are_bounded_like_the_layers_they_are():
    model = nn.Sequential(Normalize([0.4, 0.1], [0.2, 0.5]), nn.BatchNorm2d(2))
    model = randomise(model, seeded(0)).double()
    box = box_around(torch.rand(1, 2, 3, 3, generator=seeded(1), dtype=torch.float64), 2)
    bounds, ends = trace(model).bounds(box), torch.stack([model(box.lower), model(box.upper)])
    torch.testing.assert_close(bounds.lower, ends.amin(dim=0))
    torch.testing.assert_close(bounds.upper, ends.amax(dim=0))


FORMS = {
    "a x + b": lambda x, a, b: x * a + b,
    "b - a x": lambda x, a, b: b - a * x,
    "x / a - b": lambda x, a, b: x / a - b,
    "-x": lambda x, a, b: -x,
}


class Formed(nn.Module):
    """A form of the image by two constants: numbers, or buffers with one for each channel."""

    def __init__(self, form, first, second):
        super().__init__()
        self.form = form
        for name, constant in (("first", first), ("second", second)):
            if isinstance(constant, float):
                setattr(self, name, constant)
            else:
                self.register_buffer(name, constant)

    def forward(self, images):
        return self.form(images, self.first, self.second)


@pytest.mark.parametrize("name", FORMS)
@given(seeds(), st.sampled_from([1.0, 1e-30, 1e30, 1e-44]), st.booleans())
def test_constants_hold_the_exact_ends_and_nothing_more(name, seed, scale, has_numbers):
    """In fractions, for factors up to those that are hardly numbers of the type."""
    scale = 1e-30 if "/" in name and scale == 1e-44 else scale
    first, second = torch.randn(2, 3, 1, 1, generator=seeded(seed))
    first = first * scale
    box = box_around(torch.rand(1, 3, 2, 2, generator=seeded(seed)), seed)
    if has_numbers:
        first, second = float(first[0]) or 1e-44, float(second[0])
    network = trace(Formed(FORMS[name], first, second))
    bounds = network.bounds(box, rounding=Rounding.outward(torch.float32))
    for place in product(range(3), range(2), range(2)):
        constants = [each if has_numbers else float(each[place[0], 0, 0]) for each in (first, second)]
        reached = [
            FORMS[name](*map(Fraction, (float(end[0][place]), *constants))) for end in (box.lower, box.upper)
        ]
        lower, upper = (Fraction(float(end[0][place])) for end in (bounds.lower, bounds.upper))
        assert lower <= min(reached)
        assert max(reached) <= upper
        size = max(map(abs, (*reached, Fraction(constants[1]) if name != "-x" else 0)))
        assert upper - lower <= max(reached) - min(reached) + size / 2**16 + Fraction(2) ** -90


def test_constants_in_place_are_those_of_their_operators():
    def forward(images):
        changed = images * 1
        changed += 0.5
        changed -= 2
        changed *= 3
        changed /= 7
        return changed.mul_(2).add_(1).sub_(0.25).div_(3)

    images = torch.rand(2, 3, 2, 2, generator=seeded(0))
    model = Formed(lambda images, *_: forward(images), 0.0, 0.0)
    torch.testing.assert_close(trace(model).values(images)[-1], model(images))


@pytest.mark.parametrize("shape", [(2, 1, 1, 1), (4, 1, 1), (2, 2, 3, 2, 2), (1, 3, 2, 5)])
def test_constants_that_tell_images_apart_or_make_more_of_them_are_refused(shape):
    model = Formed(lambda x, a, b: x * a, torch.ones(shape), 0.0)
    with pytest.raises(UnsupportedLayer, match="does not fit results of shape"):
        trace(model).values(torch.rand(2, 3, 2, 2))


@given(seeds(), st.sampled_from(["chunk", "split", "index"]))
def test_picked_values_have_the_bounds_they_had(seed, by):
    takes = {
        "chunk": lambda x: x.chunk(2, dim=1)[1],
        "split": lambda x: x.split((1, 2), dim=-1)[-1],
        "index": lambda x: x[:, 1, 1:],
    }
    box = box_around(torch.rand(2, 4, 3, 3, generator=seeded(seed), dtype=torch.float64), seed)
    network = trace(Formed(lambda x, *_: takes[by](x), 0.0, 0.0))
    bounds = network.bounds(box, rounding=OUTWARD)
    assert torch.equal(bounds.lower, takes[by](box.lower))
    assert torch.equal(bounds.upper, takes[by](box.upper))


def test_pieces_of_the_batch_are_refused():
    with pytest.raises(UnsupportedLayer, match="are split along the batch"):
        trace(Formed(lambda x, *_: x.chunk(2)[0], 0.0, 0.0)).values(torch.rand(2, 3, 2, 2))


class Mean(nn.Module):
    """The mean over height and width, as forward passes write it."""

    def __init__(self, dim, keepdim):
        super().__init__()
        self.dim, self.keepdim = dim, keepdim

    def forward(self, maps):
        return maps.mean(self.dim, self.keepdim)


AXES = st.sampled_from([(2, 3), (3, 2), (-2, -1), (2, -1), (3, -2)])


@given(seeds(), st.tuples(*[st.integers(1, 9)] * 2), AXES, st.booleans(), st.booleans())
def test_a_mean_attains_its_bounds_which_are_those_of_the_pooling(seed, size, dim, keepdim, is_single):
    dtype = torch.float32 if is_single else torch.float64
    images = torch.rand(2, 3, *size, generator=seeded(seed), dtype=dtype)
    box, mean = box_around(images, seed), Mean(dim, keepdim)
    twin = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Identity() if keepdim else nn.Flatten())
    outward = Rounding.outward(dtype)
    for rounding in (outward, Rounding(0.0, 0.0)):
        bounds, pooled = (trace(model).bounds(box, rounding=rounding) for model in (mean, twin))
        assert torch.equal(bounds.lower, pooled.lower)
        assert torch.equal(bounds.upper, pooled.upper)
    bounds = trace(mean).bounds(box, rounding=outward)
    lowest, highest = mean(box.lower.double()), mean(box.upper.double())
    assert contains(bounds, Interval(lowest, highest), 1e-15)
    assert contains(Interval(lowest, highest), bounds, 400 * torch.finfo(dtype).eps)
    for point in points_of(box, seed):
        assert contains(bounds, Interval.point(mean(point.double())), 1e-15)


@given(networks_with_boxes(residual=False), AXES, seeds())
def test_no_point_of_the_box_leaves_the_bounds_of_a_network_with_a_mean(case, dim, seed):
    model, box = case
    maps = nn.Sequential(
        nn.Conv2d(box.shape[1], 4, 1), nn.ReLU(), Mean(dim, keepdim=True), nn.Conv2d(4, box.shape[1], 1)
    )
    attended = ResidualBlock(nn.Identity(), randomise(maps, seeded(seed)).double())
    whole = nn.Sequential(attended, model)
    with torch.no_grad():
        bounds = trace(whole).bounds(box, rounding=OUTWARD)
        for point in points_of(box, seed):
            assert contains(bounds, Interval.point(whole(point)), 1e-12)


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


def test_a_convolution_has_the_same_values_and_gradients_with_channels_last():
    layer = nn.Conv2d(3, 5, 3, padding=1).double()
    images = torch.rand(4, 3, 6, 7, generator=seeded(0), dtype=torch.float64)
    network, found = trace(layer), []
    for memory in (torch.contiguous_format, torch.channels_last):
        output = network.values(images.contiguous(memory_format=memory))[-1]
        assert output.is_contiguous(memory_format=memory)
        found.append((output, *torch.autograd.grad(output.square().sum(), list(layer.parameters()))))
    for plain, last in zip(*found, strict=True):
        torch.testing.assert_close(last, plain)


FUNCTIONS = {
    "elu": (F.elu, lambda x: x if x > 0 else mpmath.expm1(x)),
    "sigmoid": (torch.sigmoid, lambda x: 1 / (1 + mpmath.exp(-x))),
    "tanh": (torch.tanh, mpmath.tanh),
    "log sigmoid": (F.logsigmoid, lambda x: -mpmath.log1p(mpmath.exp(-x))),
    "softsign": (F.softsign, lambda x: x / (1 + abs(x))),
    "hard sigmoid": (F.hardsigmoid, lambda x: min(max(x + 3, 0), 6) / 6),
    "celu": (
        lambda x: F.celu(x, 0.7),
        lambda x: x if x > 0 else mpmath.mpf(0.7) * mpmath.expm1(x / mpmath.mpf(0.7)),
    ),
    "leaky relu": (lambda x: F.leaky_relu(x, 0.01), lambda x: x if x > 0 else mpmath.mpf(0.01) * x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementary_functions_are_as_exact_as_assumed(name, dtype):
    """Within 7 units in the last place, 14 unit roundoffs, or the smallest normal number."""
    function, exact = FUNCTIONS[name]
    spread = torch.rand(300, generator=seeded(0), dtype=torch.float64)
    sizes = torch.cat([10 ** (spread[:200] * 10 - 9), spread[200:] * 80])
    points = torch.cat([sizes, -sizes]).to(dtype)
    information = torch.finfo(dtype)
    with mpmath.workprec(160):
        for point, value in zip(points.tolist(), function(points).tolist(), strict=True):
            truth = exact(mpmath.mpf(point))
            assert abs(value - truth) <= max(7 * information.eps * abs(truth), information.tiny)


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


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.7), (-0.3, 0.3)])
def test_limits_that_are_no_numbers_of_the_type_are_paid_for(low, high):
    """0.1 in float32 lies above the 0.1 of the layer."""
    bounds = trace(nn.Hardtanh(low, high)).bounds(
        Interval.point(torch.tensor([[-5.0, 5.0]])), rounding=Rounding.outward(torch.float32)
    )
    assert float(bounds.lower[0, 0]) <= low
    assert float(bounds.upper[0, 1]) >= high


@pytest.mark.parametrize("layer", [nn.LeakyReLU(6e-46), nn.ELU(6e-46)])
def test_constants_below_the_numbers_of_the_type_are_kept(layer):
    """A slope of 6e-46 is 0 in float32, but times -1e38 it is not."""
    bounds = trace(layer).bounds(
        Interval.point(torch.tensor([[-1e38]])), rounding=Rounding.outward(torch.float32)
    )
    exact = float(layer(torch.tensor([[-1e38]], dtype=torch.float64)))
    assert exact < 0
    assert float(bounds.lower) <= exact <= float(bounds.upper)


def test_numbers_too_small_to_multiply_are_paid_for():
    """A pixel of 1e-39 times a weight of 1e38 is rounded although its error bound underflows."""
    layer = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1e38, -1e38, 3e37]]))
        pixels = torch.tensor([[1e-39, 3e-40, 7e-40]])
        bounds = trace(layer).bounds(Interval.point(pixels), rounding=Rounding.outward(torch.float32))
        exact = float((layer.weight.double() * pixels.double()).sum())
    assert float(bounds.lower) <= exact <= float(bounds.upper)
    assert float(bounds.upper - bounds.lower) > 0


VALLEYS = {
    "gelu": (nn.GELU(), lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2),
    "gelu by tanh": (
        nn.GELU("tanh"),
        lambda x: x / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))),
    ),
    "silu": (nn.SiLU(), lambda x: x / (1 + mpmath.exp(-x))),
    "hardswish": (nn.Hardswish(), lambda x: x * min(max(x + 3, 0), 6) / 6),
    "softplus": (nn.Softplus(), lambda x: x if x > 20 else mpmath.log1p(mpmath.exp(x))),
    "low softplus": (
        nn.Softplus(3, 1),
        lambda x: x if 3 * x > 1 else mpmath.log1p(mpmath.exp(3 * x)) / 3,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", VALLEYS)
def test_functions_that_fall_and_rise_hold_their_exact_values_and_are_tight(name, dtype):
    """Single points of all sizes, and boxes: exact values of a grid inside are held, and the bounds are reached."""
    layer, exact = VALLEYS[name]
    network, rounding = trace(nn.Sequential(layer)), Rounding.outward(dtype)
    sizes = 10 ** (torch.rand(60, generator=seeded(0), dtype=torch.float64) * 11 - 9)
    points = torch.cat([sizes, -sizes, torch.linspace(-900, 900, 41).double()]).to(dtype)
    held = network.bounds(Interval.point(points[None]), rounding=rounding)
    with mpmath.workprec(200):
        for lower, point, upper in zip(
            *(part.flatten().tolist() for part in (held.lower, points, held.upper)), strict=True
        ):
            assert lower <= exact(mpmath.mpf(point)) <= upper
    ends = (torch.rand(2, 40, generator=seeded(1), dtype=torch.float64) * 8 - 5).to(dtype)
    ends = torch.cat(
        [
            ends,
            torch.tensor([[-0.7518, -1.2785, -1.6, 0.2, 19.9], [-0.7517, -1.2784, -1.4, 0.4, 20.1]]).to(
                dtype
            ),
        ],
        1,
    )
    box = Interval(ends.amin(dim=0)[None], ends.amax(dim=0)[None])
    bounds = network.bounds(box, rounding=rounding)
    with mpmath.workprec(100):
        for low, high, lower, upper in zip(
            *(part.flatten().tolist() for part in (box.lower, box.upper, bounds.lower, bounds.upper)),
            strict=True,
        ):
            grid = [mpmath.mpf(low) + (mpmath.mpf(high) - mpmath.mpf(low)) * step / 60 for step in range(61)]
            values = [exact(point) for point in grid]
            assert lower <= min(values)
            assert max(values) <= upper
            loose = 0.7 if name == "low softplus" else 2e-3 * (high - low) ** 2 + 2e-5
            assert min(values) - lower <= loose
            assert upper - max(values) <= loose


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


def made(name, seed, dtype=torch.float64):
    model = nn.Sequential(NEW[name](), nn.Flatten(), nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    model(torch.rand(1, 2, 6, 5))
    return randomise(model, seeded(seed)).to(dtype)


@pytest.mark.parametrize("name", NEW)
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


FUNCTIONAL = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x),
    "hardswish": lambda x: F.hardswish(x),
    "celu": lambda x: F.celu(x, 0.5),
    "softplus": lambda x: F.softplus(x, beta=2.0),
    "largest of parts": lambda x: F.adaptive_max_pool2d(x, (3, 2)),
    "enlarged": lambda x: F.interpolate(x, scale_factor=1.5),
    "enlarged to a size": lambda x: F.interpolate(x, size=(7, 8), mode="nearest"),
    "padded": lambda x: F.pad(F.pad(x, (1, 2)), (0, 1, 2, -1), "constant", 0),
    "turned": lambda x: x.transpose(-1, 2),
    "multiplied in place": lambda x: torch.relu(x).mul_(torch.sigmoid(x)),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functions_are_bounded_like_layers(name):
    model = Branches(FUNCTIONAL[name], nn.Conv2d(2, 2, 3)).double()
    images = torch.rand(2, 2, 6, 5, generator=seeded(0), dtype=torch.float64)
    box = box_around(images, 1)
    with torch.no_grad():
        bounds = trace(model).bounds(box, rounding=OUTWARD)
        for point in points_of(box, 0):
            assert contains(bounds, Interval.point(model(point)), 1e-12)


@given(seeds())
def test_a_product_attains_its_bounds(seed):
    ends = torch.rand(4, 1, 30, generator=seeded(seed), dtype=torch.float64) * 4 - 2
    first = Interval(ends[:2].amin(dim=0), ends[:2].amax(dim=0))
    second = Interval(ends[2:].amin(dim=0), ends[2:].amax(dim=0))
    bounds = Multiply().interval(first, second, rounding=Rounding(0.0, 0.0))
    corners = torch.stack([a * b for a in (first.lower, first.upper) for b in (second.lower, second.upper)])
    torch.testing.assert_close(bounds.lower, corners.amin(dim=0), rtol=0, atol=0)
    torch.testing.assert_close(bounds.upper, corners.amax(dim=0), rtol=0, atol=0)
    mixes = torch.rand(2, 50, 30, generator=seeded(seed), dtype=torch.float64)
    inside = torch.lerp(first.lower, first.upper, mixes[0]) * torch.lerp(second.lower, second.upper, mixes[1])
    assert contains(bounds, Interval(inside, inside), 1e-15)


@given(
    seeds(),
    st.sampled_from([(1, 0, 0, 1), (2, 1, 1, 1), (3, 0, 2, 2), (2, 3, 1, 1)]),
    st.sampled_from([1, 2]),
)
def test_one_transposed_convolution_attains_its_bounds(seed, geometry, groups):
    stride, padding, more, dilation = geometry
    layer = nn.ConvTranspose2d(2, 2, 3, stride, padding, min(more, stride - 1), groups, dilation=dilation)
    box = box_around(torch.rand(1, 2, 5, 4, generator=seeded(seed), dtype=torch.float64), seed)
    layer = layer.double()
    weights = torch.autograd.functional.jacobian(lambda image: layer(image)[0], box.centre).detach()
    highest = ((weights.clamp(min=0) * box.upper + weights.clamp(max=0) * box.lower).flatten(3)).sum(dim=-1)
    with torch.no_grad():
        highest = highest + layer.bias[:, None, None]
        for rounding in (OUTWARD, Rounding(0.0, 0.0)):
            torch.testing.assert_close(trace(layer).bounds(box, rounding=rounding).upper[0], highest)
