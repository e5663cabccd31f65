"""ONNX files are read as what ONNX Runtime computes, or refused by the operator's name and place."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import patchcert as pc
from families import FAMILIES
from onnx_graphs import SHAPE, constant, ints, node, with_head, write
from patchcert.bounds import Interval, Rounding, trace
from patchcert.errors import ModelError, UnsupportedLayer
from patchcert.models import load_onnx
from patchcert.models.onnx import runtime
from patchcert.models.onnx.operators import OPERATORS
from patchcert.models.onnx.runtime import runtime_outputs
from patchcert.models.onnx.unbounded import UNBOUNDED
from patchcert.testing.networks import randomise

WEIGHT, CHANNELS = constant(3, 2, 3, 3), constant(2, 1, 1)
STATISTICS = {
    "scale": constant(2),
    "shift": constant(2, seed=1),
    "mean": constant(2, seed=2),
    "variance": np.abs(constant(2, seed=3)),
}
NORM = ["x", *STATISTICS]

# ruff: noqa: E501 - a case is a line
# The operator, its inputs, its constants, the opset, how many values it gives, its settings.
CASES = {
    "Conv": ("Conv", ["x", "w", "b"], {"w": WEIGHT, "b": constant(3)}, 17, 108, {"pads": [1, 1, 1, 1]}),
    "Conv, one-sided": ("Conv", ["x", "w"], {"w": WEIGHT}, 17, 75, {"pads": [1, 0, 0, 1], "strides": [1, 1], "dilations": [1, 1], "kernel_shape": [3, 3]}),
    "Conv, same upper": ("Conv", ["x", "w"], {"w": WEIGHT[:, :, :2, :2]}, 17, 108, {"auto_pad": "SAME_UPPER"}),
    "Conv, same lower": ("Conv", ["x", "w"], {"w": WEIGHT[:, :, :2, :2]}, 17, 27, {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    "Conv, valid and dilated": ("Conv", ["x", "w"], {"w": WEIGHT}, 17, 12, {"auto_pad": "VALID", "dilations": [2, 2]}),
    "Conv, groups": ("Conv", ["x", "w"], {"w": constant(4, 1, 3, 3)}, 17, 64, {"group": 2}),
    "ConvTranspose": ("ConvTranspose", ["x", "w", "b"], {"w": constant(2, 3, 2, 2), "b": constant(3)}, 17, 300, {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "ConvTranspose, wider": ("ConvTranspose", ["x", "w"], {"w": constant(2, 1, 3, 3)}, 17, 2 * 14 * 14, {"group": 2, "strides": [2, 2], "output_padding": [1, 1]}),
    "MatMul": ("MatMul", ["x", "w"], {"w": constant(6, 4)}, 17, 48, {}),
    "BatchNormalization": ("BatchNormalization", NORM, STATISTICS, 17, 72, {"epsilon": 1e-3, "momentum": 0.9}),
    "BatchNormalization 7": ("BatchNormalization", NORM, STATISTICS, 7, 72, {}),
    "Add": ("Add", ["x", "c"], {"c": CHANNELS}, 17, 72, {}),
    "Add, first": ("Add", ["c", "x"], {"c": constant(1, 2, 6, 6)}, 17, 72, {}),
    "Add, both": ("Add", ["x", "x"], {}, 17, 72, {}),
    "Sum": ("Sum", ["x", "x", "x"], {}, 17, 72, {}),
    "Sum of one": ("Sum", ["x"], {}, 17, 72, {}),
    "Sub": ("Sub", ["x", "c"], {"c": CHANNELS}, 17, 72, {}),
    "Sub, first": ("Sub", ["c", "x"], {"c": CHANNELS}, 17, 72, {}),
    "Sub, both": ("Sub", ["x", "x"], {}, 17, 72, {}),
    "Mul": ("Mul", ["x", "c"], {"c": np.float32(-3)}, 17, 72, {}),
    "Mul, both": ("Mul", ["x", "x"], {}, 17, 72, {}),
    "Div": ("Div", ["x", "c"], {"c": CHANNELS}, 17, 72, {}),
    "Neg": ("Neg", ["x"], {}, 17, 72, {}),
    "Relu": ("Relu", ["x"], {}, 7, 72, {}),
    "LeakyRelu": ("LeakyRelu", ["x"], {}, 17, 72, {"alpha": 0.3}),
    "PRelu": ("PRelu", ["x", "c"], {"c": np.full((1, 1, 1), 0.2, dtype=np.float32)}, 17, 72, {}),
    "Elu": ("Elu", ["x"], {}, 17, 72, {"alpha": 0.7}),
    "Celu": ("Celu", ["x"], {}, 17, 72, {"alpha": 0.7}),
    "Selu": ("Selu", ["x"], {}, 17, 72, {}),
    "Sigmoid": ("Sigmoid", ["x"], {}, 17, 72, {}),
    "HardSigmoid": ("HardSigmoid", ["x"], {}, 17, 72, {"alpha": 0.7}),
    "HardSwish": ("HardSwish", ["x"], {}, 17, 72, {}),
    "Tanh": ("Tanh", ["x"], {}, 17, 72, {}),
    "Softplus": ("Softplus", ["x"], {}, 17, 72, {}),
    "Softsign": ("Softsign", ["x"], {}, 17, 72, {}),
    "Gelu": ("Gelu", ["x"], {}, 20, 72, {}),
    "Gelu, tanh": ("Gelu", ["x"], {}, 20, 72, {"approximate": "tanh"}),
    "Clip": ("Clip", ["x", "l", "h"], {"l": np.float32(0.2), "h": np.float32(0.6)}, 17, 72, {}),
    "Clip, six": ("Clip", ["x", "l", "h"], {"l": np.float32(0), "h": np.float32(6)}, 17, 72, {}),
    "Clip, below": ("Clip", ["x", "l"], {"l": np.float32(0.2)}, 17, 72, {}),
    "Clip, above": ("Clip", ["x", "", "h"], {"h": np.float32(0.6)}, 17, 72, {}),
    "Clip, at 0": ("Clip", ["x", "l"], {"l": np.float32(0)}, 17, 72, {}),
    "Clip, nowhere": ("Clip", ["x"], {}, 17, 72, {}),
    "Clip 7": ("Clip", ["x"], {}, 7, 72, {"min": 0.25}),
    "MaxPool": ("MaxPool", ["x"], {}, 17, 18, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "MaxPool, ceil": ("MaxPool", ["x"], {}, 17, 18, {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    "MaxPool, dilated": ("MaxPool", ["x"], {}, 17, 32, {"kernel_shape": [2, 2], "dilations": [2, 2]}),
    "AveragePool": ("AveragePool", ["x"], {}, 17, 18, {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "AveragePool, padded": ("AveragePool", ["x"], {}, 17, 18, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "AveragePool, counted": ("AveragePool", ["x"], {}, 17, 18, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 0, 0], "count_include_pad": 1}),
    "GlobalAveragePool": ("GlobalAveragePool", ["x"], {}, 17, 2, {}),
    "GlobalMaxPool": ("GlobalMaxPool", ["x"], {}, 17, 2, {}),
    "ReduceMean": ("ReduceMean", ["x"], {}, 17, 2, {"axes": [2, 3]}),
    "ReduceMean 18": ("ReduceMean", ["x", "a"], {"a": ints(-1, 2)}, 18, 2, {"keepdims": 0}),
    "Flatten": ("Flatten", ["x"], {}, 17, 72, {"axis": -3}),
    "Reshape": ("Reshape", ["x", "s"], {"s": ints(0, -1, 9)}, 17, 72, {}),
    "Reshape to one": ("Reshape", ["x", "s"], {"s": ints(1, 72)}, 17, 72, {}),
    "Unsqueeze": ("Unsqueeze", ["x", "a"], {"a": ints(2)}, 17, 72, {}),
    "Unsqueeze 11": ("Unsqueeze", ["x"], {}, 11, 72, {"axes": [-1]}),
    "Transpose": ("Transpose", ["x"], {}, 17, 72, {"perm": [0, 2, 3, 1]}),
    "Expand": ("Expand", ["x", "s"], {"s": ints(1, 1, 6)}, 17, 72, {}),
    "Concat": ("Concat", ["x", "x"], {}, 17, 144, {"axis": 1}),
    "Concat, last": ("Concat", ["x", "x"], {}, 17, 144, {"axis": -1}),
    "Split": ("Split", ["x", "s"], {"s": ints(2, 4)}, 17, 72, {"axis": 2, "count": 2}),
    "Split 18": ("Split", ["x"], {}, 18, 72, {"axis": 3, "count": 2, "num_outputs": 2}),
    "Split 11": ("Split", ["x"], {}, 11, 72, {"axis": 1, "count": 2, "split": [1, 1]}),
    "Slice": ("Slice", ["x", "s", "e", "a", "t"], {"s": ints(1, -4), "e": ints(9, -1), "a": ints(2, 3), "t": ints(2, 1)}, 17, 18, {}),
    "Slice 9": ("Slice", ["x"], {}, 9, 24, {"starts": [0, 2], "ends": [2, 4], "axes": [1, 2]}),
    "Pad": ("Pad", ["x", "p"], {"p": ints(0, 0, 1, 0, 0, 0, 0, 2)}, 17, 2 * 7 * 8, {}),
    "Pad 18": ("Pad", ["x", "p", "v", "a"], {"p": ints(1, 2), "v": np.float32(0), "a": ints(3)}, 18, 2 * 6 * 9, {}),
    "Pad 7": ("Pad", ["x"], {}, 7, 2 * 8 * 6, {"pads": [0, 0, 1, 0, 0, 0, 1, 0]}),
    "Dropout": ("Dropout", ["x", "r"], {"r": np.float32(0.4)}, 17, 72, {}),
    "Dropout 7": ("Dropout", ["x"], {}, 7, 72, {"ratio": 0.3}),
    "Identity": ("Identity", ["x"], {}, 17, 72, {}),
    "Cast": ("Cast", ["x"], {}, 17, 72, {"to": TensorProto.FLOAT}),
}  # fmt: skip


def made(path, name):
    kind, inputs, constants, opset, features, settings = CASES[name]
    return with_head(path, kind, inputs, constants, opset, features, **settings)


@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_what_the_runtime_computes_and_has_bounds(tmp_path, name):
    path = made(tmp_path / "case.onnx", name)
    network = load_onnx(path)
    images = torch.rand(3, *SHAPE) * 4 - 2
    logits = network(images)
    torch.testing.assert_close(logits, runtime_outputs(str(path), images), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        box = Interval(images - 0.1, images + 0.1)
        bounds = trace(network, SHAPE).bounds(box, Rounding.outward(torch.float32))
        for end in (images, images + 0.1 * torch.rand(images.shape).round(), images - 0.05):
            found = network(end)
            assert (bounds.lower <= found + 1e-5).all()
            assert (found <= bounds.upper + 1e-5).all()


def test_every_operator_that_is_read_has_a_case():
    assert {kind for kind, *_ in CASES.values()} | {"Gemm", "Squeeze"} == set(OPERATORS)


def test_sizes_that_are_asked_for_are_those_of_one_image(tmp_path):
    """As PyTorch writes x.view(x.size(0), -1), and constants that are computed in the graph."""
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "zero"], ["batch"], axis=0),
        node("Unsqueeze", ["batch", "zeros"], ["first"]),
        node("Concat", ["first", "rest"], ["sizes"], axis=0),
        node("Reshape", ["x", "sizes"], ["flat"]),
        node("Transpose", ["w"], ["turned"], perm=[1, 0]),
        node("MatMul", ["flat", "turned"], ["y"]),
    ]
    constants = {"zero": ints(0)[0], "zeros": ints(0), "rest": ints(-1), "w": constant(3, 72)}
    path = write(tmp_path / "view.onnx", nodes, constants)
    network = load_onnx(path)
    images = torch.rand(5, *SHAPE)
    assert network(images).shape == (5, 3)
    torch.testing.assert_close(network(images), runtime_outputs(str(path), images))
    assert [type(step.operation).__name__ for step in trace(network, SHAPE).steps] == ["Reshape", "Linear"]


@pytest.mark.parametrize(("opset", "settings"), [(11, {"axes": [2, 3]}), (17, {})])
def test_dimensions_of_size_one_are_dropped_unless_they_are_the_batch(tmp_path, opset, settings):
    axes = [] if settings else ["axes"]
    nodes = [
        node("GlobalAveragePool", ["x"], ["mean"]),
        node("Squeeze", ["mean", *axes], ["flat"], **settings),
        node("Gemm", ["flat", "w", "b"], ["y"]),
    ]
    weights = {"w": constant(2, 3), "b": constant(3), "axes": ints(-2, -1)}
    network = load_onnx(write(tmp_path / "squeeze.onnx", nodes, weights, opset=opset))
    assert network(torch.rand(4, *SHAPE)).shape == (4, 3)
    nodes[1] = node("Squeeze", ["mean"], ["flat"])
    with pytest.raises(
        UnsupportedLayer, match=r"operator Squeeze at 'the Squeeze': it drops whatever has size 1, a"
    ):
        load_onnx(write(tmp_path / "all.onnx", nodes, weights, opset=opset))


def test_nodes_of_one_name_are_kept_apart(tmp_path):
    nodes = [
        helper.make_node("Relu", ["x"], ["z"], name="one"),
        helper.make_node("Relu", ["z"], ["v"], name="one"),
    ]
    network = load_onnx(write(tmp_path / "one.onnx", [*nodes, *flattened("v")], WEIGHTS), check=False)
    assert list(network.layers)[:2] == ["one", "one_"]


def flattened(name):
    return [node("Flatten", [name], ["flat"]), node("Gemm", ["flat", "w", "b"], ["y"])]


def test_a_gate_by_its_own_sigmoid_is_one_function(tmp_path):
    nodes = [
        node("Sigmoid", ["x"], ["gate"]),
        node("Mul", ["gate", "x"], ["silu"]),
        node("Flatten", ["silu"], ["flat"]),
        node("Gemm", ["flat", "w"], ["y"]),
    ]
    network = load_onnx(write(tmp_path / "silu.onnx", nodes, {"w": constant(72, 3)}))
    assert [type(step.operation).__name__ for step in trace(network).steps] == ["Valley", "Reshape", "Linear"]


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("opset", [11, 17])
def test_a_softmax_at_the_end_is_left_out(tmp_path, kind, opset):
    nodes = [
        node("Flatten", ["x"], ["flat"]),
        node("Gemm", ["flat", "w"], ["z"]),
        node(kind, ["z"], ["y"], axis=1),
    ]
    path = write(tmp_path / "end.onnx", nodes, {"w": constant(72, 4)}, opset=opset)
    network, images = load_onnx(path), torch.rand(20, *SHAPE)
    assert network.left_out == kind
    assert len(network.layers) == 2
    assert torch.equal(network(images).argmax(dim=1), runtime_outputs(str(path), images).argmax(dim=1))


def test_layers_have_the_names_of_their_nodes(tmp_path):
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"], name="/body/flatten"),
        helper.make_node("Gemm", ["flat", "w"], ["z"], name="keys"),
        helper.make_node("Relu", ["z"], ["y"]),
    ]
    network = load_onnx(write(tmp_path / "names.onnx", nodes, {"w": constant(72, 4)}))
    assert list(network.layers) == ["body_flatten", "Gemm_1", "Relu_2"]


def test_maps_of_one_place_are_copied_to_all_places(tmp_path):
    nodes = [
        node("GlobalAveragePool", ["x"], ["mean"]),
        node("Expand", ["mean", "s"], ["wide"]),
        node("Mul", ["x", "wide"], ["z"]),
        *flattened("z"),
    ]
    path = write(tmp_path / "expand.onnx", nodes, {**WEIGHTS, "s": ints(1, 2, 6, 6)})
    network, images = load_onnx(path), torch.rand(3, *SHAPE)
    torch.testing.assert_close(network(images), runtime_outputs(str(path), images), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["ResNet", "SENet", "MobileNetV3", "ShuffleNetV2"])
def test_what_torch_has_exported_is_the_module_it_was(tmp_path, name):
    """By its older exporter, which needs no other package."""
    torch.manual_seed(0)
    model = randomise(FAMILIES[name](), torch.Generator().manual_seed(1), gain=0.5)
    path, images = tmp_path / "exported.onnx", torch.rand(3, 3, 32, 32)
    torch.onnx.export(
        model,
        (images[:1],),
        path,
        dynamo=False,
        input_names=["images"],
        dynamic_axes={"images": {0: "batch"}},
    )
    torch.testing.assert_close(load_onnx(path)(images), model(images), rtol=1e-4, atol=1e-5)


def test_double_precision_is_kept(tmp_path):
    nodes = [node("Flatten", ["x"], ["flat"]), node("Gemm", ["flat", "w"], ["y"])]
    weights = {"w": constant(72, 3, dtype=np.float64)}
    path = write(tmp_path / "double.onnx", nodes, weights, kind=TensorProto.DOUBLE)
    network = load_onnx(path)
    assert network(torch.rand(2, *SHAPE, dtype=torch.float64)).dtype == torch.float64


def test_what_is_read_is_certified_like_the_module_it_is(tmp_path):
    path = made(tmp_path / "convolution.onnx", "Conv")
    network = load_onnx(path)
    twin = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(108, 3)).eval()
    with torch.no_grad():
        for own, weight in zip(twin.parameters(), network.parameters(), strict=True):
            own.copy_(weight)
    images, threat = torch.rand(4, *SHAPE), pc.Patch(2)
    labels = twin(images).argmax(dim=1)
    ours, theirs = (pc.certify(model, images, labels, threat) for model in (network, twin))
    assert torch.equal(ours.margins, theirs.margins)
    assert torch.equal(ours.certified, theirs.certified)


REFUSED = {
    "unknown": (("Hardmax", ["x"], {}, 17, 72, {}), "operator Hardmax at 'the Hardmax': it is not read; operators that are: Abs, Add"),
    "a batch of constants": (("Add", ["x", "c"], {"c": constant(2, 2, 6, 6)}, 17, 144, {}), r"of shapes \(1, 2, 6, 6\), \(2, 2, 6, 6\) broadcast over the batch"),
    "one-sided pool": (("MaxPool", ["x"], {}, 17, 50, {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}), "the same padding on opposite sides"),
    "ceil of a mean": (("AveragePool", ["x"], {}, 17, 18, {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}), "ceil_mode or dilations are set"),
    "a mean over everything": (("ReduceMean", ["x"], {}, 17, 72, {}), "its axis is 0, the batch; what is said"),
    "flattened batch": (("Flatten", ["x"], {}, 17, 72, {"axis": 0}), "its axis is 0, the batch; what is said"),
    "mixed batch": (("Reshape", ["x", "s"], {"s": ints(2, 36)}, 17, 36, {}), r"its output has shape \(2, 3\) for one image; expected \(1, classes\)"),
    "misfit": (("Reshape", ["x", "s"], {"s": ints(1, 5)}, 17, 5, {}), "operator Reshape at 'the Reshape': it does not fit its inputs"),
    "no dimension of size one": (("Squeeze", ["x", "a"], {"a": ints(1)}, 17, 72, {}), "operator Squeeze at 'the Squeeze': it does not fit its inputs"),
    "permuted batch": (("Transpose", ["x"], {}, 17, 12, {}), r"its output has shape \(6, 3\) for one image"),
    "expanded batch": (("Expand", ["x", "s"], {"s": ints(3, 1, 1, 1)}, 17, 72, {}), r"it makes \(3, 2, 6, 6\) of \(1, 2, 6, 6\)"),
    "one more dimension": (("Expand", ["x", "s"], {"s": ints(1, 1, 1, 1, 1)}, 17, 72, {}), r"it makes \(1, 1, 2, 6, 6\)"),
    "joined batch": (("Concat", ["x", "x"], {}, 17, 72, {"axis": 0}), "its axis is 0, the batch; what is said"),
    "cut batch": (("Slice", ["x", "s", "e", "a"], {"s": ints(0), "e": ints(0), "a": ints(0)}, 17, 72, {}), "its axis is 0, the batch; what is said"),
    "backwards": (("Slice", ["x", "s", "e", "a", "t"], {"s": ints(5), "e": ints(0), "a": ints(2), "t": ints(-1)}, 17, 60, {}), "it takes steps of -1"),
    "another padding": (("Pad", ["x", "p"], {"p": ints(0, 0, 1, 1, 0, 0, 1, 1)}, 17, 128, {"mode": "edge"}), "its mode is 'edge'"),
    "another type": (("Cast", ["x"], {}, 17, 72, {"to": TensorProto.DOUBLE}), "it casts to another type"),
    "training": (("BatchNormalization", NORM, STATISTICS, 17, 72, {"training_mode": 1}), "it normalises by the statistics of the batch"),
    "limits the wrong way": (("Clip", ["x", "l", "h"], {"l": np.float32(1), "h": np.float32(0)}, 17, 72, {}), "its limits are 1.0 and 0.0"),
    "no map": (("Conv", ["x", "w"], {"w": constant(2, 2, 1)}, 17, 72, {}), "Conv"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_operator_and_place(tmp_path, name):
    (kind, inputs, constants, opset, features, settings), message = REFUSED[name]
    path = with_head(tmp_path / "case.onnx", kind, inputs, constants, opset, features, **settings)
    with pytest.raises((UnsupportedLayer, ModelError), match=message):
        load_onnx(path)


MIXING = {
    "a result of fewer dimensions": ("Add", ["x", "less"], {"s": ints(0, -1)}),
    "a result of more dimensions": ("Mul", ["x", "less"], {"s": ints(0, 1, 2, 6, 6)}),
    "a constant of more dimensions": ("Sub", ["less", "c"], {"s": ints(0, -1), "c": constant(1, 1, 72)}),
    "joined dimensions": ("Concat", ["x", "less"], {"s": ints(0, -1)}),
}


@pytest.mark.parametrize("name", MIXING)
def test_inputs_that_broadcast_over_the_batch_are_refused(tmp_path, name):
    """For one image they would do; in a batch each image would meet others."""
    kind, inputs, constants = MIXING[name]
    settings = {"axis": 1} if kind == "Concat" else {}
    nodes = [node("Reshape", ["x", "s"], ["less"]), node(kind, inputs, ["made"], **settings)]
    path = write(tmp_path / "mixing.onnx", [*nodes, *flattened("made")], {**WEIGHTS, **constants})
    with pytest.raises(UnsupportedLayer, match="broadcast over the batch"):
        load_onnx(path, check=False)


@pytest.mark.parametrize("kind", ["GlobalMaxPool", "GlobalAveragePool"])
def test_a_pooling_of_rows_is_refused(tmp_path, kind):
    """Of (n, channels, length) it pools the length, where a pooling of maps would pool channels too."""
    nodes = [
        node("Reshape", ["x", "s"], ["rows"]),
        node(kind, ["rows"], ["pooled"]),
        node("Mul", ["rows", "pooled"], ["made"]),
    ]
    path = write(tmp_path / "rows.onnx", [*nodes, *flattened("made")], {**WEIGHTS, "s": ints(0, 2, 36)})
    with pytest.raises(UnsupportedLayer, match=f"operator {kind}.*maps, of four dimensions"):
        load_onnx(path, check=False)


def test_settings_that_nobody_knows_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(OPERATORS, "Elu", lambda node: (node.result(), nn.ELU())[1])
    with pytest.raises(
        UnsupportedLayer, match="operator Elu at 'the Elu': alpha is set, and nothing is known"
    ):
        load_onnx(made(tmp_path / "elu.onnx", "Elu"))


LINEAR = [node("Flatten", ["x"], ["flat"]), node("Gemm", ["flat", "w", "b"], ["y"])]
WEIGHTS = {"w": constant(72, 3), "b": constant(3)}
FILES = {
    "old": ({"opset": 6}, "has opset 6; those from 7 to"),
    "flat": ({"shape": ("n", 72)}, r"takes inputs of shape \(n, 72\); expected \(batch, channels, height, width\)"),
    "of any size": ({"shape": ("n", 2, "h", "w")}, r"takes inputs of shape \(n, 2, h, w\)"),
    "half precision": ({"kind": TensorProto.FLOAT16}, "takes images of TensorProto.FLOAT16; expected FLOAT or DOUBLE"),
    "mixed types": ({"kind": TensorProto.DOUBLE}, "it mixes float32 with images of torch.float64"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_of_another_kind_are_refused(tmp_path, name):
    settings, message = FILES[name]
    path = write(tmp_path / "file.onnx", LINEAR, WEIGHTS, **settings)
    with pytest.raises(UnsupportedLayer, match=message):
        load_onnx(path)


def test_operators_of_other_domains_are_refused(tmp_path):
    nodes = [helper.make_node("Gelu", ["x"], ["y"], name="own", domain="com.example")]
    path = write(tmp_path / "own.onnx", nodes, {}, domain="com.example")
    with pytest.raises(UnsupportedLayer, match="operator Gelu at 'own' is of the domain 'com.example'"):
        load_onnx(path)


def test_a_map_at_the_end_is_refused(tmp_path):
    with pytest.raises(UnsupportedLayer, match=r"its output has shape \(1, 2, 6, 6\) for one image"):
        load_onnx(write(tmp_path / "map.onnx", [node("Relu", ["x"], ["y"])], {}))


def test_random_numbers_are_refused(tmp_path):
    nodes = [node("RandomNormal", [], ["r"], shape=[1, 2, 6, 6]), node("Add", ["x", "r"], ["y"])]
    with pytest.raises(
        UnsupportedLayer, match="operator RandomNormal at 'the RandomNormal': it draws numbers or has graphs"
    ):
        load_onnx(write(tmp_path / "random.onnx", nodes, {}))


def test_a_second_output_is_refused(tmp_path):
    nodes = [
        node("MaxPool", ["x"], ["z", "places"], kernel_shape=[2, 2]),
        node("Cast", ["places"], ["y"], to=1),
    ]
    with pytest.raises(UnsupportedLayer, match="takes 'places', which is more than the first output"):
        load_onnx(write(tmp_path / "places.onnx", nodes, {}))


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", b"\x08\x08\x12\x04"])
def test_other_files_are_said_to_be_none(tmp_path, content):
    path = tmp_path / "garbage.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"garbage.onnx is not a readable ONNX file"):
        load_onnx(path)
    with pytest.raises(ModelError, match=r"there is no file .*nowhere.onnx"):
        load_onnx(tmp_path / "nowhere.onnx")


def test_a_file_that_the_runtime_does_not_take_is_refused(tmp_path):
    nodes = [node("Flatten", ["x"], ["flat"]), node("Flatten", ["flat"], ["again"]), LINEAR[1]]
    with pytest.raises(ModelError, match="twice.onnx cannot be run by ONNX Runtime"):
        load_onnx(write(tmp_path / "twice.onnx", nodes, WEIGHTS))


def test_a_file_that_the_runtime_reads_otherwise_is_refused(tmp_path, monkeypatch):
    path = made(tmp_path / "relu.onnx", "Relu")
    theirs = runtime.runtime_outputs
    monkeypatch.setattr(runtime, "runtime_outputs", lambda file, images: theirs(file, images) + 3e-4)
    with pytest.raises(
        ModelError, match=r"gives other outputs in ONNX Runtime: they differ by .*1e-04 is allowed"
    ):
        load_onnx(path)
    assert load_onnx(path, check=False).image_shape == SHAPE


def test_without_the_packages_it_is_said_what_to_install(tmp_path, monkeypatch):
    path = made(tmp_path / "relu.onnx", "Relu")
    found = importlib.import_module

    def missing(name, *rest):
        if name in absent:
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(runtime.importlib, "import_module", missing)
    absent = {"onnxruntime"}
    assert load_onnx(path).image_shape == SHAPE
    absent = {"onnx"}
    with pytest.raises(ModelError, match="needs the package onnx, which is not installed") as caught:
        load_onnx(path)
    assert caught.value.hint == "pip install 'patchcert[onnx]'"


def test_the_page_lists_the_operators_that_are_read():
    page = (Path(__file__).parents[3] / "docs" / "guides" / "your-own-model.md").read_text()
    table = page.split("## ONNX files")[1].split("| | operators |")[1].partition("\nand everything")[0]
    with_bounds, without = table.split("| Without bounds |")
    assert set(re.findall(r"`(\w+)`", with_bounds)) == {*OPERATORS, "Softmax", "LogSoftmax"}
    assert set(re.findall(r"`(\w+)`", without)) == {*UNBOUNDED} - {*OPERATORS}
