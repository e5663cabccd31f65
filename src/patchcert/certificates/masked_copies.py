"""Copies of images of which parts are hidden, and what a model says of them, in batches of one shape."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, final

import torch
from torch import Tensor, nn

from patchcert.certificates.batches import FixedBatches
from patchcert.certificates.classifier import ABSTAINED
from patchcert.errors import InvalidInput
from patchcert.progress import Progress
from patchcert.tensors import Images, Labels, Logits
from patchcert.threats.masks import MaskSet

_BATCHES_BEFORE_DOUBT = 32
"""Full batches of copies before the mirror images of those in doubt are asked, so that these fill batches too."""

Numbers = Annotated[Tensor, "b"]
"""One whole number for each of b copies: the image, or the mask."""


class Mirrored(nn.Module):
    """A model that is shown each image and its mirror image; its logits are their mean."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, images: Images) -> Logits:
        """Half the sum of both."""
        # First of the copy: a model may change the images that it is given.
        return (self.model(images.flip(3)) + self.model(images)) / 2


@final
@dataclass(frozen=True, eq=False)
class Answers:
    """What the model says of copies: -1 where a logit is not finite, which is no class and leads nothing.

    `largest` is the largest logit, whatever its sign, `lead` the share of it by which the image's label leads the best
    other class, `confidence` the softmax of what is said, and `odds`, in float64, the logarithm of its odds.
    """

    said: Annotated[Tensor, "..."]
    lead: Annotated[Tensor, "..."]
    confidence: Annotated[Tensor, "..."]
    odds: Annotated[Tensor, "..."]
    largest: Annotated[Tensor, "..."]

    @staticmethod
    def of(logits: Logits, labels: Labels) -> "Answers":
        """What the logits of copies of images with these labels say."""
        finite = logits.isfinite().all(dim=1)
        own = logits.gather(1, labels[:, None])[:, 0]
        others = logits.scatter(1, labels[:, None], -torch.inf).amax(dim=1)
        largest, said = logits.abs().amax(dim=1), logits.argmax(dim=1)
        lead = (own - others) / largest
        rest = logits.double().scatter(1, said[:, None], -torch.inf).logsumexp(dim=1)
        return Answers(
            torch.where(finite, said, ABSTAINED),
            torch.where(finite & ~lead.isnan(), lead, -torch.inf),
            torch.where(finite, logits.softmax(dim=1).amax(dim=1), 0.0),
            logits.amax(dim=1) - rest,
            largest,
        )

    def settled(self, asked: Numbers, mean: "Answers", by_mean: Tensor, either: Tensor) -> "Answers":
        """These, but for the copies with the numbers `asked` what the `mean` of two images says where it decides.

        Where `either` may decide, the worse of both proves.
        """
        own = {name: column[asked] for name, column in vars(self).items()}
        new = {name: torch.where(by_mean, getattr(mean, name), column) for name, column in own.items()}
        for name, worse in (("lead", torch.minimum), ("odds", torch.minimum), ("largest", torch.maximum)):
            new[name] = torch.where(either, worse(own[name], getattr(mean, name)), new[name])
        return Answers(*(column.index_copy(0, asked, new[name]) for name, column in vars(self).items()))

    @staticmethod
    def joined(parts: "Iterable[Answers]", shape: tuple[int, ...]) -> "Answers":
        """All parts, as tensors of this shape."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return Answers(*(torch.cat(column).reshape(shape) for column in columns))


class MaskedCopies:
    """Copies of images behind masks that show a `fill`, given to the batches of a model.

    With a `doubt` the mean of a copy and its mirror image decides where the copy's best class leads by no more; the
    `slack` is what a proof pays for.
    """

    def __init__(
        self,
        images: Images,
        masks: MaskSet,
        fill: Annotated[Tensor, "1 c 1 1"],
        base: FixedBatches,
        slack: float,
        doubt: float | None = None,
    ) -> None:
        self.masks, self.fill = masks, fill
        # The last one hides nothing.
        nothing = torch.zeros_like(masks.hidden[:1])
        self.hidden = torch.cat([masks.hidden, nothing]).to(images.device)
        self.images, self.base, self.size = images, base, base.size
        self.slack, self.doubt = slack, doubt
        self.together = self.size if doubt is None else _BATCHES_BEFORE_DOUBT * self.size

    @property
    def classes(self) -> int:
        """How many classes the model tells apart."""
        return self.base.classes

    @torch.no_grad()
    def check_company(self) -> None:
        """Answers may differ by a quarter of the slack: twice that is the change of a lead, of two logits.

        So may the means that are asked in doubt, whose largest logit can be much smaller than that of either image.
        """
        if len(self.images):
            numbers = torch.arange(self.size, device=self.images.device)
            owner, mask = numbers % len(self.images), numbers % len(self.hidden)
            copies = self._shown(owner, mask, mask)
            self.base.check_company(copies, self.slack / 4)
            if self.doubt is not None:
                self.base.check_company(copies, self.slack / 4, asked=self._means)

    def _means(self, copies: Images) -> Logits:
        return (self.base.logits(copies) + self.base.logits(copies.flip(3))) / 2

    def _shown(self, owner: Numbers, first: Numbers, second: Numbers) -> Annotated[Tensor, "b c h w"]:
        hidden = self.hidden[first] | self.hidden[second]
        return torch.where(hidden[:, None], self.fill, self.images[owner])

    @torch.no_grad()
    def look(
        self, owner: Numbers, first: Numbers, second: Numbers, labels: Labels | None = None
    ) -> Iterator[Answers]:
        """What the model says of each image under two masks, in parts of `together`; of no images one empty part."""
        known = torch.zeros_like(owner) if labels is None else labels[owner]
        parts = zip(*(each.split(self.together) for each in (owner, first, second, known)), strict=True)
        for images, one, other, label in parts:
            logits = self._logits(images, one, other)
            answers = Answers.of(logits, label)
            yield (
                answers if self.doubt is None else self._in_doubt(answers, logits, images, one, other, label)
            )

    def _logits(self, owner: Numbers, first: Numbers, second: Numbers, mirrored: bool = False) -> Logits:
        batches = zip(*(each.split(self.size) for each in (owner, first, second)), strict=True)
        copies = (self._shown(*batch) for batch in batches)
        return torch.cat([self.base.logits(copy.flip(3) if mirrored else copy) for copy in copies])

    def _in_doubt(
        self,
        answers: Answers,
        logits: Logits,
        owner: Numbers,
        first: Numbers,
        second: Numbers,
        label: Labels,
    ) -> Answers:
        """The answers, but those of both images' mean where the best class leads by no more than the `doubt`.

        A proof allows logits to move by half of the slack s times the largest. A lead L, a share of the largest, then
        stays between (L - s) / (1 + s / 2) and (L + s) / (1 - s / 2): on its side of the doubt d if it is further than
        s (1 + d / 2) away from it. Nearer to it both ways of asking have to prove.
        """
        assert self.doubt is not None
        best, next_best = logits.topk(2, dim=1).values.unbind(dim=1)
        lead = (best - next_best) / logits.abs().amax(dim=1)
        room = self.slack * (1 + self.doubt / 2)
        asked = (~(lead > self.doubt + room)).nonzero().flatten()  # NaN is asked, and says nothing either way
        if not len(asked):
            return answers
        mirrored = self._logits(owner[asked], first[asked], second[asked], mirrored=True)
        mean = Answers.of((logits[asked] + mirrored) / 2, label[asked])
        decided, either = lead[asked] > self.doubt, (lead[asked] - self.doubt).abs() <= room
        return answers.settled(asked, mean, ~decided, either)

    def whole_images(self) -> Labels:
        """What the model says with nothing hidden."""
        owner = torch.arange(len(self.images), device=self.images.device)
        nothing = torch.full_like(owner, len(self.masks))
        return Answers.joined(self.look(owner, nothing, nothing), (len(owner),)).said

    def singles(self, labels: Labels | None = None, progress: Progress | None = None) -> Answers:
        """What the model says of each image under each mask alone: tensors (n, m)."""
        count, masks = len(self.images), len(self.masks)
        owner = torch.arange(count, device=self.images.device).repeat_interleave(masks)
        mask = torch.arange(masks, device=self.images.device).repeat(count)
        parts = list[Answers]()
        for part in self.look(owner, mask, mask, labels):
            parts.append(part)
            if progress is not None:
                progress(min(self.together * len(parts), count * masks) / masks, count)
        return Answers.joined(parts, (count, masks))

    def predictions(self, said: Annotated[Tensor, "n m"], owners: Labels) -> Labels:
        """What is predicted of images by number, where this is said of them under one mask."""
        counts = torch.stack([(said == label).sum(dim=1) for label in range(ABSTAINED, self.classes)], dim=1)
        frequent = counts.argmax(dim=1) + ABSTAINED
        image, mask = (said != frequent[:, None]).nonzero().T
        keep = self._is_unanimous(owners[image], mask, said[image, mask])
        # Two masks that say different things with every second mask would say both of the copy under the two of them.
        first = torch.full_like(frequent, said.shape[1])
        first = first.scatter_reduce(0, image[keep], mask[keep], "amin")
        known = torch.cat([said, frequent[:, None]], dim=1)
        return known.gather(1, first[:, None])[:, 0]

    def _is_unanimous(self, owner: Numbers, mask: Numbers, label: Numbers) -> Annotated[Tensor, "b"]:
        """Whether the label under one mask comes out with every second mask too."""
        is_unanimous = torch.ones_like(owner, dtype=torch.bool)
        start, total = 0, len(self.masks)
        while start < total and bool(is_unanimous.any()):
            left = is_unanimous.nonzero().flatten()
            seconds = torch.arange(
                start, min(total, start + copies_of_each(self.size, len(left))), device=owner.device
            )
            who, second = left.repeat_interleave(len(seconds)), seconds.repeat(len(left))
            said = torch.cat([part.said for part in self.look(owner[who], mask[who], second)])
            is_unanimous[who[said != label[who]]] = False
            start += len(seconds)
        return is_unanimous


def fill_values(fill: float | tuple[float, ...], channels: int) -> Annotated[Tensor, "1 c 1 1"]:
    """What hidden pixels show in each channel."""
    values = fill if isinstance(fill, tuple) else (fill,) * channels
    if len(values) != channels:
        raise InvalidInput(
            f"fill has {len(values)} values, but images have {channels} channels",
            hint="give one value for all channels, or one for each",
        )
    return torch.tensor(values)[None, :, None, None]


def copies_of_each(copies: int, images: int) -> int:
    """How many copies of each image make at most this many copies in all, so that no batch is nearly empty."""
    return max(1, copies // max(images, 1))
