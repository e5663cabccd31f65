"""A certifier under test: its answers, checked for shape and brought to one device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from patchcert.errors import PatchcertError
from patchcert.testing.report import require
from patchcert.threats import Patch, SparsePixels


class CertificatesLike(Protocol):
    """What a certifier returns for n images."""

    @property
    def certified(self) -> Tensor:
        """True (n,) where the prediction is proven."""
        ...

    @property
    def margins(self) -> Tensor:
        """Lower bounds (n, classes) of logit[label] - logit[class]."""
        ...

    @property
    def worst_placement(self) -> Tensor:
        """Top and left (n, 2) of the weakest placement."""
        ...


Certify = Callable[[nn.Module, Tensor, Tensor, Patch | SparsePixels], CertificatesLike]


@dataclass(frozen=True)
class Outcome:
    """The answer to one call, on the CPU."""

    certified: Tensor
    margins: Tensor
    worst_placement: Tensor


@dataclass(frozen=True)
class CertifierUnderTest:
    """A certifier and what may be asked of it.

    `variants` are the same certifier with other settings, such as a smaller memory budget, and must agree
    with it. `bounds_margins` says that margins are lower bounds of logit differences and that the worst
    placement is theirs. `refusals` are the errors by which it declines a model, which is always sound.
    """

    certify: Certify
    variants: tuple[Certify, ...] = ()
    bounds_margins: bool = True
    sparse: bool = False
    refusals: tuple[type[Exception], ...] = (PatchcertError, NotImplementedError)
    device: str = "cpu"

    def outcome(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Sequence[int] | Tensor,
        threat: Patch | SparsePixels,
        variant: Certify | None = None,
    ) -> Outcome:
        """What the certifier says, after a look at shapes and types."""
        labels = torch.as_tensor(labels)
        model, images = model.to(self.device), images.to(self.device)
        found = (variant or self.certify)(model, images, labels.to(self.device), threat)
        model.cpu()
        certified = torch.as_tensor(found.certified).cpu()
        require(
            certified.dtype == torch.bool and certified.shape == labels.shape,
            f"certified must be bool of shape {tuple(labels.shape)}, "
            f"got {certified.dtype} of {tuple(certified.shape)}",
        )
        return Outcome(certified, found.margins.detach().cpu(), found.worst_placement.cpu())

    def verdicts(
        self, model: nn.Module, images: Tensor, labels: Sequence[int] | Tensor, threat: Patch | SparsePixels
    ) -> Tensor:
        """True (n,) where the certifier says certified; a model that it refuses is not certified."""
        try:
            return self.outcome(model, images, labels, threat).certified
        except self.refusals:
            model.cpu()
            return torch.zeros(len(images), dtype=torch.bool)

    def refuses(
        self, model: nn.Module, images: Tensor, labels: Sequence[int], threat: Patch | SparsePixels
    ) -> bool:
        """Whether the certifier declines with an error."""
        try:
            self.outcome(model, images, labels, threat)
        except Exception:  # any error is better than a verdict here
            return True
        return False
