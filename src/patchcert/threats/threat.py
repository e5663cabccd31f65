"""The one noun that training, certificates and attacks share: the set of images an attacker may reach."""

from typing import Protocol, runtime_checkable

from torch import Generator, Tensor

Plain = str | int | float | bool | list["Plain"] | dict[str, "Plain"]


@runtime_checkable
class Threat(Protocol):
    """A set of images around each clean image; images are (n, c, h, w) with pixels in [0, 1]."""

    def contains(self, clean: Tensor, changed: Tensor) -> Tensor:
        """True (n,) where the changed image may be reached from the clean one."""
        ...

    def sample(self, images: Tensor, generator: Generator) -> Tensor:
        """One random member per image."""
        ...

    def project(self, clean: Tensor, changed: Tensor) -> Tensor:
        """The member nearest to each changed image in Euclidean distance."""
        ...

    def to_dict(self) -> dict[str, Plain]:
        """The threat in plain types, from which `threat_from_dict` builds an equal one."""
        ...
