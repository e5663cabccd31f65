"""Specifications from files and presets, with changes from the command line decoded just as strictly."""

import tomllib
from collections.abc import Iterable
from copy import deepcopy
from importlib import resources
from pathlib import Path
from typing import Any

from patchcert.errors import SpecError
from patchcert.train.decode import Place, decode, nearest
from patchcert.train.plain import to_plain, to_toml
from patchcert.train.spec import Spec


def preset_names() -> tuple[str, ...]:
    """The specifications that come with the package."""
    folder = resources.files("patchcert.train") / "presets"
    return tuple(
        sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    )


def read_spec(source: str | Path, changes: Iterable[str] = ()) -> Spec:
    """The specification in a TOML file or preset, after changes such as 'strategy.kind=random'."""
    table = _load(source)
    made = {}
    for change in changes:
        key, value = _split(change)
        made[key] = change
        _change(table, key.split("."), value, change)
    return decode(Spec, table, Place(str(source), changes=made))


def write_spec(spec: Spec) -> str:
    """The whole specification, defaults included, as TOML text that reads back to an equal one."""
    return to_toml(to_plain(spec))


def _load(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    if path.is_file():
        return _parse(_text(path), str(path))
    if str(source) in preset_names():
        preset = resources.files("patchcert.train") / "presets" / f"{source}.toml"
        return _parse(preset.read_text(encoding="utf-8"), str(source))
    presets = preset_names()
    message = f"{source} is neither a file nor a preset, nor a folder with a run"
    raise SpecError(message, hint=nearest(str(source), presets, "presets are"))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path} is no text, so no specification", hint="give a SPEC.toml, a preset or a run folder"
        ) from error


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{source} is not valid TOML: {error}", hint="text values need quotes") from error


def _split(change: str) -> tuple[str, Any]:
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise SpecError(f"--set {change} is not of the form key=value", hint="write --set model.name=cnn2")
    return key.strip(), _plain_value(text.strip())


def _plain_value(text: str) -> Any:  # noqa: ANN401 - any TOML value
    """The text read as a TOML value where it is one, such as a number or a list; else as bare text."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if set(parsed) == {"value"} else text


def _change(table: dict[str, Any], path: list[str], value: Any, change: str) -> None:  # noqa: ANN401
    """Set one value; a new `kind` starts its table afresh, since the other keys belonged to the old kind."""
    *parents, name = path
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise SpecError(f"--set {change}: {parent} is no table, so it has no key {name!r}")
    if name == "kind" and table.get("kind") != value:
        table.clear()
    table[name] = deepcopy(value)
