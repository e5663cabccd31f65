"""Frozen dataclasses as TOML tables and back: nothing is guessed, nothing skipped, and every mistake is named.

A dataclass is a table with its fields as keys. A union of dataclasses is told apart by their `kind`.
"""

# ruff: noqa: ANN401 - types are those of the dataclasses' fields, known at run time only

import dataclasses
import json
import re
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from patchcert.errors import PatchcertError, SpecError, did_you_mean
from patchcert.threats import Patch, SparsePixels

THREAT_KEYS = {"patch": ("kind", "stamp", "placements"), "sparse": ("kind", "pixels", "bound")}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands: the file or preset, the dotted key, and the changes made from outside, by key."""

    source: str
    key: str = ""
    changes: Mapping[str, str] = field(default_factory=dict)

    def below(self, name: str) -> "Place":
        """The place of a key inside this table."""
        return Place(self.source, f"{self.key}.{name}" if self.key else name, self.changes)

    def error(self, message: str, hint: str = "") -> SpecError:
        """An error that names the key, and the change or the file that it came from."""
        source = f"--set {self.changes[self.key]}" if self.key in self.changes else self.source
        return SpecError(f"{source}: {self.key or 'the specification'} {message}", hint=hint)


def parse_size(key: str, text: str) -> tuple[int, int]:
    """Height and width, as they stand under a key."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise SpecError(f"{key} is {text!r}; expected height x width", hint=f'write {key} = "32x32"')
    height, width = map(int, text.split("x"))
    return height, width


def decode(kind: Any, value: Any, place: Place) -> Any:
    """The value as this type, such as a frozen dataclass; errors name the key, the file and the nearest valid key."""
    if dataclasses.is_dataclass(kind) and kind not in (Patch, SparsePixels):
        return _table(kind, value, place)
    origin = get_origin(kind)
    if origin is Literal:
        return _choice(get_args(kind), value, place)
    if origin is tuple:
        return _sequence(get_args(kind), value, place)
    if origin in (Union, types.UnionType):
        return _union(get_args(kind), value, place)
    return _scalar(kind, value, place)


def _table(kind: Any, value: Any, place: Place) -> Any:
    table = _as_table(value, place)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    refuse_unknown(table, fields, place)
    hints = get_type_hints(kind)
    missing = [
        name
        for name, each in fields.items()
        if name not in table and each.default is each.default_factory is dataclasses.MISSING
    ]
    if missing:
        wanted = f"{missing[0]} = ..." if place.key else f"a section [{missing[0]}]"
        raise place.below(missing[0]).error("is missing", hint=f"add {wanted}")
    values = {name: decode(hints[name], table[name], place.below(name)) for name in table}
    try:
        return kind(**values)
    except PatchcertError as error:
        raise place.error(f"does not hold together: {error.message}", error.hint) from error


def _union(kinds: tuple[Any, ...], value: Any, place: Place) -> Any:
    rest = tuple(kind for kind in kinds if kind is not type(None))
    if set(rest) == {Patch, SparsePixels}:
        return _threat(value, place)
    if len(rest) == 1:
        return decode(rest[0], value, place)
    table = _as_table(value, place)
    tagged = {get_args(get_type_hints(kind)["kind"])[0]: kind for kind in rest}
    if "kind" not in table:
        raise place.below("kind").error("is missing", hint=f"choose one of {', '.join(tagged)}")
    return _table(tagged[_choice(tuple(tagged), table["kind"], place.below("kind"))], table, place)


def _threat(value: Any, place: Place) -> Patch | SparsePixels:
    table = _as_table(value, place)
    kind = _choice(tuple(THREAT_KEYS), table.get("kind", "patch"), place.below("kind"))
    refuse_unknown(table, THREAT_KEYS[kind], place)
    read = {"patch": Patch, "sparse": SparsePixels}[kind]
    try:
        return read.from_dict(table)
    except PatchcertError as error:
        raise place.error(f"is not a valid threat: {error.message}", error.hint) from error


def _choice(choices: tuple[Any, ...], value: Any, place: Place) -> Any:
    if value in choices and not isinstance(value, bool):
        return value
    listed = ", ".join(map(repr, choices))
    hint = did_you_mean(str(value), map(str, choices))
    raise place.error(f"is {value!r}; expected one of {listed}", hint)


def _sequence(kinds: tuple[Any, ...], value: Any, place: Place) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise place.error(f"is {value!r}; expected a list", hint=f"write [{value}]")
    return tuple(decode(kinds[0], item, place.below(str(index))) for index, item in enumerate(value))


def _scalar(kind: Any, value: Any, place: Place) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is kind:
        return value
    names = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}
    raise place.error(f"is {value!r}; expected {names[kind]}")


def _as_table(value: Any, place: Place) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise place.error(f"is {value!r}; expected a table", hint=f"write [{place.key}] and its keys below")
    return value


def refuse_unknown(table: Iterable[str], known: Iterable[str], place: Place) -> None:
    """Raise for the first key that is not known, with the nearest one that is."""
    names = list(known)
    for name in table:
        if name not in names:
            raise place.below(name).error("is not a known key", nearest(name, names))


def nearest(word: str, choices: Iterable[str], listed: str = "known") -> str:
    """A hint with the choice most like the word, or with all of them where none is."""
    names = list(choices)
    return did_you_mean(word, names) or f"{listed}: {', '.join(names)}"


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The tables of a TOML text; `source` names it in errors."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{source} is not valid TOML: {error}", hint="text values need quotes") from error


def parse_value(text: str) -> Any:
    """The text read as a TOML value where it is one, such as a number or a list; otherwise the text itself."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if set(parsed) == {"value"} else text


def to_table(value: Any) -> Any:
    """Tables, lists and scalars with the same content; None is left out, since TOML has no word for it."""
    if isinstance(value, Patch | SparsePixels):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        pairs = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
        return {name: to_table(item) for name, item in pairs if item is not None}
    if isinstance(value, tuple | list):
        return [to_table(item) for item in value]
    return value


def without_defaults(value: Any) -> Any:
    """The same table without values that are defaults, so that a new setting does not change old fingerprints."""
    if not dataclasses.is_dataclass(value) or isinstance(value, Patch | SparsePixels):
        return to_table(value)
    pairs = ((each, getattr(value, each.name)) for each in dataclasses.fields(value))
    return {
        each.name: without_defaults(item)
        for each, item in pairs
        if item != each.default or each.name == "kind"
    }


def to_toml(table: Mapping[str, Any]) -> str:
    """TOML text of nested tables: each table's own values first, then its tables under their headers."""
    return "\n".join(_lines(table, ())).lstrip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    if path and (len(inner) < len(table) or not table):
        yield f"\n[{'.'.join(path)}]"
    for key, value in table.items():
        if key not in inner:
            yield f"{key} = {_value(value)}"
    for key, value in inner.items():
        yield from _lines(value, (*path, key))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)
