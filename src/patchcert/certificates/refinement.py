"""What intervals leave open, looked at again: an image ends proven, broken by a member of the threat, or open.

Stage by stage, each only on what the one before has left: the corners of a search by gradients, which may break the
image; linear bounds at open placements, for open classes; and branch and bound on what remains. Bounds are of float64,
whatever the type of the intervals: there are few of them, and they carry more roundings.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor, nn

from patchcert.bounds import Interval, Network, Rounding
from patchcert.bounds.linear import SLOPES, BackwardPass, margin_forms
from patchcert.bounds.reduction import is_lossless, marked, reduced
from patchcert.bounds.restriction import Restriction
from patchcert.bounds.splitting import Problems, Refute, Splitting
from patchcert.certificates.checks import logits_of
from patchcert.errors import InvalidInput
from patchcert.tensors import Images, Labels, PerImage, PlacementMargins
from patchcert.threats import Patch
from patchcert.threats.patch import stamp_cells
from patchcert.windows.linear_placements import images_at_once

Refine = Literal["linear", "split"]
DEFAULT_BUDGET = 2000
"""Parts of margins that branch and bound takes on for an image. Nearly all images of the zoo that can be proven need
fewer than a tenth."""

_STEPS, _STEP_SIZE = 30, 0.1
"""Three times across the range of a pixel, so that signs may change on the way."""
_LIVE_COPIES = 12
"""How many tensors of forms are alive at once."""
_UNITS = 64
"""About as many units of a layer can bend on a box."""
_SHARED = 4
"""If at least this many images are open at a placement, it pays to write down what the patch moves there."""


def check_refinement(refine: object, budget: object, verdicts_only: bool) -> None:
    """Refuses settings that mean nothing, alone or together."""
    if refine not in (None, *get_args(Refine)):
        raise InvalidInput(f"refine is {refine!r}; expected 'linear', 'split' or None")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise InvalidInput(
            f"budget is {budget!r}; expected how many parts branch and bound may take for an image",
            hint=f"{DEFAULT_BUDGET} is usual",
        )
    if budget is not None and refine != "split":
        raise InvalidInput(
            "budget is a setting of refine='split'", hint="set refine='split', or leave it out"
        )
    if refine is not None and verdicts_only:
        raise InvalidInput(
            "verdicts_only does not find out which placements are open, which refine needs",
            hint="leave one of them out",
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Layers that refinement stops at: `by_interval` have no linear rule and count by their intervals, and `unsplit`
    bend otherwise than a ReLU, so that branch and bound does not begin. Bounds are sound either way."""

    by_interval: tuple[str, ...]
    unsplit: tuple[str, ...]

    @staticmethod
    def of(network: Network, images: Images) -> "Limits":
        """Those of a network on images of this size."""
        intervals = network.intervals(Interval.point(images[:1]))
        forms = torch.ones_like(intervals[-1].lower).unsqueeze(1)
        carried = BackwardPass(network, intervals).carry(forms, len(network.steps))
        bending = tuple(step.name for step in network.steps if not is_lossless(step.operation))
        return Limits(tuple(reversed(carried.by_interval)), bending)


@dataclass(frozen=True, slots=True)
class Refined:
    """Margins at all placements, none below the one that was given; and which images are broken, by what.

    `counterexamples` are members of the threat that the model, as it is deployed, gets wrong; where there is none, the
    clean image.
    """

    margins: PlacementMargins
    broken: PerImage
    counterexamples: Images


@dataclass(frozen=True, slots=True)
class Refinement:
    """Settings and model; `audit` and `network` are its traced operations, in float64 and in the type of intervals."""

    model: nn.Module
    audit: Network
    network: Network
    threat: Patch
    kind: Refine
    budget: int
    memory_budget: int
    _restrictions: dict[int, Restriction | None] = field(default_factory=dict, repr=False, compare=False)

    def restriction(self, placement: int, like: Images) -> Restriction | None:
        """What the patch moves at a placement in images like the given ones; kept, as far as memory goes."""
        if placement in self._restrictions:
            return self._restrictions[placement]
        corner = self.threat.placements(*like.shape[-2:]).corners[placement]
        pixels = stamp_cells(self.threat, corner[None].to(like.device), like.shape[1:])[0]
        found = Restriction.of(self.audit, like, pixels)
        weights = sum(each.size for each in (found, *self._restrictions.values()) if each is not None)
        if 8 * weights <= self.memory_budget:
            self._restrictions[placement] = found
        return found

    def refined(
        self, images: Images, labels: Labels, margins: PlacementMargins, is_sound: PerImage
    ) -> Refined:
        """Better margins of the images that are not proven, where the rest `is_sound`."""
        work = _Work(self, images, labels, margins, is_sound)
        work.search()
        work.bound()
        if self.kind == "split":
            work.split()
        return Refined(_rounded_down(work.margins, margins.dtype), work.confirmed(), work.found)


@dataclass(frozen=True, slots=True)
class _Open:
    """Boxes by image and placement, and the open classes of each: those of `targets` that count, the label else."""

    image: Annotated[Tensor, "b"]
    placement: Annotated[Tensor, "b"]
    targets: Annotated[Tensor, "b m"]
    counts: Annotated[Tensor, "b m"]


class _Work:
    """The images of one call, and what is known of them so far."""

    def __init__(
        self,
        settings: Refinement,
        images: Images,
        labels: Labels,
        margins: PlacementMargins,
        is_sound: PerImage,
    ) -> None:
        self.settings, self.images, self.labels = settings, images, labels
        self.margins, self.classes = margins.double(), margins.shape[2]
        self.rounding = Rounding.outward(torch.float64)
        self.pixels = images.double()
        self.corners = settings.threat.placements(*images.shape[-2:]).corners.to(images.device)
        self.is_refined = is_sound & margins.isfinite().flatten(1).all(dim=1)
        self.broken = torch.zeros_like(is_sound)
        self.found = images.clone()
        self.nodes = torch.zeros_like(labels)
        self.is_given_up = torch.zeros_like(is_sound)

    @cached_property
    def clean(self) -> list[Interval]:
        """Where all values of the clean images lie."""
        return self.settings.audit.intervals(Interval.point(self.pixels), self.rounding)

    @cached_property
    def images_at_once(self) -> int:
        """How many images are bounded together with the patch at one placement."""
        return images_at_once(self.settings.audit, self.pixels)

    def open(self) -> Annotated[Tensor, "n p k"]:
        """True for placements and classes that are to be proven yet."""
        own = torch.nn.functional.one_hot(self.labels, self.classes).bool()[:, None]
        wanted = (self.is_refined & ~self.broken)[:, None, None]
        return ~(self.margins > 0) & ~own & wanted

    def search(self) -> None:
        """Sign-gradient steps at open placements of least margin: at one first, at more where that breaks nothing."""
        for first, last in ((0, 1), (1, 4), (4, 16)):
            left = self.open()
            chosen = left.flatten(1).any(dim=1).nonzero().flatten()
            least = self.margins.masked_fill(~left, torch.inf).amin(dim=2)[chosen]
            places = least.argsort(dim=1, stable=True)[:, first:last]
            rows, columns = least.gather(1, places).isfinite().nonzero(as_tuple=True)
            size = self._boxes_at_once(1)
            for some in torch.arange(len(rows), device=rows.device).split(size):
                self._descend(chosen[rows[some]], places[rows[some], columns[some]])

    def _descend(self, image: Annotated[Tensor, "b"], placement: Annotated[Tensor, "b"]) -> None:
        """From the clean patch and from a grey one; what breaks needs no further steps."""
        for is_grey in (False, True):
            rows = (~self.broken[image]).nonzero().flatten()
            if not len(rows):
                return
            image, placement = image[rows], placement[rows]
            box = self._boxes(image, placement).map(lambda part: part.to(self.images.dtype))
            current = box.centre if is_grey else self.images[image]
            for step in range(_STEPS + 1):
                gradient, leads = self._slope(current, self.labels[image])
                wrong = (leads <= 0).nonzero().flatten()
                if len(wrong):
                    self._try(image[wrong], current[wrong])
                if step == _STEPS or bool(self.broken[image].all()):
                    break
                current = (current - _STEP_SIZE * gradient.sign()).clamp(box.lower, box.upper)

    def _slope(self, current: Images, labels: Labels) -> tuple[Images, PerImage]:
        """Where the label's lead over the best other class rises, and the lead itself."""
        own = labels.unsqueeze(1)
        with torch.enable_grad():
            given = current.detach().requires_grad_()
            logits = self.settings.network.values(given)[-1]
            others = logits.scatter(1, own, -torch.inf).amax(dim=1)
            leads = logits.gather(1, own)[:, 0] - others
            (gradient,) = torch.autograd.grad(leads.sum(), given)
        return gradient, leads.detach()

    def bound(self) -> None:
        """Linear bounds at the placements and classes that are open.

        Where several images are open at a placement, what the patch moves there is bounded alone; else whole images.
        """
        left = self.open()
        is_done = left.any(dim=2).sum(dim=0) >= _SHARED
        for placement in is_done.nonzero().flatten():
            is_done[placement] = self._bound_at(placement, left[:, placement])
        for some in self._batches(left & ~is_done[:, None], forms=None):
            self._bound(self.settings.audit, self._boxes(some.image, some.placement), some)

    def _bound_at(self, placement: Annotated[Tensor, ""], left: Annotated[Tensor, "n k"]) -> bool:
        """Linear bounds of all images that are open at one placement; False where the patch has no restriction."""
        found = self.settings.restriction(int(placement), self.pixels)
        if found is None:
            return False
        for image in left.any(dim=1).nonzero().flatten().split(self.images_at_once):
            image = image[~self.broken[image]]
            if len(image):
                some = self._of(image, placement.expand(len(image)), left[image])
                clean = [interval.map(lambda part, image=image: part[image]) for interval in self.clean]
                box = found.box(self._boxes(image, some.placement))
                self._bound(found.network(clean, self.rounding), box, some, found)
        return True

    def _bound(
        self, network: Network, box: Interval, some: "_Open", restriction: Restriction | None = None
    ) -> None:
        """Linear bounds on boxes, of whole images or of restricted ones; where a bound fails, its corner is tried."""
        intervals = network.intervals(box, self.rounding)
        forms = margin_forms(self.labels[some.image], some.targets, self.classes, torch.float64)
        for slope in SLOPES:
            found = BackwardPass(network, intervals, slope, self.rounding).bound(forms, len(network.steps))
            self._raise(some, found.lower)
            boxes, places = (some.counts & ~(found.lower > 0)).nonzero(as_tuple=True)
            if not len(boxes):
                continue
            corners = found.minimisers(box)[boxes, places]
            image = some.image[boxes]
            self._try(
                image, corners if restriction is None else restriction.filled(self.pixels[image], corners)
            )

    def split(self) -> None:
        """Branch and bound on what is left, under the budget of each image."""
        for some in self._batches(self.open(), forms=_UNITS):
            box, labels = self._boxes(some.image, some.placement), self.labels[some.image]
            small = reduced(self.settings.audit, box, labels, some.targets, self.classes, self.rounding)
            if small is None:
                return
            boxes, outputs = some.counts.nonzero(as_tuple=True)
            problems = Problems(small, boxes, outputs, some.image[boxes])
            splitting = Splitting(self.rounding, self.settings.budget)
            outcome = splitting.solve(problems, self.nodes, self._refute(problems, some.image))
            self.nodes = outcome.nodes
            self.is_given_up |= outcome.is_given_up
            lower = torch.full_like(some.targets, -torch.inf, dtype=torch.float64)
            lower[boxes, outputs] = outcome.lower
            self._raise(some, lower)

    def _refute(self, problems: Problems, image: Annotated[Tensor, "b"]) -> Refute:
        """Tries values of the free inputs of problems on the images of their boxes."""

        def refute(problem: Tensor, values: Tensor) -> Tensor:
            boxes = problems.boxes[problem]
            changed = problems.reduced.filled(boxes, self.pixels[image[boxes]], values)
            return self._try(image[boxes], changed)

        return refute

    def confirmed(self) -> PerImage:
        """The broken images, asked once more: in another batch a model may answer nearly equal logits otherwise."""
        return self.broken & (logits_of(self.settings.model, self.found).argmax(dim=1) != self.labels)

    def _batches(self, left: Annotated[Tensor, "n p k"], forms: int | None) -> Iterator["_Open"]:
        """Open boxes by image and placement, with the open classes of each, boxes with few of them first.

        Those of images that broke meanwhile, or were given up, are left out.
        """
        image, placement = left.any(dim=2).nonzero(as_tuple=True)
        order = left[image, placement].sum(dim=1).argsort(stable=True)
        image, placement = image[order], placement[order]
        start = 0
        while start < len(image):
            widest = int(left[image[start], placement[start]].sum())
            rows = slice(start, start + self._boxes_at_once(forms or widest))
            kept = ~(self.broken | self.is_given_up)[image[rows]]
            chosen, where = image[rows][kept], placement[rows][kept]
            start = rows.stop
            if len(chosen):
                yield self._of(chosen, where, left[chosen, where])

    def _of(
        self, image: Annotated[Tensor, "b"], placement: Annotated[Tensor, "b"], left: Annotated[Tensor, "b k"]
    ) -> "_Open":
        targets, counts = marked(left)
        return _Open(image, placement, torch.where(counts, targets, self.labels[image].unsqueeze(1)), counts)

    def _boxes_at_once(self, forms: int) -> int:
        with torch.no_grad():
            values = self.settings.audit.values(self.pixels[:1])
        largest = max(value.numel() for value in values)
        return max(1, self.settings.memory_budget // (8 * _LIVE_COPIES * largest * forms))

    def _boxes(self, image: Annotated[Tensor, "b"], placement: Annotated[Tensor, "b"]) -> Interval:
        return self.settings.threat.boxes(self.pixels[image], self.corners[placement][:, None]).map(
            lambda part: part[:, 0]
        )

    def _raise(self, some: "_Open", lower: Annotated[Tensor, "b m"]) -> None:
        """Higher margins where bounds are higher; a NaN changes nothing."""
        rows, places = some.counts.nonzero(as_tuple=True)
        where = some.image[rows], some.placement[rows], some.targets[rows, places]
        found = lower[rows, places]
        before = self.margins[where]
        self.margins[where] = torch.where(found > before, found, before)

    def _try(self, image: Annotated[Tensor, "b"], changed: Annotated[Tensor, "b c h w"]) -> PerImage:
        """Whether changed images break theirs; what does is kept: a member of the threat that the model gets wrong."""
        candidates = changed.to(self.images.dtype)
        wrong = logits_of(self.settings.model, candidates).argmax(dim=1) != self.labels[image]
        wrong &= self.settings.threat.contains(self.images[image], candidates)
        rows = (wrong & ~self.broken[image]).nonzero().flatten()
        # Of several that break one image the first is kept, whole.
        first = torch.full_like(self.labels, len(image)).scatter_reduce(0, image[rows], rows, "amin")
        owners = image[rows].unique()
        self.found[owners] = candidates[first[owners]]
        self.broken[owners] = True
        return wrong


def _rounded_down(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in the type, none larger than it was."""
    stored = values.to(dtype)
    below = torch.nextafter(stored, torch.full_like(stored, -torch.inf))
    return torch.where(stored.double() > values, below, stored)
