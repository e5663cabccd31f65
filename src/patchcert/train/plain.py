"""Frozen dataclasses as plain tables, and plain tables as TOML text that reads back to the same values."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from patchcert.threats import Patch, SparsePixels


def to_plain(value: Any) -> Any:  # noqa: ANN401 - mirrors whatever the dataclass holds
    """Tables, lists and scalars with the same content, without what is None: TOML has no word for it."""
    if isinstance(value, Patch | SparsePixels):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        pairs = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
        return {name: to_plain(item) for name, item in pairs if item is not None}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


def decisive(value: Any) -> Any:  # noqa: ANN401
    """The plain tables without default values, so that a new setting does not change old fingerprints."""
    if not dataclasses.is_dataclass(value) or isinstance(value, Patch | SparsePixels):
        return to_plain(value)
    pairs = ((each, getattr(value, each.name)) for each in dataclasses.fields(value))
    return {each.name: decisive(item) for each, item in pairs if item != each.default or each.name == "kind"}


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


def _value(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)
