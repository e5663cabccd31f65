"""Models of one's own on the command line: modules that are imported, and functions in them that make a model."""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from patchcert.errors import InvalidInput, ModelError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

_FACTORY = re.compile(r"(?P<module>[\w.]+|.*\.py):(?P<name>\w+)")


def names_a_factory(target: str) -> bool:
    """Whether the target has the form MODULE:FACTORY or FILE.py:FACTORY."""
    return _FACTORY.fullmatch(target) is not None


def make_model(target: str) -> "nn.Module":
    """The model that MODULE:FACTORY, called without arguments, returns, in eval mode; or the model of that name.

    DataParallel and torch.compile are taken off, so that weights fit whether they were saved with or without them.
    """
    from torch import nn

    from patchcert.bounds.network import unwrapped

    match = _FACTORY.fullmatch(target)
    assert match is not None
    factory = _find(import_own(match["module"], target), match["name"], target)
    try:
        model = factory if isinstance(factory, nn.Module) else factory()
    except Exception as error:
        raise ModelError(
            f"{target} raised {type(error).__name__}: {error}",
            hint=f"mend {match['name']}, which is called without arguments.",
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{target} returned {type(model).__name__}; expected a torch.nn.Module",
            hint=f"let {match['name']} return the model.",
        )
    return unwrapped(model).eval()


def import_own(module: str, given_as: str) -> ModuleType:
    """As `python -m` would find it: in the working folder, then among what is installed; or the file of a path."""
    try:
        return _import_file(Path(module)) if module.endswith(".py") else _import_name(module)
    except ImportError as error:
        raise InvalidInput(
            f"{given_as}: {error}", hint="name a module like my_models, in this folder or installed."
        ) from error
    except Exception as error:
        where = f"python {module}" if module.endswith(".py") else f"python -c 'import {module}'"
        raise InvalidInput(
            f"{given_as}: the module raised {type(error).__name__}: {error}",
            hint=f"mend the module: `{where}` shows where it fails.",
        ) from error


def _import_name(module: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(module)


def _import_file(path: Path) -> ModuleType:
    """Modules beside the file can be imported by it, as when it is run."""
    if not path.is_file():
        raise ImportError(f"there is no {path}")
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _find(module: ModuleType, name: str, target: str) -> Callable[[], Any]:
    factory = getattr(module, name, None)
    if factory is None:
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InvalidInput(
            f"{target}: there is no {name} in {module.__file__}",
            hint=f"{did_you_mean(name, own)} Name a function without arguments that returns the model.".strip(),
        )
    if not _takes_nothing(factory):
        raise InvalidInput(
            f"{target} ({type(factory).__name__}) cannot be called without arguments",
            hint=f"write a function that returns the model: def make(): return {name}(...).",
        )
    return factory


def _takes_nothing(factory: Callable[..., Any]) -> bool:
    """Also true of a module, whose call takes whatever its forward method takes."""
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError):
        return False
    return True
