"""A network restricted to what some pixels move is the whole network there, and has its linear bounds."""

import copy

import pytest
import torch
from hypothesis import event, given
from torch import nn

import patchcert as pc
from boxes import OUTWARD
from patchcert.bounds import Interval, precise_arithmetic, trace
from patchcert.bounds import restriction as restrictions
from patchcert.bounds.linear import BackwardPass
from patchcert.bounds.restriction import Restriction
from patchcert.certificates.refinement import Limits
from patchcert.testing.networks import linear
from patchcert.threats.patch import stamp_cells
from patchcert.windows.dense import dense_linear_margins
from patchcert.windows.linear_placements import linear_placement_margins
from strategies import cases, seeds


def clean_intervals(network, images):
    return network.intervals(Interval.point(images), OUTWARD)


@torch.no_grad()
@given(cases(dtype=torch.float64), seeds())
def test_it_computes_what_the_whole_network_computes(case, seed):
    network, generator = trace(case.model), torch.Generator().manual_seed(seed)
    corners = case.threat.placements(*case.images.shape[2:]).corners
    corner = corners[int(torch.randint(len(corners), (), generator=generator))]
    pixels = stamp_cells(case.threat, corner[None], case.images.shape[1:])[0]
    found = Restriction.of(network, case.images, pixels)
    event(f"restricted: {found is not None}")
    if found is None:
        pools = (nn.MaxPool2d, nn.AdaptiveMaxPool2d)
        assert any(isinstance(layer, pools) for layer in case.model.modules())
        return
    small = found.network(clean_intervals(network, case.images), OUTWARD)
    values = torch.rand(len(case.images), len(pixels), generator=generator, dtype=torch.float64)
    expected = case.model(found.filled(case.images, values))
    torch.testing.assert_close(small.values(values)[-1], expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@given(cases(dtype=torch.float64))
def test_bounds_at_every_placement_are_those_of_whole_images(case):
    network = trace(case.model)
    corners = case.threat.placements(*case.images.shape[2:]).corners[:6]
    given_ = (network, case.images, case.labels, case.threat, corners, OUTWARD)
    found, expected = linear_placement_margins(*given_), dense_linear_margins(*given_)
    assert (found >= expected - 1e-8 * (1 + expected.abs())).all()
    limits = Limits.of(network, case.images)
    event(f"layers by their intervals: {len(limits.by_interval)}")
    if not limits.by_interval:  # matrices have rules for more layers
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_the_networks_of_the_zoo_have_the_bounds_of_whole_images():
    chosen = pc.load_dataset("mnist-mini").split("test")[torch.arange(3)]
    patch = pc.Patch(5)
    corners = patch.placements(28, 28).corners[[0, 23, 300, 575]]
    for name in ("mnist-5x5-cnn2", "mnist-5x5-cnn4", "mnist-5x5-mlp"):
        network = trace(copy.deepcopy(pc.load(name)).double())
        given_ = (network, chosen.floats().double(), chosen.labels, patch, corners, OUTWARD)
        torch.testing.assert_close(
            linear_placement_margins(*given_), dense_linear_margins(*given_), rtol=1e-8, atol=1e-8
        )


@torch.no_grad()
def test_only_what_moves_is_in_it():
    network = trace(copy.deepcopy(pc.load("mnist-5x5-cnn2")).double())
    images, patch = torch.rand(1, 1, 28, 28, dtype=torch.float64), pc.Patch(5)
    pixels = stamp_cells(patch, torch.tensor([[10, 10]]), images.shape[1:])[0]
    found = Restriction.of(network, images, pixels)
    sizes = [len(piece.places) for piece in found.pieces if piece.matrices]
    whole = [value.numel() for value in network.values(images)]
    assert sizes[0] <= 4 * 16 < whole[1]
    assert sizes[1] <= 8 * 16 < whole[3]
    assert sizes[-1] == 10


@torch.no_grad()
def test_logits_that_no_pixel_moves_are_those_of_the_image():
    weight = torch.zeros(2, 1, 3, 3)
    weight[0, 0, 0, 0] = 1.0
    network = trace(
        nn.Sequential(nn.Flatten(), linear(weight, [0.5, 0.0]), nn.ReLU(), nn.Linear(2, 2)).double()
    )
    images = torch.rand(2, 1, 3, 3, dtype=torch.float64)
    found = Restriction.of(network, images, torch.tensor([7, 8]))
    small = found.network(clean_intervals(network, images), OUTWARD)
    assert len(small.steps) == 1
    torch.testing.assert_close(
        small.values(torch.rand(2, 2, dtype=torch.float64))[-1], network.values(images)[-1]
    )


@pytest.mark.parametrize("weight", [torch.nan, torch.inf, 1e-310])
@torch.no_grad()
def test_weights_that_are_no_ordinary_numbers_are_left_to_whole_images(weight):
    scale = nn.BatchNorm2d(1)
    scale.weight.fill_(1.0)
    network_of = nn.Sequential(scale, nn.Flatten(), nn.Linear(9, 2)).double().eval()
    scale.weight.fill_(weight)
    images = torch.rand(1, 1, 3, 3, dtype=torch.float64)
    assert Restriction.of(trace(network_of), images, torch.tensor([4])) is None


@torch.no_grad()
def test_large_matrices_are_left_to_whole_images(monkeypatch):
    network = trace(nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 2)).double())
    images = torch.rand(1, 1, 3, 3, dtype=torch.float64)
    assert Restriction.of(network, images, torch.tensor([4])) is not None
    monkeypatch.setattr(restrictions, "_MOST_WEIGHTS", 7)
    assert Restriction.of(network, images, torch.tensor([4])) is None


@torch.no_grad()
def test_lines_of_bent_units_alone_are_those_of_all():
    """A pass for gradients draws the lines of all units, one without those of bent ones; a NaN is never dropped."""
    generator = torch.Generator().manual_seed(3)
    operation = trace(nn.Sequential(nn.ReLU())).steps[0].operation
    middle = 10 * torch.randn(5, 2, 3, generator=generator, dtype=torch.float64)
    box = Interval(middle - 1.0, middle + 1.0)
    assert 0 < ((box.lower < 0) & (box.upper > 0)).sum() < middle.numel() / 4
    forms = torch.randn(4, 5, 3, 2, generator=generator, dtype=torch.float64).permute(1, 0, 3, 2)
    for slope in (
        None,
        torch.rand(5, 1, 2, 3, generator=generator),
        torch.rand(5, 4, 2, 3, generator=generator),
    ):
        slope = slope if slope is None else slope.double()
        alone = operation.backward(forms, box, slope=slope, rounding=OUTWARD)
        with torch.enable_grad():
            whole = operation.backward(forms, box, slope=slope, rounding=OUTWARD)
        assert alone.coefficients[0].equal(whole.coefficients[0])
        torch.testing.assert_close(alone.constant, whole.constant)
        torch.testing.assert_close(alone.error, whole.error)
    for part in (box.lower, box.upper):
        part[1, 0, 2] = torch.nan
        assert operation.backward(forms, box, slope=None, rounding=OUTWARD).constant[1].isnan().all()
        part[1, 0, 2] = 1.0


@torch.no_grad()
def test_curves_are_followed_more_closely_than_by_their_intervals():
    """Both logits see the same unit: intervals let it move against itself."""
    for layer in (nn.Sigmoid(), nn.Tanh(), nn.LeakyReLU(0.1), nn.Hardtanh(), nn.ELU()):
        first = linear(torch.tensor([[1.0, 1.0]]), [-1.0])
        model = nn.Sequential(
            nn.Flatten(), first, layer, linear(torch.tensor([[1.0], [0.0]]), [0.0, 0.0])
        ).double()
        network = trace(model)
        # The margin is f(x + y - 1) against 0.2 (x + y - 1): a skip connection in the form of a second box of pixels.
        box = Interval(torch.zeros(1, 1, 1, 2).double(), torch.ones(1, 1, 1, 2).double())
        intervals = network.intervals(box, OUTWARD)
        forms = torch.tensor([[[1.0, -1.0]]], dtype=torch.float64)
        found = BackwardPass(network, intervals, rounding=OUTWARD).bound(forms, len(network.steps))
        assert found.carried.by_interval == ()
        slope = found.carried.image.flatten()
        assert (slope > 0).all()
        points = torch.rand(200, 1, 1, 2, generator=torch.Generator().manual_seed(1)).double()
        line = (points.flatten(1) @ slope) + found.carried.constant
        logits = model(points)
        gap = (logits[:, 0] - logits[:, 1]) - line.flatten()
        assert gap.min() >= -1e-12
        chord = float((intervals[3].upper - intervals[3].lower) / 2)
        assert gap.min() <= 2 * chord / 64 + 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@torch.no_grad()
def test_what_a_gpu_computes_is_the_same_up_to_rounding():
    chosen, patch = pc.load_dataset("mnist-mini").split("test")[torch.arange(3)], pc.Patch(5)
    corners = patch.placements(28, 28).corners[[0, 300]]
    found = {}
    for device in ("cpu", "cuda"):
        network = trace(copy.deepcopy(pc.load("mnist-5x5-cnn2")).double().to(device))
        images, labels = chosen.floats().double().to(device), chosen.labels.to(device)
        with precise_arithmetic():
            found[device] = linear_placement_margins(network, images, labels, patch, corners, OUTWARD)
    torch.testing.assert_close(found["cuda"].cpu(), found["cpu"], rtol=1e-8, atol=1e-8)
