"""Random changes of training images as tensor operations, on the images' device and from a generator."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from patchcert.errors import InvalidInput


def random_flip(images: Tensor, generator: Generator) -> Tensor:
    """Each image (n, c, h, w) mirrored left to right with probability one half."""
    flipped = torch.rand(len(images), generator=generator, device=images.device) < 0.5
    return torch.where(flipped[:, None, None, None], images.flip(-1), images)


def random_crop(images: Tensor, padding: int, generator: Generator) -> Tensor:
    """Each image (n, c, h, w) shifted by up to `padding` pixels either way; what comes in is zero."""
    if padding < 0:
        raise InvalidInput(f"random_crop needs a padding of at least 0, got {padding}")
    count, channels, height, width = images.shape
    padded = F.pad(images, (padding, padding, padding, padding))
    corners = torch.randint(2 * padding + 1, (2, count), generator=generator, device=images.device)
    rows = corners[0][:, None] + torch.arange(height, device=images.device)
    columns = corners[1][:, None] + torch.arange(width, device=images.device)
    image = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
