"""Networks to ONNX files, from the very operations that bounds are computed for."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.bounds import trace
from patchcert.bounds.network import Step
from patchcert.bounds.operations import (
    AdaptiveMaxPool,
    Add,
    AveragePool,
    ChannelScale,
    Concatenate,
    Convolution,
    ExpandAs,
    Linear,
    MaxPool,
    Monotone,
    Multiply,
    Part,
    Permute,
    Rescale,
    Reshape,
    Softplus,
    TransposedConvolution,
    Valley,
    ZeroPad,
)
from patchcert.errors import ModelError, UnsupportedLayer
from patchcert.files import atomic_write
from patchcert.models.onnx.operators import FLOATS
from patchcert.models.onnx.runtime import compare_with_runtime, drawn_images, has_runtime, import_onnx

OPSET = 13
"""Which readers of all kinds know; where an operator is newer, its opset is taken."""
IR_VERSION = 8
INPUT, OUTPUT = "images", "logits"
_KINDS = {dtype: number for number, dtype in FLOATS.items()}


def save_onnx(
    model: nn.Module, path: str | Path, image_shape: tuple[int, int, int], check: bool = True
) -> None:
    """Write the model's operations as an ONNX file that takes images (batch, channels, height, width) in [0, 1].

    Weights are stored as they are; scales of batch norms and of constants, which bounds take as real numbers, are
    rounded to the type of the weights. With `check`, and where ONNX Runtime is installed, the file is compared with the
    model on drawn images.
    """
    path = Path(path)
    onnx = import_onnx(f"writing {path}")
    network = trace(model, image_shape)
    own = next((value for value in model.state_dict().values() if value.is_floating_point()), torch.empty(0))
    if own.dtype not in _KINDS:
        raise ModelError(
            f"weights of {own.dtype} cannot be written to {path}; expected torch.float32 or torch.float64",
            hint="convert the model with .float()",
        )
    image = torch.zeros(1, *image_shape, dtype=own.dtype, device=own.device)
    with torch.no_grad():
        examples = network.values(image)
        writer = _Writer(onnx, [tuple(value.shape) for value in examples], own.dtype)
        for number, step in enumerate(network.steps, start=1):
            writer.write(step, number)
    content = writer.model().SerializeToString()
    if check and has_runtime():
        compare_with_runtime(model, path, drawn_images(image_shape), content=content)
    with atomic_write(path) as stream:
        stream.write(content)


class _Writer:
    """Nodes and weights, as far as they are written; value i of the network is named `value_i`."""

    def __init__(self, onnx: Any, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:  # noqa: ANN401
        self.onnx, self.shapes, self.dtype = onnx, shapes, dtype
        self.nodes: list[Any] = []
        self.weights: dict[str, Tensor] = {}
        self.opset = OPSET
        self.step, self.number = "", 0

    def write(self, step: Step, number: int) -> None:
        """The nodes of one step, the last of which gives its value."""
        rule = _WRITERS.get(type(step.operation))
        self.step, self.number = step.name, number
        if rule is None:
            self.refuse(step)
        rule(self, step, tuple(self.value(index) for index in step.inputs))

    def refuse(self, step: Step, reason: str = "") -> NoReturn:
        """Says which step cannot be written."""
        raise UnsupportedLayer(
            f"layer '{step.name}' ({type(step.operation).__name__}) cannot be written as ONNX{reason}",
            hint="replace the layer, or export the module by torch.onnx.",
        )

    def value(self, index: int) -> str:
        """The name of a value of the network."""
        return INPUT if index == 0 else OUTPUT if index == len(self.shapes) - 1 else f"value_{index}"

    def add(
        self, kind: str, inputs: Sequence[str], is_last: bool = True, since: int = OPSET, **attributes: object
    ) -> str:
        """The name of the output of a new node: that of the step's value, if it is the step's last."""
        place = len(self.nodes)
        output = self.value(self.number) if is_last else f"node_{place}"
        name = self.step if is_last else f"{self.step}_{place}"
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), [output], name, **attributes))
        self.opset = max(self.opset, since)
        return output

    def weight(self, name: str, value: Tensor) -> str:
        """The name of a stored tensor; floats take the type of the model."""
        key = f"{self.step}.{name}"
        value = value.detach().cpu()
        self.weights[key] = value.to(self.dtype) if value.is_floating_point() else value
        return key

    def model(self) -> Any:  # noqa: ANN401
        """The whole, checked."""
        helper, kind = self.onnx.helper, _KINDS[self.dtype]
        ends = [
            helper.make_tensor_value_info(name, kind, ["batch", *shape[1:]])
            for name, shape in ((INPUT, self.shapes[0]), (OUTPUT, self.shapes[-1]))
        ]
        tensors = [
            self.onnx.numpy_helper.from_array(value.numpy(), name) for name, value in self.weights.items()
        ]
        graph = helper.make_graph(self.nodes, "patchcert", ends[:1], ends[1:], tensors)
        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(
            graph, opset_imports=opsets, producer_name="patchcert", ir_version=IR_VERSION
        )
        self.onnx.checker.check_model(model, full_check=True)
        return model


Names = tuple[str, ...]


def _linear(writer: _Writer, step: Step, inputs: Names) -> None:
    operation = step.operation
    assert isinstance(operation, Linear)
    weight, bias = operation.weight(), None if operation.bias is None else operation.bias()
    if len(writer.shapes[step.inputs[0]]) == 2:
        names = [writer.weight("weight", weight), *([] if bias is None else [writer.weight("bias", bias)])]
        writer.add("Gemm", [*inputs, *names], transB=1)
        return
    turned = writer.weight("weight", weight.T.contiguous())
    product = writer.add("MatMul", [*inputs, turned], is_last=bias is None)
    if bias is not None:
        writer.add("Add", [product, writer.weight("bias", bias)])


def _pads(padding: Sequence[int]) -> list[int]:
    """From (top, bottom, left, right) to begins and ends."""
    top, bottom, left, right = padding
    return [top, left, bottom, right]


def _convolution(writer: _Writer, step: Step, inputs: Names) -> None:
    operation = step.operation
    assert isinstance(operation, Convolution)
    geometry = operation.geometry
    names = [writer.weight("weight", operation.weight())]
    names += [] if operation.bias is None else [writer.weight("bias", operation.bias())]
    writer.add(
        "Conv",
        [*inputs, *names],
        kernel_shape=geometry.kernel,
        strides=geometry.stride,
        pads=_pads(geometry.padding),
        dilations=geometry.dilation,
        group=operation.groups,
    )


def _transposed(writer: _Writer, step: Step, inputs: Names) -> None:
    operation = step.operation
    assert isinstance(operation, TransposedConvolution)
    names = [writer.weight("weight", operation.weight())]
    names += [] if operation.bias is None else [writer.weight("bias", operation.bias())]
    writer.add(
        "ConvTranspose",
        [*inputs, *names],
        strides=operation.stride,
        pads=[*operation.cut, *operation.cut],
        output_padding=operation.output_padding,
        dilations=operation.dilation,
        group=operation.groups,
    )


def _scaled(writer: _Writer, value: str, parts: Sequence[tuple[str, str, Tensor | None]]) -> None:
    """One operator after the other, each with a constant; those without one are left out."""
    given = [(kind, name, constant) for kind, name, constant in parts if constant is not None]
    for place, (kind, name, constant) in enumerate(given, start=1):
        value = writer.add(kind, [value, writer.weight(name, constant)], is_last=place == len(given))


def _channel_scale(writer: _Writer, step: Step, inputs: Names) -> None:
    operation = step.operation
    assert isinstance(operation, ChannelScale)
    ones = [1] * (len(writer.shapes[step.inputs[0]]) - 2)

    def by_channel(source: Callable[[], Tensor] | None) -> Tensor | None:
        return None if source is None else source().reshape(-1, *ones)

    parts = (("Sub", "mean"), ("Div", "deviation"), ("Mul", "gain"), ("Add", "shift"))
    _scaled(writer, inputs[0], [(kind, name, by_channel(getattr(operation, name))) for kind, name in parts])


def _rescale(writer: _Writer, step: Step, inputs: Names) -> None:
    operation = step.operation
    assert isinstance(operation, Rescale)
    factor, shift = (None if each is None else each() for each in (operation.factor, operation.shift))
    _scaled(writer, inputs[0], [("Mul", "factor", factor), ("Add", "shift", shift)])


def _limits(writer: _Writer, value: str, low: float, high: float) -> None:
    ends = [writer.weight(name, torch.tensor(end)) for name, end in (("low", low), ("high", high))]
    writer.add("Clip", [value, *ends])


_PLAIN: Mapping[Callable, str] = {
    torch.relu: "Relu",
    torch.sigmoid: "Sigmoid",
    torch.tanh: "Tanh",
    F.softsign: "Softsign",
    F.leaky_relu: "LeakyRelu",
    F.elu: "Elu",
    F.celu: "Celu",
    F.selu: "Selu",
}
"""Activations that are operators, whose only setting, if any, is called alpha."""


def _activation(writer: _Writer, step: Step, inputs: Names) -> None:
    operation = step.operation
    assert isinstance(operation, Monotone)
    whole, settings = operation.function, {}
    if isinstance(whole, partial):
        whole, settings = whole.func, whole.keywords
    if whole in _PLAIN:
        writer.add(_PLAIN[whole], inputs, **dict(zip(["alpha"], settings.values(), strict=False)))
    elif whole is F.relu6:
        _limits(writer, inputs[0], 0.0, 6.0)
    elif whole is F.hardtanh:
        _limits(writer, inputs[0], settings["min_val"], settings["max_val"])
    elif whole is F.hardsigmoid:
        writer.add("HardSigmoid", inputs, alpha=1 / 6, beta=0.5)
    else:
        writer.refuse(step, ": its function is no operator")


def _valley(writer: _Writer, step: Step, inputs: Names) -> None:
    operation = step.operation
    assert isinstance(operation, Valley)
    if operation.function is F.silu:
        gate = writer.add("Sigmoid", inputs, is_last=False)
        writer.add("Mul", [*inputs, gate])
    elif operation.function is F.hardswish:
        writer.add("HardSwish", inputs, since=14)
    elif isinstance(operation.function, partial) and operation.function.func is F.gelu:
        writer.add("Gelu", inputs, since=20, **operation.function.keywords)
    else:
        writer.refuse(step, ": its function is no operator")


def _softplus(writer: _Writer, step: Step, inputs: Names) -> None:
    operation = step.operation
    assert isinstance(operation, Softplus)
    if operation.beta != 1 or operation.threshold < 20:
        writer.refuse(
            step,
            f": beta is {operation.beta} and threshold {operation.threshold}, known are 1 and from 20 on",
        )
    writer.add("Softplus", inputs)


def _max_pool(writer: _Writer, step: Step, inputs: Names) -> None:
    operation = step.operation
    assert isinstance(operation, MaxPool)
    geometry = operation.geometry
    writer.add(
        "MaxPool",
        inputs,
        kernel_shape=geometry.kernel,
        strides=geometry.stride,
        pads=_pads(geometry.padding),
        dilations=geometry.dilation,
        ceil_mode=int(operation.ceil_mode),
    )


def _adaptive_max_pool(writer: _Writer, step: Step, inputs: Names) -> None:
    sizes, results = writer.shapes[step.inputs[0]][2:], writer.shapes[writer.number][2:]
    if any(size % result for size, result in zip(sizes, results, strict=True)):
        writer.refuse(step, f": a map of {sizes} has no {results} parts of one size")
    kernel = [size // result for size, result in zip(sizes, results, strict=True)]
    writer.add("MaxPool", inputs, kernel_shape=kernel, strides=kernel)


def _average_pool(writer: _Writer, step: Step, inputs: Names) -> None:
    operation = step.operation
    assert isinstance(operation, AveragePool)
    height, width = writer.shapes[step.inputs[0]][2:]
    geometry = operation.geometry(height, width)
    if geometry is None:
        writer.refuse(step, ": it divides by different counts at different places")
    writer.add(
        "AveragePool",
        inputs,
        kernel_shape=geometry.kernel,
        strides=geometry.stride,
        pads=_pads(geometry.padding),
        count_include_pad=1,
    )


def _pad(writer: _Writer, step: Step, inputs: Names) -> None:
    operation = step.operation
    assert isinstance(operation, ZeroPad)
    top, left, bottom, right = _pads(operation.sides)
    writer.add("Pad", [*inputs, writer.weight("pads", torch.tensor([0, 0, top, left, 0, 0, bottom, right]))])


def _reshape(writer: _Writer, step: Step, inputs: Names) -> None:
    """The batch is what the other sizes leave."""
    shape = writer.shapes[writer.number]
    if len(shape) == 2:
        writer.add("Flatten", inputs, axis=1)
    else:
        writer.add("Reshape", [*inputs, writer.weight("shape", torch.tensor([-1, *shape[1:]]))])


def _permute(writer: _Writer, step: Step, inputs: Names) -> None:
    """The order is seen on a tensor whose sizes all differ."""
    sizes = range(2, 2 + len(writer.shapes[step.inputs[0]]))
    turned = step.operation.forward(torch.empty(tuple(sizes)))
    writer.add("Transpose", inputs, perm=[sizes.index(size) for size in turned.shape])


def _part(writer: _Writer, step: Step, inputs: Names) -> None:
    """A run along one dimension."""
    shape = writer.shapes[step.inputs[0]]
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    taken = step.operation.forward(numbers)
    axes = [
        axis for axis, size in enumerate(shape) if taken.dim() == len(shape) and taken.shape[axis] != size
    ]
    axis = axes[0] if axes else 1
    start = int((numbers == taken.flatten()[0]).nonzero()[0, axis])
    stop = start + (taken.shape[axis] if taken.dim() == len(shape) else 0)
    if len(axes) > 1 or not torch.equal(taken, numbers.narrow(axis, start, stop - start)):
        writer.refuse(step, ": known is a run along one dimension")
    ends = [
        writer.weight(name, torch.tensor([value]))
        for name, value in (("start", start), ("stop", stop), ("axis", axis))
    ]
    writer.add("Slice", [*inputs, *ends])


def _expand(writer: _Writer, step: Step, inputs: Names) -> None:
    """A size of 1 for the batch leaves it as it is."""
    shape = torch.tensor([1, *writer.shapes[writer.number][1:]])
    writer.add("Expand", [inputs[0], writer.weight("shape", shape)])


def _concatenate(writer: _Writer, step: Step, inputs: Names) -> None:
    assert isinstance(step.operation, Concatenate)
    writer.add("Concat", inputs, axis=step.operation.dim)


_WRITERS: Mapping[type, Callable[[_Writer, Step, Names], object]] = {
    Linear: _linear,
    Convolution: _convolution,
    TransposedConvolution: _transposed,
    ChannelScale: _channel_scale,
    Rescale: _rescale,
    Monotone: _activation,
    Valley: _valley,
    Softplus: _softplus,
    MaxPool: _max_pool,
    AdaptiveMaxPool: _adaptive_max_pool,
    AveragePool: _average_pool,
    ZeroPad: _pad,
    Reshape: _reshape,
    Permute: _permute,
    Part: _part,
    Add: lambda writer, step, inputs: writer.add("Add", inputs),
    Multiply: lambda writer, step, inputs: writer.add("Mul", inputs),
    Concatenate: _concatenate,
    ExpandAs: _expand,
}
