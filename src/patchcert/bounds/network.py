"""From a model's forward pass, traced by torch.fx, to a network of operations in order, and what they make of values
and of intervals; what has no bound is refused."""

import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument, map_arg
from torch.fx.proxy import Attribute
from torch.nn.modules import module as module_globals

from patchcert.bounds.lowering import (
    BATCH_SIZE,
    FUNCTION_RULES,
    LAYER_RULES,
    SPLITTING,
    Lowered,
    Site,
    bare_name,
    instead_of,
)
from patchcert.bounds.operations import ANY_NUMBER, Interval, Linear, Operation
from patchcert.bounds.rounding import NEAREST, Rounding
from patchcert.errors import ModelError, PatchcertError, UnsupportedLayer
from patchcert.tensors import Labels, Margins


@dataclass(frozen=True, slots=True)
class Step:
    """One operation and the values it takes: value 0 is the image, value i + 1 the result of step i.

    `is_foreign` says that it comes of a rule from elsewhere, which nothing but sampling vouches for.
    """

    name: str
    operation: Operation
    inputs: tuple[int, ...]
    is_foreign: bool = False


@dataclass(frozen=True, slots=True)
class Network:
    """The operations of a model, in an order in which they can be carried out.

    All of them are needed for the logits, which the last one gives; so its input, if it takes only one, is
    the result of the step before it.
    """

    steps: tuple[Step, ...]

    @property
    def head(self) -> Linear | None:
        """The last layer, where it is linear and can be merged with the specification."""
        last = self.steps[-1].operation if self.steps else None
        return last if isinstance(last, Linear) else None

    def values(self, images: Annotated[Tensor, "n ..."]) -> list[Tensor]:
        """The image and the result of every step."""
        values = [images]
        for step in self.steps:
            values.append(step.operation.forward(*(values[index] for index in step.inputs)))
        return values

    def intervals(
        self, box: Interval, rounding: Rounding = NEAREST, known: Mapping[int, Interval] | None = None
    ) -> list[Interval]:
        """Bounds for the image and for the result of every step, where some results are `known`, by their numbers, to
        lie in intervals besides."""
        return list(self._propagate(box, 0, len(self.steps), rounding, known or {}).values())

    def bounds(self, box: Interval, rounding: Rounding = NEAREST) -> Interval:
        """Contains every result of the network for images in the box."""
        return self.intervals(box, rounding)[-1]

    def margins(self, box: Interval, labels: Labels, start: int = 0, rounding: Rounding = NEAREST) -> Margins:
        """Lower bounds of logit[label] - logit[class] over the box; 0 at the label itself.

        The box holds value `start`: the image, or the result of a step, past which no later step may look back.
        """
        head = self.head if start < len(self.steps) else None
        stop = len(self.steps) - (head is not None)
        last = self._propagate(box, start, stop, rounding, {})[stop]
        if head is None:
            return _separate_margins(last, labels, rounding)
        return merged_margins(head, last, labels, rounding)

    def _propagate(
        self, box: Interval, start: int, stop: int, rounding: Rounding, known: Mapping[int, Interval]
    ) -> dict[int, Interval]:
        """Bounds of value `start`, the box, and of those after it up to `stop`; earlier ones must not be needed."""
        values = {start: box}
        for number, step in enumerate(self.steps[start:stop], start + 1):
            if min(step.inputs) < start:
                raise UnsupportedLayer(
                    f"layer '{step.name}' looks back past the layer from which bounds start"
                )
            found = step.operation.interval(*(values[index] for index in step.inputs), rounding=rounding)
            values[number] = found.intersection(known[number]) if number in known else found
        return values


def merged_margins(head: Linear, box: Interval, labels: Labels, rounding: Rounding) -> Margins:
    """Margins through the last layer merged with the specification: row label minus row class of its weights.

    This is tighter than subtracting bounds of the logits, which would let both move against each other.
    """
    weight, bias = head.weight(), None if head.bias is None else head.bias()
    difference = weight[labels].unsqueeze(1) - weight  # n k features
    centre, radius = box.centre, box.radius
    if rounding.is_outward:
        # A term is rounded in its difference, its product and a sum for each feature: features + 1, two to spare.
        gamma, unit = rounding.gamma(weight.shape[1] + 3), rounding.unit
        # As in `Affine`, with 2 gamma for the centre because differences may themselves be too small by u.
        radius = radius * (1 + 8 * unit) + centre.abs() * (2 * gamma + 4 * unit) + rounding.tiny
        # Differences and products make the spread too small by at most 1 - gamma, and (1 - gamma)(1 + 2 gamma) >= 1.
        radius = radius * (1 + 2 * gamma)
    middle = _row_products(difference, centre)
    spread = _row_products(difference.abs(), radius)
    if bias is not None:
        middle = middle + (bias[labels].unsqueeze(1) - bias)
    margins = middle - spread
    if rounding.is_outward:
        magnitude = middle.abs() + spread
        if bias is not None:
            magnitude = magnitude + bias[labels].abs().unsqueeze(1) + bias.abs()
        # Two sums with the bias, the one with the spread and the last one cost a unit of it each: 4 of these 8. Sums of
        # fewer than 1/u products lose less than tiny/u to underflow.
        margins = margins - (magnitude * (8 * rounding.unit) + rounding.tiny / rounding.unit)
    return zero_at_label(margins, labels)


def _row_products(
    weights: Annotated[Tensor, "n k features"], values: Annotated[Tensor, "n features"]
) -> Annotated[Tensor, "n k"]:
    """Of each row with its own weights.

    Libraries sum a lone row in another order, so it is given a copy: on a CPU, in float32, a row's result does not
    depend on how many others there are.
    """
    if len(values) != 1:
        return torch.einsum("nkf,nf->nk", weights, values)
    return torch.einsum("nkf,nf->nk", torch.cat([weights, weights]), torch.cat([values, values]))[:1]


def _separate_margins(logits: Interval, labels: Labels, rounding: Rounding) -> Margins:
    own = logits.lower.gather(1, labels.unsqueeze(1))
    margins = own - logits.upper
    if rounding.is_outward:
        # The difference is off by at most half the distance to the next number, and 2u of it are that whole distance:
        # the margin moves to the next number or further, however the last sum is rounded.
        margins = margins - margins.abs() * (2 * rounding.unit)
    return zero_at_label(margins, labels)


def zero_at_label(
    margins: Annotated[Tensor, "n ... k"], labels: Annotated[Tensor, "n ..."]
) -> Annotated[Tensor, "n ... k"]:
    """The margins with the label's own entry set to 0; the entries of a NaN row stay NaN elsewhere."""
    return margins.scatter(-1, _at_label(margins, labels), 0.0)


def least_over_others(
    margins: Annotated[Tensor, "n ... k"], labels: Annotated[Tensor, "n ..."]
) -> Annotated[Tensor, "n ..."]:
    """The least margin over the classes other than the label; NaN where one of them is NaN."""
    return margins.scatter(-1, _at_label(margins, labels), torch.inf).amin(dim=-1)


def _at_label(
    margins: Annotated[Tensor, "n ... k"], labels: Annotated[Tensor, "n ..."]
) -> Annotated[Tensor, "n ... 1"]:
    return labels.unsqueeze(-1).expand(*margins.shape[:-1], 1)


def trace(model: nn.Module, image_shape: Sequence[int] | None = None) -> Network:
    """The operations of the model; a layer or function without a bound is refused by its name and place.

    A forward pass may ask for the sizes of its results if the (channels, height, width) of images are given; the
    network is then that of such images alone.
    """
    model = unwrapped(model)
    _refuse_changed_calls(model)
    try:
        graph = _Tracer(image_shape).trace(model)
    except PatchcertError:
        raise
    except Exception as error:
        raise UnsupportedLayer(
            f"the model {type(model).__name__} cannot be traced by torch.fx: {error}",
            hint="control flow that depends on the input has no bounds; write the forward pass without it",
        ) from error
    return _Lowering(model).network(graph)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that DataParallel or torch.compile wraps, and computes; others as they are.

    A wrapper with hooks or with another forward pass than its class makes may say something else, and is refused.
    """
    while True:
        if type(model) in (nn.DataParallel, nn.parallel.DistributedDataParallel):
            _refuse_changed_call("", model)
            model = model.get_submodule("module")
        elif type(model) is _compiled_class():
            _refuse_hooks("", model)
            if _is_from_elsewhere(model.forward):
                raise _replaced("", model)
            model = model.get_submodule("_orig_mod")
        else:
            return model


def _compiled_class() -> type[nn.Module] | None:
    """What torch.compile makes of modules; before it has made one nobody has imported that, which takes seconds."""
    made = sys.modules.get("torch._dynamo.eval_frame")
    return None if made is None else made.OptimizedModule


def _is_from_elsewhere(function: Callable[..., Any]) -> bool:
    """Whether the function is not PyTorch's own."""
    code = getattr(function, "__code__", None)
    return code is None or Path(torch.__file__).parent not in Path(code.co_filename).parents


def _refuse_changed_calls(model: nn.Module) -> None:
    if module_globals._global_forward_hooks or module_globals._global_forward_pre_hooks:
        raise UnsupportedLayer(
            "forward hooks are registered for all modules, which could change results unseen",
            hint="remove the hooks before asking for bounds",
        )
    for name, layer in model.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            raise UnsupportedLayer(
                f"{Site(name, type(layer))} is compiled by torch.jit, and its forward pass cannot be read",
                hint="give the module that it was made from",
            )
        _refuse_changed_call(name, layer)


def _refuse_changed_call(name: str, layer: nn.Module) -> None:
    _refuse_hooks(name, layer)
    if _is_called_otherwise(layer):
        raise _replaced(name, layer)


def _refuse_hooks(name: str, layer: nn.Module) -> None:
    if layer._forward_hooks or layer._forward_pre_hooks:
        raise UnsupportedLayer(
            f"{Site(name, type(layer))} has forward hooks, which may change its result",
            hint="remove the hooks before asking for bounds",
        )


def _replaced(name: str, layer: nn.Module) -> UnsupportedLayer:
    return UnsupportedLayer(
        f"the call or forward pass of {Site(name, type(layer))} has been replaced, which tracing does not see",
        hint="write the change as a class of its own with a forward method; of a compiled model give the original",
    )


def _is_called_otherwise(layer: nn.Module) -> bool:
    """Whether a call of the layer is more, or other, than the forward method of its class.

    The class of a GraphModule is made for it alone, with a call that only adds to error messages.
    """
    if vars(layer).keys() & {"forward", "_call_impl"}:
        return True
    kept = ("_call_impl",) if isinstance(layer, fx.GraphModule) else ("__call__", "_call_impl")
    return any(getattr(type(layer), name) is not getattr(nn.Module, name) for name in kept)


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[fx.Proxy, object], fx.Proxy]:
    def recorded(value: fx.Proxy, other: object) -> fx.Proxy:
        return value.tracer.create_proxy("call_function", function, (value, other), {})

    return recorded


class _Proxy(fx.Proxy):
    """Records `h += y` as what it is; torch.fx would make `h = h + y` of it, which leaves other names of h alone."""

    __iadd__ = _in_place(operator.iadd)
    __isub__ = _in_place(operator.isub)
    __imul__ = _in_place(operator.imul)
    __itruediv__ = _in_place(operator.itruediv)
    __ifloordiv__ = _in_place(operator.ifloordiv)
    __imod__ = _in_place(operator.imod)
    __ipow__ = _in_place(operator.ipow)
    __imatmul__ = _in_place(operator.imatmul)

    @property
    def shape(self) -> Any:  # noqa: ANN401
        """All sizes but that of the batch as numbers, where the tracer knows those of the images."""
        asked = Attribute(self, "shape")
        known = self.tracer.sizes(self.node)  # pyright: ignore[reportAttributeAccessIssue]
        if known is None:
            return asked
        return known if self.node.op == "get_attr" else (asked[0], *known[1:])  # pyright: ignore[reportIndexIssue]

    @property
    def ndim(self) -> Any:  # noqa: ANN401
        return self.dim()

    def dim(self) -> Any:  # noqa: ANN401
        known = self.tracer.sizes(self.node)  # pyright: ignore[reportAttributeAccessIssue]
        return Attribute(self, "dim")() if known is None else len(known)

    def size(self, dim: int | None = None) -> Any:  # noqa: ANN401
        shape = self.shape
        if isinstance(shape, tuple):
            return shape if dim is None else shape[dim]
        return Attribute(self, "size")(*([] if dim is None else [dim]))


class _Tracer(fx.Tracer):
    """Records a forward pass. The sizes that it asks for are those of images of one shape, where that is given."""

    proxy_buffer_attributes = True  # what is computed of them becomes part of the graph, as with parameters

    def __init__(self, image_shape: Sequence[int] | None) -> None:
        super().__init__()
        self.image_shape = image_shape
        self._examples: dict[fx.Node, Any] = {}
        self._is_recording = True

    def sizes(self, node: fx.Node) -> tuple[int, ...] | None:
        """Of the result of a node for a single image; None where the shape of images is not known."""
        if self.image_shape is None:
            return None
        self._is_recording = False
        try:
            with torch.no_grad(), _evaluated(self.root):
                return tuple(self._example(node).shape)
        finally:
            self._is_recording = True

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401
        """Recorded, unless it is an example that is computed."""
        return (
            super().call_module(m, forward, args, kwargs) if self._is_recording else forward(*args, **kwargs)
        )

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:  # noqa: ANN401
        """Weights stand for themselves in an example."""
        return super().getattr(attr, attr_val, parameter_proxy_cache) if self._is_recording else attr_val

    def _example(self, node: fx.Node) -> Any:  # noqa: ANN401
        """What the node gives for a black image."""
        if node not in self._examples:
            assert self.image_shape is not None
            own = next(iter(self.root.parameters()), torch.empty(0))
            if node.op == "placeholder":
                self._examples[node] = own.new_zeros(1, *self.image_shape)
            elif node.op == "get_attr":
                self._examples[node] = operator.attrgetter(str(node.target))(self.root)
            else:
                self._examples[node] = self._run(node)
        return self._examples[node]

    def _run(self, node: fx.Node) -> Any:  # noqa: ANN401
        arguments = map_arg(node.args, self._example)
        keywords = map_arg(node.kwargs, self._example)
        if node.op == "call_method":
            return getattr(arguments[0], str(node.target))(*arguments[1:], **keywords)  # pyright: ignore
        called = self.root.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        return called(*arguments, **keywords)  # pyright: ignore

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],
        is_module: bool,
        concrete_args: Any = None,  # noqa: ANN401
    ) -> tuple[Any, list[Any]]:
        """What has a default has it while traced too, so that `argument is None` is answered as in a call."""
        function, arguments = super().create_args_for_root(root_fn, is_module, concrete_args)
        written = inspect.unwrap(root_fn)
        parameters = inspect.signature(written).parameters
        for place, name in enumerate(written.__code__.co_varnames[: len(arguments)]):
            if place > 1 and parameters[name].default is not inspect.Parameter.empty:
                arguments[place] = parameters[name].default
        return function, arguments

    def create_arg(self, a: Any) -> Argument:  # noqa: ANN401
        """Tensors that the forward pass makes, of others or of numbers, would be frozen into the trace unseen."""
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter) and not self._is_kept(a):
            raise UnsupportedLayer(
                f"the forward pass makes a tensor of shape {tuple(a.shape)}, which tracing cannot follow",
                hint="keep it as a parameter or buffer, computed before",
            )
        return super().create_arg(a)

    def _is_kept(self, tensor: Tensor) -> bool:
        return tensor in self.tensor_attrs or any(tensor is buffer for buffer in self.root.buffers())

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in LAYER_RULES or super().is_leaf_module(m, module_qualified_name)


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Inside, all layers are in eval mode, so that a pass changes none of them."""
    training = [layer for layer in model.modules() if layer.training]
    for layer in training:
        layer.training = False
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


@dataclass(frozen=True, slots=True)
class _Value:
    """A result of the network; those that may share memory have one storage, whose changes are counted."""

    index: int
    storage: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class _Call:
    """A layer or function with its arguments: results of the network first, settings after them."""

    where: Site
    rule: Callable[..., Lowered]
    layer: nn.Module | None
    inputs: tuple[_Value, ...]
    settings: tuple[object, ...]
    keywords: dict[str, object]

    def operations(self) -> tuple[Operation, ...]:
        """What the rule makes of it, one after the other; none for the identity."""
        if self.layer is not None and (self.settings or self.keywords):
            raise UnsupportedLayer(f"{self.where} called with more than its input")
        if any(isinstance(setting, _Value) for setting in (*self.settings, *self.keywords.values())):
            raise UnsupportedLayer(
                f"{self.where} called with a result of the network in place of a setting",
                instead_of(self.where.target),
            )
        try:
            arguments = self.settings if self.layer is None else (self.layer,)
            lowered = self.rule(*arguments, **self.keywords)
        except (UnsupportedLayer, ModelError) as error:
            raise type(error)(f"{self.where}: {error.message}", error.hint) from None
        except TypeError as error:
            raise UnsupportedLayer(f"{self.where} called in a way that has no bound: {error}") from error
        if lowered is None:
            return ()
        return lowered if isinstance(lowered, tuple) else (lowered,)

    def piece(self, where: Site, index: object) -> "_Call":
        """One of the results, where there are several."""
        return replace(self, where=where, settings=(index, *self.settings))

    @property
    def is_in_place(self) -> bool:
        """The first input's memory is overwritten by the result."""
        if self.layer is not None:
            return bool(getattr(self.layer, "inplace", False))
        name = bare_name(self.where.target)
        if name.endswith("_") or name in ("iadd", "imul", "isub", "itruediv"):
            return True
        return bool(
            inspect.signature(self.rule).bind(*self.settings, **self.keywords).arguments.get("inplace")
        )


class _Lowering:
    """Walks the traced graph once and looks every node up in the tables of rules."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.steps: list[Step] = []
        self.values: dict[fx.Node, object] = {}
        self.versions: dict[int, int] = {0: 0}

    def network(self, graph: fx.Graph) -> Network:
        result = None
        for node in graph.nodes:
            if node.op == "output":
                result = self._resolve(node.args[0])
            else:
                self.values[node] = self._lower(node)
        if not isinstance(result, _Value) or result.index == 0:
            raise UnsupportedLayer("the model must return one tensor of logits, the result of an operation")
        self._refuse_stale("the model returns its output", result)
        return Network(_needed(self.steps, result.index))

    def _lower(self, node: fx.Node) -> object:
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            path = str(node.target)
            return lambda: operator.attrgetter(path)(self.model)
        if node.op == "call_module":
            layer = self.model.get_submodule(str(node.target))
            where = Site(str(node.target), type(layer))
            return self._append(self._call(node, where, LAYER_RULES.get(type(layer)), layer))
        size = self._batch_size(node)
        if size is not None:
            return size
        if node.target is operator.add and node.args[0] == 0:  # how Python's sum() begins
            return self._resolve(node.args[1])
        where = Site(node.name, node.target)
        whole = self._resolve(node.args[0]) if node.target is operator.getitem else None
        if whole is _SHAPE:
            raise UnsupportedLayer(f"{where} asks for a size that is not the batch's", instead_of("size"))
        if isinstance(whole, _Call):
            return self._append(whole.piece(where, self._resolve(node.args[1])))
        call = self._call(node, where, FUNCTION_RULES.get(node.target), None)
        return call if node.target in SPLITTING else self._append(call)

    def _placeholder(self, node: fx.Node) -> object:
        if not any(isinstance(value, _Value) for value in self.values.values()):
            return _Value(0, storage=0)
        if node.args:
            return node.args[0]
        raise UnsupportedLayer(f"the model takes a second input {node.name!r}; bounds exist for images alone")

    def _call(self, node: fx.Node, where: Site, rule: Callable | None, layer: nn.Module | None) -> _Call:
        if rule is None:
            where.refuse()
        arguments = [self._resolve(argument) for argument in node.args]
        keywords = {key: self._resolve(argument) for key, argument in node.kwargs.items()}
        if arguments and isinstance(keywords.get("other"), _Value):
            arguments.append(keywords.pop("other"))
        if node.target in _TURNED and [isinstance(each, _Value) for each in arguments] == [False, True]:
            rule, arguments = FUNCTION_RULES[_TURNED[node.target]], arguments[::-1]
        joined = keywords.pop("tensors", None) or (arguments.pop(0) if _are_values(arguments[:1]) else ())
        arguments = [*joined, *arguments]  # pyright: ignore[reportGeneralTypeIssues]
        inputs = list(takewhile(lambda argument: isinstance(argument, _Value), arguments))
        settings = arguments[len(inputs) :]
        inputs += [keywords.pop(key) for key in ("input", "other") if isinstance(keywords.get(key), _Value)]
        return _Call(where, rule, layer, tuple(inputs), tuple(settings), keywords)  # pyright: ignore[reportArgumentType]

    def _append(self, call: _Call) -> _Value:
        operations = call.operations()
        expected = operations[0].arity if operations else 1
        if len(call.inputs) != expected and (expected != ANY_NUMBER or not call.inputs):
            raise UnsupportedLayer(
                f"{call.where} of {len(call.inputs)} results of the network; bounds exist for {expected}"
            )
        for value in call.inputs:
            self._refuse_stale(call.where, value)
        value, inputs = call.inputs[0], call.inputs
        for position, operation in enumerate(operations, start=1):
            name = call.where.place if position == len(operations) else f"{call.where.place}.{position}"
            indices = tuple(value.index for value in inputs)
            self.steps.append(Step(name, operation, indices, _is_foreign(call.rule)))
            value = self._result(call, operation, value)
            inputs = (value,)
        return value

    def _result(self, call: _Call, operation: Operation, source: _Value) -> _Value:
        index = len(self.steps)
        if call.is_in_place:
            if source.storage == 0:
                raise UnsupportedLayer(f"{call.where} changes the images in place", hint="use inplace=False")
            self.versions[source.storage] += 1
            return _Value(index, source.storage, self.versions[source.storage])
        if operation.may_share_memory:
            return replace(source, index=index)
        self.versions[index] = 0
        return _Value(index, storage=index)

    def _refuse_stale(self, where: Site | str, value: _Value) -> None:
        """The graph keeps results apart that share memory, so one that was overwritten is not what it says."""
        if value.version != self.versions[value.storage]:
            raise UnsupportedLayer(
                f"{where}; it uses a result that another layer has changed in place",
                hint="use inplace=False",
            )

    def _batch_size(self, node: fx.Node) -> object:
        """Recognises x.size(0), x.shape[0] and x.size()[0], the only sizes a reshape may ask for."""
        if node.op == "call_method" and node.target == "size":
            return BATCH_SIZE if node.args[1:] == (0,) else _SHAPE if len(node.args) == 1 else None
        if node.target is getattr and node.args[1] == "shape":
            return _SHAPE
        if node.target is operator.getitem and self._resolve(node.args[0]) is _SHAPE and node.args[1] == 0:
            return BATCH_SIZE
        return None

    def _resolve(self, argument: object) -> object:
        if isinstance(argument, fx.Node):
            return self.values[argument]
        if isinstance(argument, tuple | list):
            return tuple(self._resolve(item) for item in argument)
        return argument


def _are_values(arguments: Sequence[object]) -> bool:
    """Whether the first argument is a list of results, as torch.cat takes."""
    first = arguments[0] if arguments else None
    return isinstance(first, tuple) and len(first) > 0 and all(isinstance(item, _Value) for item in first)


def _is_foreign(rule: Callable[..., Lowered]) -> bool:
    return rule.__module__.partition(".")[0] != "patchcert"


def _needed(steps: Sequence[Step], result: int) -> tuple[Step, ...]:
    """The steps that the result depends on, numbered anew."""
    needed = {result}
    for position in reversed(range(result)):
        if position + 1 in needed:
            needed.update(steps[position].inputs)
    number = {0: 0} | {index: place for place, index in enumerate(sorted(needed - {0}), start=1)}
    kept = [steps[index - 1] for index in sorted(needed - {0})]
    return tuple(replace(step, inputs=tuple(number[index] for index in step.inputs)) for step in kept)


_TURNED: dict[object, Callable] = {
    operator.add: operator.add,
    torch.add: torch.add,
    operator.mul: operator.mul,
    torch.mul: torch.mul,
    operator.sub: torch.rsub,
    torch.sub: torch.rsub,
}
"""Functions of a constant and a result, and the function that is the same with both changed over."""

_SHAPE = object()
