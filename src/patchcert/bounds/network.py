"""A traced network: its operations in order, and what they make of values and of intervals."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from patchcert.bounds.interval import Interval
from patchcert.bounds.lowering import BATCH_SIZE, FUNCTION_RULES, LAYER_RULES
from patchcert.bounds.operations import Affine, Linear, Operation
from patchcert.bounds.rounding import NEAREST, Rounding
from patchcert.bounds.sparse import FirstLayer, sparse_first_layer
from patchcert.errors import InvalidInput, ModelError, PatchcertError, UnsupportedLayer


@dataclass(frozen=True, slots=True)
class Step:
    """One operation and the values it takes: value 0 is the image, value i + 1 the result of step i."""

    name: str
    operation: Operation
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Network:
    """The operations of a model, in an order in which they can be carried out. The last one gives the logits."""

    steps: tuple[Step, ...]

    @property
    def affine_layers(self) -> tuple[str, ...]:
        """The names of the layers with weights, in order."""
        return tuple(step.name for step in self.steps if isinstance(step.operation, Affine))

    @property
    def head(self) -> Linear | None:
        """The last layer, where it is linear and can be merged with the specification."""
        last = self.steps[-1].operation if self.steps else None
        return last if isinstance(last, Linear) else None

    def values(self, images: Tensor) -> list[Tensor]:
        """The image and the result of every step."""
        values = [images]
        for step in self.steps:
            values.append(step.operation.forward(*(values[index] for index in step.inputs)))
        return values

    def intervals(self, box: Interval, rounding: Rounding = NEAREST) -> list[Interval]:
        """Bounds for the image and for the result of every step."""
        return self._propagate([box], 0, len(self.steps), rounding)

    def bounds(self, box: Interval, until: str | None = None, rounding: Rounding = NEAREST) -> Interval:
        """Contains every result of the network, or of the layer `until`, for images in the box."""
        stop = len(self.steps) if until is None else self._position(until) + 1
        return self._propagate([box], 0, stop, rounding)[-1]

    def margins(
        self, box: Interval, labels: Tensor, after: str | None = None, rounding: Rounding = NEAREST
    ) -> Tensor:
        """Lower bounds of logit[label] - logit[class] over the box; 0 at the label itself.

        With `after`, the box holds the results of that layer instead of images; no later layer may look back past it.
        """
        start = 0 if after is None else self._position(after) + 1
        values: list[Any] = [None] * start + [box]
        head = self.head if start < len(self.steps) else None
        stop = len(self.steps) - (head is not None)
        last = self._propagate(values, start, stop, rounding)[-1]
        if head is None:
            return _separate_margins(last, labels, rounding)
        return merged_margins(head, last, labels, rounding)

    def sparse_margins(
        self,
        images: Tensor,
        labels: Tensor,
        pixels: int,
        bound: str = "tight",
        epsilon: float | Tensor = 1.0,
        rounding: Rounding = NEAREST,
    ) -> Tensor:
        """Margins over every image that differs from the given one in at most `pixels` pixels."""
        layer = FirstLayer.of(self.steps)
        name = self.steps[layer.position].name
        clean = self.bounds(Interval.point(images), until=name, rounding=rounding)
        box = sparse_first_layer(layer, clean, images, pixels, bound, epsilon, rounding)
        return self.margins(box, labels, after=name, rounding=rounding)

    def _propagate(self, values: list[Any], start: int, stop: int, rounding: Rounding) -> list[Any]:
        for step in self.steps[start:stop]:
            inputs = [values[index] for index in step.inputs]
            if any(value is None for value in inputs):
                raise UnsupportedLayer(
                    f"layer '{step.name}' looks back past the layer from which bounds go on"
                )
            values.append(step.operation.interval(*inputs, rounding=rounding))
        return values

    def _position(self, name: str) -> int:
        for position, step in enumerate(self.steps):
            if step.name == name:
                return position
        known = ", ".join(step.name for step in self.steps)
        raise InvalidInput(f"the network has no layer {name!r}; its layers are {known}")


def merged_margins(head: Linear, box: Interval, labels: Tensor, rounding: Rounding) -> Tensor:
    """Margins through the last layer merged with the specification: row label minus row class of its weights.

    This is tighter than subtracting bounds of the logits, which would let both move against each other.
    """
    weight, bias = head.weight(), None if head.bias is None else head.bias()
    difference = weight[labels].unsqueeze(1) - weight  # (m, classes, features)
    centre, radius = box.centre, box.radius
    slack = None
    if rounding.is_outward:
        gamma, unit = rounding.gamma(weight.shape[1] + 3), rounding.unit
        radius = (radius * (1 + 8 * unit) + centre.abs() * (2 * gamma + 4 * unit)) * (1 + 2 * gamma)
        slack = rounding.tiny / unit
    middle = torch.einsum("mcf,mf->mc", difference, centre)
    spread = torch.einsum("mcf,mf->mc", difference.abs(), radius)
    if bias is not None:
        middle = middle + (bias[labels].unsqueeze(1) - bias)
    margins = middle - spread
    if slack is not None:
        magnitude = middle.abs() + spread
        if bias is not None:
            magnitude = magnitude + bias[labels].abs().unsqueeze(1) + bias.abs()
        margins = margins - (magnitude * (8 * rounding.unit) + slack)
    return zero_at_label(margins, labels)


def _separate_margins(logits: Interval, labels: Tensor, rounding: Rounding) -> Tensor:
    own = logits.lower.gather(1, labels.unsqueeze(1))
    margins = own - logits.upper
    if rounding.is_outward:
        margins = margins - margins.abs() * (2 * rounding.unit)
    return zero_at_label(margins, labels)


def zero_at_label(margins: Tensor, labels: Tensor) -> Tensor:
    """The margins with the label's own entry set to 0; the entries of a NaN row stay NaN elsewhere."""
    return margins.scatter(-1, labels.unsqueeze(-1).expand(*margins.shape[:-1], 1), 0.0)


def trace(model: nn.Module) -> Network:
    """The operations of the model; a layer or function without a bound is refused by its name and place."""
    _refuse_hooks(model)
    tracer = _Tracer()
    try:
        graph = tracer.trace(model)
    except PatchcertError:
        raise
    except Exception as error:
        raise UnsupportedLayer(
            f"the model {type(model).__name__} cannot be traced by torch.fx: {error}",
            hint="control flow that depends on the input has no bounds; write the forward pass without it",
        ) from error
    return _Lowering(model).network(graph)


def _refuse_hooks(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if layer._forward_hooks or layer._forward_pre_hooks:
            raise UnsupportedLayer(
                f"layer '{name}' is a {type(layer).__name__} with forward hooks, which could change its result unseen",
                hint="remove the hooks before asking for bounds",
            )


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in LAYER_RULES or super().is_leaf_module(m, module_qualified_name)


class _Lowering:
    """Walks the traced graph once and looks every node up in the tables of rules."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.steps: list[Step] = []
        self.values: dict[fx.Node, Any] = {}

    def network(self, graph: fx.Graph) -> Network:
        result = None
        for node in graph.nodes:
            if node.op == "output":
                result = self._resolve(node.args[0])
            else:
                self.values[node] = self._lower(node)
        if not isinstance(result, _Value) or result.index != len(self.steps):
            raise UnsupportedLayer(
                "the model must return one tensor of logits, the result of its last operation"
            )
        return Network(tuple(self.steps))

    def _lower(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            path = str(node.target)
            return lambda: operator.attrgetter(path)(self.model)
        if node.op == "call_module":
            layer = self.model.get_submodule(str(node.target))
            return self._apply(
                node, str(node.target), type(layer).__name__, LAYER_RULES.get(type(layer)), (layer,)
            )
        size = self._batch_size(node)
        if size is not None:
            return size
        name = (
            node.target
            if isinstance(node.target, str)
            else getattr(node.target, "__name__", str(node.target))
        )
        return self._apply(node, node.name, str(name), FUNCTION_RULES.get(node.target), None)

    def _placeholder(self, node: fx.Node) -> Any:
        if any(isinstance(value, _Value) for value in self.values.values()):
            if node.args:
                return node.args[0]
            raise UnsupportedLayer(
                f"the model takes a second input {node.name!r}; bounds exist for images alone"
            )
        return _Value(0)

    def _apply(
        self, node: fx.Node, place: str, kind: str, rule: Callable | None, settings: tuple | None
    ) -> Any:
        where = f"layer '{place}' is a {kind}"
        if rule is None:
            raise UnsupportedLayer(
                f"{where}, for which no bound is known; {_known_rules()}", hint=_REGISTER_HINT
            )
        arguments = [self._resolve(argument) for argument in node.args]
        keywords = {key: self._resolve(argument) for key, argument in node.kwargs.items()}
        keywords_in = [keywords.pop(key) for key in ("input", "other") if key in keywords]
        inputs = [argument for argument in (*arguments, *keywords_in) if isinstance(argument, _Value)]
        others = [argument for argument in arguments if not isinstance(argument, _Value)]
        try:
            operation = rule(*settings) if settings is not None else rule(*others, **keywords)
        except (UnsupportedLayer, ModelError) as error:
            raise type(error)(f"{where}: {error.message}", error.hint) from None
        except TypeError as error:
            raise UnsupportedLayer(f"{where} called in a way that has no bound: {error}") from error
        return self._append(place, where, operation, inputs)

    def _append(
        self, place: str, where: str, operation: Operation | None, inputs: Sequence["_Value"]
    ) -> "_Value":
        expected = 2 if type(operation).__name__ == "Add" else 1
        if len(inputs) != expected:
            raise UnsupportedLayer(
                f"{where} of {len(inputs)} results of the network; bounds exist for {expected}"
            )
        if operation is None:
            return inputs[0]
        self.steps.append(Step(place, operation, tuple(value.index for value in inputs)))
        return _Value(len(self.steps))

    def _batch_size(self, node: fx.Node) -> Any:
        """Recognises x.size(0), x.shape[0] and x.size()[0], the only sizes a reshape may ask for."""
        if node.op == "call_method" and node.target == "size":
            return BATCH_SIZE if node.args[1:] == (0,) else _SHAPE if len(node.args) == 1 else None
        if node.target is getattr and node.args[1] == "shape":
            return _SHAPE
        if node.target is operator.getitem and self._resolve(node.args[0]) is _SHAPE and node.args[1] == 0:
            return BATCH_SIZE
        return None

    def _resolve(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.values[argument]
        if isinstance(argument, tuple | list):
            return type(argument)(self._resolve(item) for item in argument)
        return argument


@dataclass(frozen=True, slots=True)
class _Value:
    index: int


_SHAPE = object()
_REGISTER_HINT = "replace the layer, or register a sound rule for it with patchcert.bounds.layer_rule"


def _known_rules() -> str:
    names = sorted({key.__name__ for key in LAYER_RULES})
    return f"rules exist for: {', '.join(names)}"
