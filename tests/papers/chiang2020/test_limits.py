"""Of images that conflict one at most is certified, whatever the weights; and the bound counts groups of them."""

import json

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from patchcert.bounds import NEAREST, Interval, trace
from patchcert.bounds.sparse import FirstLayer, sparse_first_layer
from patchcert.papers.chiang2020.limits import conflicts, main, most_certified
from patchcert.threats import SparsePixels
from strategies import seeds


def boxes(model, images, pixels, bound):
    """The bounds of the first layer's results, image by image."""
    network = trace(model)
    layer = FirstLayer.of(network.steps)
    with torch.no_grad():
        clean = network.intervals(Interval.point(images))[layer.position + 1]
        return sparse_first_layer(layer, clean, images, pixels, bound, 1.0, NEAREST)


def pairs_of_images(seed, levels):
    """Two images of 5x5 pixels that differ in many pixels, some of them fully."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(levels + 1, (2, 1, 5, 5), generator=generator).double() / levels


@given(seeds(), st.sampled_from([1, 2, 5]), st.integers(1, 5), st.sampled_from(["tight", "per-pixel"]))
def test_the_intervals_of_conflicting_images_meet_at_every_neuron(seed, levels, pixels, bound):
    images = pairs_of_images(seed, levels)
    found = conflicts(images, torch.tensor([0, 1]), SparsePixels(pixels, bound), kernel=3)
    assert torch.equal(found, found.T)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 30, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(750, 2)).double()
    with torch.no_grad():
        model[0].weight[:10] = (images[0] - images[1])[
            :, :3, :3
        ].sign()  # nothing tells the images apart better
    box = boxes(model, images, pixels, bound)
    if found[0, 1]:
        assert (box.lower[0] <= box.upper[1] + 1e-9).all()
        assert (box.lower[1] <= box.upper[0] + 1e-9).all()


def test_nine_full_differences_under_a_kernel_can_be_told_apart_and_eight_cannot():
    images = torch.zeros(3, 1, 5, 5).double()
    images[0, 0, :3, :3] = 1
    images[1, 0, :3, :3] = 1
    images[1, 0, 0, 0] = 0
    found = conflicts(images, torch.tensor([0, 1, 2]), SparsePixels(4), kernel=3)
    assert not found[0, 2]
    assert found[0, 1]
    model = nn.Sequential(
        nn.Conv2d(1, 1, 3, padding=1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(25, 2)
    )
    model = model.double()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    box = boxes(model, images, 4, "tight")
    assert (box.lower[0] > box.upper[2]).any()


def test_rounding_makes_no_conflict_of_images_that_wide_kernels_tell_apart():
    """Their shares sum up to the number of pixels and a little more, less than float32 can tell."""
    images = torch.zeros(2, 1, 27, 27)
    images[1] = 7 / (27 * 27 - 7) * (1 + 1e-6)
    assert not conflicts(images, torch.tensor([0, 1]), SparsePixels(7), kernel=27).any()


def test_images_of_one_label_do_not_conflict():
    assert not conflicts(torch.zeros(3, 1, 4, 4), torch.tensor([1, 1, 1]), SparsePixels(1), 3).any()


def test_one_of_each_group_counts():
    """Two triangles that share no side, and one image alone."""
    found = torch.zeros(7, 7, dtype=torch.bool)
    for group in ((0, 1, 2), (3, 4, 5)):
        for first in group:
            for second in group:
                found[first, second] = first != second
    assert most_certified(found) == 3


def test_the_command_counts_the_embedded_images(capsys):
    main(["--data", "mnist-mini", "--group", "50"])
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == 1000
    assert len(found["by group"]) == 20
    assert 0 < found["most certified"] < 950


def test_wider_kernels_tell_more_apart():
    test = torch.rand(30, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    labels = F.one_hot(torch.arange(30) % 3).argmax(dim=1)
    narrow, wide = (conflicts(test, labels, SparsePixels(3), kernel) for kernel in (3, 5))
    assert (wide <= narrow).all()
    assert narrow.any()


def test_a_looser_bound_has_more_conflicts():
    test = torch.rand(30, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(30) % 3
    tight, loose = (conflicts(test, labels, SparsePixels(2, bound), 3) for bound in ("tight", "per-pixel"))
    assert (tight <= loose).all()
    assert int(tight.sum()) < int(loose.sum())
