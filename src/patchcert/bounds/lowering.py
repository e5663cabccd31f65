"""The table that maps the layers and functions of PyTorch to operations, and how what is not in it is refused.

A rule takes the layer (or the arguments of the function after its input) and returns the operation, or raises
`UnsupportedLayer` where the settings have no sound bound. The rules stand beside the operations, in `operations`.
"""

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.errors import UnsupportedLayer

if TYPE_CHECKING:
    from patchcert.bounds.operations import Operation

Lowered: TypeAlias = "Operation | tuple[Operation, ...] | None"
"""What a rule returns: an operation, a chain of them, or None for the identity."""

LAYER_RULES: dict[type[nn.Module], Callable[[Any], Lowered]] = {}
FUNCTION_RULES: dict[Callable | str, Callable[..., Lowered]] = {}
SPLITTING: set[Callable | str] = set()
"""Functions and methods that give several results, of which pieces are picked."""


def layer_rule(*types: type[nn.Module]) -> Callable:
    """Registers how a layer is lowered; a second rule for the same type is an error."""
    return partial(_register, LAYER_RULES, types)


def function_rule(*functions: Callable | str, layers: tuple[type[nn.Module], ...] = ()) -> Callable:
    """Registers how a function, or a tensor method given by name, is lowered.

    So are `layers`, whose attributes must have the names of the rule's parameters.
    """

    def register(rule: Callable) -> Callable:
        _register(LAYER_RULES, layers, _by_attributes(rule))
        return _register(FUNCTION_RULES, functions, rule)

    return register


def splitting_rule(*functions: Callable | str) -> Callable:
    """Registers how one piece is lowered of what a function, or a tensor method given by name, makes of its input.

    The rule takes the piece's index before the arguments.
    """

    def register(rule: Callable) -> Callable:
        SPLITTING.update(functions)
        return _register(FUNCTION_RULES, functions, rule)

    return register


def _by_attributes(rule: Callable) -> Callable:
    names = tuple(inspect.signature(rule).parameters)

    @wraps(rule)
    def of_layer(layer: nn.Module) -> Lowered:
        return rule(**{name: _attribute(layer, name) for name in names})

    return of_layer


def _attribute(layer: nn.Module, name: str) -> object:
    """A setting as it is; a weight as a source, which reads it whenever it is asked."""
    value = getattr(layer, name)
    return (lambda: getattr(layer, name)) if isinstance(value, Tensor) else value


def _register(table: dict, keys: tuple, rule: Callable) -> Callable:
    for key in dict.fromkeys(keys):
        if key in table:
            raise ValueError(f"a rule for {key} is registered already")
        table[key] = rule
    return rule


def refuse(reason: str, hint: str = "") -> NoReturn:
    """Refuses a layer for its settings; the place is added by `trace`."""
    raise UnsupportedLayer(reason, hint)


def pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    """Height and width from a setting that may be one number for both."""
    if isinstance(value, int):
        return (value, value)
    values = tuple(value)
    return (values[0], values[0]) if len(values) == 1 else (values[0], values[1])


class _BatchSize:
    """Stands for the number of images in a traced `x.size(0)` or `x.shape[0]`."""

    def __repr__(self) -> str:
        return "batch"


BATCH_SIZE = _BatchSize()


Target = type[nn.Module] | Callable | str
"""What a forward pass calls: a layer by its type, a function, a method of a tensor by its name."""


def kind_of(target: Target) -> Literal["layer", "function", "method"]:
    """How a forward pass calls it: a type is a layer, a string a method."""
    if isinstance(target, str):
        return "method"
    return "layer" if isinstance(target, type) and issubclass(target, nn.Module) else "function"


@dataclass(frozen=True, slots=True)
class Site:
    """What is called, and where in the model; printed as refusals name it."""

    place: str
    target: Target

    def __str__(self) -> str:
        kind, name = kind_of(self.target), public_name(self.target)
        if kind != "layer":
            return f"{kind} {name} at '{self.place}'"
        return f"layer '{self.place}' ({name})" if self.place else f"the model ({name})"

    def refuse(self) -> NoReturn:
        """Says what has bounds instead, and what to do."""
        kind, rules = kind_of(self.target), {**LAYER_RULES, **FUNCTION_RULES}
        alike = [target for target in rules if kind_of(target) == kind and not always_refuses(rules[target])]
        known = ", ".join(sorted({public_name(target) for target in alike}, key=str.lower))
        raise UnsupportedLayer(
            f"{self}: no bound is known for it; {kind}s with bounds: {known}", _advice(self.target)
        )


def always_refuses(rule: Callable) -> bool:
    """Whether the rule is there for its message alone."""
    return getattr(rule, "__annotations__", {}).get("return") is NoReturn


_PUBLIC = {"F": F, "torch": torch, "operator": operator}


def public_name(target: Target) -> str:
    """The name by which users know it; F is torch.nn.functional."""
    if isinstance(target, str):
        return f".{target}()"
    name = bare_name(target)
    if kind_of(target) == "function":
        for prefix, module in _PUBLIC.items():
            if getattr(module, name, None) is target:
                return f"{prefix}.{name}"
    return name


def bare_name(target: Target) -> str:
    """The name without where it comes from."""
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def instead_of(target: Target) -> str:
    """What to write instead of the call, where something is known; else ""."""
    name = bare_name(target).lower().removesuffix("_")
    return next((hint for names, hint in _HINTS.items() if name in names.split()), "")


def _advice(target: Target) -> str:
    known = instead_of(target)
    if known:
        return known
    if kind_of(target) == "layer":
        return (
            "replace the layer, or register a sound rule for it with patchcert.bounds.layer_rule; else "
            + MASKING_HINT
        )
    key = repr(target) if isinstance(target, str) else public_name(target)
    return (
        f"use a layer that has bounds, or register a sound rule with patchcert.bounds.function_rule({key}); else "
        + MASKING_HINT
    )


MASKING_HINT = (
    "double masking proves models of any layers, if they were trained for it: --method masking on the command line, "
    "patchcert.DoubleMasking(model, threat) in Python"
)

_HINTS = {
    "groupnorm layernorm instancenorm2d localresponsenorm rmsnorm group_norm layer_norm instance_norm rms_norm "
    "local_response_norm multiheadattention transformerencoderlayer transformerencoder scaled_dot_product_attention "
    "multi_head_attention_forward matmul imatmul bmm baddbmm einsum": "a patch moves the statistics of a whole image, "
    f"and all of its attention, so that no useful bound is known: {MASKING_HINT}",
    "softmax log_softmax logsoftmax": "where it comes last leave it out and return the logits: it does not "
    f"change their order; in attention it has no useful bound: {MASKING_HINT}",
    "div truediv itruediv divide true_divide sub isub subtract": "differences and quotients of two results have no "
    "bounds; write a difference as a + b * -1, and a product instead of a quotient",
    "amax max": "the largest value of a whole map is nn.AdaptiveMaxPool2d(1) and nn.Flatten",
    "clamp clip": "nn.Hardtanh(low, high) is the same; with the limit min=0 alone it is nn.ReLU",
    "constantpad2d": "zeros around a map are nn.ZeroPad2d, or the padding of the nn.Conv2d that follows",
    "squeeze unsqueeze": "drop dimensions with nn.Flatten or x.flatten(1), shape them with x.view(x.size(0), "
    "...)",
    "narrow select unbind tensor_split": "channels are picked by x[:, 2:4], x.chunk(2, dim=1) or x.split(4, dim=1)",
    "size": "without the shape of the images only the batch size, x.size(0), may be asked for: write the other sizes "
    "as numbers, or use nn.Flatten",
    "prelu": "with one slope of at least 0, nn.LeakyReLU(slope) is the same",
}
"""What to write instead of the calls of these names."""
