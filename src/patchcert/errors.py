"""Every error a user can cause. Each says what is wrong, where, what was expected, what came, and what to do."""

import difflib
from collections.abc import Iterable
from numbers import Integral


class PatchcertError(Exception):
    """The base of all errors that a user can cause and correct; `hint` says how."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}\nhint: {hint}" if hint else message)
        self.message = message
        self.hint = hint


class UnsupportedLayer(PatchcertError):
    """The model holds an operation for which no sound bound is known."""


class InvalidInput(PatchcertError, ValueError):
    """Images, labels or settings that do not fit together or are out of range."""


class InvalidThreat(PatchcertError, ValueError):
    """A threat that is empty, malformed or does not fit the images."""


class ModelError(PatchcertError):
    """A model that is unknown, in the wrong mode, or whose weights do not fit."""


class DataError(PatchcertError):
    """A data set that is missing, damaged or unknown."""


class SpecError(PatchcertError):
    """A specification file with an unknown key, a wrong type or a bad value."""


class RunError(PatchcertError):
    """A run folder that is missing, incomplete or belongs to something else."""


class StorageError(PatchcertError):
    """A file that cannot be written: the disk is full, or the folder is not the user's."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A hint with the choice most like the word, or an empty one where none is like it."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else ""


def at_least(least: int, name: str, value: float | None) -> None:
    """Refuse a setting that is given and not at least this; NaN is not."""
    if value is not None and not value >= least:
        raise InvalidInput(f"{name} is {value}; expected at least {least}")


def whole_number(least: int, name: str, value: object) -> None:
    """Refuse a setting that is given and no whole number, or not at least this."""
    if value is None:
        return
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:
        raise InvalidInput(f"{name} is {value!r}; expected a whole number of at least {least}")
