"""Proofs that no adversarial patch changes what an image classifier says. Public names load on first use."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchcert import zoo
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
    "placement_margins",
    "resized_patch",
    "shapes",
    "worst_case_margins",
    "zoo",
]

_HOMES = {
    "BandVotes": "patchcert.certificates.band_votes",
    "BlockVotes": "patchcert.certificates.band_votes",
    "Certificates": "patchcert.certificates",
    "Classifier": "patchcert.certificates",
    "DoubleMasking": "patchcert.certificates.masking",
    "Interval": "patchcert.bounds",
    "IntervalBounds": "patchcert.certificates",
    "LocalVotes": "patchcert.certificates.local_votes",
    "MaskSet": "patchcert.threats.masks",
    "MaskedDetection": "patchcert.certificates.masking",
    "ModelSpec": "patchcert.models",
    "Normalize": "patchcert.models",
    "Patch": "patchcert.threats",
    "PatchAttack": "patchcert.attacks",
    "PatchcertError": "patchcert.errors",
    "Patches": "patchcert.threats",
    "RandomAblation": "patchcert.certificates.ablation",
    "SparseAttack": "patchcert.attacks",
    "SparsePixels": "patchcert.threats",
    "certify": "patchcert.certificates",
    "certify_loader": "patchcert.certificates",
    "load": "patchcert.zoo",
    "load_dataset": "patchcert.data",
    "masks_covering": "patchcert.threats.masks",
    "placement_margins": "patchcert.certificates",
    "resized_patch": "patchcert.threats.resizing",
    "shapes": "patchcert.threats",
    "worst_case_margins": "patchcert.train.margins",
    "zoo": "patchcert.zoo",
}


def __getattr__(name: str) -> object:
    """Import the home of a public name when it is first asked for, so that `import patchcert` is cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'patchcert' has no attribute {name!r}; it has: {', '.join(__all__)}")
    home = importlib.import_module(_HOMES[name])
    value = home if home.__name__ == f"patchcert.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
