"""Certificates: what they hold, what is never certified, and what is refused with which words."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import patchcert as pc
from patchcert.bounds import Interval
from patchcert.bounds.lowering import LAYER_RULES
from patchcert.bounds.operations import Operation
from patchcert.certificates import Certificates
from patchcert.errors import InvalidInput, ModelError
from patchcert.testing.networks import constant, randomise

SHAPE = (1, 4, 5)


def network(seed=0, dtype=torch.float32, channels=1, gain=0.3):
    layers = nn.Conv2d(channels, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(60, 3)
    model = randomise(nn.Sequential(*layers), torch.Generator().manual_seed(seed), gain).to(dtype)
    with torch.no_grad():
        model[-1].bias.copy_(torch.tensor([0.6, 0.0, -0.3]))
    return model


def batch(count=4, shape=SHAPE, dtype=torch.float32):
    images = torch.rand(count, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return images, torch.zeros(count, dtype=torch.long)


def test_certificates_say_what_is_proven():
    model, (images, labels) = network(), batch()
    certificates = pc.certify(model, images, labels, pc.Patch(2))
    assert certificates.certified.all()
    assert certificates.certified.dtype == torch.bool
    assert certificates.margins.shape == (4, 3)
    assert (certificates.margins[:, 0] == 0).all()
    assert (certificates.margins[:, 1:] > 0).all()
    assert torch.equal(certificates.predictions, model(images).argmax(dim=1))
    assert torch.equal(certificates.labels, labels)
    assert certificates.clean_accuracy == certificates.certified_accuracy == 1.0
    assert torch.equal(certificates.least_margin, certificates.margins[:, 1:].amin(dim=1))
    assert repr(certificates) == "Certificates(4 images, 4 right, 4 certified: recovery, deterministic)"
    placements = pc.Patch(2).placements(*SHAPE[1:]).corners.tolist()
    assert all(corner in placements for corner in certificates.worst_placement.tolist())


def test_accuracies_are_shares_of_the_images():
    flags = torch.tensor([True, False, True, False])
    labels = torch.tensor([0, 1, 1, 2])
    certificates = Certificates(flags, torch.tensor([0, 1, 1, 1]), labels)
    assert certificates.certified_accuracy == 0.5
    assert certificates.clean_accuracy == 0.75


def test_wrong_labels_are_not_certified_and_their_margins_are_negative():
    model, (images, labels) = network(), batch()
    certificates = pc.certify(model, images, labels + 1, pc.Patch(1))
    assert not certificates.certified.any()
    assert (certificates.least_margin < 0).all()
    assert certificates.clean_accuracy == 0


@pytest.mark.parametrize("threat", [pc.Patch(1), pc.SparsePixels(1)], ids=str)
@pytest.mark.parametrize("logits", [[0.0, 0.0], [2.0, 2.0, 1.0]])
def test_a_tie_is_no_proof(logits, threat):
    certificates = pc.certify(constant(SHAPE, logits), *batch(), threat)
    assert certificates.clean_accuracy == 1
    assert not certificates.certified.any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["0.weight", "0.bias", "3.weight", "3.bias"])
@pytest.mark.parametrize("verdicts_only", [False, True])
def test_networks_that_are_not_finite_are_not_certified(place, value, verdicts_only):
    model, (images, labels) = network(), batch()
    with torch.no_grad():
        model.get_parameter(place).view(-1)[-1] = value
    bounds = pc.IntervalBounds(model, verdicts_only=verdicts_only)
    assert not bounds.certify(images, labels, pc.Patch(2)).certified.any()
    assert not bounds.certify(images, labels, pc.SparsePixels(1)).certified.any()
    for subject in (model, bounds, pc.DoubleMasking(model, pc.Patch(2))):
        with pytest.raises(ModelError, match=f"{place} of the model holds NaN or infinities"):
            pc.certify(subject, images, labels, pc.Patch(2))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Hardtanh(), nn.Sigmoid(), nn.MaxPool2d(2)])
def test_overflow_in_the_bounds_alone_is_not_certified(activation):
    """Clean images give finite logits; only what a patch could do is too large for the type."""
    model = nn.Sequential(nn.Conv2d(1, 4, 1, bias=False), activation, nn.Flatten(), nn.LazyLinear(2))
    images, labels = torch.zeros(2, *SHAPE), torch.zeros(2, dtype=torch.long)
    model(images)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([3e38, -3e38, 3e38, -3e38]).reshape(4, 1, 1, 1))
        model[3].weight.fill_(1.0)
        model[3].weight[0] *= -1
        model[3].bias.copy_(torch.tensor([1e3, 0.0]))
    assert model(images).isfinite().all()
    margins = pc.certify(model, images, labels, pc.Patch(3)).margins.double()
    exact = pc.certify(model, images, labels, pc.Patch(3), dtype=torch.float64).margins
    assert not (margins > exact).any()


def test_a_model_of_one_class_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 1))
    with pytest.raises(
        ModelError, match="1 logit for each image; a certificate compares at least two"
    ) as caught:
        pc.certify(model, *batch(), pc.Patch(1))
    assert "cat([-z, z]" in caught.value.hint


def test_the_map_says_where_each_image_is_proven():
    model, test = pc.load("mnist-5x5-cnn2"), pc.load_dataset("mnist-mini").test.take(12)
    found = pc.certify(model, test.floats(), test.labels, pc.Patch(5))
    margins = pc.placement_margins(model, test.floats(), test.labels, pc.Patch(5))
    others = margins.scatter(2, test.labels[:, None, None].expand(-1, margins.shape[1], 1), torch.inf)
    right = found.predictions == test.labels
    assert torch.equal(found.placements, (others > 0).all(dim=2) & right[:, None])
    assert torch.equal(found.certified, found.placements.all(dim=1))
    assert 0 < int(found.certified.sum()) < 12
    assert found.placements[~found.certified & right].any()


def test_a_wrong_prediction_is_proven_nowhere():
    model, (images, _) = network(), batch()
    wrong = (model(images).argmax(dim=1) + 1) % 3
    assert not pc.certify(model, images, wrong, pc.Patch(1)).placements.any()


def test_a_classifier_certifies_as_its_model_does():
    model, (images, labels) = network(), batch()
    bounds = pc.IntervalBounds(model)
    for found in (
        bounds.certify(images, labels, pc.Patch(1)),
        pc.certify(bounds, images, labels, pc.Patch(1)),
    ):
        assert torch.equal(found.margins, pc.certify(model, images, labels, pc.Patch(1)).margins)
        assert torch.equal(found.predictions, bounds.predict(images))
    with pytest.raises(InvalidInput, match="settings of interval bounds of a plain model"):
        pc.certify(bounds, images, labels, pc.Patch(1), dtype=torch.float64)


@pytest.mark.parametrize("threat", [pc.Patch(2), pc.SparsePixels(2)], ids=str)
def test_no_images_give_no_certificates(threat):
    images, labels = batch(0)
    certificates = pc.certify(network(), images, labels, threat)
    assert certificates.certified.shape == (0,)
    assert certificates.margins.shape == (0, 3)
    assert certificates.worst_placement.shape == (0, 2)
    assert certificates.certified_accuracy != certificates.certified_accuracy
    assert pc.placement_margins(network(), images, labels, pc.Patch(2)).shape == (0, 12, 3)


def test_the_layout_of_the_images_does_not_matter():
    shape = (2, 4, 5)
    model, (images, labels) = network(channels=2), batch(shape=shape)
    plain = pc.certify(model, images, labels, pc.Patch(2))
    turned = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    inside = torch.rand(8, 4, 6, 7)
    inside[::2, 1:3, 1:5, 1:6] = images
    for other in (
        images.contiguous(memory_format=torch.channels_last),
        turned,
        inside[::2, 1:3, 1:5, 1:6],
        images.clone().requires_grad_(),
    ):
        certificates = pc.certify(model, other, labels, pc.Patch(2))
        torch.testing.assert_close(certificates.margins, plain.margins, rtol=1e-6, atol=1e-6)
        assert not certificates.margins.requires_grad


def test_repeated_images_share_memory_and_results():
    images, labels = batch(1)
    certificates = pc.certify(network(), images.expand(3, -1, -1, -1), labels.expand(3), pc.Patch(2))
    assert len(set(certificates.least_margin.tolist())) == 1


def test_types_are_taken_as_they_come():
    images, labels = batch()
    assert pc.certify(network(), images, labels, pc.Patch(1)).margins.dtype == torch.float32
    assert pc.certify(network(), images.half(), labels, pc.Patch(1)).margins.dtype == torch.float32
    double = network(dtype=torch.float64)
    assert pc.certify(double, images, labels, pc.Patch(1)).margins.dtype == torch.float64
    audit = pc.certify(network(), images, labels, pc.Patch(1), dtype=torch.float64)
    assert audit.margins.dtype == torch.float64


def test_progress_ends_with_all_images():
    told = []
    images, labels = batch(7)
    pc.certify(
        network(), images, labels, pc.Patch(1), memory_budget=1, progress=lambda *state: told.append(state)
    )
    assert {(done, 7) for done in range(8)} <= set(told)
    assert told == sorted(told)
    assert told[-1] == (7, 7)
    assert told[:2] == [(0, 7), (pytest.approx(1 / 20), 7)]  # one of the placements of the first image


def test_sparse_certificates_have_no_placement():
    certificates = pc.certify(network(), *batch(), pc.SparsePixels(2))
    assert (certificates.worst_placement == -1).all()
    with pytest.raises(InvalidInput, match=r"SparsePixels\(2 pixels, tight bound\) has no single placement"):
        pc.placement_margins(network(), *batch(), pc.SparsePixels(2))


def test_more_pixels_and_looser_bounds_prove_less():
    shape = (2, 4, 5)
    model, (images, labels) = network(channels=2), batch(shape=shape)
    margins = [
        pc.certify(model, images, labels, pc.SparsePixels(pixels, bound)).margins
        for pixels, bound in ((1, "tight"), (2, "tight"), (2, "per-pixel"))
    ]
    assert (margins[1] <= margins[0] + 1e-6).all()
    assert (margins[2] <= margins[1] + 1e-6).all()


class Raises(nn.Module):
    """Fails in the middle of its forward pass, and remembers the switches it saw."""

    seen: tuple[str, bool] | None = None

    def __init__(self, fails):
        super().__init__()
        self.head, self.fails = nn.Linear(20, 2), fails

    def forward(self, images):
        if not isinstance(images, torch.fx.Proxy) and images.dtype == torch.float32:
            Raises.seen = torch.backends.cuda.matmul.fp32_precision, torch.is_autocast_enabled("cpu")
            if self.fails:
                raise RuntimeError("broken on purpose")
        return self.head(torch.flatten(images, 1))


@pytest.mark.parametrize("fails", [False, True])
def test_shortcuts_are_off_while_certifying_and_back_after(fails):
    legacy = torch.get_float32_matmul_precision()
    images, labels = batch()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if fails:
                with pytest.raises(ModelError, match="broken on purpose"):
                    pc.certify(Raises(fails), images, labels, pc.Patch(1))
            else:
                margins = pc.certify(Raises(fails), images, labels, pc.Patch(1)).margins
                assert margins.dtype == torch.float32
            assert torch.is_autocast_enabled("cpu")
        assert Raises.seen == ("ieee", False)
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision(legacy)


def test_the_model_and_the_images_stay_as_they_are():
    model, (images, labels) = network(), batch()
    weights, kept = copy.deepcopy(model.state_dict()), images.clone()
    model[1].inplace = True
    pc.certify(model, images, labels, pc.Patch(2))
    assert torch.equal(images, kept)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Magnitude(nn.Module):
    """A layer that is not monotone."""

    def forward(self, features):
        return features.abs()


@dataclass(frozen=True)
class Absolute(Operation):
    def forward(self, *inputs):
        return inputs[0].abs()

    def interval(self, *inputs, rounding):
        (box,) = inputs
        least, largest = box.lower.clamp(min=0) - box.upper.clamp(max=0), torch.maximum(-box.lower, box.upper)
        return Interval(least, largest)


@pytest.mark.parametrize("verdicts_only", [False, True])
def test_an_operation_of_ones_own_is_certified_the_dense_way(monkeypatch, verdicts_only):
    monkeypatch.setitem(LAYER_RULES, Magnitude, lambda layer: Absolute())
    model = network()
    model[1] = Magnitude()
    images, labels = batch()
    labels = model(images).argmax(dim=1)
    found = pc.certify(model, images, labels, pc.Patch(1), verdicts_only=verdicts_only)
    members = torch.stack(
        [pc.Patch(1).sample(images, torch.Generator().manual_seed(seed)) for seed in range(50)]
    )
    withstood = (model(members.flatten(0, 1)).argmax(dim=1).view(50, -1) == labels).all(dim=0)
    assert found.certified.any()
    assert (withstood | ~found.certified).all()


def loaded(images, labels, size):
    return DataLoader(TensorDataset(images, labels), batch_size=size)


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: pc.DoubleMasking(model, pc.Patch(2))])
def test_a_loader_is_certified_batch_by_batch(wrap):
    images = torch.rand(7, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)).eval()
    labels, told = model(images).argmax(dim=1), []
    whole = pc.certify(wrap(model), images, labels, pc.Patch(2))
    found = pc.certify_loader(
        wrap(model), loaded(images, labels, 3), pc.Patch(2), device="cpu", progress=lambda *_: told.append(_)
    )
    assert told == [(3, 7), (6, 7), (7, 7)]
    assert found.to_tensors().keys() == whole.to_tensors().keys()
    for name, column in whole.to_tensors().items():
        torch.testing.assert_close(found.to_tensors()[name], column)
    assert found.guarantee == whole.guarantee


def test_loaders_of_something_else_are_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).eval()
    images = torch.rand(2, 1, 6, 6)
    with pytest.raises(InvalidInput, match=r"the loader gave a Tensor, expected a pair of tensors"):
        pc.certify_loader(model, [images], pc.Patch(2))
    with pytest.raises(InvalidInput, match="the loader gave a list, expected a pair of tensors"):
        pc.certify_loader(model, [[images.tolist(), [0, 1]]], pc.Patch(2))
    with pytest.raises(InvalidInput, match="the loader is a NoneType; expected batches of images and labels"):
        pc.certify_loader(model, None, pc.Patch(2))
    with pytest.raises(InvalidInput, match="the loader gave no images"):
        pc.certify_loader(model, [], pc.Patch(2))
    with pytest.raises(InvalidInput, match="the device 'toaster' cannot be used"):
        pc.certify_loader(model, [], pc.Patch(2), device="toaster")
