"""Digital Watermarking (Hayes 2018): paint over the region that drives the prediction most."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Annotated, Literal, final, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.defenses.preprocessing import Defense, Surrogate, straight_through
from patchcert.errors import InvalidInput, ModelError, at_least
from patchcert.tensors import Images
from patchcert.threats.placements import stamp_masks

Fill = Literal["ring"] | tuple[float, ...]
SaliencyKind = Literal["guided", "gradient", "loss-gradient"]
Map = Annotated[Tensor, "n h w"]
Mask = Annotated[Tensor, "n 1 h w"]
Corner = Annotated[Tensor, "n"]


@final
class DigitalWatermarking(Defense):
    """Finds the window densest in salient pixels and paints over it; exactly one window in every image.

    Salient are the pixels at or above a quantile of the model's saliency, less isolated ones (an opening of
    side `opening`, skipped where it would leave nothing; 1 for none). Of equally dense windows the one with
    the larger sum of saliency is taken. The fill is a colour (one value, or one per channel), or "ring": the
    mean of the one-pixel ring around the window.
    """

    colour: Tensor

    def __init__(
        self,
        model: nn.Module,
        window: int,
        quantile: float = 0.95,
        opening: int = 2,
        saliency_kind: SaliencyKind = "guided",
        fill: Fill = (0.0,),
    ) -> None:
        super().__init__()
        _check_settings(window, quantile, opening, saliency_kind, fill)
        self.model = model
        self.window = window
        self.quantile = quantile
        self.opening = opening
        self.saliency_kind: SaliencyKind = saliency_kind
        self.fill: Fill = fill
        colour = torch.tensor((0.0,) if fill == "ring" else fill).reshape(1, -1, 1, 1)
        self.register_buffer("colour", colour, persistent=False)
        self.train(model.training)

    @classmethod
    def imagenet(cls, model: nn.Module, patch: int = 42) -> "DigitalWatermarking":
        """A window 1.2 times the patch's side, the mean colour of ImageNet as fill."""
        return cls(model, window=round(1.2 * patch), opening=3, fill=(0.485, 0.456, 0.406))

    def extra_repr(self) -> str:
        """The settings as in the constructor."""
        return (
            f"window={self.window}, quantile={self.quantile}, opening={self.opening}, "
            f"saliency_kind={self.saliency_kind!r}, fill={self.fill!r}"
        )

    def forward(self, images: Images) -> Images:
        """The images with one window painted over; no gradient through the choice of the window."""
        region = self.region(images)
        return torch.where(region, self._fill_for(images, region), images)

    def surrogates(self) -> tuple[Surrogate, ...]:
        """One: the painted image in value, the identity in gradient (known as BPDA)."""
        return (self.forward_as_identity,)

    def forward_as_identity(self, images: Images) -> Images:
        """Equal to `forward`, with the gradient of the identity."""
        return straight_through(self.forward(images.detach()), images)

    def region(self, images: Images) -> Mask:
        """True on the window that is painted over."""
        if self.window > min(images.shape[-2:]):
            raise InvalidInput(
                f"the watermarking window of {self.window} does not fit into images of "
                f"{images.shape[-2]}x{images.shape[-1]}",
                hint="use a window a little larger than the patch",
            )
        strength = saliency(self.model, images, self.saliency_kind)
        salient = opened(at_least_quantile(strength, self.quantile), self.opening)
        top, left = densest_window(salient, strength, self.window)
        corners, (height, width) = torch.stack([top, left], dim=1), images.shape[2:]
        return stamp_masks(None, (self.window, self.window), corners, (height, width))[:, None]

    def _fill_for(self, images: Images, region: Mask) -> Tensor:
        if self.fill == "ring":
            ring = F.max_pool2d(region.to(images.dtype), 3, 1, 1) - region.to(images.dtype)
            total = ring.sum(dim=(2, 3), keepdim=True).clamp(min=1)
            return (images * ring).sum(dim=(2, 3), keepdim=True) / total
        if len(self.fill) not in (1, images.shape[1]):
            raise InvalidInput(
                f"the fill colour has {len(self.fill)} values but the images have {images.shape[1]} channels",
                hint="give one value, or one per channel",
            )
        return self.colour.to(images)


def at_least_quantile(values: Map, quantile: float) -> Map:
    """True where a value is at least the linearly interpolated quantile of its own map."""
    flat = values.flatten(1)
    rank = math.ceil(quantile * (flat.shape[1] - 1) - 1e-9)
    threshold = flat.kthvalue(rank + 1, dim=1, keepdim=True).values
    return (flat >= threshold).unflatten(1, values.shape[1:])


def opened(mask: Map, side: int) -> Map:
    """The mask without what no square of this side fits into; unchanged where nothing would be left.

    Erosion keeps the squares that lie wholly inside mask and image, dilation paints them back, so an opening
    never adds a pixel, for even sides either.
    """
    values = mask.float()[:, None]
    if side == 1 or side > min(mask.shape[1:]):
        return mask
    fits = 1 - F.max_pool2d(1 - values, side, 1)
    painted = F.max_pool2d(F.pad(fits, (side - 1,) * 4), side, 1)[:, 0] > 0
    return torch.where(painted.flatten(1).any(dim=1)[:, None, None], painted, mask)


def densest_window(salient: Map, strength: Map, side: int) -> tuple[Corner, Corner]:
    """Top and left of the window with most salient pixels; the larger sum of strength decides ties."""
    counts = window_sums(salient.float(), side).flatten(1).round()
    sums = window_sums(strength, side).flatten(1)
    densest = counts == counts.amax(dim=1, keepdim=True)
    best = torch.where(densest, sums, -math.inf).argmax(dim=1)
    columns = salient.shape[2] - side + 1
    return best // columns, best % columns


def window_sums(values: Map, side: int) -> Annotated[Tensor, "n rows columns"]:
    """The sum over every window: first along columns, then along rows, which is `side / 2` times less work."""
    along_columns = F.avg_pool2d(values[:, None], (side, 1), 1, divisor_override=1)
    return F.avg_pool2d(along_columns, (1, side), 1, divisor_override=1)[:, 0]


def saliency(model: nn.Module, images: Images, kind: SaliencyKind) -> Map:
    """How strongly each pixel drives the prediction: its largest absolute gradient over the channels, without a graph.

    Of the predicted class's logit ("gradient"; "guided" lets ReLUs pass only positive gradients back), or of
    the cross entropy at the predicted class ("loss-gradient"). Images do not influence each other in eval
    mode, so one backward pass serves the batch. Works inside `no_grad` and `inference_mode` and leaves the
    model as it was.
    """
    guided = guided_backpropagation(model) if kind == "guided" else nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), guided:
        inputs = images.detach().clone().requires_grad_()
        logits = model(inputs)
        predicted = logits.detach().argmax(dim=1)
        if kind == "loss-gradient":
            score = F.cross_entropy(logits, predicted, reduction="sum")
        else:
            score = logits.gather(1, predicted[:, None]).sum()
        (gradient,) = torch.autograd.grad(score, inputs)
    return gradient.abs().amax(dim=1)


@contextmanager
def guided_backpropagation(model: nn.Module) -> Iterator[None]:
    """Inside, every ReLU module passes only positive gradients back; afterwards no trace is left."""
    rectifiers = [module for module in model.modules() if isinstance(module, nn.ReLU | nn.ReLU6)]
    if not rectifiers:
        raise ModelError(
            f"guided saliency needs ReLU modules, but {type(model).__name__} has none",
            hint="use the saliency kind 'gradient' for this model",
        )
    with ExitStack() as hooks:
        for module in rectifiers:
            hooks.enter_context(module.register_forward_hook(_keep_positive))
        yield


def _keep_positive(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """The gradient that reaches a ReLU's output is cut at 0; the ReLU itself cuts it where it was off."""
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.clamp(min=0))


def _check_settings(window: int, quantile: float, opening: int, kind: str, fill: Fill) -> None:
    at_least(1, "window", window)
    at_least(1, "opening", opening)
    if not 0 <= quantile <= 1:
        raise InvalidInput(f"the saliency quantile must lie in [0, 1], got {quantile}", hint="0.95 is usual")
    if kind not in get_args(SaliencyKind):
        raise InvalidInput(
            f"unknown saliency kind {kind!r}", hint=f"choose one of {', '.join(get_args(SaliencyKind))}"
        )
    if fill != "ring" and not (isinstance(fill, tuple) and fill and all(0 <= value <= 1 for value in fill)):
        raise InvalidInput(
            f"the fill must be 'ring' or values in [0, 1], got {fill!r}", hint="use (0.0,) for black"
        )
