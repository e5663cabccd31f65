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
        (isinstance(value, int) and not isinstance(value, bool))
        or (isinstance(value, float) and math.isfinite(value))
    ),
}


def leaderboard_schema() -> Schema:
    """The schema of leaderboard files, as it ships with the package."""
    return json.loads(resources.files("patchcert.comparison").joinpath("schema.json").read_text("utf-8"))


def mistakes(value: object, schema: Schema) -> Iterator[str]:
    """What in a document is not as its schema says: where it is, what is expected, and what came instead."""
    yield from _mistakes(value, schema, schema, "")


def _mistakes(value: Any, schema: Schema, root: Schema, where: str) -> Iterator[str]:  # noqa: ANN401 - plain JSON
    unknown = schema.keys() - _CHECKED - _WORDS
    if unknown:
        raise InvalidInput(
            f"the schema has the keyword {min(unknown)!r}, which is not checked here",
            hint=f"it may use {', '.join(sorted(_CHECKED))}",
        )
    if "$ref" in schema:
        referred = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
        yield from _mistakes(value, referred, root, where)
        return
    kind = schema.get("type")
    if kind is not None and not _TYPES[kind](value):
        yield _mistake(where, f"{'an' if kind[0] in 'aio' else 'a'} {kind}", value)
        return
    for keyword, (words, holds) in _RULES.items():
        if keyword in schema and not holds(value, schema[keyword]):
            expected = schema[keyword]
            shown = ", ".join(map(str, expected)) if isinstance(expected, list) else expected
            yield _mistake(where, f"{words} {shown}", value)
    yield from _mistaken_keys(value, schema, where or "the document")
    for name, rule in schema.get("properties", {}).items():
        if name in value:
            yield from _mistakes(value[name], rule, root, f"{where}.{name}".lstrip("."))
    for position, item in enumerate(value if "items" in schema else ()):
        yield from _mistakes(item, schema["items"], root, f"{where}[{position}]")


def _mistaken_keys(value: Any, schema: Schema, where: str) -> Iterator[str]:  # noqa: ANN401 - plain JSON
    yield from (f"{where} lacks {name!r}" for name in schema.get("required", ()) if name not in value)
    if schema.get("additionalProperties") is False:
        known = schema["properties"]
        for name in value.keys() - known.keys():
            yield f"{where} has the unknown key {name!r}; its keys are {', '.join(known)}"


def _mistake(where: str, expected: str, value: object) -> str:
    got = json.dumps(value, default=str)
    got = got if len(got) <= 60 else f"{got[:57]}..."
    return f"{where or 'the document'} must be {expected}, got {got}"


_RULES: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "enum": (
        "one of",
        lambda value, expected: any(type(value) is type(each) and value == each for each in expected),
    ),
    "minimum": ("at least", lambda value, expected: value >= expected),
    "maximum": ("at most", lambda value, expected: value <= expected),
    "exclusiveMinimum": ("above", lambda value, expected: value > expected),
    "minLength": ("a text of a length of at least", lambda value, expected: len(value) >= expected),
    "pattern": ("a text like", lambda value, expected: re.search(expected, value) is not None),
}
_CHECKED = {"$ref", "type", "properties", "items", "additionalProperties", "required", *_RULES}
