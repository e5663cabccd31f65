"""Training a classifier to be right when two rectangles of an image are hidden, as double masking asks of it."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from patchcert.errors import SpecError, at_least
from patchcert.tensors import Images, Labels
from patchcert.threats import Patch
from patchcert.threats.placements import stamp_masks
from patchcert.train.strategy import (
    Batch,
    Forward,
    Objective,
    Strategy,
    Subject,
    TrainedThreat,
    WorstCase,
    logit_margins,
)
from patchcert.train.toml import parse_size

Masks = Annotated[Tensor, "n 2 2"]
"""For each image the (top, left) corners of two masks."""

Pairs = Annotated[Tensor, "n p 2 2"]
"""For each image the corners of p pairs of masks."""

Wanted = Annotated[Tensor, "n 2"]
"""Which of its two masks hide something of an image."""

_PAIRS_AT_ONCE = {"cuda": 8}
"""How many copies of each image a search looks at together: batches of a few hundred images leave a GPU half idle."""


@final
@dataclass(frozen=True, slots=True)
class Masked(Strategy):
    """Plain cross entropy on images of which two masks hide parts, whatever epsilon is.

    Masks are `size` (height x width) large, lie anywhere inside the image and show the colour `fill`, given for all
    channels or for each; outside of [0, 1] no pixel can look like it. A random `clean_share` of the images has no mask
    and a `single_share` has one. Once the share `worst_from` of the epochs is done, `worst_of` copies of every image
    are tried, and the pair of masks with the largest cross entropy is trained on: the worst of random pairs or, where
    the `search` is greedy, the worst of half as many single masks with the worst of as many second ones. For that the
    model is asked as it would be deployed, in eval mode. With `bfloat16` the products of the network are rounded to it,
    those of the loss are not. With `compiled` a GPU carries the network out as torch.compile fuses its layers.
    """

    has_bounds: ClassVar = False
    has_epsilon: ClassVar = False
    kind: Literal["masked"] = "masked"
    size: str = "6x6"
    clean_share: float = 0.0
    single_share: float = 0.0
    worst_of: int = 1
    worst_from: float = 0.5
    search: Literal["random", "greedy"] = "random"
    fill: tuple[float, ...] = (0.5,)
    bfloat16: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        parse_size("strategy.size", self.size)
        if min(self.clean_share, self.single_share) < 0 or not self.clean_share + self.single_share <= 1:
            raise SpecError(
                f"clean_share is {self.clean_share} and single_share {self.single_share}; expected shares of the "
                "images, at least 0 and together at most 1"
            )
        at_least(1, "worst_of", self.worst_of)
        if self.search == "greedy" and self.worst_of < 2:
            raise SpecError(
                f"search is greedy and worst_of {self.worst_of}; expected at least 2",
                hint="a mask, and a second",
            )
        if not 0 <= self.worst_from <= 1:
            raise SpecError(f"worst_from is {self.worst_from}; expected a share of the epochs, from 0 to 1")
        if not self.fill or not all(map(math.isfinite, self.fill)):
            raise SpecError(f"fill is {list(self.fill)}; expected one number, or one for each channel")

    def learned_method(self, threat: TrainedThreat) -> tuple[str, dict[str, Any]]:
        """Double masking, whose masks show the same colour."""
        return "masking", {"fill": self.fill[0] if len(self.fill) == 1 else self.fill}

    @property
    def mask_size(self) -> tuple[int, int]:
        """Height and width of a mask."""
        return parse_size("strategy.size", self.size)

    def bind(self, subject: Subject) -> Objective:
        """The margins of one masked copy of each image by the model in training mode."""
        self._check_fit(subject)
        forward = Forward.of(subject, self.bfloat16, self.compiled)
        network, fill = forward.network, torch.tensor(self.fill, device=subject.device)[:, None, None]
        trainer = MaskedTraining(self, forward, fill)
        hardest = None if self.worst_of == 1 else Objective(network, trainer.hardest_case)
        return Objective(network, trainer.random_case, later=hardest, later_from=self.worst_from)

    def _check_fit(self, subject: Subject) -> None:
        spec, threat, (height, width) = subject.model_spec, subject.threat, self.mask_size
        if height > spec.height or width > spec.width:
            raise SpecError(
                f"masks of {self.size} do not fit into images of {spec.height}x{spec.width}",
                hint="set strategy.size to less",
            )
        if isinstance(threat, Patch) and (height < threat.height or width < threat.width):
            raise SpecError(
                f"masks of {self.size} cannot hide a patch of {threat.height}x{threat.width}",
                hint="set strategy.size to at least the size of the patch",
            )
        if len(self.fill) not in (1, spec.channels):
            raise SpecError(
                f"fill has {len(self.fill)} values, but images have {spec.channels} channels",
                hint="give one value, or one for each channel",
            )


@dataclass(frozen=True, slots=True)
class MaskedTraining:
    """The strategy at work on a model, whose colour of masks lies on its device."""

    strategy: Masked
    forward: Forward
    fill: Annotated[Tensor, "_ 1 1"]

    def random_case(self, batch: Batch, epsilon: float | Tensor, generator: Generator) -> WorstCase:
        """The margins with one random pair of masks on each image."""
        masks, wanted = self._draw(batch, 1, generator)
        return self._margins(batch, masks[:, 0], wanted)

    def hardest_case(self, batch: Batch, epsilon: float | Tensor, generator: Generator) -> WorstCase:
        """The margins with the hardest of several random pairs of masks on each image."""
        masks, wanted = self._draw(batch, self.strategy.worst_of, generator)
        find = self.hardest if self.strategy.search == "random" else self.hardest_greedily
        return self._margins(batch, find(batch.own_images, batch.own_labels, masks, wanted), wanted)

    def draw(
        self, count: int, pairs: int, height: int, width: int, generator: Generator
    ) -> tuple[Pairs, Wanted]:
        """Pairs of masks that lie anywhere inside an image, and which of its two masks an image has."""
        tall, wide = self.strategy.mask_size
        shape, device = (count, pairs, 2), generator.device
        tops = torch.randint(height - tall + 1, shape, generator=generator, device=device)
        lefts = torch.randint(width - wide + 1, shape, generator=generator, device=device)
        luck = torch.rand(count, generator=generator, device=device)
        clean, single = self.strategy.clean_share, self.strategy.single_share
        wanted = torch.stack([luck >= clean, luck >= clean + single], dim=1)
        return torch.stack([tops, lefts], dim=3), wanted

    def hide(self, images: Images, masks: Masks, wanted: Wanted) -> Images:
        """The images with the colour of masks where a wanted mask lies."""
        height, width = images.shape[2:]
        places = stamp_masks(None, self.strategy.mask_size, masks, (height, width))
        hidden = (places & wanted[:, :, None, None]).any(dim=1, keepdim=True)
        return torch.where(hidden, self.fill.to(images.dtype), images)

    def hardest(self, images: Images, labels: Labels, masks: Pairs, wanted: Wanted) -> Masks:
        """Of each image's pairs the one with the largest cross entropy by the model in eval mode."""
        worst = self._losses(images, labels, masks, wanted).argmax(dim=1)
        return masks.gather(1, worst[:, None, None, None].expand(-1, 1, 2, 2)).squeeze(1)

    def hardest_greedily(self, images: Images, labels: Labels, masks: Pairs, wanted: Wanted) -> Masks:
        """The first mask that alone has the largest cross entropy, of the first half of the pairs, and with it the
        second mask with the largest, of the other half."""
        half = masks.shape[1] // 2
        alone = torch.stack([wanted[:, 0], torch.zeros_like(wanted[:, 1])], dim=1)
        first = self._losses(images, labels, masks[:, :half], alone).argmax(dim=1)
        corner = masks[:, :, 0].gather(1, first[:, None, None].expand(-1, 1, 2))
        seconds = masks[:, half:, 1]
        return self.hardest(images, labels, torch.stack([corner.expand_as(seconds), seconds], dim=2), wanted)

    @torch.no_grad()
    def _losses(
        self, images: Images, labels: Labels, masks: Pairs, wanted: Wanted
    ) -> Annotated[Tensor, "n p"]:
        """The cross entropy with each pair, by the model in eval mode."""
        model = self.forward.network.model
        at_once = _PAIRS_AT_ONCE.get(images.device.type, 1)
        model.eval()
        try:
            losses = [
                self._losses_at_once(images, labels, some, wanted) for some in masks.split(at_once, dim=1)
            ]
        finally:
            model.train()
        return torch.cat(losses, dim=1)

    def _losses_at_once(
        self, images: Images, labels: Labels, masks: Pairs, wanted: Wanted
    ) -> Annotated[Tensor, "n p"]:
        """The same of few pairs, in one batch."""
        pairs = masks.shape[1]
        copies, known = images.repeat_interleave(pairs, dim=0), labels.repeat_interleave(pairs)
        hidden = self.hide(copies, masks.flatten(0, 1), wanted.repeat_interleave(pairs, dim=0))
        losses = F.cross_entropy(self.forward.logits(hidden), known, reduction="none")
        return losses.unflatten(0, (-1, pairs))

    def _draw(self, batch: Batch, pairs: int, generator: Generator) -> tuple[Pairs, Wanted]:
        """What is drawn for the images of this process, among draws for the whole batch."""
        height, width = batch.images.shape[2:]
        masks, wanted = self.draw(len(batch), pairs, height, width, generator)
        return masks[batch.rows], wanted[batch.rows]

    def _margins(self, batch: Batch, masks: Masks, wanted: Wanted) -> WorstCase:
        logits = self.forward.logits(self.hide(batch.own_images, masks, wanted))
        return WorstCase(logit_margins(logits, batch.own_labels))
