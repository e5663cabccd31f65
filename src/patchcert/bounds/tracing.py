"""From a model's forward pass, traced by torch.fx, to a network of operations; the rest is refused."""

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import Argument
from torch.nn.modules import module as module_globals

from patchcert.bounds.lowering import BATCH_SIZE, FUNCTION_RULES, LAYER_RULES, Lowered, Site, bare_name
from patchcert.bounds.network import Network, Step
from patchcert.bounds.operations import Operation
from patchcert.errors import ModelError, PatchcertError, UnsupportedLayer


def trace(model: nn.Module) -> Network:
    """The operations of the model; a layer or function without a bound is refused by its name and place."""
    _refuse_changed_calls(model)
    try:
        graph = _Tracer().trace(model)
    except PatchcertError:
        raise
    except Exception as error:
        raise UnsupportedLayer(
            f"the model {type(model).__name__} cannot be traced by torch.fx: {error}",
            hint="control flow that depends on the input has no bounds; write the forward pass without it",
        ) from error
    return _Lowering(model).network(graph)


def _refuse_changed_calls(model: nn.Module) -> None:
    if module_globals._global_forward_hooks or module_globals._global_forward_pre_hooks:
        raise UnsupportedLayer(
            "forward hooks are registered for all modules, which could change results unseen",
            hint="remove the hooks before asking for bounds",
        )
    for name, layer in model.named_modules():
        if layer._forward_hooks or layer._forward_pre_hooks:
            raise UnsupportedLayer(
                f"{Site(name, type(layer))} has forward hooks, which may change its result",
                hint="remove the hooks before asking for bounds",
            )
        if _is_called_otherwise(layer):
            raise UnsupportedLayer(
                f"the call or forward pass of {Site(name, type(layer))} has been replaced, which tracing does not see",
                hint="write the change as a class of its own with a forward method; of a compiled model give the "
                "original",
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


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # what is computed of them becomes part of the graph, as with parameters

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
            raise UnsupportedLayer(f"{self.where} called with a result of the network in place of a setting")
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

    @property
    def is_in_place(self) -> bool:
        """The first input's memory is overwritten by the result."""
        if self.layer is not None:
            return bool(getattr(self.layer, "inplace", False))
        name = bare_name(self.where.target)
        if name.endswith("_") or name == "iadd":
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
        where = Site(node.name, node.target)
        return self._append(self._call(node, where, FUNCTION_RULES.get(node.target), None))

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
        inputs = list(takewhile(lambda argument: isinstance(argument, _Value), arguments))
        settings = arguments[len(inputs) :]
        inputs += [keywords.pop(key) for key in ("input", "other") if isinstance(keywords.get(key), _Value)]
        return _Call(where, rule, layer, tuple(inputs), tuple(settings), keywords)  # pyright: ignore[reportArgumentType]

    def _append(self, call: _Call) -> _Value:
        operations = call.operations()
        expected = operations[0].arity if operations else 1
        if len(call.inputs) != expected:
            raise UnsupportedLayer(
                f"{call.where} of {len(call.inputs)} results of the network; bounds exist for {expected}"
            )
        for value in call.inputs:
            self._refuse_stale(call.where, value)
        value, inputs = call.inputs[0], call.inputs
        for position, operation in enumerate(operations, start=1):
            name = call.where.place if position == len(operations) else f"{call.where.place}.{position}"
            self.steps.append(Step(name, operation, tuple(value.index for value in inputs)))
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


def _needed(steps: Sequence[Step], result: int) -> tuple[Step, ...]:
    """The steps that the result depends on, numbered anew."""
    needed = {result}
    for position in reversed(range(result)):
        if position + 1 in needed:
            needed.update(steps[position].inputs)
    number = {0: 0} | {index: place for place, index in enumerate(sorted(needed - {0}), start=1)}
    kept = [steps[index - 1] for index in sorted(needed - {0})]
    return tuple(replace(step, inputs=tuple(number[index] for index in step.inputs)) for step in kept)


_SHAPE = object()
