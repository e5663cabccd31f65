"""Networks from ONNX files: every operator becomes a module, or is refused by its name.

Bounds refuse modules that have none. A file is read as a function of one image, and its module takes batches of them,
of which each image is answered by itself. Reading runs no code of the file.
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchcert.bounds.lowering import MASKING_HINT
from patchcert.errors import ModelError, UnsupportedLayer
from patchcert.models.onnx.nodes import FLOATS, Array, Made, Node, Rule, held
from patchcert.models.onnx.operators import OPERATORS
from patchcert.models.onnx.runtime import compare_with_runtime, drawn_images, has_runtime, import_onnx
from patchcert.models.onnx.unbounded import UNBOUNDED, Unbounded
from patchcert.tensors import Images, Logits

OLDEST_OPSET = 7
"""From here on operators broadcast as NumPy does; before, they had settings for it."""


class OnnxNetwork(nn.Module):
    """The graph of an ONNX file, as a function of each image of a batch.

    `layers` have the names of the nodes. `left_out` is the operator at the end that does not change the order of the
    logits, such as Softmax; "" where there is none.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        layers: Mapping[str, nn.Module],
        inputs: Sequence[tuple[int, ...]],
        output: int,
        left_out: str,
    ) -> None:
        super().__init__()
        self.image_shape, self.left_out = image_shape, left_out
        self.layers = nn.ModuleDict(layers)
        self._inputs, self._output = tuple(inputs), output

    def forward(self, images: Images) -> Logits:
        """One row of logits for each image."""
        values = [images]
        for layer, inputs in zip(self.layers.values(), self._inputs, strict=True):
            values.append(layer(*(values[index] for index in inputs)))
        return values[self._output]


def load_onnx(path: str | Path, check: bool = True) -> OnnxNetwork:
    """The network of an ONNX file, on the CPU in eval mode.

    It takes one input, images (batch, channels, height, width) of a fixed size, and gives one row of logits for each. A
    Softmax at the end is left out: in real numbers, which certificates are about, it keeps the order of the logits.
    Operators without bounds are modules too, which bounds refuse.
    With `check`, and where ONNX Runtime is installed, the network is compared with it on drawn images.
    """
    path = Path(path)
    network = _Reader(_read(path), str(path)).network()
    if check and has_runtime():
        compare_with_runtime(network, path, drawn_images(network.image_shape), network.left_out)
    return network


def _read(path: Path) -> Any:  # noqa: ANN401 - onnx has no types
    onnx = import_onnx(f"reading {path}")
    if not path.is_file():
        raise ModelError(f"there is no file {path}")
    try:
        model = onnx.load(path)
        onnx.checker.check_model(model)
    except Exception as error:
        raise ModelError(
            f"{path} is not a readable ONNX file: {str(error).splitlines()[0]}",
            hint="it may be cut short or of another format.",
        ) from error
    return importlib.import_module("onnx.inliner").inline_local_functions(model) if model.functions else model


_HINTS = {
    "Erf": f"export with opset 20 or later, in which GELU is one operator; else {MASKING_HINT}",
    "ArgMax": "give the file with logits as its output",
}


class _Reader:
    """Walks the graph once. Of every result an example is kept, so that sizes are known."""

    def __init__(self, model: Any, file: str) -> None:  # noqa: ANN401
        self.numpy = importlib.import_module("onnx.numpy_helper")
        self.helper = importlib.import_module("onnx.helper")
        self.model, self.graph, self.file = model, model.graph, file
        self.opset, self.dtype = self._opset(), torch.float32
        self.constants = {each.name: self.numpy.to_array(each) for each in self.graph.initializer}
        self.producers = {name: node for node in self.graph.node for name in node.output}
        self.layers: dict[str, nn.Module] = {}
        self.inputs: list[tuple[int, ...]] = []
        self.examples: list[Tensor] = []
        self.results: dict[str, int] = {}

    def network(self) -> OnnxNetwork:
        shape = self._take_image()
        end, left_out = self._end()
        for position, proto in enumerate(self.graph.node):
            if left_out and proto.output[0] == self.graph.output[0].name:
                continue
            with torch.no_grad():
                self._take(proto, position)
        if end not in self.results or self.results[end] == 0:
            raise UnsupportedLayer(f"{self.file}: its output {end!r} is not computed from its image")
        logits = self.examples[self.results[end]]
        if logits.dim() != 2 or len(logits) != 1 or logits.shape[1] < 2:
            raise UnsupportedLayer(
                f"{self.file}: its output has shape {tuple(logits.shape)} for one image; expected (1, classes)",
                hint="give the file with one row of logits for each image as its output.",
            )
        return OnnxNetwork(shape, self.layers, self.inputs, self.results[end], left_out).eval()

    def _opset(self) -> int:
        """Of the standard operators; others are refused where they occur."""
        newest = importlib.import_module("onnx").defs.onnx_opset_version()
        found = [each.version for each in self.model.opset_import if each.domain in _STANDARD]
        opset = found[0] if found else 0
        if not OLDEST_OPSET <= opset <= newest:
            raise UnsupportedLayer(
                f"{self.file} has opset {opset}; those from {OLDEST_OPSET} to {newest} are read",
                hint="convert it with onnx.version_converter, or export it anew.",
            )
        return opset

    def _take_image(self) -> tuple[int, int, int]:
        inputs = [each for each in self.graph.input if each.name not in self.constants]
        if len(inputs) != 1 or len(self.graph.output) != 1 or self.graph.sparse_initializer:
            raise UnsupportedLayer(
                f"{self.file} has {len(inputs)} inputs and {len(self.graph.output)} outputs; expected one of each: "
                "images, logits",
            )
        kind = inputs[0].type.tensor_type
        sizes: list[Any] = [each.dim_value or each.dim_param or "?" for each in kind.shape.dim]
        shape = sizes[1:]
        if len(shape) != 3 or not all(isinstance(size, int) and size > 0 for size in shape):
            raise UnsupportedLayer(
                f"{self.file} takes inputs of shape ({', '.join(map(str, sizes))}); expected (batch, channels, height, "
                "width), of which only the batch may be left open",
                hint="export it with images of a fixed size.",
            )
        if kind.elem_type not in FLOATS:
            name = self.helper.tensor_dtype_to_string(kind.elem_type)
            raise UnsupportedLayer(f"{self.file} takes images of {name}; expected FLOAT or DOUBLE")
        self.dtype = FLOATS[kind.elem_type]
        self.examples.append(torch.zeros(1, *shape, dtype=self.dtype))
        self.results[inputs[0].name] = 0
        return shape[0], shape[1], shape[2]

    def _end(self) -> tuple[str, str]:
        """The name of the logits, and the operator after them that is left out."""
        name = self.graph.output[0].name
        last = self.producers.get(name)
        if last is None or last.op_type not in ("Softmax", "LogSoftmax") or last.domain not in _STANDARD:
            return name, ""
        axes = [each.i for each in last.attribute if each.name == "axis"]
        if axes and axes[0] not in (1, -1):
            raise UnsupportedLayer(
                f"{self._where(last, len(self.graph.node) - 1)}: its axis is {axes[0]}, expected that of the classes, 1"
            )
        return last.input[0], last.op_type

    def _where(self, proto: Any, position: int) -> str:  # noqa: ANN401
        return f"operator {proto.op_type} at '{proto.name or position}'"

    def _take(self, proto: Any, position: int) -> None:  # noqa: ANN401
        where = self._where(proto, position)
        if proto.domain not in _STANDARD:
            raise UnsupportedLayer(
                f"{where} is of the domain {proto.domain!r}; operators of the ONNX standard are read"
            )
        inputs = [self._input(name, where) for name in proto.input]
        attributes = {each.name: self.helper.get_attribute_value(each) for each in proto.attribute}
        node = Node(proto, where, self.opset, inputs, attributes, self.producers)
        if proto.op_type in ("Shape", "Size") and isinstance(inputs[0], Tensor):
            inputs[0] = np.zeros(tuple(inputs[0].shape), dtype=np.int8)
        if not any(isinstance(value, Tensor) for value in inputs):
            self._fold(node)
            return
        self._refuse_types(node)
        try:
            made = _made(node)
        except (RuntimeError, ValueError, IndexError) as error:
            node.refuse(f"it does not fit its inputs: {error}")
        for place, module in enumerate(made if isinstance(made, list) else [made]):
            self._append(node, module, proto.output[place], position)

    def _input(self, name: str, where: str) -> Array | Tensor | None:
        if not name:
            return None
        if name in self.results:
            return self.examples[self.results[name]]
        if name not in self.constants:
            raise UnsupportedLayer(f"{where} takes {name!r}, which is more than the first output of a node")
        return self.constants[name]

    def _refuse_types(self, node: Node) -> None:
        for value in node.inputs:
            if not isinstance(value, np.ndarray) or value.dtype.kind in "iub":
                continue
            if value.dtype != (np.float32 if self.dtype == torch.float32 else np.float64):
                node.refuse(f"it mixes {value.dtype} with images of {self.dtype}; expected one type")

    def _fold(self, node: Node) -> None:
        """What a node makes of constants alone, by the reference of the package `onnx`."""
        if node.proto.op_type.startswith("Random") or node.proto.op_type in _NOT_FOLDED:
            node.refuse("it draws numbers or has graphs of its own, which are not read")
        reference = importlib.import_module("onnx.reference")
        names = [name for name in node.proto.input if name]
        graph = self.helper.make_graph(
            [node.proto],
            "folded",
            [self.helper.make_empty_tensor_value_info(name) for name in dict.fromkeys(names)],
            [self.helper.make_empty_tensor_value_info(name) for name in node.proto.output if name],
        )
        model = self.helper.make_model(graph, opset_imports=self.model.opset_import)
        given = {name: value for name, value in zip(node.proto.input, node.inputs, strict=True) if name}
        try:
            found = reference.ReferenceEvaluator(model).run(None, given)
        except Exception as error:
            node.refuse(f"it cannot be computed from its constants: {error}")
        outputs = [name for name in node.proto.output if name]
        self.constants.update(zip(outputs, map(np.asarray, found), strict=True))

    def _append(self, node: Node, module: nn.Module, output: str, position: int) -> None:
        numbers = tuple(self.results[name] for name in node.proto.input if name in self.results)
        inputs = [self.examples[number] for number in numbers]
        try:
            example = _example(module.eval(), inputs)
        except (RuntimeError, ValueError, IndexError) as error:
            node.refuse(f"it does not fit its inputs: {error}")
        if example.dim() < 2:
            node.refuse(
                f"it makes a result of shape {tuple(example.shape)} for one image; expected two dimensions"
            )
        self.results[output] = len(self.examples)
        self.examples.append(example)
        self.layers[self._name(node.proto, position)] = module
        self.inputs.append(numbers)

    def _name(self, proto: Any, position: int) -> str:  # noqa: ANN401
        """That of the node, as far as modules can have it."""
        name = re.sub(r"\W+", "_", proto.name).strip("_")
        if not name or hasattr(nn.ModuleDict, name):
            name = f"{proto.op_type}_{position}"
        while name in self.layers:
            name += "_"
        return name


def _made(node: Node) -> Made:
    """What has bounds, where a rule gives that; else what computes the same."""
    kind = node.proto.op_type
    if kind not in OPERATORS and kind not in UNBOUNDED:
        known = ", ".join(sorted({*OPERATORS, *UNBOUNDED}))
        node.refuse(f"it is not read; operators that are: {known}", _HINTS.get(kind, ""))
    reason = f"{node.where}: no bound is known for it; operators with bounds: {', '.join(sorted(OPERATORS))}"
    if kind in OPERATORS:
        try:
            return _by_rule(OPERATORS[kind], node)
        except UnsupportedLayer as refusal:
            if kind not in UNBOUNDED:
                raise
            reason = refusal.message
    why_unbounded = reason, _HINTS.get(kind, MASKING_HINT)
    return _by_rule(UNBOUNDED[kind], replace(node, read=set(), why_unbounded=why_unbounded))


def _by_rule(rule: Rule, node: Node) -> Made:
    made = rule(node)
    node.refuse_unread()
    return made


def _example(module: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """What ONNX has of one image after the module; none but an Unbounded one moves the first dimension."""
    values = [held(value) for value in inputs]
    if isinstance(module, Unbounded):
        return module.whole(*values)[0]
    made = module(*values)
    if len(made) != 1:
        raise ValueError(f"it makes {tuple(made.shape)} of one image")
    return made if all(len(value) == 1 for value in inputs) else made[0]


_STANDARD = ("", "ai.onnx")
_NOT_FOLDED = ("If", "Loop", "Scan", "Multinomial", "Bernoulli", "Dropout")
"""What holds graphs of its own, or draws numbers."""
