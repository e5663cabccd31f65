"""Small ONNX files for tests, made with the package `onnx` alone."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

SHAPE = (2, 6, 6)


def constant(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def ints(*values):
    return np.array(values, dtype=np.int64)


def node(kind, inputs, outputs, name=None, **attributes):
    """A node with a name."""
    return helper.make_node(kind, inputs, outputs, name=name or f"the {kind}", **attributes)


def write(
    path,
    nodes,
    constants,
    opset=17,
    shape=("batch", *SHAPE),
    kind=TensorProto.FLOAT,
    domain="",
):
    """A file with the input x and the output y, and whatever its nodes say."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", kind, list(shape))],
        [helper.make_tensor_value_info("y", kind, ["batch", "classes"])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def with_head(path, kind, inputs, constants=None, opset=17, features=None, count=1, **attributes):
    """The operator on the image, then all of its results flattened, joined and weighed into three logits.

    `features` are how many there are.
    """
    outputs = [f"made{place}" for place in range(count)]
    flat = [f"{name} flat" for name in outputs]
    nodes = [node(kind, inputs, outputs, **attributes)]
    nodes += [
        node("Flatten", [name], [made], f"flatten {name}") for name, made in zip(outputs, flat, strict=True)
    ]
    if count > 1:
        nodes.append(node("Concat", flat, ["joined"], "join", axis=1))
    nodes.append(
        node("Gemm", ["joined" if count > 1 else flat[0], "weight", "bias"], ["y"], "head", transB=1)
    )
    weights = {"weight": constant(3, features, seed=1) / features, "bias": constant(3, seed=2)}
    return write(path, nodes, {**(constants or {}), **weights}, opset=opset)
