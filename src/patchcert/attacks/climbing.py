"""Sign-gradient ascent inside boxes, many starts at once, and the best image met for every attacked image."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchcert.attacks.judging import require_finite, wrong_lead

Loss = Literal["cross-entropy", "margin"]

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": lambda logits, labels: F.cross_entropy(logits, labels, reduction="none"),
    "margin": wrong_lead,
}

_ROUNDING = 100.0


@final
@dataclass(frozen=True, eq=False)
class Climbers:
    """Ascents under way (m): where each may go, where it is, and the best point it has met."""

    owner: Tensor
    """Index of the attacked image."""
    placement: Tensor
    """Index of the placement; -1 where there is none."""
    lower: Tensor
    upper: Tensor
    current: Tensor
    best: Tensor
    lead: Tensor
    """Of `best`: by how much, beyond rounding, the best wrong class leads the label."""

    @classmethod
    def at(cls, owner: Tensor, placement: Tensor, lower: Tensor, upper: Tensor, start: Tensor) -> "Climbers":
        """New ascents at the nearest points of their boxes to the given starts."""
        current = torch.minimum(torch.maximum(start, lower), upper)
        lead = current.new_full((len(current),), -torch.inf)
        return cls(owner, placement, lower, upper, current, current, lead)

    def __len__(self) -> int:
        return len(self.owner)

    def keep(self, index: Tensor) -> "Climbers":
        """The ascents of these indices."""
        return Climbers(
            self.owner[index],
            self.placement[index],
            self.lower[index],
            self.upper[index],
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

    def advance(self, model: nn.Module, labels: Tensor, climbers: Climbers, steps: int) -> Climbers:
        """So many steps; every point is evaluated before it is left. Waits for the device only at the end.

        `labels` are those of the attacked images, not of the climbers.
        """
        truth = labels[climbers.owner]
        current, best, lead = climbers.current, climbers.best, climbers.lead
        sound = torch.ones((), dtype=torch.bool, device=current.device)
        for _ in range(steps):
            with torch.enable_grad():
                point = current.detach().requires_grad_()
                logits = model(point)
                (gradient,) = torch.autograd.grad(LOSSES[self.loss](logits, truth).sum(), point)
            best, lead = self._better(best, lead, current, logits.detach(), truth)
            sound &= logits.isfinite().all()
            moved = current + self.step_size * gradient.sign()
            current = torch.minimum(torch.maximum(moved, climbers.lower), climbers.upper)
        require_finite(sound)
        return replace(climbers, current=current, best=best, lead=lead)

    @torch.no_grad()
    def finish(self, model: nn.Module, labels: Tensor, climbers: Climbers) -> Climbers:
        """The ascents with their last point evaluated too."""
        truth = labels[climbers.owner]
        logits = model(climbers.current)
        require_finite(logits.isfinite().all())
        best, lead = self._better(climbers.best, climbers.lead, climbers.current, logits, truth)
        return replace(climbers, best=best, lead=lead)

    def _better(
        self, best: Tensor, lead: Tensor, current: Tensor, logits: Tensor, truth: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The better of the best and the current points; with an early stop a success is never given up."""
        reached = sure_lead(logits, truth).to(lead.dtype)
        improved = reached > lead
        if self.early_stop:
            improved &= lead <= 0
        return torch.where(improved[:, None, None, None], current, best), torch.where(improved, reached, lead)


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

    def __init__(self, images: Tensor) -> None:
        self.images = images.clone()
        self.lead = images.new_full((len(images),), -torch.inf)
        self.placement = torch.full((len(images),), -1, dtype=torch.long, device=images.device)
        self.steps = torch.zeros_like(self.placement)

    def update(self, climbers: Climbers) -> None:
        """Take over what the ascents found; of equally good ones the first."""
        count, order = len(climbers), torch.arange(len(climbers), device=climbers.owner.device)
        reached = self.lead.scatter_reduce(0, climbers.owner, climbers.lead, "amax")
        attains = climbers.lead == reached[climbers.owner]
        first = torch.full_like(self.placement, count).scatter_reduce(
            0, climbers.owner, torch.where(attains, order, count), "amin"
        )
        improved = ((reached > self.lead) & (first < count)).nonzero().flatten()
        chosen = first[improved]
        self.images[improved] = climbers.best[chosen]
        self.placement[improved] = climbers.placement[chosen]
        self.lead = reached

    def count(self, climbers: Climbers, steps: int) -> None:
        """Write down steps spent by the ascents."""
        self.steps.index_add_(0, climbers.owner, torch.full_like(climbers.owner, steps))

    def open(self, early_stop: bool) -> Tensor:
        """The indices of the images that are still worth attacking."""
        if early_stop:
            return (self.lead <= 0).nonzero().flatten()
        return torch.arange(len(self.lead), device=self.lead.device)


def climb_all(
    climb: Climb, model: nn.Module, labels: Tensor, climbers: Climbers, record: Record, segments: list[int]
) -> Climbers:
    """Run the ascents in segments, after each of which those whose image is broken are given up; the rest."""
    for steps in segments:
        record.count(climbers, steps)
        climbers = climb.advance(model, labels, climbers, steps)
        record.update(climbers)
        if climb.early_stop:
            climbers = climbers.keep((record.lead[climbers.owner] <= 0).nonzero().flatten())
        if not len(climbers):
            return climbers
    climbers = climb.finish(model, labels, climbers)
    record.update(climbers)
    return climbers


def segments_of(steps: int, length: int) -> list[int]:
    """The steps in segments of at most `length`."""
    return [min(length, steps - start) for start in range(0, steps, length)]
