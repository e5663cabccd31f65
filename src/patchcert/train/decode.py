"""From the plain values of a TOML file to frozen dataclasses: nothing is guessed, nothing skipped."""

import dataclasses
import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from patchcert.errors import PatchcertError, SpecError
from patchcert.threats import Patch, SparsePixels, threat_from_dict

T = TypeVar("T")
Plain = object
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


def decode(kind: type[T], value: Plain, place: Place) -> T:
    """The value as a frozen dataclass; errors name the key, the file and the nearest valid key."""
    return _decode(kind, value, place)


def _decode(kind: Any, value: Any, place: Place) -> Any:  # noqa: ANN401 - the kind is only known at run time
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


def _table(kind: Any, value: Any, place: Place) -> Any:  # noqa: ANN401
    table = _as_table(value, place)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    refuse_unknown(table, fields, place)
    hints = get_type_hints(kind)
    missing = [name for name, field in fields.items() if name not in table and _is_required(field)]
    if missing:
        wanted = f"{missing[0]} = ..." if place.key else f"a section [{missing[0]}]"
        raise place.below(missing[0]).error("is missing", hint=f"add {wanted}")
    values = {name: _decode(hints[name], table[name], place.below(name)) for name in table}
    return _checked(kind, values, place)


def _checked(kind: Any, values: dict[str, Any], place: Place) -> Any:  # noqa: ANN401
    try:
        return kind(**values)
    except PatchcertError as error:
        raise place.error(f"does not hold together: {error.message}", error.hint) from error


def _union(kinds: tuple[Any, ...], value: Any, place: Place) -> Any:  # noqa: ANN401
    rest = tuple(kind for kind in kinds if kind is not type(None))
    if set(rest) == {Patch, SparsePixels}:
        return _threat(value, place)
    if len(rest) == 1:
        return _decode(rest[0], value, place)
    table = _as_table(value, place)
    tagged = {get_args(get_type_hints(kind)["kind"])[0]: kind for kind in rest}
    if "kind" not in table:
        raise place.below("kind").error("is missing", hint=f"choose one of {', '.join(tagged)}")
    return _table(tagged[_choice(tuple(tagged), table["kind"], place.below("kind"))], table, place)


def _threat(value: Any, place: Place) -> Patch | SparsePixels:  # noqa: ANN401
    table = _as_table(value, place)
    kind = _choice(tuple(THREAT_KEYS), table.get("kind", "patch"), place.below("kind"))
    refuse_unknown(table, THREAT_KEYS[kind], place)
    try:
        return threat_from_dict({"kind": kind, **table})
    except PatchcertError as error:
        raise place.error(f"is no threat: {error.message}", error.hint) from error


def _choice(choices: tuple[Any, ...], value: Any, place: Place) -> Any:  # noqa: ANN401
    if value in choices and not isinstance(value, bool):
        return value
    listed = ", ".join(map(repr, choices))
    close = difflib.get_close_matches(str(value), map(str, choices), n=1)
    raise place.error(f"is {value!r}; expected one of {listed}", f"did you mean {close[0]}?" if close else "")


def _sequence(kinds: tuple[Any, ...], value: Any, place: Place) -> tuple[Any, ...]:  # noqa: ANN401
    if not isinstance(value, list | tuple):
        raise place.error(f"is {value!r}; expected a list", hint=f"write [{value}]")
    return tuple(_decode(kinds[0], item, place.below(str(index))) for index, item in enumerate(value))


def _scalar(kind: Any, value: Any, place: Place) -> Any:  # noqa: ANN401
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is kind:
        return value
    names = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}
    raise place.error(f"is {value!r}; expected {names[kind]}")


def _as_table(value: Any, place: Place) -> Mapping[str, Any]:  # noqa: ANN401
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
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]}?" if close else f"{listed}: {', '.join(names)}"


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
