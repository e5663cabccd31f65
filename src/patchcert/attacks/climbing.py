"""Sign-gradient ascent in [0, 1], many starts at once, and the best image met for every attacked image."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor

from patchcert.attacks.base import (
    Attack,
    AttackedModel,
    AttackJob,
    Rows,
    require_finite,
    sure_lead,
    wrong_lead,
)
from patchcert.attacks.views import AscentLogits, OnCells, PerAscent, View, put
from patchcert.errors import InvalidInput, whole_number
from patchcert.tensors import Images, Labels, Logits, PerImage
from patchcert.work import bytes_made, count_at_once

Loss = Literal["cross-entropy", "margin"]

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": lambda logits, labels: F.cross_entropy(logits, labels, reduction="none"),
    "margin": wrong_lead,
}

# A thread of a CPU takes 50 ps for a multiply-add with its gradient, in narrow networks up to 170 ps, so that a step of
# this many takes one to three seconds. Measured on residual networks of 12 to 560 million for an image, which larger
# batches make no faster.
WORK_AT_ONCE = 2**34

# Images of a residual network take 1.7 times as long one by one as in large batches, and 1.2 times in fours.
FEWEST_AT_ONCE = 4


# Half of a GPU for what a step keeps for its gradient; the other half for gradients on their way, and for others.
SHARE_OF_MEMORY = 0.5


def ascents_at_once(look: Callable[[Tensor], Logits], point: Tensor, batch_size: int) -> int:
    """How many ascents run side by side, at most a batch: on a CPU so few that a step of theirs takes about a second,
    on a GPU so few that it fits into memory.

    `point` is where one ascent looks from.
    """
    if point.is_cuda:
        memory = torch.cuda.get_device_properties(point.device).total_memory
        return fitting_at_once(look, point, batch_size, int(SHARE_OF_MEMORY * memory))
    return count_at_once(look, point, batch_size, WORK_AT_ONCE, FEWEST_AT_ONCE)


def fitting_at_once(look: Callable[[Tensor], Logits], point: Tensor, batch_size: int, memory: int) -> int:
    """How many ascents keep no more bytes for their gradients than there are, at most a batch and at least one."""
    return min(batch_size, max(1, memory // max(bytes_made(look, point), 1)))


@final
@dataclass(frozen=True, eq=False)
class Climbers:
    """Ascents under way (m): what each may change, where it is, and the best point it has met."""

    owner: PerAscent
    """Index of the attacked image."""
    placement: PerAscent
    """Index of the placement; -1 where there is none."""
    view: View
    current: OnCells
    """Values of the view's cells."""
    best: OnCells
    lead: PerAscent
    """Of `best`: by how much, beyond rounding, the best wrong class leads the label."""

    @classmethod
    def at(cls, owner: PerAscent, placement: PerAscent, view: View, start: OnCells) -> "Climbers":
        """New ascents at the values nearest to the given ones."""
        current = start.clamp(0, 1)
        return cls(owner, placement, view, current, current, current.new_full((len(current),), -torch.inf))

    def __len__(self) -> int:
        return len(self.owner)

    def keep(self, index: Rows) -> "Climbers":
        """The ascents of these indices; the same object where these are all."""
        if len(index) == len(self):
            return self
        return Climbers(
            self.owner[index],
            self.placement[index],
            self.view.keep(index),
            self.current[index],
            self.best[index],
            self.lead[index],
        )


@final
class Record:
    """The best image met so far for every attacked image, over all ascents."""

    def __init__(self, target: AttackedModel, images: Images, labels: Labels) -> None:
        self.target, self.clean, self.labels = target, images, labels
        self.images = images.clone()
        self.lead = images.new_full((len(images),), -torch.inf)
        self.placement = torch.full((len(images),), -1, dtype=torch.long, device=images.device)
        self.steps = torch.zeros_like(self.placement)

    def update(self, climbers: Climbers) -> Climbers:
        """Keep what the ascents found, of equally good points the first; the ascents, corrected where necessary.

        Where what an ascent sees is not exactly what decides, the judge is asked about each point to be kept.
        """
        count, order = len(climbers), torch.arange(len(climbers), device=climbers.owner.device)
        reached = self.lead.scatter_reduce(0, climbers.owner, climbers.lead, "amax")
        attains = climbers.lead == reached[climbers.owner]
        first = torch.full_like(self.placement, count).scatter_reduce(
            0, climbers.owner, torch.where(attains, order, count), "amin"
        )
        improved = ((reached > self.lead) & (first < count)).nonzero().flatten()
        kept = first[improved]
        if not len(kept):
            return climbers
        changed = put(self.clean[improved], climbers.view.cells[kept], climbers.best[kept])
        lead = climbers.lead[kept]
        if not (self.target.is_exact and climbers.view.is_exact):
            lead = self.target.evaluate(changed, self.labels[improved]).sure_margins
            climbers = replace(climbers, lead=climbers.lead.index_copy(0, kept, lead))
        self._keep(improved, changed, climbers.placement[kept], lead)
        return climbers

    def _keep(self, index: PerImage, images: Images, placement: PerImage, lead: PerImage) -> None:
        better = lead > self.lead[index]
        self.images[index] = torch.where(better[:, None, None, None], images, self.images[index])
        self.placement[index] = torch.where(better, placement, self.placement[index])
        self.lead[index] = torch.maximum(lead, self.lead[index])


@final
class Effort:
    """How much of an attack is done, by the points that ascents look at.

    Broken images are spared the rest, so that the share that is done is what was spent of it and of what is left for
    the open ones. It never falls.
    """

    def __init__(self, job: AttackJob, record: Record, looks: int) -> None:
        """`looks` are those at each image that stays open to the end."""
        self.job, self.record = job, record
        self.ahead, self.each, self.spent, self.open = float(looks), 0.0, 0, len(job.images)

    def follow(self, share: float) -> None:
        """Other work came first, which was this share of all."""
        self.job = self.job.between(share, 1.0)

    def begin(self, ahead: float, each: float) -> None:
        """Ascents begin with `ahead` looks left for each open image; one by all of them is worth `each` of these."""
        self.ahead, self.each = ahead, each

    def look(self, ascents: int) -> None:
        """These ascents have looked once more, or will have: only a CPU is as far as what it was told."""
        self.spent += ascents
        self.ahead -= self.each
        if self.job.images.device.type == "cpu":
            self._report()

    def settle(self, still_open: int) -> None:
        """All looks are over, and `still_open` images are not broken."""
        self.open = still_open
        self._report()

    def _report(self) -> None:
        images, left = len(self.job.images), self.open * max(self.ahead, 0.0)
        self.job.report(images * self.spent / (self.spent + left), images)


def segments_of(steps: int, length: int) -> list[int]:
    """The steps in segments of at most `length`."""
    return [min(length, steps - start) for start in range(0, steps, length)]


class GradientAttack(Attack):
    """Climbs by sign-gradient steps under these settings; subclasses are dataclasses that give them defaults."""

    steps: int
    step_size: float
    restarts: int
    loss: Loss
    early_stop: bool

    def __post_init__(self) -> None:
        """Refuse settings with which no ascent can run."""
        whole_number(0, "steps", self.steps)
        whole_number(1, "restarts", self.restarts)
        whole_number(1, "batch_size", self.batch_size)
        if not 0 < self.step_size < math.inf:
            raise InvalidInput(
                f"step_size is {self.step_size}; expected a number above 0", hint="0.05 is usual"
            )
        check_choice("loss", self.loss, tuple(LOSSES))

    def exhaustive(self) -> Self:
        """The same attack without an early stop: it continues after a success, to the largest margin."""
        return replace(self, early_stop=False)  # pyright: ignore[reportArgumentType]

    def turns(self, record: Record, restarts: int) -> Iterator[tuple[Rows, range]]:
        """The images still worth attacking and the numbers of their next restarts, as many as fit into a batch."""
        done = 0
        while done < restarts and len(still_open := self._still_open(record)):
            group = min(max(self.batch_size // len(still_open), 1), restarts - done)
            yield still_open, range(done, done + group)
            done += group

    def _still_open(self, record: Record) -> Rows:
        if self.early_stop:
            return (record.lead <= 0).nonzero().flatten()
        return torch.arange(len(record.lead), device=record.lead.device)

    def parts(self, effort: Effort, owner: PerAscent, at_once: int, looks: int) -> Iterator[Rows]:
        """The ascents of each owner in parts of at most `at_once`, without those on images that an earlier part broke.

        Every open image owns equally many of them, and each looks `looks` times.
        """
        rows = torch.arange(len(owner), device=owner.device).split(at_once)
        each = len(owner) / max(effort.open, 1) / len(rows)
        ahead = effort.ahead
        for number, part in enumerate(rows):
            effort.begin(ahead - number * each * looks, each)
            if self.early_stop:
                part = part[effort.record.lead[owner[part]] <= 0]
            if len(part):
                yield part
        effort.begin(ahead - len(rows) * each * looks, 0.0)

    def ascend(self, climbers: Climbers, effort: Effort, segments: list[int]) -> Climbers:
        """Run the ascents in segments of steps, after each of which those on broken images end; the rest."""
        record = effort.record
        for steps in segments:
            record.steps.index_add_(0, climbers.owner, torch.full_like(climbers.owner, steps))
            climbers = record.update(self._advance(climbers, effort, steps))
            effort.settle(len(self._still_open(record)))
            if self.early_stop:
                climbers = climbers.keep((record.lead[climbers.owner] <= 0).nonzero().flatten())
            if not len(climbers):
                return climbers
        climbers = record.update(self._finish(record.labels, climbers))
        effort.look(len(climbers))
        effort.settle(len(self._still_open(record)))
        return climbers

    def gradient(
        self, look: Callable[[Tensor], Logits], point: Tensor, labels: Labels
    ) -> tuple[Logits, Tensor]:
        """The logits at a point, and the gradient there of the sum of their losses."""
        with torch.enable_grad():
            point = point.detach().requires_grad_()
            logits = look(point)
            (gradient,) = torch.autograd.grad(LOSSES[self.loss](logits, labels).sum(), point)
        return logits.detach(), gradient

    def _advance(self, climbers: Climbers, effort: Effort, steps: int) -> Climbers:
        """The ascents after `steps` steps; every point is evaluated before it is left.

        Waits for the device only at the end.
        """
        truth = effort.record.labels[climbers.owner]
        current, best, lead = climbers.current, climbers.best, climbers.lead
        peak = torch.zeros_like(lead)
        for _ in range(steps):
            logits, gradient = self.gradient(climbers.view.logits, current, truth)
            best, lead, size = self._better(best, lead, current, logits, truth)
            peak = torch.maximum(peak, size)
            current = torch.add(current, gradient.sign(), alpha=self.step_size).clamp(0, 1)
            effort.look(len(climbers))
        require_finite(peak.isfinite().all())
        return replace(climbers, current=current, best=best, lead=lead)

    @torch.no_grad()
    def _finish(self, labels: Labels, climbers: Climbers) -> Climbers:
        """The ascents with their last point evaluated too."""
        logits, truth = climbers.view.logits(climbers.current), labels[climbers.owner]
        best, lead, size = self._better(climbers.best, climbers.lead, climbers.current, logits, truth)
        require_finite(size.isfinite().all())
        return replace(climbers, best=best, lead=lead)

    def _better(
        self, best: OnCells, lead: PerAscent, current: OnCells, logits: AscentLogits, truth: PerAscent
    ) -> tuple[OnCells, PerAscent, PerAscent]:
        """The better of the best and the current points, its lead, and the size of the logits, NaN included.

        With an early stop a success is never given up.
        """
        size = logits.abs().amax(dim=1).to(lead.dtype)
        reached = sure_lead(logits, truth).to(lead.dtype)
        improved = reached > lead
        if self.early_stop:
            improved &= lead <= 0
        return torch.where(improved[:, None], current, best), torch.where(improved, reached, lead), size


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a word that is none of the choices."""
    if value not in choices:
        raise InvalidInput(
            f"unknown {name} {value!r} of an attack", hint=f"choose one of {', '.join(choices)}"
        )
