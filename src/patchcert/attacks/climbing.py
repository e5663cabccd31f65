"""Sign-gradient ascent in [0, 1], many starts at once, and the best image met for every attacked image."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.attacks.judging import require_finite, wrong_lead
from patchcert.attacks.views import View, put

Loss = Literal["cross-entropy", "margin"]

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": lambda logits, labels: F.cross_entropy(logits, labels, reduction="none"),
    "margin": wrong_lead,
}

_ROUNDING = 100.0


@final
@dataclass(frozen=True, eq=False)
class Climbers:
    """Ascents under way (m): what each may change, where it is, and the best point it has met."""

    owner: Tensor
    """Index of the attacked image."""
    placement: Tensor
    """Index of the placement; -1 where there is none."""
    view: View
    current: Tensor
    """Values (m, v) of the view's cells."""
    best: Tensor
    lead: Tensor
    """Of `best`: by how much, beyond rounding, the best wrong class leads the label."""

    @classmethod
    def at(cls, owner: Tensor, placement: Tensor, view: View, start: Tensor) -> "Climbers":
        """New ascents at the values nearest to the given ones."""
        current = start.clamp(0, 1)
        return cls(owner, placement, view, current, current, current.new_full((len(current),), -torch.inf))

    def __len__(self) -> int:
        return len(self.owner)

    def keep(self, index: Tensor) -> "Climbers":
        """The ascents of these indices; the same where these are all."""
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
@dataclass(frozen=True)
class Climb:
    """The rule of an ascent: what is maximised, how long the steps are, whether the first success ends it."""

    loss: Loss
    step_size: float
    early_stop: bool

    def advance(self, labels: Tensor, climbers: Climbers, steps: int) -> Climbers:
        """So many steps; every point is evaluated before it is left. Waits for the device only at the end.

        `labels` are those of the attacked images, not of the climbers.
        """
        truth, loss = labels[climbers.owner], LOSSES[self.loss]
        current, best, lead = climbers.current, climbers.best, climbers.lead
        peak = torch.zeros_like(lead)
        for _ in range(steps):
            with torch.enable_grad():
                point = current.detach().requires_grad_()
                logits = climbers.view.logits(point)
                (gradient,) = torch.autograd.grad(loss(logits, truth).sum(), point)
            best, lead, size = self._better(best, lead, current, logits.detach(), truth)
            peak = torch.maximum(peak, size)
            current = torch.add(current, gradient.sign(), alpha=self.step_size).clamp(0, 1)
        require_finite(peak.isfinite().all())
        return replace(climbers, current=current, best=best, lead=lead)

    @torch.no_grad()
    def finish(self, labels: Tensor, climbers: Climbers) -> Climbers:
        """The ascents with their last point evaluated too."""
        logits, truth = climbers.view.logits(climbers.current), labels[climbers.owner]
        best, lead, size = self._better(climbers.best, climbers.lead, climbers.current, logits, truth)
        require_finite(size.isfinite().all())
        return replace(climbers, best=best, lead=lead)

    def _better(
        self, best: Tensor, lead: Tensor, current: Tensor, logits: Tensor, truth: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The better of the best and the current points, its lead, and the size of the logits, NaN included.

        With an early stop a success is never given up.
        """
        size = logits.abs().amax(dim=1).to(lead.dtype)
        reached = sure_lead(logits, truth).to(lead.dtype)
        improved = reached > lead
        if self.early_stop:
            improved &= lead <= 0
        return torch.where(improved[:, None], current, best), torch.where(improved, reached, lead), size


def sure_lead(logits: Tensor, labels: Tensor) -> Tensor:
    """The wrong class's lead less what rounding may have given it.

    The same image in a batch of another size has slightly other logits. A success beyond that survives the
    framework's own check.
    """
    scale = 1 + logits.abs().amax(dim=1)
    return wrong_lead(logits, labels) - _ROUNDING * torch.finfo(logits.dtype).eps * scale


@final
class Record:
    """The best image met so far for every attacked image, over all ascents."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        self.model, self.clean, self.labels = model, images, labels
        self.images = images.clone()
        self.lead = images.new_full((len(images),), -torch.inf)
        self.placement = torch.full((len(images),), -1, dtype=torch.long, device=images.device)
        self.steps = torch.zeros_like(self.placement)

    def update(self, climbers: Climbers) -> Climbers:
        """Take over what the ascents found, of equally good ones the first; the ascents, put right if need be.

        Where a view is not exact the model itself is asked about what would be taken over, and believed.
        """
        count, order = len(climbers), torch.arange(len(climbers), device=climbers.owner.device)
        reached = self.lead.scatter_reduce(0, climbers.owner, climbers.lead, "amax")
        attains = climbers.lead == reached[climbers.owner]
        first = torch.full_like(self.placement, count).scatter_reduce(
            0, climbers.owner, torch.where(attains, order, count), "amin"
        )
        improved = ((reached > self.lead) & (first < count)).nonzero().flatten()
        chosen = first[improved]
        if not len(chosen):
            return climbers
        changed = put(self.clean[improved], climbers.view.cells[chosen], climbers.best[chosen])
        lead = climbers.lead[chosen]
        if not climbers.view.is_exact:
            lead = self._asked(changed, self.labels[improved]).to(lead.dtype)
            climbers = replace(climbers, lead=climbers.lead.index_copy(0, chosen, lead))
        self._take_over(improved, changed, climbers.placement[chosen], lead)
        return climbers

    def _take_over(self, index: Tensor, images: Tensor, placement: Tensor, lead: Tensor) -> None:
        better = lead > self.lead[index]
        self.images[index] = torch.where(better[:, None, None, None], images, self.images[index])
        self.placement[index] = torch.where(better, placement, self.placement[index])
        self.lead[index] = torch.maximum(lead, self.lead[index])

    @torch.no_grad()
    def _asked(self, images: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(images)
        require_finite(logits.isfinite().all())
        return sure_lead(logits, labels)

    def count(self, climbers: Climbers, steps: int) -> None:
        """Write down steps spent by the ascents."""
        self.steps.index_add_(0, climbers.owner, torch.full_like(climbers.owner, steps))

    def open(self, early_stop: bool) -> Tensor:
        """The indices of the images that are still worth attacking."""
        if early_stop:
            return (self.lead <= 0).nonzero().flatten()
        return torch.arange(len(self.lead), device=self.lead.device)


def climb_all(climb: Climb, climbers: Climbers, record: Record, segments: list[int]) -> Climbers:
    """Run the ascents in segments, after each of which those whose image is broken are given up; the rest."""
    for steps in segments:
        record.count(climbers, steps)
        climbers = record.update(climb.advance(record.labels, climbers, steps))
        if climb.early_stop:
            climbers = climbers.keep((record.lead[climbers.owner] <= 0).nonzero().flatten())
        if not len(climbers):
            return climbers
    return record.update(climb.finish(record.labels, climbers))


def segments_of(steps: int, length: int) -> list[int]:
    """The steps in segments of at most `length`."""
    return [min(length, steps - start) for start in range(0, steps, length)]
