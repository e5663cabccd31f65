"""The small U-net that guesses the margins a classifier keeps under a patch, for every placement."""

from functools import lru_cache
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from patchcert.tensors import Images
from patchcert.windows.passes import is_fused

_MOST_CHANNELS = 64
_MOST_NUMBERS = 2**31
"""The kernels count in 32 bits."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut, which is projected where the stride or the width changes."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            SmallConv2d(channels, width, 3, stride, 1, bias=False),
            _normalisation(width),
            nn.ReLU(),
            SmallConv2d(width, width, 3, 1, 1, bias=False),
            _normalisation(width),
        )
        projects = stride != 1 or channels != width
        self.shortcut = (
            nn.Sequential(SmallConv2d(channels, width, 1, stride, bias=False), _normalisation(width))
            if projects
            else nn.Identity()
        )

    def forward(self, features: Annotated[Tensor, "n _ _ _"]) -> Annotated[Tensor, "n _ _ _"]:
        """Features of the block's width, at the block's stride."""
        return F.relu(self.residual(features) + self.shortcut(features))


class MarginUNet(nn.Module):
    """Maps images in [0, 1] to a guess (n, classes, H, W) of each class's margin at each top-left corner.

    A patch of h x w pixels fits only at the first H-h+1 rows and W-w+1 columns of corners; the rest means
    nothing. As it only guesses where to look, its convolutions on CUDA are in TF32 even where the bounds of the
    same step are in float32.
    """

    def __init__(self, channels: int, classes: int, width: int, normalise: nn.Module | None = None) -> None:
        super().__init__()
        self.normalise = normalise or nn.Identity()
        self.stem = nn.Sequential(SmallConv2d(channels, width, 7, 2, 3), _normalisation(width), nn.ReLU())
        self.down = nn.ModuleList(
            [
                nn.Sequential(nn.MaxPool2d(3, 2, 1), BasicBlock(width, width), BasicBlock(width, width)),
                nn.Sequential(BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 2 * width)),
                nn.Sequential(BasicBlock(2 * width, 4 * width, 2), BasicBlock(4 * width, 4 * width)),
            ]
        )
        self.full = nn.Sequential(_convolution(channels, width), _convolution(width, width))
        self.laterals = nn.ModuleList(
            _convolution(size, size, 1) for size in (width, width, 2 * width, 4 * width)
        )
        self.up = nn.ModuleList(
            [
                _convolution(6 * width, 4 * width),
                _convolution(5 * width, 2 * width),
                _convolution(3 * width, width),
                _convolution(2 * width, width),
            ]
        )
        self.head = SmallConv2d(width, classes, 1)

    def forward(self, images: Images) -> Annotated[Tensor, "n k h w"]:
        """The guessed margins; each up-sampled map is joined with the encoder's map of that size."""
        normal = self.normalise(images)
        maps = [self.stem(normal)]
        for stage in self.down:
            maps.append(stage(maps[-1]))
        sides = [lateral(features) for lateral, features in zip(self.laterals, maps, strict=True)]
        features = sides.pop()
        for convolution, side in zip(self.up, [*reversed(sides), self.full(normal)], strict=True):
            larger = enlarged(features, side.shape[2], side.shape[3])
            features = convolution(torch.cat([larger, side], dim=1))
        return self.head(features)


def enlarged(maps: Annotated[Tensor, "n c _ _"], height: int, width: int) -> Annotated[Tensor, "n c _ _"]:
    """Bilinear interpolation with aligned corners, as two products: on small maps many times faster than
    `F.interpolate`, which goes through all maps of a batch one after the other."""
    rows = _hats(maps.shape[2], height, maps.device, maps.dtype)
    columns = _hats(maps.shape[3], width, maps.device, maps.dtype)
    return rows @ (maps @ columns.T)


@lru_cache(maxsize=64)
def _hats(size: int, larger: int, device: torch.device, dtype: torch.dtype) -> Annotated[Tensor, "_ _"]:
    """The matrix (larger, size) of linear interpolation whose first and last points are the ends."""
    step = (size - 1) / (larger - 1) if larger > 1 else 0.0
    places = torch.arange(larger, device=device, dtype=dtype) * step
    points = torch.arange(size, device=device, dtype=dtype)
    return (1 - (places[:, None] - points).abs()).clamp(min=0)


def build_unet(
    channels: int, classes: int, width: int, generator: Generator, normalise: nn.Module | None = None
) -> MarginUNet:
    """A U-net whose weights depend on the generator alone (PyTorch's default initialisation)."""
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MarginUNet(channels, classes, width, normalise)


def _normalisation(width: int) -> nn.BatchNorm2d:
    """By the batch alone: the U-net only ever guesses about the batch it learns from."""
    return nn.BatchNorm2d(width, track_running_stats=False)


def _convolution(channels: int, width: int, kernel: int = 3) -> nn.Sequential:
    return nn.Sequential(SmallConv2d(channels, width, kernel, padding=kernel // 2), nn.ReLU())


class SmallConv2d(nn.Conv2d):
    """A convolution of few channels, for which libraries are slow: on CUDA it has kernels of its own.

    They compute in TF32 whatever the process allows, so the layer is for guesses and never for bounds.
    """

    def __init__(
        self, channels: int, width: int, kernel: int, stride: int = 1, padding: int = 0, bias: bool = True
    ) -> None:
        super().__init__(channels, width, kernel, stride, padding, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Conv2d`, which also takes over where the kernels do not apply."""
        if not self._is_small(input):
            return super().forward(input)
        from patchcert.train.unet_kernels import small_convolution

        return small_convolution(input, self.weight, self.bias, self.stride[0], int(self.padding[0]))

    def _is_small(self, images: Images) -> bool:
        channels = max(self.in_channels, self.out_channels)
        numbers = images.shape[0] * images.shape[2] * images.shape[3] * channels
        is_few = channels <= _MOST_CHANNELS and numbers < _MOST_NUMBERS
        return is_few and is_fused(images) and is_fused(self.weight)
