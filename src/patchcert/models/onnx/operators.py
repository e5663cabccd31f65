"""What operators of ONNX become whose bounds are known: for each a rule from a node to a module that has them.

A rule refuses what has none; `unbounded` has rules for forward passes alone.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.models.onnx.nodes import FLOATS, Array, Made, Node, Rule, reads, tensor_of, weighted

OPERATORS: dict[str, Rule] = {}
_operator = partial(reads, OPERATORS)


class Applied(nn.Module):
    """A function of results of the network, with at most one constant after them."""

    def __init__(self, function: Callable[..., Tensor], constant: Array | None = None) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("constant", None if constant is None else tensor_of(constant))

    def forward(self, *inputs: Tensor) -> Tensor:
        """The function's value."""
        return self.function(*inputs) if self.constant is None else self.function(*inputs, self.constant)


def _pads(
    node: Node, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[int, int, int, int]:
    """(top, bottom, left, right)"""
    automatic = node.attribute("auto_pad", b"NOTSET").decode()
    explicit = node.attribute("pads", [0, 0, 0, 0])
    if automatic in ("NOTSET", "VALID"):
        top, left, bottom, right = explicit if automatic == "NOTSET" else (0, 0, 0, 0)
        return top, bottom, left, right
    sides = []
    for axis, size in enumerate(node.map().shape[2:]):
        span = dilations[axis] * (kernel[axis] - 1) + 1
        total = max((-(-size // strides[axis]) - 1) * strides[axis] + span - size, 0)
        less = total // 2
        sides += [less, total - less] if automatic == "SAME_UPPER" else [total - less, less]
    return sides[0], sides[1], sides[2], sides[3]


def _pair(node: Node, name: str, default: int = 1) -> tuple[int, int]:
    first, second = node.attribute(name, [default, default])
    return first, second


@_operator("Conv")
def _convolution(node: Node) -> Made:
    node.map()
    weight, bias = node.needed(1), node.constant(2)
    node.attribute("kernel_shape")  # that of the weights, by the checker
    kernel, groups = weight.shape[2:], node.attribute("group", 1)
    strides, dilations = _pair(node, "strides"), _pair(node, "dilations")
    top, bottom, left, right = _pads(node, kernel, strides, dilations)
    padding = (top, left) if top == bottom >= 0 and left == right >= 0 else 0
    layer = nn.Conv2d(1, 1, kernel, strides, padding, dilations)  # pyright: ignore[reportArgumentType]
    layer.in_channels, layer.out_channels, layer.groups = weight.shape[1] * groups, len(weight), groups
    weighted(layer, weight, bias)
    return layer if padding != 0 else nn.Sequential(nn.ZeroPad2d((left, right, top, bottom)), layer)


@_operator("ConvTranspose")
def _transposed_convolution(node: Node) -> Made:
    node.map()
    weight, bias = node.needed(1), node.constant(2)
    node.attribute("kernel_shape")
    if node.attribute("output_shape") is not None or node.attribute("auto_pad", b"NOTSET") != b"NOTSET":
        node.refuse("its padding is found from a size; bounds exist for explicit pads")
    top, left, bottom, right = node.attribute("pads", [0, 0, 0, 0])
    if (top, left) != (bottom, right):
        node.refuse(f"pads are {[top, left, bottom, right]}; bounds exist for the same on opposite sides")
    groups, dilations = node.attribute("group", 1), _pair(node, "dilations")
    extra = _pair(node, "output_padding", 0)
    layer = nn.ConvTranspose2d(
        1, 1, weight.shape[2:], _pair(node, "strides"), (top, left), extra, dilation=dilations
    )  # pyright: ignore
    layer.in_channels, layer.out_channels, layer.groups = len(weight), weight.shape[1] * groups, groups
    return weighted(layer, weight, bias)


@_operator("Gemm")
def _gemm(node: Node) -> Made:
    value, weight, bias = node.result(), node.needed(1), node.constant(2)
    for name in ("alpha", "beta"):
        if node.attribute(name, 1.0) != 1.0:
            node.refuse(f"{name} is {node.attribute(name)}; bounds exist for 1")
    if node.attribute("transA", 0) or value.dim() != 2:
        node.refuse("its first input is turned, or no table; bounds exist for one row for each image")
    weight = weight if node.attribute("transB", 0) else weight.T
    if bias is not None:
        bias = np.broadcast_to(bias, (1, len(weight)))[0]
    return _linear(weight, bias)


def _linear(weight: Array, bias: Array | None) -> nn.Module:
    layer = nn.Linear(1, 1)
    layer.out_features, layer.in_features = weight.shape
    return weighted(layer, weight, bias)


@_operator("MatMul")
def _product(node: Node) -> Made:
    node.result()
    weight = node.needed(1)
    if weight.ndim != 2:
        node.refuse(f"its second input has shape {weight.shape}; bounds exist for a matrix")
    return _linear(weight.T, None)


@_operator("BatchNormalization")
def _batch_norm(node: Node) -> Made:
    value = node.batch()
    scale, bias, mean, variance = (node.needed(place) for place in (1, 2, 3, 4))
    node.attribute("momentum")
    if node.attribute("training_mode", 0) or not node.attribute("spatial", 1):
        node.refuse(
            "it normalises by the statistics of the batch, or by place; bounds exist for stored ones by channel"
        )
    kind = nn.BatchNorm2d if value.dim() == 4 else nn.BatchNorm1d
    layer = kind(len(scale), eps=node.attribute("epsilon", 1e-5))
    weighted(layer, scale, bias)
    layer.running_mean, layer.running_var = tensor_of(mean), tensor_of(variance)
    return layer


def _arithmetic(
    node: Node, function: Callable[[Any, Any], Any], turned: Callable[[Any, Any], Any] | None
) -> Made:
    """Of a result and a constant, on either side."""
    first, second = node.inputs
    if isinstance(first, Tensor):
        return Applied(function, second)  # pyright: ignore[reportArgumentType]
    if turned is None:
        node.refuse("it divides by a result of the network; bounds exist for constants there")
    return Applied(turned, first)


@_operator("Add", "Sum")
def _sum(node: Node) -> Made:
    if not node.takes_results_alone():
        if len(node.inputs) != 2:
            node.refuse(f"it sums {len(node.inputs)} inputs, constants among them; bounds exist for two then")
        return _arithmetic(node, operator.add, operator.add)
    return Applied(lambda *terms: reduce(operator.add, terms)) if len(node.inputs) > 1 else nn.Identity()


@_operator("Sub")
def _difference(node: Node) -> Made:
    if not node.takes_results_alone():
        return _arithmetic(node, operator.sub, lambda value, constant: constant - value)
    return Applied(lambda first, second: first + second * -1)


@_operator("Mul")
def _multiplied(node: Node) -> Made:
    """x sigmoid(x) is one function, SiLU, whose bound is tighter than that of a product."""
    if not node.takes_results_alone():
        return _arithmetic(node, operator.mul, operator.mul)
    for own, other in ((0, 1), (1, 0)):
        gate = node.producers.get(node.proto.input[other])
        if gate is not None and gate.op_type == "Sigmoid" and gate.input[0] == node.proto.input[own]:
            return Applied(lambda *factors, own=own: F.silu(factors[own]))
    return Applied(operator.mul)


@_operator("Div")
def _quotient(node: Node) -> Made:
    if node.takes_results_alone():
        node.refuse("it divides by a result of the network; bounds exist for constants there")
    return _arithmetic(node, operator.truediv, None)


def _plain(name: str, layer: Callable[..., nn.Module], **defaults: float) -> None:
    """Registers an operator that is a layer, which takes the named settings in their order."""

    def rule(node: Node) -> Made:
        node.result()
        return layer(*(node.attribute(setting, default) for setting, default in defaults.items()))

    _operator(name)(rule)


_plain("Neg", partial(Applied, torch.neg))
_plain("Relu", nn.ReLU)
_plain("Sigmoid", nn.Sigmoid)
_plain("Tanh", nn.Tanh)
_plain("Softsign", nn.Softsign)
_plain("HardSwish", nn.Hardswish)
_plain("Identity", nn.Identity)
_plain("LeakyRelu", nn.LeakyReLU, alpha=0.01)
_plain("Elu", nn.ELU, alpha=1.0)
_plain("Celu", nn.CELU, alpha=1.0)
# ONNX has no threshold. From 80 on x and log(1 + exp(x)) differ by less than 2e-35, a tiny part of a unit of x.
_plain("Softplus", partial(nn.Softplus, threshold=80.0))


@_operator("PRelu")
def _learnt_slope(node: Node) -> Made:
    node.result()
    slope = node.needed(1)
    if slope.size != 1:
        node.refuse(f"it has {slope.size} slopes; bounds exist for one")
    return nn.LeakyReLU(float(slope.item()))


@_operator("Selu")
def _selu(node: Node) -> Made:
    """Its constants are numbers of float32, which those of PyTorch are not."""
    node.result()
    alpha = node.attribute("alpha", 1.67326319217681884765625)
    gamma = node.attribute("gamma", 1.05070102214813232421875)
    return nn.Sequential(nn.ELU(alpha), Applied(lambda value: value * gamma))


@_operator("HardSigmoid")
def _hard_sigmoid(node: Node) -> Made:
    node.result()
    alpha, beta = node.attribute("alpha", 0.2), node.attribute("beta", 0.5)
    return nn.Sequential(Applied(lambda value: value * alpha + beta), nn.Hardtanh(0.0, 1.0))


@_operator("Gelu")
def _gelu(node: Node) -> Made:
    node.result()
    return nn.GELU(approximate=node.attribute("approximate", b"none").decode())


@_operator("Clip")
def _clip(node: Node) -> Made:
    node.result()
    lower, upper = node.setting("min", 1, since=11), node.setting("max", 2, since=11)
    largest = np.finfo(np.float32).max  # the default, where limits are attributes
    low = -np.inf if lower is None or lower == -largest else float(lower.item())
    high = np.inf if upper is None or upper == largest else float(upper.item())
    if (low, high) == (-np.inf, np.inf):
        return nn.Identity()
    if (low, high) == (0.0, np.inf):
        return nn.ReLU()
    if not low < high:
        node.refuse(f"its limits are {low} and {high}; bounds exist for a lower and a higher one")
    return nn.ReLU6() if (low, high) == (0.0, 6.0) else nn.Hardtanh(low, high)


def _pooled(
    node: Node,
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int, int, int], tuple[int, int]]:
    """Kernel, strides, padding and dilations."""
    node.map()
    first, second = node.attribute("kernel_shape")
    strides, dilations = _pair(node, "strides"), _pair(node, "dilations")
    return (first, second), strides, _pads(node, (first, second), strides, dilations), dilations


@_operator("MaxPool")
def _max_pool(node: Node) -> Made:
    kernel, strides, (top, bottom, left, right), dilations = _pooled(node)
    node.attribute("storage_order")  # of the second output, which nothing may use
    is_long = bool(node.attribute("ceil_mode", 0))
    if (top, left) != (bottom, right) or (
        is_long and (top or left or strides[0] > kernel[0] or strides[1] > kernel[1])
    ):
        node.refuse("bounds exist for the same padding on opposite sides, and with ceil_mode for none")
    return nn.MaxPool2d(kernel, strides, (top, left), dilations, ceil_mode=is_long)


@_operator("AveragePool")
def _average_pool(node: Node) -> Made:
    kernel, strides, (top, bottom, left, right), dilations = _pooled(node)
    counts = bool(node.attribute("count_include_pad", 0))
    if node.attribute("ceil_mode", 0) or dilations != (1, 1):
        node.refuse("ceil_mode or dilations are set; bounds exist without them")
    if (top, left) == (bottom, right):
        return nn.AvgPool2d(kernel, strides, (top, left), count_include_pad=counts)
    if not counts:
        node.refuse(
            "it pads opposite sides otherwise, which do not count; bounds exist for the same padding there"
        )
    return nn.Sequential(nn.ZeroPad2d((left, right, top, bottom)), nn.AvgPool2d(kernel, strides))


@_operator("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(node: Node) -> Made:
    node.map()
    return nn.AdaptiveMaxPool2d(1) if node.proto.op_type == "GlobalMaxPool" else nn.AdaptiveAvgPool2d(1)


@_operator("ReduceMean")
def _mean(node: Node) -> Made:
    value = node.map()
    axes = node.setting("axes", 1, since=18)
    node.attribute("noop_with_empty_axes")
    keeps = bool(node.attribute("keepdims", 1))
    if axes is None or {int(axis) % value.dim() for axis in axes} != {2, 3}:
        node.refuse(f"it is taken over axes {axes}; bounds exist for the mean over height and width, 2 and 3")
    return Applied(lambda value: value.mean((2, 3), keepdim=keeps))


def shape_after(node: Node) -> tuple[int, ...]:
    """The shape that Flatten, Reshape, Squeeze or Unsqueeze gives what ONNX has of one image."""
    value = node.result().numpy()
    if node.proto.op_type == "Flatten":
        axis = node.attribute("axis", 1)
        node.inner_axis(axis)
        return value.reshape(math.prod(value.shape[:axis]), -1).shape
    if node.proto.op_type == "Reshape":
        sizes = [int(size) for size in node.needed(1)]
        if not node.attribute("allowzero", 0):
            sizes = [value.shape[place] if size == 0 else size for place, size in enumerate(sizes)]
        return value.reshape(sizes).shape
    axes, is_longer = node.setting("axes", 1, since=13), node.proto.op_type == "Unsqueeze"
    if axes is None and len(value) == 1:
        node.refuse("it drops whatever has size 1, a batch of one image too; expected axes")
    given = None if axes is None else tuple(int(axis) for axis in axes)
    return np.expand_dims(value, given or ()).shape if is_longer else value.squeeze(given).shape


@_operator("Flatten", "Reshape", "Squeeze", "Unsqueeze")
def _reshape(node: Node) -> Made:
    """The values of each image in another shape."""
    node.batch()
    shape = shape_after(node)
    if len(shape) < 2 or shape[0] != 1:
        node.refuse(f"it makes {shape} of one image; the first dimension, the batch, must stay")
    if node.proto.op_type == "Flatten":
        return nn.Flatten()
    return Applied(lambda value: value.reshape(-1, *shape[1:]))


def permuted(node: Node) -> list[int]:
    """Where Transpose takes each dimension from."""
    return node.attribute("perm", list(reversed(range(node.result().dim()))))


@_operator("Transpose")
def _transpose(node: Node) -> Made:
    node.batch()
    order = permuted(node)
    if order[0] != 0:
        node.refuse(f"it permutes to {order}; the first dimension, the batch, must stay")
    return Applied(lambda value: value.permute(*order))


def expanded_shape(node: Node) -> tuple[int, ...]:
    """The shape that Expand gives what ONNX has of one image."""
    value, sizes = node.result(), [int(size) for size in node.needed(1)]
    shape = tuple(torch.broadcast_shapes(value.shape, sizes))
    if len(shape) != value.dim() or (len(value) == 1 and shape[0] != 1):
        node.refuse(f"it makes {shape} of {tuple(value.shape)}; the first dimension, the batch, must stay")
    return shape


@_operator("Expand")
def _expand(node: Node) -> Made:
    """Copies one after the other along each dimension that grows."""
    value, shape = node.batch(), expanded_shape(node)
    grown = [axis for axis, size in enumerate(shape) if size != value.shape[axis]]

    def expand(value: Tensor) -> Tensor:
        for axis in grown:
            value = torch.cat([value] * shape[axis], axis)
        return value

    return Applied(expand)


@_operator("Concat")
def _concatenate(node: Node) -> Made:
    axis = node.attribute("axis")
    if not node.takes_results_alone():
        node.refuse("constants are among its inputs; bounds exist for joined results")
    node.inner_axis(axis)
    return Applied(lambda *parts: torch.cat(parts, axis))


def split_lengths(node: Node) -> tuple[list[int], int]:
    """How long the pieces of Split are, and the axis, counted from the end."""
    value, axis = node.result(), node.inner_axis(node.attribute("axis", 0))
    sizes = node.setting("split", 1, since=13)
    node.attribute("num_outputs")
    count = len(node.proto.output)
    if sizes is None:
        each = -(-value.shape[axis] // count)
        sizes = [min(each, value.shape[axis] - place * each) for place in range(count)]
    return [int(size) for size in sizes], axis


@_operator("Split")
def _split(node: Node) -> Made:
    node.batch()
    lengths, axis = split_lengths(node)
    axis += node.result().dim()
    return [Applied(partial(piece, lengths, axis, place)) for place in range(len(node.proto.output))]


def piece(lengths: list[int], axis: int, place: int, value: Tensor) -> Tensor:
    """One of the pieces of these lengths along an axis."""
    return value.split(lengths, axis)[place]


def sliced(node: Node) -> tuple[slice, ...]:
    """What Slice takes along each dimension of what ONNX has of one image; of the batch all."""
    value = node.result()
    starts, ends = (node.setting(name, place, since=10) for place, name in ((1, "starts"), (2, "ends")))
    axes = node.setting("axes", 3, since=10)
    steps = node.constant(4) if node.opset >= 10 else None
    assert starts is not None
    assert ends is not None
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    index = [slice(None)] * value.dim()
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        place, size = range(value.dim())[axis], value.shape[axis]
        if step < 1:
            node.refuse(f"it takes steps of {step} along axis {axis}; expected forward steps")
        taken = slice(*slice(int(start), int(end), int(step)).indices(size))
        if len(range(size)[taken]) < size:
            index[node.inner_axis(place)] = taken
    return tuple(index)


@_operator("Slice")
def _slice(node: Node) -> Made:
    node.batch()
    chosen = sliced(node)
    return Applied(lambda value: value[chosen])


def padded(node: Node) -> tuple[list[tuple[int, int]], float]:
    """How many places Pad adds before and after each dimension of what ONNX has of one image, and their value."""
    value, mode = node.result(), node.attribute("mode", b"constant").decode()
    pads, fill = node.setting("pads", 1, since=11), node.setting("value", 2, since=11)
    axes = node.constant(3) if node.opset >= 18 else None
    assert pads is not None
    if mode != "constant":
        node.refuse(f"its mode is {mode!r}; expected 'constant'")
    sides = [(0, 0)] * value.dim()
    count = len(pads) // 2
    for place, axis in enumerate(range(value.dim()) if axes is None else axes):
        sides[axis] = int(pads[place]), int(pads[place + count])
    return sides, 0.0 if fill is None else float(fill.item())


@_operator("Pad")
def _pad(node: Node) -> Made:
    node.map()
    sides, fill = padded(node)
    if any(sides[0]) or any(sides[1]) or fill != 0:
        node.refuse(f"it pads by {sides} with {fill}; bounds exist for zeros around a map")
    return nn.ZeroPad2d((*sides[3], *sides[2]))


@_operator("Dropout")
def _dropout(node: Node) -> Made:
    node.result()
    node.setting("ratio", 1, since=12)
    training = node.constant(2)
    if training is not None and bool(training):
        node.refuse("it drops values at random (training mode)")
    node.attribute("seed")
    return nn.Identity()


@_operator("Cast")
def _cast(node: Node) -> Made:
    wanted = FLOATS.get(node.attribute("to"))
    node.attribute("saturate")
    if wanted != node.result().dtype:
        node.refuse("it casts to another type; bounds exist for one type")
    return nn.Identity()
