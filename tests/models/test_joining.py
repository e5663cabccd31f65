"""A joined network computes the mean of its members, and is certified for itself."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import patchcert as pc
from patchcert.errors import ModelError
from patchcert.models import ModelSpec, architecture, build, join, load, save

SPECS = [
    ModelSpec("mlp", 1, 6, 7, classes=4, hidden=12),
    ModelSpec("cnn2", 3, 12, 8, classes=4, hidden=9, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.2)),
    ModelSpec("cnn4", 1, 12, 12, classes=3, hidden=10),
]


@architecture("one layer of a test")
def _one_layer(spec: ModelSpec) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(spec.channels * spec.height * spec.width, spec.classes))


@pytest.mark.parametrize(
    "spec", [*SPECS, ModelSpec("one layer of a test", 1, 3, 4)], ids=lambda spec: spec.name
)
def test_logits_are_the_mean_of_those_of_the_members(spec, generator):
    members = [build(spec, generator) for _ in range(3)]
    joined, wide = join(members, [spec] * 3)
    images = torch.rand(20, *spec.image_shape, generator=generator)
    expected = torch.stack([member(images) for member in members]).mean(0)
    torch.testing.assert_close(joined(images), expected)
    assert not joined.training
    assert all(width % 3 == 0 for width in wide.widths)
    assert expected.std() > 0


def test_members_may_differ_in_width_and_files_keep_the_joined_network(generator, tmp_path):
    specs = [replace(SPECS[0], mean=(0.0,), std=(1.0,)), replace(SPECS[0], hidden=None, widths=(5,))]
    members = [build(spec, generator) for spec in specs]
    joined, wide = join(members, specs)
    assert wide.widths == (17,)
    save(joined, wide, tmp_path / "joined.safetensors")
    loaded, described = load(tmp_path / "joined.safetensors")
    images = torch.rand(9, 1, 6, 7, generator=generator)
    assert described == wide
    assert torch.equal(loaded(images), joined(images))
    torch.testing.assert_close(joined(images), (members[0](images) + members[1](images)) / 2)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_bounds_are_no_looser_than_the_mean_of_those_of_the_members(spec, generator):
    """Intervals lose nothing by the joining, and the least mean is no less than the mean of what is least."""
    members = [build(spec, generator) for _ in range(2)]
    joined, _ = join(members, [spec] * 2)
    images = torch.rand(6, *spec.image_shape, generator=generator)
    labels = joined(images).argmax(1)
    own = [pc.certify(member, images, labels, pc.Patch(2)).margins for member in members]
    together = pc.certify(joined, images, labels, pc.Patch(2)).margins
    assert (together >= (own[0] + own[1]) / 2 - 1e-4).all()
    assert together.isfinite().all()


def test_what_cannot_be_joined_is_refused(generator):
    spec = SPECS[0]
    model = build(spec, generator)
    with pytest.raises(ModelError, match="expected two networks at least to join, got 1"):
        join([model], [spec])
    taller = replace(spec, height=7)
    with pytest.raises(ModelError, match=r"differ in more than their widths cannot be joined.*height=7"):
        join([model, build(taller, generator)], [spec, taller])
    normed = replace(spec, name="mlp_bn")
    other = replace(normed, hidden=13)
    with pytest.raises(ModelError, match=r"networks that differ cannot be joined.*hidden=13"):
        join([build(normed, generator), build(other, generator)], [normed, other])
    with pytest.raises(ModelError, match="Linear is not as the architecture 'mlp' is built"):
        join([nn.Linear(2, 2)] * 2, [spec] * 2)
    joined, both = join([build(normed, generator)] * 2, [normed] * 2)
    with pytest.raises(ModelError, match="are joined already"):
        join([joined] * 2, [both] * 2)


class Whole(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.network = nn.Linear(inputs, classes)

    def forward(self, images):
        return self.network(images.flatten(1)).exp()


@architecture("a module of a test")
def _module(spec: ModelSpec) -> nn.Module:
    return Whole(spec.channels * spec.height * spec.width, spec.classes)


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize(
    "spec",
    [
        ModelSpec("mlp_bn", 3, 8, 8, classes=4, hidden=12),
        ModelSpec("resnet8", 3, 16, 16, classes=4),
        ModelSpec("stripnet", 3, 16, 16, classes=4, filters=8),
        ModelSpec("a module of a test", 3, 4, 4, classes=3),
    ],
    ids=lambda spec: spec.name,
)
def test_other_networks_become_members_of_their_mean(spec, normalises, generator, tmp_path):
    if normalises:
        spec = replace(spec, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.2))
    members = [build(spec, generator) for _ in range(3)]
    joined, together = join(members, [spec] * 3)
    images = torch.rand(9, *spec.image_shape, generator=generator)
    expected = torch.stack([member(images) for member in members]).mean(0)
    torch.testing.assert_close(joined(images), expected)
    assert together == replace(spec, members=3)
    assert not any(module.training for module in joined.modules())
    save(joined, together, tmp_path / "joined.safetensors")
    loaded, described = load(tmp_path / "joined.safetensors")
    assert described == together
    assert torch.equal(loaded(images), joined(images))


def test_a_mean_is_bounded_as_any_network_is(generator):
    spec = ModelSpec("resnet8", 3, 16, 16, classes=4, members=2)
    model, images = build(spec, generator), torch.rand(4, 3, 16, 16, generator=generator)
    labels = model(images).argmax(1)
    margins = pc.certify(model, images, labels, pc.Patch(1, placements=[(3, 4)])).margins
    changed = images.clone()
    changed[:, :, 3, 4] = torch.rand(4, 3, generator=generator)
    said = model(changed)
    leads = said.gather(1, labels[:, None]) - said.scatter(1, labels[:, None], -torch.inf).amax(
        1, keepdim=True
    )
    assert margins.isfinite().all()
    assert (leads[:, 0] >= margins.amin(1) - 1e-5).all()


def test_local_votes_of_a_mean_see_what_its_members_see(generator):
    spec = ModelSpec("stripnet", 3, 16, 16, classes=4, filters=8, receptive_field=3)
    images = torch.rand(2, 3, 16, 16, generator=generator)
    alone, together = (
        pc.LocalVotes(build(each, generator), "double-masked", "logits", 2)
        for each in (spec, replace(spec, members=2))
    )
    assert torch.equal(alone.touched(pc.Patch(2), images), together.touched(pc.Patch(2), images))
    labels = together.predict(images)
    assert torch.equal(together.certify(images, labels, pc.Patch(2)).predictions, labels)
