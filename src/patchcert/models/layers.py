"""Layers that PyTorch does not bring."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from patchcert.bounds import layer_rule
from patchcert.bounds.operations import ChannelScale, Operation
from patchcert.errors import ModelError


class Normalize(nn.Module):
    """(image - mean) / std per channel, as a layer: threats then stay in raw pixels of [0, 1]."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or len(mean) == 0:
            raise ModelError(
                f"Normalize needs one mean and one std per channel, got {len(mean)} and {len(std)} values"
            )
        if not all(value > 0 for value in std):
            raise ModelError(f"Normalize needs positive standard deviations, got {tuple(std)}")
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.get_default_dtype())[:, None, None])
        self.register_buffer("std", torch.tensor(std, dtype=torch.get_default_dtype())[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """The images with every channel centred and scaled."""
        return (images - self.mean) / self.std

    def extra_repr(self) -> str:
        """Shows the values in `print(model)`."""
        return f"mean={_rounded(self.mean)}, std={_rounded(self.std)}"


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.flatten().tolist()]


@layer_rule(Normalize)
def _normalize(layer: Normalize) -> Operation:
    return ChannelScale(lambda: layer.mean.flatten(), lambda: layer.std.flatten(), None, None)
