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
    with pytest.raises(ModelError, match=r"\(BatchNorm1d\) cannot be joined"):
        join([build(normed, generator)] * 2, [normed] * 2)
    with pytest.raises(ModelError, match="Linear cannot be joined: it is no nn.Sequential of its layers"):
        join([nn.Linear(2, 2)] * 2, [spec] * 2)
