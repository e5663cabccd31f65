"""Local Gradient Smoothing (Naseer, Khan and Porikli 2019): darken where the image changes abruptly."""

import math
from typing import Annotated, Self, final

import torch.nn.functional as F
from torch import Tensor

from patchcert.defenses.preprocessing import Defense, Surrogate, straight_through
from patchcert.errors import InvalidInput
from patchcert.tensors import Images

PixelMap = Annotated[Tensor, "n 1 h w"]

_ROOT_GUARD = 1e-12  # the root's slope is infinite at 0, and the sign of a NaN would stall every attack
_RANGE_GUARD = 1e-7


@final
class LocalGradientSmoothing(Defense):
    """Scales down every pixel by its local gradient inside windows whose mean gradient exceeds a threshold.

    Works on images in [0, 1], each by itself. Which windows are kept is a constant for the gradient; the
    smoothing is differentiable. Where the factor saturates its gradient is 0, so there is a second surrogate
    that passes it.
    """

    def __init__(
        self, window: int = 15, overlap: int = 5, threshold: float = 0.1, smoothing: float = 2.3
    ) -> None:
        super().__init__()
        _check_settings(window, overlap, threshold, smoothing)
        self.window = window
        self.overlap = overlap
        self.threshold = threshold
        self.smoothing = smoothing

    @classmethod
    def imagenet(cls) -> Self:
        """The settings of the original paper, for images of about 224 to 299 pixels."""
        return cls(window=15, overlap=5, threshold=0.1, smoothing=2.3)

    def extra_repr(self) -> str:
        """The settings as in the constructor."""
        return (
            f"window={self.window}, overlap={self.overlap}, threshold={self.threshold}, "
            f"smoothing={self.smoothing}"
        )

    def forward(self, images: Images) -> Images:
        """The smoothed images; the gradient is exact except for the choice of windows."""
        return images * (1 - self._strength(images).clamp(0, 1))

    def surrogates(self) -> tuple[Surrogate, ...]:
        """The exact gradient, and the gradient that passes the saturated clip."""
        return self.forward, self.forward_past_clip

    def forward_past_clip(self, images: Images) -> Images:
        """Equal to `forward`, with the gradient of the clip taken as 1 everywhere."""
        strength = self._strength(images)
        return images * (1 - straight_through(strength.clamp(0, 1), strength))

    def _strength(self, images: Images) -> PixelMap:
        """How much of each pixel is to be removed, before clipping to [0, 1]."""
        gradient = normalised_gradient(images)
        return self.smoothing * gradient * self.covered(gradient)

    def covered(self, gradient: PixelMap) -> PixelMap:
        """1 on the pixels of windows whose mean gradient exceeds the threshold; a constant."""
        stride = self.window - self.overlap
        height, width = gradient.shape[-2:]
        bottom = _windows(height, self.window, stride) * stride + self.overlap - height
        right = _windows(width, self.window, stride) * stride + self.overlap - width
        padded = F.pad(gradient.detach(), (0, right, 0, bottom))
        kept = (F.avg_pool2d(padded, self.window, stride) > self.threshold).to(gradient.dtype)
        spread = F.conv_transpose2d(kept, kept.new_ones(1, 1, self.window, self.window), stride=stride)
        return (spread[..., :height, :width] > 0).to(gradient.dtype)


def normalised_gradient(images: Images) -> PixelMap:
    """First-order local gradients over all channels, stretched to [0, 1] image by image."""
    right = F.pad(images.diff(dim=3), (0, 1))
    below = F.pad(images.diff(dim=2), (0, 0, 0, 1))
    size = (right.square() + below.square()).sum(dim=1, keepdim=True).add(_ROOT_GUARD).sqrt()
    least = size.amin(dim=(2, 3), keepdim=True)
    largest = size.amax(dim=(2, 3), keepdim=True)
    return (size - least) / (largest - least + _RANGE_GUARD)


def _windows(size: int, window: int, stride: int) -> int:
    """How many windows cover a line of `size` pixels; the last one may hang over the border."""
    return max(math.ceil((size - window) / stride), 0) + 1


def _check_settings(window: int, overlap: int, threshold: float, smoothing: float) -> None:
    if window < 1 or not 0 <= overlap < window:
        raise InvalidInput(
            f"smoothing needs window >= 1 and 0 <= overlap < window, got window {window}, overlap {overlap}",
            hint="for ImageNet the original uses window 15, overlap 5",
        )
    if not (0 <= threshold <= 1 and 0 <= smoothing < math.inf):
        raise InvalidInput(
            f"smoothing needs a threshold in [0, 1] and a factor >= 0, got {threshold} and {smoothing}",
            hint="for ImageNet the original uses threshold 0.1, smoothing 2.3",
        )
