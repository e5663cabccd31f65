"""Double masking (Xiang et al. 2022): a proof for any classifier, from what it says of images with two parts hidden.

`masks_covering` gives masks such that wherever the patch lies, one of them hides it. docs/concepts/masking.md has the
rules and their proofs.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property, partial
from numbers import Real
from typing import Annotated, Any, ClassVar, Self, final

import numpy as np
import torch
from torch import Tensor, nn

from patchcert.certificates.batches import (
    BatchedClassifier,
    FixedBatches,
    MeanVote,
    Precision,
    check_counts,
    copies_at_once,
)
from patchcert.certificates.checks import check_images, check_inputs, check_labels, weight_dtype
from patchcert.certificates.classifier import (
    ABSTAINED,
    AnyThreat,
    Certificates,
    Columns,
    Guarantee,
    Promise,
    first_row,
)
from patchcert.certificates.masked_copies import (
    Answers,
    MaskedCopies,
    Mirrored,
    Numbers,
    copies_of_each,
    fill_values,
)
from patchcert.errors import InvalidInput, InvalidThreat
from patchcert.progress import Progress
from patchcert.tensors import Images, Labels, PerImage
from patchcert.threats import Patch, Patches, threat_from_dict
from patchcert.threats.masks import MaskSet, hidden_patch, masks_covering, masks_per_axis
from patchcert.threats.patch import choices

_PIXELS_AT_ONCE = {"cuda": 2**22, "cpu": 2**17}
_BATCHES_AT_ONCE = 4
"""Full batches of pairs between two looks at which images can still be proven."""
_PASSES_PER_BLOCK = {"cuda": 2**21, "cpu": 2**12}


@dataclass(frozen=True)
class _Masked(BatchedClassifier):
    """A model that looks at copies of an image of which parts are hidden."""

    model: nn.Module
    threat: Patch | Patches
    _: KW_ONLY
    masks: int | tuple[int, int] = 6
    fill: float | tuple[float, ...] = 0.5
    precision: Precision = "float32"
    slack: float | None = None
    mirrored: bool = False
    doubt: float | None = None
    compiled: bool = False
    batch_size: int | None = None
    optional: ClassVar[tuple[str, ...]] = ("doubt",)
    undescribed: ClassVar[tuple[str, ...]] = ("model", "threat", "batch_size", "with_map")

    def __post_init__(self) -> None:
        super().__post_init__()
        masks_per_axis(self.masks)
        hidden_patch(self.threat)
        values = self.fill if isinstance(self.fill, tuple) else (self.fill,)
        if not values or not all(isinstance(value, Real) and math.isfinite(value) for value in values):
            raise InvalidInput(
                f"fill is {self.fill!r}; expected a number, or a tuple of one for each channel",
                hint="fill=0.5 hides parts behind grey; no pixel looks like a fill outside of [0, 1]",
            )
        if self.batch_size is not None:
            check_counts(batch_size=self.batch_size)
        self._check_doubt()

    def _check_doubt(self) -> None:
        if self.doubt is None:
            return
        # No class leads by more than twice the largest logit.
        if not isinstance(self.doubt, Real) or not 0 < self.doubt < 2:
            raise InvalidInput(
                f"doubt is {self.doubt!r}; expected a share of the largest logit, above 0 and below 2",
                hint="doubt=0.5 asks the mirror images of copies whose class leads by no more than half of it; "
                "None asks those of all",
            )
        if not self.mirrored:
            raise InvalidInput(
                f"doubt={self.doubt} without mirrored=True: no mirror image is asked",
                hint="give mirrored=True too, or no doubt",
            )

    def shown_model(self) -> nn.Module:
        """The model that all copies are shown to."""
        return Mirrored(self.model) if self.mirrored and self.doubt is None else self.model

    @cached_property
    def compiled_model(self) -> nn.Module:
        """The model that copies are shown to, as torch.compile carries it out for batches of one shape."""
        return torch.compile(self.shown_model(), dynamic=False)  # pyright: ignore[reportReturnType]

    def mask_set(self, height: int, width: int) -> MaskSet:
        """The masks for images of this size; part of the classifier, and so kept once made."""
        size = (height, width)
        if size not in self._mask_sets:
            self._mask_sets[size] = masks_covering(self.threat, height, width, self.masks)
        return self._mask_sets[size]

    @cached_property
    def _mask_sets(self) -> dict[tuple[int, int], MaskSet]:
        return {}

    def describe(self) -> dict[str, Any]:
        masked = {"masked_threat": self.threat.to_dict(), "patches": hidden_patch(self.threat)[1]}
        return {"name": type(self).__name__, **masked, **super().describe()}

    @classmethod
    def described(cls, model: nn.Module, description: Mapping[str, Any]) -> Self:
        threat = threat_from_dict(description["masked_threat"])
        return super().described(model, {**description, "threat": threat})

    def passes(self, height: int, width: int) -> int | None:
        """One for each mask, if all copies agree and none is in doubt."""
        return len(self.mask_set(height, width).hidden) * self._passes_each

    @property
    def _passes_each(self) -> int:
        """How often a copy is looked at, if it is not in doubt."""
        return 2 if self.mirrored and self.doubt is None else 1

    def surrogate(self) -> nn.Module:
        """The mean of the model's softmax over a few fixed masks and pairs of masks, in logarithms."""

        def copies(images: Images) -> Iterator[Tensor]:
            masks = self.mask_set(images.shape[2], images.shape[3]).hidden.to(images.device)
            fill = fill_values(self.fill, images.shape[1]).to(images)
            spread = torch.linspace(0, len(masks) - 1, 8).long()
            for second in (spread, spread.roll(4)):
                for hidden in masks[spread] | masks[second]:
                    yield torch.where(hidden, fill, images)

        shown = Mirrored(self.model) if self.mirrored else self.model
        return MeanVote(shown, copies, self.precision)

    @classmethod
    def contradiction(cls, columns: Columns, meta: Mapping[str, Any]) -> str:
        """Certified images have the lead that it takes, and the masks cover the threat."""
        settings, (_, height, width) = meta["classifier"], meta["data"]["image"]
        described = cls.described(nn.Identity(), settings)
        if meta["threat"] != settings["masked_threat"]:  # else it is covered by how masks are made
            described._covering(threat_from_dict(meta["threat"]), described.mask_set(height, width))
        row = first_row(columns["certified"] & ~(columns["lead"] > settings["slack"]))
        if row is not None:
            return f"row {row} is certified with a lead of {columns['lead'][row]}"
        first, second, count = columns["first_mask"], columns["second_mask"], described._count()
        row = first_row((np.minimum(first, second) < 0) | (np.maximum(first, second) >= count))
        return "" if row is None else f"row {row} names a mask that is none of {count}"

    def _count(self) -> int:
        """How many masks there are at most, whatever the size of images."""
        rows, columns = masks_per_axis(self.masks)
        return math.comb(rows * columns, min(hidden_patch(self.threat)[1], rows * columns))

    @contextmanager
    def copies(self, images: Images, for_proof: bool = False) -> "Iterator[MaskedCopies]":
        """Copies of these images, shown to the model as it is, and tried in other company where batches are new."""
        images = images.to(weight_dtype(self.model, images.dtype))
        with self.prepared(images, partial(self._batches, images), for_proof) as (batches, are_new):
            masks, fill = self.mask_set(*images.shape[2:]), fill_values(self.fill, images.shape[1]).to(images)
            copies = MaskedCopies(images, masks, fill, batches, self.needed_lead, self.doubt)
            if are_new:
                copies.check_company()
            yield copies

    def _batches(self, images: Images) -> FixedBatches:
        """As many copies at once as the device is best at."""
        device, (height, width), shown = images.device.type, images.shape[2:], self.shown_model()
        pixels = _PIXELS_AT_ONCE.get(device, _PIXELS_AT_ONCE["cpu"])
        most = max(1, min(pixels // (height * width), 4096))
        size = self.batch_size or copies_at_once(shown, images, most, self.precision)
        compiled = self.compiled_model if self.compiled and images.is_cuda else None
        return FixedBatches(shown, images, size, self.precision, compiled)

    @contextmanager
    def _covered(
        self, images: Images, labels: Labels, threat: AnyThreat, progress: Progress | None
    ) -> "Iterator[tuple[MaskedCopies, Annotated[Tensor, 'q m']]]":
        """Copies of images that fit, for a proof, and which masks hide the threat."""
        check_inputs(self.model, images, labels, progress)
        with self.copies(images, for_proof=True) as copies:
            check_labels(labels, copies.classes)
            yield copies, self._covering(threat, copies.masks).to(images.device)

    def _covering(self, threat: AnyThreat, masks: MaskSet) -> Annotated[Tensor, "q m"]:
        """Which masks hide all of the threat, for each different answer over its placements; refused where none does.

        With several patches the rows are those of as many placements together.
        """
        patch, count = hidden_patch(threat)
        cover = masks.covers(patch).unique(dim=0)
        if count > 1:
            cover = cover[choices(len(cover), count)].all(dim=1).unique(dim=0)
        if not bool(cover.any(dim=1).all()):
            raise InvalidThreat(
                f"the masks are made for {self.threat}, and at some placement none of them hides {threat}",
                hint="make the classifier with the larger of the threats; it serves all that its masks cover",
            )
        return cover

    def _map(
        self, threat: AnyThreat, masks: MaskSet, least: Annotated[Tensor, "n m"]
    ) -> Annotated[Tensor, "n p"] | None:
        """At which placements of one patch a mask that covers it leads by enough."""
        if not isinstance(threat, Patch):
            return None
        return _any_covering(least > self.needed_lead, masks.covers(threat).to(least.device))


@final
@dataclass(frozen=True)
class DoubleMasking(_Masked):
    """Any model, behind masks that cover the threat: what it says is recovered whatever a patch shows.

    Predicts what the model says of all copies with one mask, where it says one thing. Else a mask whose copy says
    something rarer, and that says it with every second mask too, hides what misled the others: its class is the
    prediction. Else the most frequent class is.

    An image is certified if for every placement a mask covers it for which the label comes out with every second
    mask. `masks` = K makes K x K masks: the more there are, the less each hides. `fill` is what hidden pixels show.
    The masks are made for `threat`, one patch or several, and serve every threat that they cover.
    With `mirrored` a copy's logits are the mean of those of the copy and of its mirror image, at twice the cost; with
    `doubt` the mirror image is asked only where the class of the copy itself leads the next one by no more than this
    share of its largest logit, which costs less the surer the model is. With `compiled` a GPU carries the model
    out as torch.compile fuses its layers, which is faster and rounds otherwise.

    The proof is about the model as it is carried out here: in `precision`, in batches of one shape, and a copy counts
    only where the label leads by more than `slack` of the largest logit. With `with_map` the certificate map is
    complete; else an image is left at its first wrong copy, which takes far less time.
    """

    _: KW_ONLY
    with_map: bool = False

    def predict(self, images: Images, progress: Progress | None = None) -> Labels:
        check_images(self.model, images, progress)
        with self.copies(images) as copies:
            owners = torch.arange(len(images), device=images.device)
            return copies.predictions(copies.singles(progress=progress).said, owners)

    def detect(self, images: Images, threshold: float = 0.0) -> PerImage:
        """Whether an alert is raised for each image, by the rule of `MaskedDetection`."""
        return self.detector(threshold).predict(images) == ABSTAINED

    def detector(self, threshold: float = 0.0) -> "MaskedDetection":
        """The same masks, used to raise an alert instead of recovering what a patch hides."""
        shared = {each.name: getattr(self, each.name) for each in fields(_Masked)}
        return MaskedDetection(**shared, threshold=threshold)

    def certify(
        self, images: Images, labels: Labels, threat: AnyThreat, progress: Progress | None = None
    ) -> Certificates:
        """A placement is proven if some mask that covers it says the label with every second mask."""
        with self._covered(images, labels, threat, progress) as (copies, covering):
            rows = _Rows(copies, labels, self.needed_lead, progress)
            rows.look_at_pairs(covering, self.with_map)
            lead = _best_leads(rows.least, covering).amin(dim=1)
            certified = lead > self.needed_lead
            # What is proven is predicted, since a patch may change nothing; only the others have to be asked for.
            predictions = labels.clone()
            others = (~certified).nonzero().flatten()
            predictions[others] = copies.predictions(rows.said[others], others)
        return Certificates(
            certified=certified,
            predictions=predictions,
            labels=labels,
            placements=self._map(threat, copies.masks, rows.least) if self.with_map else None,
            lead=lead,
            weakest_masks=rows.weakest,
        )

    def placement_leads(
        self, images: Images, labels: Labels, threat: AnyThreat, progress: Progress | None = None
    ) -> Annotated[Tensor, "n p"]:
        """The least lead of the label over the row of the best mask that covers each placement.

        A placement is proven where it exceeds `needed_lead`. Rows that cannot be proven are left at their first wrong
        copy, so that their leads are upper bounds.
        """
        if not isinstance(threat, Patch):
            raise InvalidThreat(f"one placement after the other is about one patch, got {threat!r}")
        with self._covered(images, labels, threat, progress) as (copies, covering):
            rows = _Rows(copies, labels, self.needed_lead, progress)
            rows.look_at_pairs(covering, for_map=True)
        return _best_leads(rows.least, copies.masks.covers(threat).to(images.device))

    def images_per_block(self, device: torch.device) -> int | None:
        """About as many as a few seconds serve; on a CPU very few."""
        count = self._count()
        passes = _PASSES_PER_BLOCK.get(device.type, _PASSES_PER_BLOCK["cpu"])
        return max(1, min(2048, 2 * passes // (count * (count + 1))))


@final
@dataclass(frozen=True)
class MaskedDetection(_Masked):
    """Any model, behind masks that cover the threat: what it says stays right, or an alert is raised.

    Predicts what the model says of the whole image, and abstains (an alert) where a copy with one mask says something
    else with a confidence, its largest softmax value, above `threshold`. One pass for each mask, none for pairs.

    An image is certified if the prediction is the label, and at every placement a mask covers the patch whose copy
    says the label with a confidence above the threshold: if a patch makes the model say anything else of the whole
    image, this copy, which does not show it, raises the alert. Both must hold when logits move within the same `slack`
    as in `DoubleMasking`.
    """

    _: KW_ONLY
    threshold: float = 0.0
    promise: ClassVar[Promise] = "detection"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.threshold, Real) or not 0 <= self.threshold < 1:
            raise InvalidInput(
                f"threshold is {self.threshold!r}; expected a confidence of at least 0 and below 1",
                hint="threshold=0 raises an alert at any disagreement",
            )

    def predict(self, images: Images, progress: Progress | None = None) -> Labels:
        check_images(self.model, images, progress)
        with self.copies(images) as copies:
            return self._predictions(copies.whole_images(), copies.singles(progress=progress))

    def certify(
        self, images: Images, labels: Labels, threat: AnyThreat, progress: Progress | None = None
    ) -> Certificates:
        """A placement is proven if some mask that covers it says the label, with confidence."""
        with self._covered(images, labels, threat, progress) as (copies, covering):
            whole, singles = copies.whole_images(), copies.singles(labels, progress)
        predictions = self._predictions(whole, singles)
        leads = torch.where(self._stays_confident(singles, copies.classes), singles.lead, -torch.inf)
        lead = _best_leads(leads, covering).amin(dim=1)
        return Certificates(
            certified=(predictions == labels) & (lead > self.needed_lead),
            predictions=predictions,
            labels=labels,
            guarantee=Guarantee(self.promise),
            placements=self._map(threat, copies.masks, leads),
            lead=lead,
            weakest_masks=singles.lead.argmin(dim=1, keepdim=True).expand(-1, 2),
        )

    def passes(self, height: int, width: int) -> int | None:
        """One for each mask, and one for the whole image."""
        return (len(self.mask_set(height, width).hidden) + 1) * self._passes_each

    def _stays_confident(self, answers: "Answers", classes: int) -> Annotated[Tensor, "n m"]:
        """Whether a confidence stays above the threshold when logits move within the slack.

        Where they move by half the slack times the largest, d, the odds keep exp(-2 d) of themselves at least. For each
        of k classes a softmax in float32 rounds an exponent, a power and a sum, by less than 2^-22 of the whole sum in
        all; with its division and the threshold it is wrong by a share of less than (k + 4) 2^-22.
        """
        confidence = (answers.odds - self.needed_lead * answers.largest).sigmoid()
        return confidence * (1 - (classes + 4) * 2.0**-22) > self.threshold

    def _predictions(self, whole: Labels, singles: "Answers") -> Labels:
        objects = (singles.said != whole[:, None]) & (singles.confidence > self.threshold)
        return torch.where(objects.any(dim=1), ABSTAINED, whole)


class _Rows:
    """For each image and mask the least lead of the label over the second masks looked at so far."""

    def __init__(
        self, copies: MaskedCopies, labels: Labels, needed: float, progress: Progress | None = None
    ) -> None:
        self.copies, self.labels, self.needed, self.progress = copies, labels, needed, progress
        self.pairs = copies.masks.pairs.to(labels.device)
        singles = copies.singles(labels, None if progress is None else self._note_singles)
        self.said, self.least = singles.said, singles.lead
        self._weakest_lead, own = self.least.min(dim=1)
        self.weakest = torch.stack([own, own], dim=1)

    def look_at_pairs(self, covering: Annotated[Tensor, "q m"], for_map: bool) -> None:
        """Look at copies with two masks, those most likely to fail first, until an image is proven or cannot be.

        For the map, until each of its rows is proven or cannot be.
        """
        order = (self.least[:, self.pairs[:, 0]] + self.least[:, self.pairs[:, 1]]).argsort(dim=1)
        start, left = 0, self._left(covering, for_map)
        while start < len(self.pairs) and len(left):
            copies = max(_BATCHES_AT_ONCE * self.copies.size, self.copies.together)
            chosen = order[left, start : start + copies_of_each(copies, len(left))]
            self._look(left, chosen, start)
            start += chosen.shape[1]
            left = self._left(covering, for_map)
            self._note_pairs(len(left), start)
        self._note_pairs(0)

    def _note_singles(self, done: float, images: int) -> None:
        """Report copies with one mask as their share of all copies."""
        assert self.progress is not None
        masks = len(self.copies.masks)
        self.progress(done * masks / (masks + len(self.pairs)), images)

    def _note_pairs(self, left: int, each: float = 0) -> None:
        """Report that `left` images may yet be proven, of each of which this many pairs were looked at."""
        if self.progress is not None:
            masks, images = len(self.copies.masks), len(self.least)
            share = (masks + each) / (masks + len(self.pairs))
            self.progress(images - left + left * share, images)

    def _left(self, covering: Annotated[Tensor, "q m"], for_map: bool) -> Numbers:
        """Images that may yet be proven; for the map those of which a row may yet be."""
        rows = self.least > self.needed
        is_left = rows.any(dim=1) if for_map else _any_covering(rows, covering).all(dim=1)
        return is_left.nonzero().flatten()

    def _look(self, left: Numbers, chosen: Annotated[Tensor, "b pairs"], before: int) -> None:
        """Look at the chosen pairs of the images that are left, after as many of each as were looked at `before`.

        Pairs of two rows that cannot be proven are left out.
        """
        owner, rows = left.repeat_interleave(chosen.shape[1]), self.least > self.needed
        first, second = self.pairs[chosen.flatten()].T
        open_pairs = (rows[owner, first] | rows[owner, second]).nonzero().flatten()
        if not len(open_pairs):
            return
        owner, first, second = owner[open_pairs], first[open_pairs], second[open_pairs]
        leads = list[Tensor]()
        for part in self.copies.look(owner, first, second, self.labels):
            leads.append(part.lead)
            done = min(self.copies.together * len(leads) / len(owner), 1.0)
            self._note_pairs(len(left), before + done * chosen.shape[1])
        lead = torch.cat(leads)
        flat, masks = self.least.flatten(), self.least.shape[1]
        for mask in (first, second):
            flat = flat.scatter_reduce(0, owner * masks + mask, lead, "amin")
        self.least = flat.unflatten(0, self.least.shape)
        self._note_weakest(owner, torch.stack([first, second], dim=1), lead)

    def _note_weakest(
        self, owner: Numbers, masks: Annotated[Tensor, "b 2"], lead: Annotated[Tensor, "b"]
    ) -> None:
        before = self._weakest_lead
        self._weakest_lead = before.scatter_reduce(0, owner, lead, "amin")
        is_weakest = (lead == self._weakest_lead[owner]) & (lead < before[owner])
        self.weakest[owner[is_weakest]] = masks[is_weakest]


def _any_covering(
    rows: Annotated[Tensor, "n m"], cover: Annotated[Tensor, "p m"]
) -> Annotated[Tensor, "n p"]:
    """Whether at each placement a mask covers the patch whose row is set; counts of masks are exact in float32."""
    return rows.float() @ cover.float().T > 0.5


def _best_leads(
    least: Annotated[Tensor, "n m"], covering: Annotated[Tensor, "q m"]
) -> Annotated[Tensor, "n q"]:
    """The best over the masks that cover the patch at each placement, one image at a time."""
    hidden = torch.where(covering, 0.0, -torch.inf)
    found = least.new_empty(len(least), len(covering))
    for row, leads in enumerate(least):
        found[row] = (leads + hidden).amax(dim=1)
    return found
