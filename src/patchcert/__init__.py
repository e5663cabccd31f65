"""Proofs that no adversarial patch changes what an image classifier says. Public names load on first use."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchcert.attacks import PatchAttack, SparseAttack
    from patchcert.bounds import Interval
    from patchcert.certify import Certificates, Certifier, IntervalCertifier, certify, placement_margins
    from patchcert.data import load_dataset
    from patchcert.errors import PatchcertError
    from patchcert.models import ModelSpec, Normalize
    from patchcert.threats import Patch, SparsePixels, shapes

__version__ = "0.1.0"

__all__ = [
    "Certificates",
    "Certifier",
    "Interval",
    "IntervalCertifier",
    "ModelSpec",
    "Normalize",
    "Patch",
    "PatchAttack",
    "PatchcertError",
    "SparseAttack",
    "SparsePixels",
    "certify",
    "load_dataset",
    "placement_margins",
    "shapes",
]

_HOMES = {
    "Certificates": "patchcert.certify",
    "Certifier": "patchcert.certify",
    "Interval": "patchcert.bounds",
    "IntervalCertifier": "patchcert.certify",
    "ModelSpec": "patchcert.models",
    "Normalize": "patchcert.models",
    "Patch": "patchcert.threats",
    "PatchAttack": "patchcert.attacks",
    "PatchcertError": "patchcert.errors",
    "SparseAttack": "patchcert.attacks",
    "SparsePixels": "patchcert.threats",
    "certify": "patchcert.certify",
    "load_dataset": "patchcert.data",
    "placement_margins": "patchcert.certify",
    "shapes": "patchcert.threats",
}


def __getattr__(name: str) -> object:
    """Import the home of a public name when it is first asked for, so that `import patchcert` is cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'patchcert' has no attribute {name!r}; it has: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `patchcert.certify` the function: importing the module of that name would otherwise hide it."""

    def __setattr__(self, name: str, value: object) -> None:
        is_submodule = isinstance(value, ModuleType) and value.__name__ == f"patchcert.{name}"
        if not (is_submodule and name in _HOMES):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
