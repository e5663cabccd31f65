"""Operators without bounds compute what ONNX Runtime does, image by image, and bounds refuse them by name."""

import numpy as np
import pytest
import torch

import patchcert as pc
from attention_models import NETWORKS
from families import FAMILIES
from onnx_graphs import SHAPE, constant, ints, node, with_head, write
from patchcert.bounds import trace
from patchcert.errors import ModelError, UnsupportedLayer
from patchcert.models import load_onnx
from patchcert.models.onnx.runtime import runtime_outputs
from patchcert.models.onnx.unbounded import UNBOUNDED
from patchcert.testing.networks import randomise

CHANNELS, LAST = constant(2, 1, 1), constant(6)
PAIR = {"w": constant(2), "b": constant(2, seed=1)}

# ruff: noqa: E501 - a case is a line
# The operator, its inputs, its constants, the opset, how many values it gives, its settings.
CASES = {
    "Abs": ("Abs", ["x"], {}, 17, 72, {}),
    "Erf": ("Erf", ["x"], {}, 17, 72, {}),
    "Exp": ("Exp", ["x"], {}, 17, 72, {}),
    "Log": ("Log", ["x"], {}, 17, 72, {}),
    "Reciprocal": ("Reciprocal", ["x"], {}, 17, 72, {}),
    "Sqrt": ("Sqrt", ["x"], {}, 17, 72, {}),
    "Pow": ("Pow", ["x", "c"], {"c": np.float32(3)}, 17, 72, {}),
    "Pow, whole": ("Pow", ["x", "c"], {"c": ints(2)}, 17, 72, {}),
    "Max": ("Max", ["x", "c"], {"c": CHANNELS}, 17, 72, {}),
    "Min": ("Min", ["c", "x", "x"], {"c": CHANNELS}, 17, 72, {}),
    "Where": ("Where", ["m", "x", "c"], {"m": LAST > 0, "c": CHANNELS}, 17, 72, {}),
    "Sum": ("Sum", ["x", "c", "x"], {"c": CHANNELS}, 17, 72, {}),
    "Div, both": ("Div", ["x", "x"], {}, 17, 72, {}),
    "Div, first": ("Div", ["c", "x"], {"c": CHANNELS}, 17, 72, {}),
    "PRelu": ("PRelu", ["x", "c"], {"c": CHANNELS}, 17, 72, {}),
    "MatMul, both": ("MatMul", ["x", "x"], {}, 17, 72, {}),
    "MatMul, first": ("MatMul", ["c", "x"], {"c": constant(4, 6)}, 17, 48, {}),
    "MatMul, matrices": ("MatMul", ["x", "c"], {"c": constant(2, 6, 3)}, 17, 36, {}),
    "Mish": ("Mish", ["x"], {}, 18, 72, {}),
    "Softmax": ("Softmax", ["x"], {}, 17, 72, {}),
    "Softmax, channels": ("Softmax", ["x"], {}, 13, 72, {"axis": 1}),
    "Softmax 11": ("Softmax", ["x"], {}, 11, 72, {"axis": 2}),
    "LogSoftmax": ("LogSoftmax", ["x"], {}, 17, 72, {"axis": -2}),
    "LayerNormalization": ("LayerNormalization", ["x", "w", "b"], {"w": LAST, "b": constant(6, seed=1)}, 17, 72, {}),
    "LayerNormalization, maps": ("LayerNormalization", ["x", "w"], {"w": LAST}, 17, 72, {"axis": 1, "epsilon": 0.1, "stash_type": 1}),
    "RMSNormalization": ("RMSNormalization", ["x", "w"], {"w": LAST}, 23, 72, {"epsilon": 0.1}),
    "InstanceNormalization": ("InstanceNormalization", ["x", *PAIR], PAIR, 17, 72, {"epsilon": 0.1}),
    "GroupNormalization": ("GroupNormalization", ["x", *PAIR], PAIR, 21, 72, {"num_groups": 1, "epsilon": 0.1}),
    "LRN": ("LRN", ["x"], {}, 17, 72, {"size": 3, "alpha": 0.5, "bias": 2.0}),
    "Attention": ("Attention", ["x", "x", "x"], {}, 23, 72, {"scale": 0.5}),
    "Attention, masked": ("Attention", ["x", "x", "x", "m"], {"m": constant(6, 6)}, 23, 72, {}),
    "Einsum": ("Einsum", ["x", "x"], {}, 17, 72, {"equation": "bcij, bckj -> bcik"}),
    "Einsum, constant": ("Einsum", ["c", "x"], {"c": constant(6, 4)}, 17, 48, {"equation": "jk,...j->...k"}),
    "ReduceMean": ("ReduceMean", ["x"], {}, 17, 36, {"axes": [1], "keepdims": 0}),
    "ReduceSum": ("ReduceSum", ["x", "a"], {"a": ints(-1)}, 17, 12, {}),
    "ReduceMax": ("ReduceMax", ["x"], {}, 17, 6, {"axes": [1, -1]}),
    "ReduceMin": ("ReduceMin", ["x", "a"], {"a": ints(2)}, 18, 12, {"noop_with_empty_axes": 1}),
    "ReduceL2": ("ReduceL2", ["x"], {}, 17, 12, {"axes": [3]}),
    "Tile": ("Tile", ["x", "r"], {"r": ints(1, 1, 2, 1)}, 17, 144, {}),
    "Gather": ("Gather", ["x", "i"], {"i": np.array(-1)}, 17, 36, {"axis": 1}),
    "Gather, several": ("Gather", ["x", "i"], {"i": ints(4, -1, 0, 0).reshape(2, 2)}, 17, 48, {"axis": 3}),
    "Concat": ("Concat", ["c", "x"], {"c": constant(1, 1, 6, 6)}, 17, 108, {"axis": 1}),
    "Pad": ("Pad", ["x", "p", "v"], {"p": ints(0, 1, 0, 0, 0, 0, 0, -1), "v": np.float32(2)}, 17, 90, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_what_the_runtime_computes_and_bounds_refuse_it(tmp_path, name):
    kind, inputs, constants, opset, features, settings = CASES[name]
    path = with_head(tmp_path / "case.onnx", kind, inputs, constants, opset, features, **settings)
    network, images = load_onnx(path, check=False), torch.rand(4, *SHAPE) + 0.1
    torch.testing.assert_close(network(images), runtime_outputs(str(path), images), rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedLayer, match=f"layer 'layers.the_{kind}' ") as caught:
        trace(network, SHAPE)
    assert "--method masking" in caught.value.hint


# Behind a Transpose, by which the batch is the second dimension of (6, 1, 2, 6).
MOVED = {
    "Relu": ("Relu", ["x"], {}, {}),
    "Add": ("Add", ["x", "c"], {"c": constant(6, 1, 2, 6)}, {}),
    "Mul": ("Mul", ["x", "x"], {}, {}),
    "MatMul": ("MatMul", ["x", "c"], {"c": constant(6, 6)}, {}),
    "LayerNormalization": ("LayerNormalization", ["x", "c"], {"c": LAST}, {}),
    "Softmax": ("Softmax", ["x"], {}, {"axis": 0}),
    "ReduceMean": ("ReduceMean", ["x"], {}, {"axes": [0]}),
    "Gather": ("Gather", ["x", "i"], {"i": np.array(5)}, {"axis": 0}),
    "Split": ("Split", ["x", "s"], {"s": ints(4, 2)}, {"axis": 0}),
    "Slice": ("Slice", ["x", "s", "e"], {"s": ints(1), "e": ints(5)}, {}),
    "Concat": ("Concat", ["c", "x"], {"c": constant(1, 1, 2, 6)}, {"axis": 0}),
    "Expand": ("Expand", ["x", "s"], {"s": ints(6, 3, 2, 6)}, {}),
    "Tile": ("Tile", ["x", "s"], {"s": ints(2, 1, 1, 1)}, {}),
    "Pad": ("Pad", ["x", "s"], {"s": ints(1, 0, 0, 0, 1, 0, 0, 0)}, {}),
    "Flatten": ("Flatten", ["x"], {}, {"axis": 2}),
    "Reshape": ("Reshape", ["x", "s"], {"s": ints(3, 2, 0, -1)}, {}),
    "Squeeze": ("Squeeze", ["x", "s"], {"s": ints(1)}, {}),
    "Unsqueeze": ("Unsqueeze", ["x", "s"], {"s": ints(0)}, {}),
    "Transpose": ("Transpose", ["x"], {}, {"perm": [3, 0, 1, 2]}),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_images_do_not_meet_where_the_batch_is_moved(tmp_path, name):
    kind, inputs, constants, settings = MOVED[name]
    nodes = [
        node("Transpose", ["x"], ["moved"], "move", perm=[3, 0, 1, 2]),
        node(kind, ["moved" if each == "x" else each for each in inputs], ["made"], **settings),
        node("Reshape", ["made", "flat"], ["row"], "flatten"),
        node("ReduceSum", ["row", "last"], ["sum"], "sum"),
        node("Mul", ["sum", "weight"], ["y"], "head"),
    ]
    if kind == "Split":
        nodes[1].output.append("rest")
    extra = {"flat": ints(1, -1), "last": ints(1), "weight": constant(1, 3)}
    path = write(tmp_path / "moved.onnx", nodes, {**constants, **extra})
    network, images = load_onnx(path), torch.rand(4, *SHAPE)
    torch.testing.assert_close(network(images), runtime_outputs(str(path), images), rtol=1e-4, atol=1e-4)


def test_every_operator_has_a_case():
    assert {kind for kind, *_ in [*CASES.values(), *MOVED.values()]} | {"Sub"} >= set(UNBOUNDED)


TRAPS = {
    "a token for four images": ("Concat", ["c", "x"], {"c": constant(4, 1, 6, 6)}, {"axis": 1}, "broadcast over the batch"),
    "a shape of four images": ("Reshape", ["x", "c"], {"c": ints(4, 2, 36)}, {}, "it does not fit its inputs"),
    "copies for four images": ("Expand", ["x", "c"], {"c": ints(4, 2, 6, 6)}, {}, r"it makes \(4, 2, 6, 6\)"),
    "repeated images": ("Tile", ["x", "c"], {"c": ints(4, 1, 1, 1)}, {}, "its axis is 0, the batch"),
    "the first image": ("Gather", ["x", "c"], {"c": np.array(0)}, {"axis": 0}, "its axis is 0, the batch"),
    "shares of images": ("Softmax", ["x"], {}, {"axis": 0}, "its axis is 0, the batch"),
    "the mean of images": ("ReduceMean", ["x"], {}, {"axes": [-4]}, "its axis is -4, the batch"),
    "the mean of everything": ("ReduceSum", ["x", "c"], {"c": ints()}, {}, "its axis is 0, the batch"),
    "a norm over images": ("LayerNormalization", ["x", "c"], {"c": constant(1, 2, 6, 6)}, {"axis": 0}, "its axis is 0, the batch"),
    "padded images": ("Pad", ["x", "c"], {"c": ints(1, 0, 0, 0, 0, 0, 0, 0)}, {}, "its axis is 0, the batch"),
    "products of images": ("MatMul", ["x", "c"], {"c": constant(4, 2, 6, 6)}, {}, "broadcast over the batch"),
    "a place that is not there": ("Gather", ["x", "c"], {"c": ints(6)}, {"axis": 2}, "it does not fit its inputs"),
    "reflected": ("Pad", ["x", "c"], {"c": ints(0, 0, 1, 1, 0, 0, 1, 1)}, {"mode": "reflect"}, "its mode is 'reflect'"),
    "an even number of channels": ("LRN", ["x"], {}, {"size": 2}, "its size is 2"),
    "nothing made": ("Einsum", ["x", "x"], {}, {"equation": "bcij,bckj"}, "expected one with '->'"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_what_would_mix_images_is_refused_by_name(tmp_path, name):
    kind, inputs, constants, settings, message = TRAPS[name]
    path = with_head(tmp_path / "trap.onnx", kind, inputs, constants, 17, 72, **settings)
    with pytest.raises(UnsupportedLayer, match=f"operator {kind} at 'the {kind}'.*{message}"):
        load_onnx(path, check=False)


@pytest.mark.parametrize("heads", [2, None])
def test_attention_of_flat_tokens_says_its_heads(tmp_path, heads):
    nodes = [
        node("Reshape", ["x", "s"], ["tokens"], "tokens"),
        node("Attention", ["tokens"] * 3, ["made"], **({"q_num_heads": heads, "kv_num_heads": heads} if heads else {})),
        node("Flatten", ["made"], ["flat"]),
        node("Gemm", ["flat", "w"], ["y"]),
    ]  # fmt: skip
    path = write(tmp_path / "a.onnx", nodes, {"s": ints(0, 12, 6), "w": constant(72, 3)}, opset=23)
    if heads is None:
        with pytest.raises((UnsupportedLayer, ModelError)):
            load_onnx(path)
        return
    images = torch.rand(3, *SHAPE)
    torch.testing.assert_close(load_onnx(path)(images), runtime_outputs(str(path), images))


def test_a_branch_is_refused(tmp_path):
    from onnx import helper

    branch = helper.make_graph(
        [node("Relu", ["x"], ["z"])], "branch", [], [helper.make_empty_tensor_value_info("z")]
    )
    nodes = [
        node("If", ["c"], ["made"], then_branch=branch, else_branch=branch),
        node("Flatten", ["made"], ["flat"]),
        node("Gemm", ["flat", "w"], ["y"]),
    ]
    path = write(tmp_path / "if.onnx", nodes, {"c": np.array(True), "w": constant(72, 3)})
    with pytest.raises(UnsupportedLayer, match="operator If at 'the If'"):
        load_onnx(path)


def exported(model, path, opset, size):
    torch.onnx.export(
        model.eval(),
        (torch.rand(2, 3, size, size),),
        path,
        dynamo=False,
        opset_version=opset,
        input_names=["images"],
        dynamic_axes={"images": {0: "batch"}},
    )
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [13, 17, 20])
@pytest.mark.parametrize("name", NETWORKS)
def test_what_torch_has_exported_is_the_module_it_was(tmp_path, name, opset):
    if opset < 14 and "of PyTorch" in name and name != "the attention of PyTorch":
        pytest.skip("PyTorch exports scaled_dot_product_attention from opset 14 on")
    torch.manual_seed(0)
    model, images = NETWORKS[name](), torch.rand(4, 3, 16, 16)
    network = load_onnx(exported(model, tmp_path / "model.onnx", opset, 16))
    torch.testing.assert_close(network(images), model(images), rtol=1e-4, atol=1e-5)
    alone = torch.cat([network(image) for image in images.split(1)])
    torch.testing.assert_close(network(images), alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedLayer, match=r"layer 'layers\.") as caught:
        pc.certify(network, images, torch.zeros(4, dtype=torch.long), pc.Patch(3))
    assert "--method masking" in caught.value.hint


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["ConvNeXt", "ViT"])
def test_families_without_bounds_are_proven_behind_masks(tmp_path, name):
    torch.manual_seed(0)
    model = randomise(FAMILIES[name](), torch.Generator().manual_seed(1), gain=0.5)
    network = load_onnx(exported(model, tmp_path / "model.onnx", 17, 32))
    images, threat = torch.rand(3, 3, 32, 32), pc.Patch(4)
    labels = model(images).argmax(dim=1)
    ours, theirs = (
        pc.DoubleMasking(each, threat, masks=2).certify(images, labels, threat) for each in (network, model)
    )
    assert torch.equal(ours.certified, theirs.certified)
    assert torch.equal(ours.predictions, theirs.predictions)


def test_a_gelu_in_parts_is_refused_with_the_opset_that_has_it_whole(tmp_path):
    network = load_onnx(with_head(tmp_path / "erf.onnx", "Erf", ["x"], {}, 17, 72))
    with pytest.raises(
        UnsupportedLayer,
        match="operator Erf at 'the Erf': no bound is known for it; operators with bounds: Add",
    ) as caught:
        trace(network, SHAPE)
    assert caught.value.hint.startswith("export with opset 20 or later")
