"""What is measured: networks of the paper on their images, against square patches."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from patchcert.models import ModelSpec, build
from patchcert.threats import Patch


@dataclass(frozen=True, slots=True)
class Case:
    """One network, image size and patch; weights and images are random, which does not change the work."""

    model: str
    data: str
    patch: int
    channels: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.data} {self.patch}x{self.patch}"

    @property
    def threat(self) -> Patch:
        return Patch(self.patch)

    def build(self, device: torch.device) -> nn.Module:
        """The network with fresh weights."""
        mean, std = (0.5,) * self.channels, (0.2,) * self.channels
        spec = ModelSpec(self.model, self.channels, self.size, self.size, mean=mean, std=std)
        return build(spec, Generator().manual_seed(0)).to(device)

    def images(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random images and labels."""
        generator = Generator().manual_seed(1)
        images = torch.rand(count, self.channels, self.size, self.size, generator=generator)
        return images.to(device), torch.randint(10, (count,), generator=generator).to(device)


CASES = (
    Case("mlp", "mnist", 5, 1, 28),
    Case("cnn2", "mnist", 5, 1, 28),
    Case("cnn4", "cifar10", 5, 3, 32),
    Case("cnn5w", "cifar10", 5, 3, 32),
)

DATA_SETS = ("mnist", "cifar10")
"""The data of cases that have real images."""

SIZES = tuple(Case("cnn4", f"{size}px", 5, 3, size) for size in (32, 64, 96))
"""The same network on larger images, for how the cost grows."""
