"""What every threat asks of a clean and a changed image, whatever the shape of the change."""

import torch
from torch import Tensor

from patchcert.errors import InvalidInput


def check_images(images: Tensor) -> None:
    """Refuse what is no batch of images in floating point."""
    if images.ndim != 4 or not images.is_floating_point():
        raise InvalidInput(
            f"images must be floats of shape (n, c, h, w), got {images.dtype} of {tuple(images.shape)}",
            hint="convert to floats in [0, 1] and add the missing dimensions",
        )


def check_pair(clean: Tensor, changed: Tensor) -> None:
    """Refuse two batches that cannot be compared image by image."""
    check_images(clean)
    check_images(changed)
    if clean.shape != changed.shape:
        raise InvalidInput(
            "clean and changed images must have the same shape, "
            f"got {tuple(clean.shape)} and {tuple(changed.shape)}",
            hint="give one changed image for each clean one, in the same order",
        )


def is_valid(clean: Tensor, changed: Tensor) -> Tensor:
    """True (n,) where every changed value is a pixel value in [0, 1] and neither image holds a NaN."""
    fine = (changed >= 0) & (changed <= 1) & (clean == clean)
    return fine.flatten(1).all(dim=1)


def without_nan(clean: Tensor, changed: Tensor) -> Tensor:
    """The changed image with the clean value wherever it holds a NaN, which is near to no pixel value."""
    return torch.where(changed.isnan(), clean, changed)


def gains(clean: Tensor, changed: Tensor) -> Tensor:
    """The squared distance (float64) saved by keeping each changed value, clamped, not the clean one."""
    kept = changed.clamp(0, 1).double()
    clean, changed = clean.double(), changed.double()
    return torch.where(kept == clean, 0.0, (kept - clean) * (2 * changed - clean - kept))
