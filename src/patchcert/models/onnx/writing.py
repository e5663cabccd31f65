"""Networks to ONNX files, from the very operations that bounds are computed for."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.bounds import trace
from patchcert.bounds.geometry import Geometry
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
    Operation,
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
from patchcert.models.onnx.nodes import FLOATS
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

    step: Step
    number: int
    label: str

    def __init__(self, onnx: Any, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:  # noqa: ANN401
        self.onnx, self.shapes, self.dtype = onnx, shapes, dtype
        self.nodes: list[Any] = []
        self.weights: dict[str, Tensor] = {}
        self.labels: set[str] = set()
        self.opset = OPSET

    def write(self, step: Step, number: int) -> None:
        """The nodes of one step, the last of which gives its value; a layer that is called again has another label."""
        self.step, self.number = step, number
        self.label = f"{step.name}/{number}" if step.name in self.labels else step.name
        self.labels.add(self.label)
        rule = _RULES.get(type(step.operation))
        if rule is None:
            self.refuse()
        rule(self, step.operation, tuple(self.value(index) for index in step.inputs))

    def refuse(self, reason: str = "") -> NoReturn:
        """Says which step cannot be written."""
        raise UnsupportedLayer(
            f"layer '{self.step.name}' ({type(self.step.operation).__name__}) cannot be written as ONNX{reason}",
            hint="replace the layer, or export the module by torch.onnx.",
        )

    @property
    def before(self) -> tuple[int, ...]:
        """The shape of the step's first input, for one image."""
        return self.shapes[self.step.inputs[0]]

    @property
    def after(self) -> tuple[int, ...]:
        """The shape of the step's value, for one image."""
        return self.shapes[self.number]

    def value(self, index: int) -> str:
        """The name of a value of the network."""
        return INPUT if index == 0 else OUTPUT if index == len(self.shapes) - 1 else f"value_{index}"

    def add(
        self, kind: str, inputs: Sequence[str], is_last: bool = True, since: int = OPSET, **attributes: object
    ) -> str:
        """The name of the output of a new node: that of the step's value, if it is the step's last."""
        place = len(self.nodes)
        output = self.value(self.number) if is_last else f"node_{place}"
        name = self.label if is_last else f"{self.label}/{output}"
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), [output], name, **attributes))
        self.opset = max(self.opset, since)
        return output

    def weight(self, name: str, value: Tensor) -> str:
        """The name of a stored tensor; floats take the type of the model."""
        key = f"{self.label}.{name}"
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
_Rule = Callable[[_Writer, Any, Names], object]
_RULES: dict[type[Operation], _Rule] = {
    Add: lambda writer, operation, inputs: writer.add("Add", inputs),
    Multiply: lambda writer, operation, inputs: writer.add("Mul", inputs),
}


def _writes(kind: type[Operation]) -> Callable[[_Rule], _Rule]:
    """Registers how an operation becomes nodes."""

    def register(rule: _Rule) -> _Rule:
        _RULES[kind] = rule
        return rule

    return register


def _weights(writer: _Writer, operation: Linear | Convolution | TransposedConvolution) -> list[str]:
    """The names of the weight and of the bias, if there is one."""
    names = [writer.weight("weight", operation.weight())]
    return names if operation.bias is None else [*names, writer.weight("bias", operation.bias())]


@_writes(Linear)
def _linear(writer: _Writer, operation: Linear, inputs: Names) -> None:
    if len(writer.before) == 2:
        writer.add("Gemm", [*inputs, *_weights(writer, operation)], transB=1)
        return
    turned = writer.weight("weight", operation.weight().T.contiguous())
    product = writer.add("MatMul", [*inputs, turned], is_last=operation.bias is None)
    if operation.bias is not None:
        writer.add("Add", [product, writer.weight("bias", operation.bias())])


def _window(geometry: Geometry) -> dict[str, Any]:
    """What the operators that slide a kernel have in common."""
    top, bottom, left, right = geometry.padding
    return {"kernel_shape": geometry.kernel, "strides": geometry.stride, "pads": [top, left, bottom, right]}


@_writes(Convolution)
def _convolution(writer: _Writer, operation: Convolution, inputs: Names) -> None:
    names, geometry = _weights(writer, operation), operation.geometry
    settings = {**_window(geometry), "dilations": geometry.dilation, "group": operation.groups}
    writer.add("Conv", [*inputs, *names], **settings)


@_writes(TransposedConvolution)
def _transposed(writer: _Writer, operation: TransposedConvolution, inputs: Names) -> None:
    writer.add(
        "ConvTranspose",
        [*inputs, *_weights(writer, operation)],
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


@_writes(ChannelScale)
def _channel_scale(writer: _Writer, operation: ChannelScale, inputs: Names) -> None:
    ones = [1] * (len(writer.before) - 2)

    def by_channel(source: Callable[[], Tensor] | None) -> Tensor | None:
        return None if source is None else source().reshape(-1, *ones)

    parts = (("Sub", "mean"), ("Div", "deviation"), ("Mul", "gain"), ("Add", "shift"))
    _scaled(writer, inputs[0], [(kind, name, by_channel(getattr(operation, name))) for kind, name in parts])


@_writes(Rescale)
def _rescale(writer: _Writer, operation: Rescale, inputs: Names) -> None:
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


@_writes(Monotone)
def _activation(writer: _Writer, operation: Monotone, inputs: Names) -> None:
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
        writer.refuse(": its function is no operator")


@_writes(Valley)
def _valley(writer: _Writer, operation: Valley, inputs: Names) -> None:
    if operation.function is F.silu:
        gate = writer.add("Sigmoid", inputs, is_last=False)
        writer.add("Mul", [*inputs, gate])
    elif operation.function is F.hardswish:
        writer.add("HardSwish", inputs, since=14)
    elif isinstance(operation.function, partial) and operation.function.func is F.gelu:
        writer.add("Gelu", inputs, since=20, **operation.function.keywords)
    else:
        writer.refuse(": its function is no operator")


@_writes(Softplus)
def _softplus(writer: _Writer, operation: Softplus, inputs: Names) -> None:
    beta, threshold = operation.beta, operation.threshold
    if beta != 1 or threshold < 20:
        writer.refuse(f": beta is {beta} and threshold {threshold}, known are 1 and from 20 on")
    writer.add("Softplus", inputs)


@_writes(MaxPool)
def _max_pool(writer: _Writer, operation: MaxPool, inputs: Names) -> None:
    """PyTorch leaves out the last kernel where it would begin in the padding; readers of ONNX differ on that."""
    if operation.ceil_mode and _rounded_up(operation.geometry, writer.before[2:]) != writer.after[2:]:
        writer.refuse(": with ceil_mode a kernel would begin in the padding")
    settings = {"dilations": operation.geometry.dilation, "ceil_mode": int(operation.ceil_mode)}
    writer.add("MaxPool", inputs, **_window(operation.geometry), **settings)


def _rounded_up(geometry: Geometry, size: tuple[int, ...]) -> tuple[int, ...]:
    """How often the kernel fits, the last time in part."""
    by_one = replace(geometry, stride=(1, 1)).output_size(size[0], size[1])
    return tuple(-(-(count - 1) // step) + 1 for count, step in zip(by_one, geometry.stride, strict=True))


@_writes(AdaptiveMaxPool)
def _adaptive_max_pool(writer: _Writer, operation: AdaptiveMaxPool, inputs: Names) -> None:
    sizes, results = writer.before[2:], writer.after[2:]
    if any(size % result for size, result in zip(sizes, results, strict=True)):
        writer.refuse(f": a map of {sizes} has no {results} parts of one size")
    kernel = [size // result for size, result in zip(sizes, results, strict=True)]
    writer.add("MaxPool", inputs, kernel_shape=kernel, strides=kernel)


@_writes(AveragePool)
def _average_pool(writer: _Writer, operation: AveragePool, inputs: Names) -> None:
    height, width = writer.before[2:]
    geometry = operation.geometry(height, width)
    if geometry is None:
        writer.refuse(": it divides by different counts at different places")
    writer.add("AveragePool", inputs, **_window(geometry), count_include_pad=1)


@_writes(ZeroPad)
def _pad(writer: _Writer, operation: ZeroPad, inputs: Names) -> None:
    top, bottom, left, right = operation.sides
    writer.add("Pad", [*inputs, writer.weight("pads", torch.tensor([0, 0, top, left, 0, 0, bottom, right]))])


@_writes(Reshape)
def _reshape(writer: _Writer, operation: Reshape, inputs: Names) -> None:
    """The batch is what the other sizes leave."""
    if len(writer.after) == 2:
        writer.add("Flatten", inputs, axis=1)
    else:
        writer.add("Reshape", [*inputs, writer.weight("shape", torch.tensor([-1, *writer.after[1:]]))])


@_writes(Permute)
def _permute(writer: _Writer, operation: Permute, inputs: Names) -> None:
    """The order is seen on a tensor whose sizes all differ."""
    sizes = range(2, 2 + len(writer.before))
    turned = operation.forward(torch.empty(tuple(sizes)))
    writer.add("Transpose", inputs, perm=[sizes.index(size) for size in turned.shape])


@_writes(Part)
def _part(writer: _Writer, operation: Part, inputs: Names) -> None:
    """A run along one dimension."""
    shape = writer.before
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    taken = operation.forward(numbers)
    axis = next((axis for axis, size in enumerate(taken.shape) if size != shape[axis]), 1)
    start, last = (int((numbers == taken.flatten()[end]).nonzero()[0, axis]) for end in (0, -1))
    if not torch.equal(taken, numbers.transpose(0, axis)[start : last + 1].transpose(0, axis)):
        writer.refuse(": known is a run along one dimension")
    ends = [
        writer.weight(name, torch.tensor([value]))
        for name, value in (("start", start), ("stop", last + 1), ("axis", axis))
    ]
    writer.add("Slice", [*inputs, *ends])


@_writes(ExpandAs)
def _expand(writer: _Writer, operation: ExpandAs, inputs: Names) -> None:
    """A size of 1 for the batch leaves it as it is."""
    writer.add("Expand", [inputs[0], writer.weight("shape", torch.tensor([1, *writer.after[1:]]))])


@_writes(Concatenate)
def _concatenate(writer: _Writer, operation: Concatenate, inputs: Names) -> None:
    writer.add("Concat", inputs, axis=operation.dim)
