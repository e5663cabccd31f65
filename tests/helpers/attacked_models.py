"""Models that tests attack."""

import torch
from torch import nn

from patchcert.testing.conformance import seeded


class PixelModel(nn.Module):
    """Says 1 where the mean over channels of one pixel exceeds a threshold."""

    def __init__(self, row: int, column: int, threshold: float = 0.9) -> None:
        super().__init__()
        self.row, self.column, self.threshold = row, column, threshold

    def forward(self, images):
        value = images[:, :, self.row, self.column].mean(dim=1)
        return torch.stack([torch.full_like(value, self.threshold), value], dim=1)


class Bright(nn.Module):
    """Says 1 where the first pixel exceeds one half."""

    def forward(self, images):
        value = images[:, 0, 0, 0]
        return torch.stack([0.5 - value, value - 0.5], dim=1)


def one_pixel(*values: float) -> torch.Tensor:
    """Grey images of one pixel each."""
    return torch.tensor(values).reshape(-1, 1, 1, 1)


def normal(model: nn.Module, scale: float, seed: int = 0) -> nn.Module:
    """The model in eval mode, with parameters from a normal distribution of this scale."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * scale)
    return model.eval()
