"""The table that maps the layers and functions of PyTorch to the operations that have bounds.

A rule takes the layer (or the arguments of the function after its input) and returns the operation, or raises
`UnsupportedLayer` where the settings have no sound bound. The rules themselves are in `rules`, by family.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import nn

from patchcert.bounds.operations import Operation, Source
from patchcert.errors import UnsupportedLayer

Lowered = Operation | tuple[Operation, ...] | None
"""What a rule returns: an operation, a chain of them, or None for the identity."""

LAYER_RULES: dict[type[nn.Module], Callable[[Any], Lowered]] = {}
FUNCTION_RULES: dict[Callable | str, Callable[..., Lowered]] = {}


def layer_rule(*types: type[nn.Module]) -> Callable:
    """Registers how a layer is lowered; a second rule for the same type is an error."""
    return partial(_register, LAYER_RULES, types)


def function_rule(*functions: Callable | str) -> Callable:
    """Registers how a function, or a tensor method given by name, is lowered."""
    return partial(_register, FUNCTION_RULES, functions)


def _register(table: dict, keys: tuple, rule: Callable) -> Callable:
    for key in dict.fromkeys(keys):
        if key in table:
            raise ValueError(f"a rule for {key} is registered already")
        table[key] = rule
    return rule


def refuse(reason: str, hint: str = "") -> NoReturn:
    """Refuses a layer for its settings; the place is added by `trace`."""
    raise UnsupportedLayer(reason, hint)


def attribute(layer: nn.Module, name: str) -> Source | None:
    """Reads the layer's weight of that name whenever it is asked; None where the layer has none."""
    return None if getattr(layer, name) is None else lambda: getattr(layer, name)


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
