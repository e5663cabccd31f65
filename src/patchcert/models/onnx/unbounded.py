"""What operators of ONNX become for which no useful bound is known, for proofs that only ask what a network says.

A rule here is asked where `operators` has none, or has one that refuses the node.
"""

import operator
import string
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.bounds.lowering import layer_rule
from patchcert.errors import UnsupportedLayer
from patchcert.models.onnx.nodes import Array, Made, Node, Rule, reads, tensor_of, weighted
from patchcert.models.onnx.operators import (
    expanded_shape,
    padded,
    permuted,
    piece,
    shape_after,
    sliced,
    split_lengths,
)

UNBOUNDED: dict[str, Rule] = {}
_operator = partial(reads, UNBOUNDED)


class Unbounded(nn.Module):
    """A function of results and constants, for each image by itself; bounds refuse it for the reason of its node.

    The function is given results, and gives one, with all dimensions that they have in ONNX for one image, and that of
    the images in front. It counts axes from the end, or from 1 on, so that images never meet.
    """

    def __init__(
        self, node: Node, function: Callable[..., Tensor], inputs: Sequence[Array | Tensor] | None = None
    ) -> None:
        super().__init__()
        self.function, self.why_unbounded = function, node.why_unbounded
        self.shapes: list[tuple[int, ...] | None] = []
        for place, value in enumerate([node.result()] if inputs is None else inputs):
            if isinstance(value, Tensor):
                self.shapes.append(tuple(value.shape))
            else:
                self.shapes.append(None)
                self.register_buffer(f"input{place}", tensor_of(value))

    def forward(self, *values: Tensor) -> Tensor:
        """The result as networks hold it: without the batch of ONNX, that of one image."""
        return self.whole(*values).squeeze(1)

    def whole(self, *values: Tensor) -> Tensor:
        """The result (images, *dimensions in ONNX)."""
        results = iter(values)
        given = [
            self.get_buffer(f"input{place}") if shape is None else _whole(next(results), shape)
            for place, shape in enumerate(self.shapes)
        ]
        return self.function(*given)


def _whole(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    return value.reshape(len(value), *shape)


@layer_rule(Unbounded)
def _unbounded(layer: Unbounded) -> NoReturn:
    reason, hint = layer.why_unbounded
    raise UnsupportedLayer(reason, hint)


def _each_value(name: str, function: Callable[[Tensor], Tensor]) -> None:
    """Registers an operator that takes every value by itself."""
    _operator(name)(lambda node: Unbounded(node, function))


_each_value("Abs", torch.abs)
_each_value("Erf", torch.erf)
_each_value("Exp", torch.exp)
_each_value("Log", torch.log)
_each_value("Reciprocal", torch.reciprocal)
_each_value("Sqrt", torch.sqrt)


def _broadcast(name: str, function: Callable[..., Tensor]) -> None:
    """Registers an operator of results and constants that broadcast within an image."""
    _operator(name)(lambda node: Unbounded(node, function, node.fitting()))


_broadcast("Add", operator.add)
_broadcast("Sum", lambda *terms: reduce(operator.add, terms))
_broadcast("Sub", operator.sub)
_broadcast("Mul", operator.mul)
_broadcast("Div", operator.truediv)
_broadcast("Pow", torch.pow)
_broadcast("Max", lambda *values: reduce(torch.maximum, values))
_broadcast("Min", lambda *values: reduce(torch.minimum, values))
_broadcast("MatMul", torch.matmul)
_broadcast("Where", torch.where)
_broadcast("PRelu", lambda value, slope: torch.where(value < 0, value * slope, value))


@_operator("Mish")
def _mish(node: Node) -> Made:
    node.result()
    return nn.Mish()


@_operator("Softmax", "LogSoftmax")
def _softmax(node: Node) -> Made:
    """Before opset 13 it is taken over all axes from the given one on."""
    is_newer = node.opset >= 13
    node.result()
    axis = node.inner_axis(node.attribute("axis", -1 if is_newer else 1))
    kind = nn.Softmax if node.proto.op_type == "Softmax" else nn.LogSoftmax
    if is_newer or axis == -1:
        return kind(axis)
    last = kind(-1)
    return Unbounded(node, lambda value: last(value.flatten(axis)).reshape(value.shape))


@_operator("LayerNormalization")
def _layer_norm(node: Node) -> Made:
    value = node.result()
    sizes = value.shape[node.inner_axis(node.attribute("axis", -1)) :]
    weight, bias = node.needed(1), node.constant(2)
    node.attribute("stash_type")  # the type of sums, which is no other
    layer = nn.LayerNorm(list(sizes), eps=node.attribute("epsilon", 1e-5))
    return weighted(
        layer, np.broadcast_to(weight, sizes), None if bias is None else np.broadcast_to(bias, sizes)
    )


@_operator("RMSNormalization")
def _rms_norm(node: Node) -> Made:
    value = node.result()
    sizes = value.shape[node.inner_axis(node.attribute("axis", -1)) :]
    node.attribute("stash_type")
    layer = nn.RMSNorm(list(sizes), eps=node.attribute("epsilon", 1e-5))
    return weighted(layer, np.broadcast_to(node.needed(1), sizes), None)


@_operator("InstanceNormalization")
def _instance_norm(node: Node) -> Made:
    """Every channel is a group."""
    channels = node.batch().shape[1]
    layer = nn.GroupNorm(channels, channels, eps=node.attribute("epsilon", 1e-5))
    return weighted(layer, node.needed(1), node.needed(2))


@_operator("GroupNormalization")
def _group_norm(node: Node) -> Made:
    channels = node.batch().shape[1]
    node.attribute("stash_type")
    layer = nn.GroupNorm(node.attribute("num_groups"), channels, eps=node.attribute("epsilon", 1e-5))
    return weighted(layer, node.needed(1), node.needed(2))


@_operator("LRN")
def _local_response_norm(node: Node) -> Made:
    node.batch()
    size = node.attribute("size")
    if size % 2 == 0:
        node.refuse(f"its size is {size}; expected an odd number of channels, as many on either side")
    alpha, beta = node.attribute("alpha", 1e-4), node.attribute("beta", 0.75)
    return nn.LocalResponseNorm(size, alpha, beta, node.attribute("bias", 1.0))


@_operator("Attention")
def _attention(node: Node) -> Made:
    """Of queries, keys and values (batch, heads, tokens, features), or (batch, tokens, heads x features)."""
    values, mask = [node.result(place) for place in range(3)], node.constant(3)
    query_heads, heads = node.attribute("q_num_heads"), node.attribute("kv_num_heads")
    is_causal, scale = bool(node.attribute("is_causal", 0)), node.attribute("scale")

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)

    def attend_by_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        counts = ((query, query_heads), (key, heads), (value, heads))
        parts = [each.unflatten(-1, (count, -1)).transpose(-3, -2) for each, count in counts]
        return attend(parts[0], parts[1], parts[2], mask).transpose(-3, -2).flatten(-2)

    given = values if mask is None else [*values, mask]
    if values[0].dim() == 4:
        return Unbounded(node, attend, given)
    if None in (query_heads, heads):
        node.refuse("it does not say how many heads there are; expected q_num_heads and kv_num_heads")
    return Unbounded(node, attend_by_heads, given)


@_operator("Einsum")
def _einsum(node: Node) -> Made:
    """Each result has one letter more in front, that of the images."""
    equation, values = node.attribute("equation").decode().replace(" ", ""), node.every_input()
    terms, arrow, made = equation.partition("->")
    if not arrow:
        node.refuse(f"its equation {equation!r} does not say what it makes; expected one with '->'")
    letter = next(each for each in string.ascii_letters if each not in equation)
    named = [
        letter + term if isinstance(value, Tensor) else term
        for term, value in zip(terms.split(","), values, strict=True)
    ]
    return Unbounded(node, partial(torch.einsum, f"{','.join(named)}->{letter}{made}"), values)


def _reduced(name: str, function: Callable[..., Tensor], since: int) -> None:
    """Registers an operator that makes one value of all along some axes, which are an input from an opset on."""

    def rule(node: Node) -> Made:
        given, keeps = node.setting("axes", 1, since), bool(node.attribute("keepdims", 1))
        takes_none = bool(node.attribute("noop_with_empty_axes", 0))
        if given is None or not len(given):
            if takes_none:
                node.refuse("noop_with_empty_axes is set, and there are no axes; expected some")
            given = np.arange(node.result().dim())
        axes = tuple(node.inner_axis(int(axis)) for axis in given)
        return Unbounded(node, lambda value: function(value, dim=axes, keepdim=keeps))

    _operator(name)(rule)


_reduced("ReduceMean", torch.mean, since=18)
_reduced("ReduceSum", torch.sum, since=13)
_reduced("ReduceMax", torch.amax, since=18)
_reduced("ReduceMin", torch.amin, since=18)
_reduced("ReduceL2", torch.linalg.vector_norm, since=18)


@_operator("Flatten", "Reshape", "Squeeze", "Unsqueeze")
def _reshape(node: Node) -> Made:
    shape = shape_after(node)
    return Unbounded(node, lambda value: _whole(value, shape))


@_operator("Transpose")
def _transpose(node: Node) -> Made:
    order = [axis + 1 for axis in permuted(node)]
    return Unbounded(node, lambda value: value.permute(0, *order))


@_operator("Expand")
def _expand(node: Node) -> Made:
    shape = expanded_shape(node)
    return Unbounded(node, lambda value: value.expand(-1, *shape))


@_operator("Tile")
def _tile(node: Node) -> Made:
    repeats = [int(count) for count in node.needed(1)]
    if repeats[0] != 1:
        node.inner_axis(0)
    return Unbounded(node, lambda value: value.repeat(1, *repeats))


@_operator("Concat")
def _concatenate(node: Node) -> Made:
    """Of constants, such as a class token, each image has its own copy."""
    axis = node.inner_axis(node.attribute("axis"))
    values = node.fitting()
    is_constant = [not isinstance(value, Tensor) for value in values]

    def join(*parts: Tensor) -> Tensor:
        images = len(parts[is_constant.index(False)])
        return torch.cat(
            [
                part.expand(images, *part.shape) if is_same else part
                for part, is_same in zip(parts, is_constant, strict=True)
            ],
            axis,
        )

    return Unbounded(node, join, values)


@_operator("Split")
def _split(node: Node) -> Made:
    lengths, axis = split_lengths(node)
    return [Unbounded(node, partial(piece, lengths, axis, place)) for place in range(len(node.proto.output))]


@_operator("Slice")
def _slice(node: Node) -> Made:
    chosen = (slice(None), *sliced(node))
    return Unbounded(node, lambda value: value[chosen])


@_operator("Gather")
def _gather(node: Node) -> Made:
    value, picked = node.result(), node.needed(1)
    axis = node.inner_axis(node.attribute("axis", 0))
    if picked.ndim == 0:
        number = int(picked)
        return Unbounded(node, lambda value: value.select(axis, number))
    numbers = np.where(picked < 0, picked + value.shape[axis], picked)

    def gather(value: Tensor, numbers: Tensor) -> Tensor:
        return value.index_select(axis, numbers.flatten()).unflatten(axis, numbers.shape)

    return Unbounded(node, gather, [value, numbers])


@_operator("Pad")
def _pad(node: Node) -> Made:
    """By one number."""
    sides, fill = padded(node)
    if any(sides[0]):
        node.inner_axis(0)
    pads = [count for side in reversed(sides) for count in side]
    return Unbounded(node, lambda value: F.pad(value, pads, value=fill))
