"""The one noun that training, certificates and attacks share: the set of images an attacker may reach.

Below it stands what every kind of threat needs: checks of a clean and a changed image, and of the values given to it.
"""

import operator
from typing import Annotated, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Generator, Tensor

from patchcert.errors import InvalidInput, InvalidThreat
from patchcert.tensors import Images, PerImage

Plain = str | int | float | bool | list["Plain"] | dict[str, "Plain"]


@runtime_checkable
class Threat(Protocol):
    """A set of images around each clean image; pixels lie in [0, 1]."""

    def contains(self, clean: Images, changed: Images) -> PerImage:
        """True where the changed image may be reached from the clean one."""
        ...

    def sample(self, images: Images, generator: Generator) -> Images:
        """One random member per image."""
        ...

    def project(self, clean: Images, changed: Images) -> Images:
        """The member nearest to each changed image in Euclidean distance."""
        ...

    def to_dict(self) -> dict[str, Plain]:
        """The threat in plain types, from which `threat_from_dict` builds an equal one."""
        ...


def check_images(images: Images) -> None:
    """Refuse what is not a batch of images in floating point."""
    if images.ndim != 4 or not images.is_floating_point():
        raise InvalidInput(
            f"images must be floats of shape (n, c, h, w), got {images.dtype} of {tuple(images.shape)}",
            hint="convert to floats in [0, 1] and add the missing dimensions",
        )


def check_pair(clean: Images, changed: Images) -> None:
    """Refuse two batches that cannot be compared image by image."""
    check_images(clean)
    check_images(changed)
    if clean.shape != changed.shape:
        raise InvalidInput(
            "clean and changed images must have the same shape, "
            f"got {tuple(clean.shape)} and {tuple(changed.shape)}",
            hint="give one changed image for each clean one, in the same order",
        )


def differences(clean: Images, changed: Images) -> Images:
    """True where values are not the same, nor zeros of the same sign, which a model can tell apart."""
    return (clean != changed) | (clean.signbit() != changed.signbit())


def is_valid(clean: Images, changed: Images) -> PerImage:
    """True where every changed value is a pixel value in [0, 1] and neither image holds a NaN."""
    fine = (changed >= 0) & (changed <= 1) & (clean == clean)
    return fine.flatten(1).all(dim=1)


def random_filling(images: Images, generator: Generator) -> Images:
    """For each image new values, either uniform noise or zeros and ones."""
    drawn = torch.rand(images.shape, generator=generator, device=generator.device, dtype=images.dtype)
    extreme = torch.rand(len(images), 1, 1, 1, generator=generator, device=generator.device) < 0.5
    return torch.where(extreme, drawn.round(), drawn).to(images.device)


def without_nan(clean: Images, changed: Images) -> Images:
    """The changed image with the clean value wherever it holds a NaN, which is near no pixel value."""
    return torch.where(changed.isnan(), clean, changed)


def gains(clean: Images, changed: Images) -> Images:
    """The squared distance, in float64, saved by keeping each changed value, clamped, instead of the clean one."""
    kept = changed.clamp(0, 1).double()
    clean, changed = clean.double(), changed.double()
    return torch.where(kept == clean, 0.0, (kept - clean) * (2 * changed - clean - kept))


def check_values(value: object, what: str) -> None:
    """Raises where the value is a tensor that has a shape alone."""
    if isinstance(value, Tensor) and value.is_meta:
        raise InvalidThreat(
            f"{what} is on the device 'meta', where it has no values", hint="make it on the CPU"
        )


def as_boolean(value: object, what: str) -> Annotated[Tensor, "_ _"] | None:
    """The value as a two-dimensional boolean tensor, or None if it holds anything but truth values."""
    if not isinstance(value, Tensor | np.ndarray | list | tuple):
        return None
    check_values(value, what)
    try:
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    except ValueError as error:
        raise InvalidThreat(f"{what} has rows of unequal length: {describe_value(value)}") from error
    return torch.tensor(array.copy(), device="cpu") if array.dtype == np.bool_ and array.ndim == 2 else None


def as_whole(value: object) -> int | None:
    """The value as an int, or None if it is a truth value or no whole number."""
    if isinstance(value, bool | np.bool_ | str):
        return None
    if isinstance(value, Tensor | np.ndarray) and value.ndim:
        return None
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def as_pair(value: object) -> tuple[int, int] | None:
    """The value as two ints, or None if it is no list or tuple of two whole numbers."""
    whole = [as_whole(each) for each in value] if isinstance(value, list | tuple) else []
    if len(whole) != 2 or whole[0] is None or whole[1] is None:
        return None
    return whole[0], whole[1]


def describe_value(value: object) -> str:
    """Enough of a rejected value to recognise it."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} of {value.dtype} with shape {tuple(value.shape)}"
    return repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
