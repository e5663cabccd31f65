"""Certificates against every placement and extreme filling on images so small that all can be tried."""

import torch
from hypothesis import event, given, reject, settings
from hypothesis import strategies as st

from patchcert.certificates import certify
from patchcert.errors import UnsupportedLayer
from patchcert.testing.brute_force import members, reached_margins, supports
from patchcert.threats import Patch, SparsePixels
from strategies import Case, image_batches, networks, seeds, threats


def least_reached(case, index):
    """The least margins (classes,) over all places and the 0/1 and random fillings."""
    generator = torch.Generator().manual_seed(index)
    label = int(case.labels[index])
    return reached_margins(case.model, members(case.threat, case.images[index], generator), label).amin(dim=0)


@st.composite
def tiny_cases(draw, sparse=False):
    """Images of at most 4x4 pixels; the winning bias is raised, so that there is something to certify."""
    shape = (draw(st.integers(1, 2)), draw(st.integers(2, 4)), draw(st.integers(2, 4)))
    dtype = draw(st.sampled_from((torch.float32, torch.float64)))
    model = draw(networks(shape, classes=draw(st.integers(2, 3)), dtype=dtype, affine_first=sparse))
    images = draw(image_batches(shape, dtype, most=2))
    if sparse:
        bound = draw(st.sampled_from(("tight", "per-pixel", "per-value")))
        threat: Patch | SparsePixels = SparsePixels(draw(st.integers(1, 2)), bound)
    else:
        threat = draw(threats(shape[1], shape[2]))
    with torch.no_grad():
        labels = model(images).argmax(dim=1)
        lift = draw(st.floats(0, 2)) * torch.nn.functional.one_hot(labels[:1], model(images).shape[1])[0]
        last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
        last.bias += lift.to(dtype)
        labels = model(images).argmax(dim=1)
    return Case(model, images, labels, threat)


def check(case):
    try:
        certificates = certify(case.model, case.images, case.labels, case.threat)
    except UnsupportedLayer:  # a grouped convolution has no sparse bound
        reject()
    event(f"certified: {bool(certificates.certified.any())}")
    for index, label in enumerate(case.labels.tolist()):
        reached = least_reached(case, index)
        assert (certificates.margins[index].double() <= reached + 1e-12).all()
        if certificates.certified[index]:
            others = torch.arange(reached.shape[-1]) != label
            assert reached[..., others].min() > 0


@settings(max_examples=60)
@given(tiny_cases())
def test_no_filling_of_any_placement_contradicts_a_certificate(case):
    check(case)


@settings(max_examples=60)
@given(tiny_cases(sparse=True))
def test_no_choice_of_pixels_contradicts_a_sparse_certificate(case):
    check(case)


@given(seeds(), st.integers(1, 3), st.booleans())
def test_one_linear_layer_is_certified_exactly(seed, channels, corners):
    """Interval bounds of a single layer are attained, so the least margin is that of the worst 0/1 patch."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(channels * 12, 3)).double()
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    image = torch.rand(1, channels, 3, 4, generator=generator, dtype=torch.float64)
    patch = Patch((2, 1), "corners" if corners else "everywhere")
    label = model(image).argmax(dim=1)
    certificates = certify(model, image, label, patch)
    weight, clean = model[1].weight[label] - model[1].weight, model(image)
    gain = torch.minimum(weight * (1 - image.flatten(1)), -weight * image.flatten(1)).reshape(
        3, *image.shape[1:]
    )
    places = supports(patch, *image.shape[1:])
    least = (gain[:, None] * places).sum(dim=(2, 3, 4)).amin(dim=1) + (clean[0, label] - clean[0])
    torch.testing.assert_close(certificates.margins[0], least.detach())
    assert bool(certificates.certified) == bool((least.detach().scatter(0, label, 1) > 1e-12).all())
