import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import patchcert as pc
from patchcert.bounds import trace
from patchcert.certificates.local_votes import receptive_field, sight
from patchcert.errors import ModelError
from patchcert.models import ModelSpec, architectures, build, load, save

MNIST = {"channels": 1, "height": 28, "width": 28}
CIFAR = {"channels": 3, "height": 32, "width": 32}
CIFAR_NORMALISED = {**CIFAR, "mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}


def parameters(spec):
    return sum(parameter.numel() for parameter in build(spec).parameters())


@pytest.mark.parametrize(
    ("name", "mnist", "cifar"),
    [
        ("mlp", 202_735, 786_175),
        ("cnn2", 103_766, 134_614),
        ("cnn4", 170_598, 201_390),
        ("cnn5w", 13_257_290, 17_190_602),
        ("cnn4_c11", 171_046, 202_734),
        ("cnn4_c13", 171_238, 203_310),
    ],
)
def test_parameter_counts_are_those_of_the_paper(name, mnist, cifar):
    assert parameters(ModelSpec(name, **MNIST)) == mnist
    assert parameters(ModelSpec(name, **CIFAR_NORMALISED)) == cifar


def test_hidden_sets_the_width_of_every_fully_connected_layer():
    assert parameters(ModelSpec("mlp", **MNIST, hidden=512)) == 407_050
    model = build(ModelSpec("cnn4", **MNIST, hidden=7))
    assert [model.linear1.out_features, model.linear2.out_features, model.logits.in_features] == [7, 7, 7]


def test_widths_set_every_layer_but_the_last():
    model = build(ModelSpec("cnn4", **MNIST, widths=(3, 2, 5, 7, 11, 13)))
    sizes = [tuple(value.shape[:2]) for name, value in model.named_parameters() if name.endswith("weight")]
    assert sizes == [(3, 1), (2, 3), (5, 2), (7, 5), (11, 7 * 49), (13, 11), (10, 13)]
    with pytest.raises(ModelError, match=r"cnn4 has 6 layers before the last, .* has 2 numbers: \(3, 2\)"):
        build(ModelSpec("cnn4", **MNIST, widths=(3, 2)))


def test_layers_have_readable_names_in_order():
    model = build(ModelSpec("cnn2", **CIFAR_NORMALISED))
    assert list(dict(model.named_children())) == [
        *("normalize", "conv1", "relu1", "conv2", "relu2"),
        *("flatten", "linear1", "relu3", "logits"),
    ]
    assert isinstance(model, nn.Sequential)
    assert not model.training


@pytest.mark.parametrize("name", ["mlp", "cnn2", "cnn4", "cnn4_c11", "cnn4_c13"])
@pytest.mark.parametrize(("height", "width"), [(28, 28), (32, 20), (9, 13)])
def test_every_architecture_takes_images_of_any_size(name, height, width):
    model = build(ModelSpec(name, 2, height, width, classes=4))
    assert model(torch.zeros(3, 2, height, width)).shape == (3, 4)


def test_images_too_small_for_the_convolutions_are_refused():
    with pytest.raises(ModelError, match="cnn2 needs larger images than 1x28"):
        build(ModelSpec("cnn2", 1, 1, 28))


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        (ModelSpec("cnn2_ablation", 1, 28, 28), 3_320_922),
        (ModelSpec("resnet18_ablation", 3, 32, 32), 11_175_690),
    ],
)
def test_voting_networks_have_the_published_sizes(spec, parameters):
    model = build(spec, torch.Generator().manual_seed(0))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model(torch.rand(2, 2 * spec.channels, spec.height, spec.width)).shape == (2, 10)


def test_a_voting_network_survives_being_saved(tmp_path):
    spec = ModelSpec("cnn2_ablation", 1, 8, 8, classes=3, hidden=4)
    model = build(spec, torch.Generator().manual_seed(0))
    save(model, spec, tmp_path / "model.safetensors")
    again, _ = load(tmp_path / "model.safetensors")
    encoded = torch.rand(2, 2, 8, 8)
    assert torch.equal(model(encoded), again(encoded))


RESIDUAL = [
    (ModelSpec("resnet18", **CIFAR), 11_173_962),
    (ModelSpec("resnet18", **CIFAR, filters=32), 2_797_610),
    (ModelSpec("wideresnet", **CIFAR), 10_961_370),
    (ModelSpec("wideresnet", **CIFAR, depth=28, filters=160), 36_479_194),
]


@pytest.mark.parametrize(("spec", "count"), RESIDUAL)
def test_residual_networks_have_the_published_sizes(spec, count):
    with torch.device("meta"):
        assert parameters(spec) == count


TINY = [{"name": "resnet18", "filters": 2}, {"name": "wideresnet", "filters": 3, "depth": 10}]


@pytest.mark.parametrize("size", TINY, ids=lambda size: size["name"])
@pytest.mark.parametrize("side", [8, 28, 32])
def test_residual_networks_have_bounds_and_survive_being_saved(size, side, tmp_path):
    spec = ModelSpec(**size, channels=2, height=side, width=side, classes=3, mean=(0.4, 0.5), std=(0.2, 0.3))
    model = build(spec, torch.Generator().manual_seed(0))
    images, labels = torch.rand(2, 2, side, side), torch.tensor([0, 1])
    with torch.no_grad():
        model.train()(images)
        model.eval()
    save(model, spec, tmp_path / "model.safetensors")
    again, described = load(tmp_path / "model.safetensors")
    assert described == spec
    assert torch.equal(model(images), again(images))
    if side == 8:
        found = pc.certify(model, images, labels, pc.Patch(1, placements="corners"))
        assert torch.equal(found.predictions, model(images).argmax(1))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("resnet18", {"hidden": 3}, "'resnet18' has no hidden, but it is 3"),
        ("resnet18", {"depth": 34}, "'resnet18' has no depth, but it is 34"),
        ("cnn2", {"filters": 3}, "'cnn2' has no filters, but it is 3"),
        ("resnet18_ablation", {"filters": 3}, "'resnet18_ablation' has no filters"),
        ("resnet18_ablation", {"hidden": 3}, "'resnet18_ablation' has no hidden"),
        ("cnn2_ablation", {"widths": (3, 4, 5, 6)}, "'cnn2_ablation' has no widths"),
        ("wideresnet", {"widths": (3, 4)}, "'wideresnet' has no widths"),
        ("wideresnet", {"depth": 18}, "the depth of a wideresnet is 18; expected 4 layers and 6"),
        ("wideresnet", {"depth": 4}, "the depth of a wideresnet is 4"),
        ("mlp_bn", {"filters": 2}, "'mlp_bn' has no filters"),
        ("cnn2_bn", {"depth": 2}, "'cnn2_bn' has no depth"),
        ("cnn5_bn", {"widths": (1, 2, 3, 4, 5, 6)}, "'cnn5_bn' has no widths"),
        ("resnet8", {"hidden": 2}, "'resnet8' has no hidden"),
        (
            "resnet8",
            {"depth": 10},
            "the depth of a resnet8 is 10; expected 2 layers and 6 for each block of a stage",
        ),
    ],
)
def test_keys_that_an_architecture_does_not_have_are_refused(name, keys, message):
    with pytest.raises(ModelError, match=message):
        build(ModelSpec(name, **CIFAR, **keys))


@pytest.mark.parametrize(("field", "depth"), [(3, 2), (5, 2), (9, 8), (17, 8)])
def test_scores_of_a_bagnet_see_as_many_pixels_as_asked(field, depth):
    spec = ModelSpec(
        "bagnet", 1, 20, 20, 4, filters=2, depth=depth, receptive_field=field, mean=(0.5,), std=(0.2,)
    )
    model = build(spec)
    assert receptive_field(sight(trace(model), 20, 20), 20, 20) == (field, field)
    assert model(torch.zeros(2, 1, 20, 20)).shape == (2, 4, 20, 20)


@pytest.mark.parametrize("field", [1, 4, 9])
def test_receptive_fields_that_a_bagnet_cannot_have_are_refused(field):
    with pytest.raises(ModelError, match=f"is {field}; expected an odd number from 3 to 7"):
        build(ModelSpec("bagnet", 1, 20, 20, 4, depth=2, receptive_field=field))


@pytest.mark.parametrize(("field", "depth"), [(5, 1), (7, 1), (9, 1), (11, 2), (13, 2)])
def test_scores_of_half_size_maps_see_as_many_pixels_as_asked(field, depth):
    spec = ModelSpec("bagnet_half", 1, 26, 27, 4, filters=2, depth=depth, receptive_field=field)
    model = build(spec)
    assert receptive_field(sight(trace(model), 26, 27), 26, 27) == (field, field)
    assert model(torch.zeros(2, 1, 26, 27)).shape == (2, 4, 13, 14)


@pytest.mark.parametrize("field", [3, 5, 9, 19])
@pytest.mark.parametrize("height", [28, 17])
def test_scores_of_a_stripnet_see_a_strip_from_top_to_bottom(field, height):
    model = build(ModelSpec("stripnet", 1, height, 24, 4, filters=2, receptive_field=field))
    seen = sight(trace(model, (1, height, 24)), height, 24)
    assert receptive_field(seen, height, 24) == (height, field)
    assert bool(seen[:, 0, 12].reshape(height, 24)[:, 12].all())
    assert model(torch.zeros(2, 1, height, 24)).shape == (2, 4, 1, 24)


@pytest.mark.parametrize("field", [None, 1, 5])
def test_placed_strips_see_their_columns_alone_and_know_where_they_are(field):
    model = build(ModelSpec("placed_strips", 2, 17, 24, 4, filters=6, receptive_field=field)).eval()
    seen = sight(trace(model, (2, 17, 24)), 17, 24)
    assert receptive_field(seen, 17, 24) == (17, field or 3)
    scores = model(torch.zeros(2, 2, 17, 24))
    assert scores.shape == (2, 4, 1, 24)
    assert not torch.allclose(scores[..., 10], scores[..., 11])


def test_scores_of_a_crossnet_see_strips_of_columns_and_then_of_rows():
    model = build(ModelSpec("crossnet", 1, 17, 24, 4, filters=2, receptive_field=3))
    assert model(torch.zeros(2, 1, 17, 24)).shape == (2, 4, 1, 24 + 17)
    seen = sight(trace(model, (1, 17, 24)), 17, 24)[:, 0].reshape(17, 24, 41)
    for column in range(24):
        assert seen[:, :, column].any(dim=0).nonzero().flatten().tolist() == _around(column, 24)
    for row in range(17):
        assert seen[:, :, 24 + row].any(dim=1).nonzero().flatten().tolist() == _around(row, 17)
    assert bool(seen[:, 12, 12].all())
    assert bool(seen[8, :, 24 + 8].all())


def _around(place: int, size: int) -> list[int]:
    return [each for each in (place - 1, place, place + 1) if 0 <= each < size]


@pytest.mark.parametrize("hidden", [None, 5, 8])
def test_clipped_networks_begin_with_ten_times_the_mean_of_the_features_of_a_class(hidden):
    model = build(ModelSpec("bagnet_clipped", 1, 12, 13, 4, filters=2, hidden=hidden))
    features = model[:-2](torch.rand(2, 1, 12, 13))
    assert 0 <= features.min() <= features.max() <= 1
    means = features.flatten(2).mean(dim=2)
    own = [means[:, number::4].mean(dim=1) for number in range(4)]
    logits = model.flatten(features)
    assert torch.allclose(model.logits(logits), 10 * torch.stack(own, dim=1), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("bagnet_half", {"receptive_field": 3}, "is 3; expected an odd number from 5 to 31"),
        ("bagnet_half", {"receptive_field": 8}, "is 8; expected an odd number"),
        ("bagnet_clipped", {"receptive_field": 13, "depth": 1}, "is 13; expected an odd number from 5 to 11"),
        ("bagnet_half", {"filters": 3}, "blocks of 3 filters .* an even number of filters"),
        ("stripnet", {"receptive_field": 4}, "strips of a stripnet are 4 pixels wide; expected an odd"),
        ("stripnet", {"receptive_field": 21}, "are 21 pixels wide"),
        ("placed_strips", {"receptive_field": 4}, "placed_strips are 4 pixels wide; expected an odd number"),
        ("placed_strips", {"receptive_field": 33}, "are 33 pixels wide"),
    ],
)
def test_receptive_fields_that_local_networks_cannot_have_are_refused(name, keys, message):
    with pytest.raises(ModelError, match=message):
        build(ModelSpec(name, **CIFAR, **keys))


@pytest.mark.parametrize("name", ["resnet18_parts", "cnn2_parts"])
def test_networks_of_parts_refuse_whole_images_and_normalisation(name):
    model = build(ModelSpec(name, 3, 8, 8, 4, filters=2)).eval()
    assert model(torch.zeros(2, 4, 8, 8)).shape == (2, 4)
    with pytest.raises(ModelError, match="takes parts of images, encoded in 4 channels, got 3 channels"):
        model(torch.zeros(2, 3, 8, 8))
    with pytest.raises(ModelError, match=f"{name} takes parts of images .* without normalisation"):
        build(ModelSpec(name, 1, 8, 8, 4, mean=(0.5,), std=(0.2,)))


@pytest.mark.parametrize(
    ("name", "keys", "layers"),
    [
        ("mlp_bn", {"hidden": 8, "depth": 2}, 2),
        ("cnn2_bn", {"filters": 2, "hidden": 8}, 3),
        ("cnn5_bn", {"filters": 2, "hidden": 8}, 6),
        ("cnn7_bn", {"filters": 2, "hidden": 8}, 8),
        ("resnet8", {"filters": 2}, 9),
        ("resnet8", {"filters": 2, "depth": 14}, 15),
    ],
)
@pytest.mark.parametrize(("height", "width"), [(28, 28), (9, 13)])
def test_networks_with_batch_norms_have_one_after_every_layer_and_are_certified(
    name, keys, layers, height, width
):
    model = build(ModelSpec(name, 1, height, width, classes=3, **keys))
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert len(norms) == layers
    images = torch.rand(2, 1, height, width)
    found = pc.certify(model, images, torch.tensor([0, 1]), pc.Patch(2, placements="corners"))
    assert torch.equal(found.predictions, model(images).argmax(dim=1))


def test_the_guide_lists_every_architecture():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "your-own-model.md").read_text()
    names = re.findall(r'@architecture\("(\w+)"\)', inspect.getsource(architectures))
    assert names
    assert [name for name in names if f"`{name}`" not in guide] == []
