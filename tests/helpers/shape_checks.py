"""Checks the shapes that signatures state, in the notation of `patchcert.tensors`, in every call that returns.

`check_shapes_on_import("patchcert")`, called before the package's other modules are imported, puts the check around
every function, method and dataclass of the package. A call that raises is left alone, so that refusals of malformed
input stay visible, and so is one that torch.compile follows.
"""

import ast
import functools
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin

from torch import Tensor
from torch.compiler import is_compiling

Sizes = dict[str, int]
"""The number that each name stands for, within one call."""


class ShapeError(AssertionError):
    """A tensor has another shape than a signature states."""


def shape_matches(notation: str, shape: Sequence[int], sizes: Sizes) -> bool:
    """Whether the shape is the stated one; if so, names met for the first time are added to `sizes`."""
    words = _words(notation)
    if "..." in words:
        before = words.index("...")
        after = len(words) - before - 1
        if len(shape) < before + after:
            return False
        words = words[:before] + words[before + 1 :]
        shape = (*shape[:before], *shape[len(shape) - after :])
    if len(words) != len(shape):
        return False
    found = dict(sizes)
    for word, size in zip(words, shape, strict=True):
        if word != "_" and size != (int(word) if word.isdigit() else found.setdefault(word, size)):
            return False
    sizes.update(found)
    return True


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a ShapeError where a call returns although a tensor has another shape than stated.

    A function whose annotations state no shapes is returned as it is. Annotations in quotes are not read.
    """
    stated = {name: hint for name, hint in function.__annotations__.items() if _states_shapes(hint)}
    if not stated:
        return function
    result = stated.pop("return", None)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    parameters = [
        (name, names.index(name) if name in names else sys.maxsize, hint) for name, hint in stated.items()
    ]

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        returned = function(*given, **named)
        if is_compiling():
            return returned
        sizes: Sizes = {}
        for name, position, hint in parameters:
            value = given[position] if position < len(given) else named.get(name)
            if not _fits(hint, value, sizes):
                _refuse(function, f"argument {name!r}", hint, value, sizes)
        if result is not None and not _fits(result, returned, sizes):
            _refuse(function, "the returned value", result, returned, sizes)
        return returned

    return call


def checked_fields(kind: type) -> type:
    """The class; of a dataclass, no instance can be made whose fields have other shapes than stated.

    A subclass that is not itself a dataclass is not checked: it may compute its fields when they are asked for.
    """
    if not is_dataclass(kind) or not {"__init__", "__dataclass_fields__"} <= vars(kind).keys():
        return kind
    stated = {field.name: field.type for field in fields(kind) if _states_shapes(field.type)}
    if not stated:
        return kind
    construct = kind.__init__

    @functools.wraps(construct)
    def initialise(self: Any, *given: Any, **named: Any) -> None:
        construct(self, *given, **named)
        sizes: Sizes = {}
        for name, hint in stated.items():
            if not _fits(hint, getattr(self, name), sizes):
                _refuse(kind, f"field {name!r}", hint, getattr(self, name), sizes)

    kind.__init__ = initialise  # pyright: ignore[reportAttributeAccessIssue]
    return kind


def check_shapes_on_import(package: str) -> None:
    """From now on, modules of the package are imported with all their functions and dataclasses checked."""
    sys.meta_path.insert(0, _CheckingFinder(package))


@functools.cache
def _words(notation: str) -> list[str]:
    words = notation.split()
    strange = [word for word in words if not (word.isidentifier() or word.isdigit() or word == "...")]
    if strange or words.count("...") > 1:
        raise ValueError(f"{notation!r} states no shape: write names, numbers, '_' and at most one '...'")
    return words


@functools.cache
def _notation(hint: object) -> str | None:
    """The shape that `Annotated[Tensor, ...]` states; None for any other hint."""
    if get_origin(hint) is not Annotated or get_args(hint)[0] is not Tensor:
        return None
    return next((word for word in get_args(hint)[1:] if isinstance(word, str)), None)


@functools.cache
def _states_shapes(hint: object) -> bool:
    """Whether there is a stated shape anywhere in the hint; one that cannot be read is a ValueError."""
    notation = _notation(hint)
    if notation is not None:
        _words(notation)
        return True
    return any(_states_shapes(part) for part in get_args(hint) if not isinstance(part, list))


def _fits(hint: object, value: object, sizes: Sizes) -> bool:
    """Whether every tensor in the value has the shape stated for it, if any; other values always fit."""
    notation = _notation(hint)
    if notation is not None:
        return not isinstance(value, Tensor) or shape_matches(notation, value.shape, sizes)
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Union or origin is types.UnionType:
        stated = [part for part in parts if _states_shapes(part)]
        return not stated or Tensor in parts or any(_fits(part, value, sizes) for part in stated)
    if origin is tuple and isinstance(value, tuple) and len(parts) == len(value) and parts[-1] is not ...:
        return all(_fits(part, item, sizes) for part, item in zip(parts, value, strict=True))
    if origin in (tuple, list, Sequence) and isinstance(value, list | tuple):
        return all(_fits(parts[0], item, sizes) for item in value)
    return True


def _refuse(owner: Callable[..., Any], place: str, hint: object, value: object, sizes: Sizes) -> NoReturn:
    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    stated = _notation(hint) if _notation(hint) is not None else str(hint)
    known = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    raise ShapeError(
        f"{owner.__module__}.{owner.__qualname__}: {place} has shape {shape}; the signature states {stated!r}"
        + (f", where {known}" if known else "")
    )


class _CheckingFinder(MetaPathFinder):
    """Finds modules of one package where Python would, and has them loaded with checks."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.split(".")[0] != self.package:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _CheckingLoader(spec.loader.name, spec.loader.path)
        return spec


class _CheckingLoader(SourceFileLoader):
    """Compiles every function with `checked` and every class with `checked_fields` as a decorator."""

    def get_code(self, fullname: str) -> types.CodeType | None:
        source = self.get_data(self.path)
        if b"Tensor" not in source and b"patchcert.tensors" not in source:
            return super().get_code(fullname)
        # No compiled file is written: it would serve unchecked imports too.
        return compile(_WithChecks().visit(ast.parse(source)), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(__checked__=checked, __checked_fields__=checked_fields)
        super().exec_module(module)


class _WithChecks(ast.NodeTransformer):
    """Adds the decorators: innermost to functions, so that others get the checked one, outermost to classes."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list.append(_decorator("__checked__", node))
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list.insert(0, _decorator("__checked_fields__", node))
        return self.generic_visit(node)


def _decorator(name: str, beside: ast.AST) -> ast.expr:
    """A decorator at the place of what it decorates, so that line numbers stay."""
    return ast.copy_location(ast.Name(name, ast.Load()), beside)
