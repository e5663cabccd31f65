"""How training images are varied: each draw comes from a generator, and shapes never depend on data."""

import math

import torch
import torch.nn.functional as F
from torch import Generator

from patchcert.errors import InvalidInput
from patchcert.tensors import Images


def random_flip(images: Images, generator: Generator) -> Images:
    """Each image mirrored left to right with probability one half."""
    flipped = torch.rand(len(images), generator=generator, device=images.device) < 0.5
    return torch.where(flipped[:, None, None, None], images.flip(-1), images)


def random_crop(images: Images, padding: int, generator: Generator) -> Images:
    """Each image shifted by up to `padding` pixels either way, with zeros where nothing was."""
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


def random_colours(images: Images, strength: float, generator: Generator) -> Images:
    """Brightness, contrast and saturation of each image times factors from 1 - strength to 1 + strength, in [0, 1]."""
    luck = torch.rand(3, len(images), 1, 1, 1, generator=generator, device=images.device)
    brightness, contrast, saturation = 1 + strength * (2 * luck - 1)
    brighter = images * brightness
    mean = brighter.mean(dim=(1, 2, 3), keepdim=True)
    stronger = torch.lerp(mean, brighter, contrast)
    grey = stronger.mean(dim=1, keepdim=True)
    return torch.lerp(grey, stronger, saturation).clamp(0, 1)


def random_turns(images: Images, degrees: float, stretch: float, generator: Generator) -> Images:
    """Each image, with probability one half, turned by up to `degrees` and each axis stretched by up to `stretch`,
    either way. Pixels are interpolated, and zero where nothing was.
    """
    count, _, height, width = images.shape
    luck = 2 * torch.rand(3, count, generator=generator, device=images.device) - 1
    is_turned = torch.rand(count, generator=generator, device=images.device) < 0.5
    angle = luck[0] * math.radians(degrees) * is_turned
    tall, wide = 1 + luck[1:] * stretch * is_turned
    sine, cosine = angle.sin(), angle.cos()
    # grid_sample asks where in [-1, 1] each pixel comes from; x is the first coordinate.
    rows = [
        torch.stack([cosine / wide, -sine * height / width / wide, torch.zeros_like(angle)], dim=1),
        torch.stack([sine * width / height / tall, cosine / tall, torch.zeros_like(angle)], dim=1),
    ]
    grid = F.affine_grid(torch.stack(rows, dim=1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


_KNOTS = 5
"""Places along each side that `random_warps` moves; those between follow."""


def random_warps(images: Images, pixels: float, generator: Generator) -> Images:
    """Each image, with probability one half, pulled about: knots of a coarse lattice move by up to `pixels` either way,
    and what lies between them follows. Pixels are interpolated, and zero where nothing was.
    """
    count, _, height, width = images.shape
    luck = 2 * torch.rand(count, 2, _KNOTS, _KNOTS, generator=generator, device=images.device) - 1
    is_warped = torch.rand(count, generator=generator, device=images.device) < 0.5
    across, down = F.interpolate(luck, (height, width), mode="bilinear", align_corners=True).unbind(dim=1)
    # grid_sample asks where in [-1, 1] each pixel comes from: `width` pixels across and `height` down lie between.
    moved = torch.stack([across * (2 * pixels / width), down * (2 * pixels / height)], dim=3)
    still = torch.eye(2, 3, device=images.device).expand(count, -1, -1)
    grid = F.affine_grid(still, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid + moved * is_warped[:, None, None, None], align_corners=False)
