"""A small validator of JSON documents against a JSON schema: every keyword is either checked or refused."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import Any

from patchcert.errors import InvalidInput

Schema = Mapping[str, Any]

_WORDS = {"$schema", "$defs", "title", "description"}
"""What says nothing that could be checked."""
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ),
}


def leaderboard_schema() -> Schema:
    """The schema of leaderboard files, as it ships with the package."""
    return json.loads(resources.files("patchcert.comparison").joinpath("schema.json").read_text("utf-8"))


def mistakes(value: object, schema: Schema) -> Iterator[str]:
    """What in a document is not as its schema says: where it is, what is expected, and what came instead."""
    yield from _mistakes(value, schema, schema, "")


def _mistakes(value: Any, schema: Schema, root: Schema, where: str) -> Iterator[str]:  # noqa: ANN401 - plain JSON
    unknown = schema.keys() - _CHECKS.keys() - _WORDS - {"$ref"}
    if unknown:
        raise InvalidInput(
            f"the schema has the keyword {min(unknown)!r}, which is not checked here",
            hint=f"it may use {', '.join(sorted(_CHECKS))}",
        )
    if "$ref" in schema:
        yield from _mistakes(value, _referred(schema["$ref"], root), root, where)
        return
    kind = schema.get("type")
    if kind is not None and not _TYPES[kind](value):
        yield _mistake(where, f"{'an' if kind[0] in 'aio' else 'a'} {kind}", value)
        return
    for keyword, expected in schema.items():
        if keyword in _CHECKS:
            yield from _CHECKS[keyword](value, expected, schema, root, where)


def _referred(name: str, root: Schema) -> Schema:
    return root["$defs"][name.removeprefix("#/$defs/")]


def _mistake(where: str, expected: str, value: object) -> str:
    got = json.dumps(value, default=str)
    got = got if len(got) <= 60 else f"{got[:57]}..."
    return f"{where or 'the document'} must be {expected}, got {got}"


def _check_properties(value: Any, expected: Any, schema: Schema, root: Schema, where: str) -> Iterator[str]:  # noqa: ANN401
    for name, rule in expected.items():
        if name in value:
            yield from _mistakes(value[name], rule, root, f"{where}.{name}".lstrip("."))


def _check_items(value: Any, expected: Any, schema: Schema, root: Schema, where: str) -> Iterator[str]:  # noqa: ANN401
    for position, item in enumerate(value):
        yield from _mistakes(item, expected, root, f"{where}[{position}]")


def _check_names(value: Any, expected: Any, schema: Schema, root: Schema, where: str) -> Iterator[str]:  # noqa: ANN401
    """Of `additionalProperties`, which may only be false."""
    for name in value.keys() - schema["properties"].keys() if expected is False else ():
        known = ", ".join(schema["properties"])
        yield f"{where or 'the document'} has the unknown key {name!r}; its keys are {known}"


def _check_required(value: Any, expected: Any, schema: Schema, root: Schema, where: str) -> Iterator[str]:  # noqa: ANN401
    for name in expected:
        if name not in value:
            yield f"{where or 'the document'} lacks {name!r}"


def _check_kind(value: Any, expected: Any, schema: Schema, root: Schema, where: str) -> Iterator[str]:  # noqa: ANN401
    """Of `type`, which is looked at before all others."""
    yield from ()


def _rule(words: str, holds: Callable[[Any, Any], bool]) -> Callable[..., Iterator[str]]:
    def check(value: Any, expected: Any, schema: Schema, root: Schema, where: str) -> Iterator[str]:  # noqa: ANN401
        if not holds(value, expected):
            shown = ", ".join(map(str, expected)) if isinstance(expected, list) else str(expected)
            yield _mistake(where, f"{words} {shown}", value)

    return check


_CHECKS: Mapping[str, Callable[..., Iterator[str]]] = {
    "type": _check_kind,
    "properties": _check_properties,
    "items": _check_items,
    "additionalProperties": _check_names,
    "required": _check_required,
    "enum": _rule(
        "one of",
        lambda value, expected: any(type(value) is type(each) and value == each for each in expected),
    ),
    "minimum": _rule("at least", lambda value, expected: value >= expected),
    "maximum": _rule("at most", lambda value, expected: value <= expected),
    "exclusiveMinimum": _rule("above", lambda value, expected: value > expected),
    "minLength": _rule("a text of a length of at least", lambda value, expected: len(value) >= expected),
    "pattern": _rule("a text like", lambda value, expected: re.search(expected, value) is not None),
}
