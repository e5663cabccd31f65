"""What a linear rule claims of a layer holds in fractions, at the worst values of its input, however ill scaled."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from exact import exact_matrix, fractions, ill_scaled
from patchcert.bounds import Interval, Rounding, precise_arithmetic, trace
from patchcert.bounds.linear import linear_margins
from patchcert.bounds.mixture import Mixture
from patchcert.bounds.reduction import reduced
from patchcert.bounds.restriction import Restriction
from patchcert.testing.networks import ResidualBlock
from strategies import seeds
from written_models import model_of

FLOAT32, FLOAT64 = Rounding.outward(torch.float32), Rounding.outward(torch.float64)


def some_box(shape, generator, spread):
    one, other = (ill_scaled(shape, generator, spread) for _ in range(2))
    return Interval(torch.minimum(one, other), torch.maximum(one, other))


def claim(pulled, row, form):
    """The constant and the error of one form, in fractions."""
    return Fraction(float(pulled.constant[row, form])), Fraction(float(pulled.error[row, form]))


LAYERS = {
    "linear": (lambda: nn.Linear(7, 5), (7,)),
    "convolution": (lambda: nn.Conv2d(2, 3, (2, 3), (1, 2), 1), (2, 3, 4)),
    "groups": (lambda: nn.Conv2d(2, 4, 2, groups=2, dilation=2, bias=False), (2, 4, 3)),
    "average": (lambda: nn.AvgPool2d(2, 1, 1), (2, 3, 3)),
}


@torch.no_grad()
@given(st.sampled_from(sorted(LAYERS)), seeds(), st.sampled_from([0, 6, 14]))
def test_affine_layers_lose_no_more_than_their_error_on_either_side(kind, seed, spread):
    generator, (make, shape) = torch.Generator().manual_seed(seed), LAYERS[kind]
    layer = make().eval()
    for parameter in layer.parameters():
        parameter.copy_(ill_scaled(parameter.shape, generator, spread))
    operation = trace(nn.Sequential(layer)).steps[0].operation
    box = some_box((2, *shape), generator, spread)
    outputs = operation.forward(box.lower)
    forms = ill_scaled((2, 2, *outputs.shape[1:]), generator, spread)
    with precise_arithmetic():
        pulled = operation.backward(forms, box, slope=None, rounding=FLOAT32)
    matrix, offset = exact_matrix(layer, shape)
    lower, upper = (fractions(part.flatten(1)) for part in (box.lower, box.upper))
    for row in range(2):
        for form in range(2):
            exact = fractions(forms[row, form].flatten())
            apart = exact @ matrix - fractions(pulled.coefficients[0][row, form].flatten())
            ends = apart * lower[row], apart * upper[row]
            constant, error = claim(pulled, row, form)
            left = exact @ offset - constant
            assert np.minimum(*ends).sum() + left >= -2 * error
            assert np.maximum(*ends).sum() + left <= 2 * error


@torch.no_grad()
@given(seeds(), st.sampled_from([0, 6, 14]), st.sampled_from(["half", "given", "none"]))
def test_lines_of_a_relu_hold_at_both_ends_and_at_the_bend(seed, spread, kind):
    generator = torch.Generator().manual_seed(seed)
    operation = trace(nn.Sequential(nn.ReLU())).steps[0].operation
    box, forms = some_box((2, 9), generator, spread), ill_scaled((2, 3, 9), generator, spread)
    slopes = {
        "half": torch.full((2, 1, 9), 0.5),
        "given": torch.rand(2, 3, 9, generator=generator),
        "none": None,
    }
    pulled = operation.backward(forms, box, slope=slopes[kind], rounding=FLOAT32)
    lower, upper = fractions(box.lower), fractions(box.upper)
    zero = np.clip(0, lower, upper)
    for row in range(2):
        for form in range(3):
            before, after = fractions(forms[row, form]), fractions(pulled.coefficients[0][row, form])
            worst = [before * np.maximum(z, 0) - after * z for z in (lower[row], zero[row], upper[row])]
            constant, error = claim(pulled, row, form)
            assert np.minimum.reduce(worst).sum() >= constant - 2 * error


@torch.no_grad()
@given(seeds(), st.sampled_from([0, 6]))
def test_lines_of_a_relu_touch_it(seed, spread):
    """The chord meets both ends, the lower line the bend: a lazy line would not."""
    generator = torch.Generator().manual_seed(seed)
    operation = trace(nn.Sequential(nn.ReLU())).steps[0].operation
    box = Interval(
        -torch.rand(1, 9, generator=generator).double() - 0.1,
        torch.rand(1, 9, generator=generator).double() + 0.1,
    )
    forms = -torch.rand(1, 1, 9, generator=generator).double() * 2.0**spread
    pulled = operation.backward(forms, box, slope=None, rounding=FLOAT64)
    for z in (box.lower, box.upper):
        line = (pulled.coefficients[0][0, 0] * z).sum() + pulled.constant[0, 0]
        assert float(line) == pytest.approx(float((forms[0, 0] * z.relu()).sum()), rel=1e-9)
    assert operation.backward(-forms, box, slope=None, rounding=FLOAT64).constant == 0


PIECEWISE = {
    "leaky": (nn.LeakyReLU(0.3), (0,), lambda z: z if z > 0 else Fraction(0.3) * z),
    "clipped": (nn.Hardtanh(0.0, 1.0), (0, 1), lambda z: min(max(z, 0), 1)),
    "clipped where float32 has no number": (
        nn.Hardtanh(-0.1, 0.7),
        (-0.1, 0.7),
        lambda z: min(max(z, Fraction(-0.1)), Fraction(0.7)),
    ),
    "six": (nn.ReLU6(), (0, 6), lambda z: min(max(z, 0), 6)),
}


@torch.no_grad()
@given(st.sampled_from(sorted(PIECEWISE)), seeds(), st.sampled_from([0, 6, 14]))
def test_lines_around_a_bent_function_hold_at_its_kinks_and_at_both_ends(kind, seed, spread):
    generator, (layer, kinks, exact) = torch.Generator().manual_seed(seed), PIECEWISE[kind]
    operation = trace(nn.Sequential(layer)).steps[0].operation
    box, forms = some_box((2, 9), generator, spread), ill_scaled((2, 3, 9), generator, spread)
    pulled = operation.backward(forms, box, slope=None, rounding=FLOAT32)
    lower, upper, apply = fractions(box.lower), fractions(box.upper), np.vectorize(exact, otypes=[object])
    for row in range(2):
        points = [
            lower[row],
            upper[row],
            *(np.clip(Fraction(kink), lower[row], upper[row]) for kink in kinks),
        ]
        for form in range(3):
            before, after = fractions(forms[row, form]), fractions(pulled.coefficients[0][row, form])
            worst = [before * apply(point) - after * point for point in points]
            constant, error = claim(pulled, row, form)
            assert np.minimum.reduce(worst).sum() >= constant - 2 * error


MOVES = {
    "joined": (lambda first, second: torch.cat([first, second], dim=1), 2),
    "permuted": (lambda first: first.permute(0, 2, 3, 1), 1),
    "padded": (lambda first: torch.nn.functional.pad(first, (1, 0, 2, -1)), 1),
    "repeated": (lambda first: torch.nn.functional.interpolate(first, scale_factor=2.0), 1),
    "picked": (lambda first: first[:, 1:], 1),
}


@torch.no_grad()
@given(st.sampled_from(sorted(MOVES)), seeds(), st.sampled_from([0, 6, 14]))
def test_values_that_are_moved_lose_no_more_than_their_error(kind, seed, spread):
    generator, (move, count) = torch.Generator().manual_seed(seed), MOVES[kind]
    operation = trace(model_of(lambda s, x: move(*[x, x.relu()][:count]))).steps[-1].operation
    boxes = [some_box((1, 2, 3, 2), generator, spread) for _ in range(count)]
    forms = ill_scaled((1, 2, *operation.forward(*(box.lower for box in boxes)).shape[1:]), generator, spread)
    pulled = operation.backward(forms, *boxes, slope=None, rounding=FLOAT32)
    numbers = [torch.arange(12.0).reshape(1, 2, 3, 2) + 12 * place + 1 for place in range(count)]
    taken = operation.forward(*numbers).flatten().long().tolist()
    for form in range(2):
        exact = np.full(12 * count + 1, Fraction(0))
        for place, coefficient in zip(taken, fractions(forms[0, form].flatten()), strict=True):
            exact[place] += coefficient
        found = np.concatenate([fractions(part[0, form].flatten()) for part in pulled.coefficients])
        largest = np.concatenate([fractions(box.magnitude.flatten()) for box in boxes])
        assert claim(pulled, 0, form)[0] == 0
        assert (np.abs(exact[1:] - found) * largest).sum() <= 2 * claim(pulled, 0, form)[1]


@torch.no_grad()
@given(seeds(), st.sampled_from([0, 6, 14]), st.booleans())
def test_mixtures_hold_in_fractions(seed, spread, is_shared):
    generator = torch.Generator().manual_seed(seed)
    weights = tuple(ill_scaled((2 - is_shared, 4, size), generator, spread) for size in (3, 5))
    offset, error = ill_scaled((2, 4), generator, spread), ill_scaled((2, 4), generator, spread).abs() * 1e-3
    mixture = Mixture(weights, offset, error)
    boxes = [some_box((2, size), generator, spread) for size in (3, 5)]
    forms = ill_scaled((2, 2, 4), generator, spread)
    pulled, interval = (
        mixture.backward(forms, *boxes, slope=None, rounding=FLOAT32),
        mixture.interval(*boxes, rounding=FLOAT32),
    )
    for row in range(2):
        matrices = [fractions(weight[0 if is_shared else row]) for weight in weights]
        ends = [(fractions(box.lower[row]), fractions(box.upper[row])) for box in boxes]
        least = sum(
            np.minimum(matrix * low, matrix * high).sum(axis=1)
            for matrix, (low, high) in zip(matrices, ends, strict=True)
        )
        assert (
            fractions(interval.lower[row]) <= least + fractions(offset[row]) - fractions(error[row])
        ).all()
        for form in range(2):
            exact = fractions(forms[row, form])
            constant, lost = claim(pulled, row, form)
            total = exact @ fractions(offset[row]) - np.abs(exact) @ fractions(error[row]) - constant
            for place, (matrix, (low, high)) in enumerate(zip(matrices, ends, strict=True)):
                apart = exact @ matrix - fractions(pulled.coefficients[place][row, form])
                total += np.minimum(apart * low, apart * high).sum()
            assert total >= -2 * lost


def exact_value(layer, value):
    if isinstance(layer, nn.Sequential):
        for each in layer:
            value = exact_value(each, value)
    elif isinstance(layer, nn.Linear):
        return fractions(layer.weight) @ value + fractions(layer.bias)
    elif isinstance(layer, nn.ReLU):
        return np.maximum(value, 0)
    elif isinstance(layer, ResidualBlock):
        return exact_value(layer.branch, value) + exact_value(layer.shortcut, value)
    return value


def exact_margin(model, corner, label):
    """The margins of linear layers, ReLUs and skip connections in fractions."""
    value = exact_value(model, fractions(corner.flatten()))
    return value[label] - value


CHAINS = {
    "linear": lambda: [nn.Linear(4, 5), nn.Linear(5, 3)],
    "skip": lambda: [ResidualBlock(nn.Linear(4, 4), nn.Identity()), nn.Linear(4, 3)],
    "relu": lambda: [nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)],
}


@torch.no_grad()
@given(st.sampled_from(sorted(CHAINS)), seeds(), st.sampled_from([0, 6, 14]))
def test_bounds_of_networks_that_nearly_cancel_hold_at_every_corner(kind, seed, spread):
    """Without ReLUs the bound is attained at a corner, so that nothing but its own rounding keeps it below.

    The last bias makes the least margins nearly 0, much smaller than what they are sums of.
    """
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), *CHAINS[kind]())
    for parameter in model.parameters():
        parameter.copy_(ill_scaled(parameter.shape, generator, spread))
    corners = [torch.tensor([number >> bit & 1 for bit in range(4)]).float() for number in range(16)]
    rough = np.minimum.reduce([exact_margin(model, corner, 1) for corner in corners])
    model[-1].bias += torch.tensor(rough.astype(float), dtype=torch.float32)
    exact = np.minimum.reduce([exact_margin(model, corner, 1) for corner in corners])
    for dtype in (torch.float32, torch.float64):
        box = Interval(torch.zeros(1, 1, 2, 2, dtype=dtype), torch.ones(1, 1, 2, 2, dtype=dtype))
        targets, network = torch.tensor([[0, 2]]), trace(model.to(dtype))
        lower = linear_margins(network, box, torch.tensor([1]), targets, 3, Rounding.outward(dtype))
        for place, target in enumerate((0, 2)):
            assert Fraction(float(lower[0, place])) <= exact[target]
            if kind != "relu" and dtype == torch.float64:
                scale = sum(float(parameter.abs().sum()) for parameter in model.parameters()) ** 2
                assert float(exact[target]) - float(lower[0, place]) <= 1e-9 * scale


@torch.no_grad()
@given(seeds(), st.sampled_from([0, 6, 14]))
def test_reduced_networks_are_the_whole_within_their_error(seed, spread):
    """Followed unit by unit in fractions, every mixture is off by its error at most."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)
    )
    for parameter in model.parameters():
        parameter.copy_(ill_scaled(parameter.shape, generator, spread))
    image = torch.rand(1, 1, 2, 2, generator=generator)
    box = Interval(image.clone(), image.clone())
    box.lower[..., 0], box.upper[..., 0] = 0.0, 1.0
    small = reduced(trace(model), box, torch.tensor([1]), torch.tensor([[0, 2]]), 3, FLOAT32)
    for number in range(4):
        free = torch.tensor([[float(number & 1), float(number >> 1)]])
        member = small.filled(torch.tensor([0]), image, free)
        exact = exact_margin(model, member, 1)[[0, 2]]
        values, off = followed(small.network, free)
        assert (np.abs(values - exact) <= off).all()


def followed(network, free):
    """The outputs of mixtures and ReLUs in fractions, and how far they can be off, as their errors add up."""
    values, off = [fractions(free[0])], [np.full(free.shape[1], Fraction(0))]
    for step in network.steps:
        if not isinstance(step.operation, Mixture):
            values.append(np.maximum(values[step.inputs[0]], 0))
            off.append(off[step.inputs[0]])
            continue
        total, error = fractions(step.operation.offset[0]), fractions(step.operation.error[0])
        for index, weight in zip(step.inputs, step.operation.weights, strict=True):
            matrix = fractions(weight[0])
            total, error = total + matrix @ values[index], error + np.abs(matrix) @ off[index]
        values.append(total)
        off.append(error)
    return values[-1], off[-1]


@torch.no_grad()
@given(seeds(), st.sampled_from([0, 6, 14]))
def test_restricted_networks_are_the_whole_within_their_error(seed, spread):
    """Whatever the pixels are; every error is at least half of what it stands for."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Flatten(),
        ResidualBlock(nn.Linear(4, 4), nn.Identity()),
        nn.ReLU(),
        nn.Linear(4, 4),
        nn.ReLU(),
        nn.Linear(4, 3),
    )
    for parameter in model.parameters():
        parameter.copy_(ill_scaled(parameter.shape, generator, spread))
    image, network = torch.rand(1, 1, 2, 2, generator=generator), trace(model)
    found = Restriction.of(network, image, torch.tensor([1, 3]))
    small = found.network(network.intervals(Interval.point(image), FLOAT32), FLOAT32)
    for number in range(4):
        free = torch.tensor([[float(number & 1), float(number >> 1)]])
        exact = exact_value(model, fractions(found.filled(image, free).flatten()))
        values, off = followed(small, free)
        assert (np.abs(values - exact) <= 2 * off).all()
