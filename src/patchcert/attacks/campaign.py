"""Many restarts on many images: which are still open, how they share batches, and what is found."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Generator, Tensor, nn

from patchcert.attacks.base import Findings, Task
from patchcert.attacks.climbing import Climb, Climbers, Record, climb_all, segments_of
from patchcert.threats import Patch

Draw = Callable[[], Tensor]


def noise(images: Tensor, generator: Generator) -> Tensor:
    """Uniform numbers in [-1, 1) for every pixel of every image, on the images' device."""
    drawn = torch.rand(images.shape, generator=generator, device=generator.device, dtype=images.dtype)
    return (2 * drawn - 1).to(images.device)


@final
@dataclass(frozen=True, eq=False)
class Campaign:
    """An attack on a task with one patch; what is found is gathered in `record`."""

    model: nn.Module
    task: Task
    patch: Patch
    climb: Climb
    batch_size: int
    check_every: int
    record: Record

    @property
    def corners(self) -> Tensor:
        """All allowed corners (p, 2)."""
        height, width = self.task.images.shape[2:]
        return self.patch.placements(height, width).corners.to(self.task.images.device)

    def spend(self, order: Tensor, draw: Draw, restarts: int, steps: int) -> Tensor:
        """Every open image gets its restarts, at the placements of `order` (n, q) in turn.

        `draw` is asked once per restart for noise on all images, broken ones too, so that a restart does not
        depend on how batches were cut. Returns the largest lead met at every placement (n, p).
        """
        corners = self.corners
        leads = self.task.images.new_full((len(self.task.images), len(corners)), -torch.inf)
        done = 0
        while done < restarts and len(chosen := self.record.open(self.climb.early_stop)):
            group = min(max(self.batch_size // len(chosen), 1), restarts - done)
            starts = torch.cat([draw()[chosen] for _ in range(group)])
            turns = torch.arange(done, done + group, device=chosen.device) % order.shape[1]
            owner = chosen.repeat(group)
            placement = order[owner, turns.repeat_interleave(len(chosen))]
            for climbers in self._batches(owner, placement, starts, corners):
                self._run(climbers, steps, leads)
            done += group
            self.task.tell(done, restarts)
        return leads

    def findings(self) -> Findings:
        """The best image of every attacked image and where its patch lies."""
        found = self.record.placement[:, None]
        corners = self.corners[self.record.placement.clamp(min=0)]
        return Findings(self.record.images, torch.where(found >= 0, corners, -1), self.record.steps)

    def _batches(
        self, owner: Tensor, placement: Tensor, starts: Tensor, corners: Tensor
    ) -> Iterator[Climbers]:
        for first in range(0, len(owner), self.batch_size):
            part = slice(first, first + self.batch_size)
            clean = self.task.images[owner[part]]
            boxes = self.patch.boxes(clean, corners[placement[part]][:, None])
            yield Climbers.at(
                owner[part], placement[part], boxes.lower[:, 0], boxes.upper[:, 0], clean + starts[part]
            )

    def _run(self, climbers: Climbers, steps: int, leads: Tensor) -> None:
        segments = segments_of(steps, self.check_every)
        left = climb_all(self.climb, self.model, self.task.labels, climbers, self.record, segments)
        place = (left.owner, left.placement)
        leads[place] = torch.maximum(leads[place], left.lead)
