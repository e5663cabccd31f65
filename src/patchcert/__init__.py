"""Proofs that no adversarial patch changes what an image classifier says. Public names load on first use."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchcert import models, zoo
    from patchcert.attacks import PatchAttack, SparseAttack
    from patchcert.bounds import Interval
    from patchcert.certificates import (
        Certificates,
        Classifier,
        IntervalBounds,
        certify,
        certify_loader,
        placement_margins,
    )
    from patchcert.certificates.ablation import RandomAblation
    from patchcert.certificates.band_votes import BandVotes, BlockVotes
    from patchcert.certificates.local_votes import LocalVotes
    from patchcert.certificates.masking import DoubleMasking, MaskedDetection
    from patchcert.data import load_dataset
    from patchcert.errors import PatchcertError
    from patchcert.models import ModelSpec, Normalize
    from patchcert.threats import Patch, Patches, SparsePixels, shapes
    from patchcert.threats.masks import MaskSet, masks_covering
    from patchcert.threats.resizing import resized_patch
    from patchcert.train.margins import worst_case_margins
    from patchcert.zoo import load

__version__ = "0.1.0"

__all__ = [
    "BandVotes",
    "BlockVotes",
    "Certificates",
    "Classifier",
    "DoubleMasking",
    "Interval",
    "IntervalBounds",
    "LocalVotes",
    "MaskSet",
    "MaskedDetection",
    "ModelSpec",
    "Normalize",
    "Patch",
    "PatchAttack",
    "PatchcertError",
    "Patches",
    "RandomAblation",
    "SparseAttack",
    "SparsePixels",
    "certify",
    "certify_loader",
    "load",
    "load_dataset",
    "masks_covering",
    "models",
    "placement_margins",
    "resized_patch",
    "shapes",
    "worst_case_margins",
    "zoo",
]

_HOMES = {
    "patchcert.attacks": ("PatchAttack", "SparseAttack"),
    "patchcert.bounds": ("Interval",),
    "patchcert.certificates": (
        "Certificates",
        "Classifier",
        "IntervalBounds",
        "certify",
        "certify_loader",
        "placement_margins",
    ),
    "patchcert.certificates.ablation": ("RandomAblation",),
    "patchcert.certificates.band_votes": ("BandVotes", "BlockVotes"),
    "patchcert.certificates.local_votes": ("LocalVotes",),
    "patchcert.certificates.masking": ("DoubleMasking", "MaskedDetection"),
    "patchcert.data": ("load_dataset",),
    "patchcert.errors": ("PatchcertError",),
    "patchcert.models": ("ModelSpec", "Normalize", "models"),
    "patchcert.threats": ("Patch", "Patches", "SparsePixels", "shapes"),
    "patchcert.threats.masks": ("MaskSet", "masks_covering"),
    "patchcert.threats.resizing": ("resized_patch",),
    "patchcert.train.margins": ("worst_case_margins",),
    "patchcert.zoo": ("load", "zoo"),
}


def __getattr__(name: str) -> object:
    """Import the home of a public name when it is first asked for, so that `import patchcert` is cheap."""
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'patchcert' has no attribute {name!r}; it has: {', '.join(__all__)}")
    module = importlib.import_module(home)
    value = module if home == f"patchcert.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
