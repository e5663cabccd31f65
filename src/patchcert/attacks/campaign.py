"""Many restarts on many images: which are still open, how they share batches, and what is found."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Generator, Tensor, nn

from patchcert.attacks.base import Findings, Task
from patchcert.attacks.climbing import Climb, Climbers, Record, climb_all, segments_of
from patchcert.attacks.views import Views
from patchcert.threats import Patch

Draw = Callable[[], Tensor]


def noise(images: Tensor, patch: Patch, generator: Generator) -> Tensor:
    """Uniform numbers in [-1, 1) for the pixels of a patch on every image, (n, channels * pixels), on their device."""
    shape = (len(images), images.shape[1] * patch.pixels)
    drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=images.dtype)
    return (2 * drawn - 1).to(images.device)


def vertices(images: Tensor, patch: Patch, count: int, generator: Generator) -> Iterator[Tensor]:
    """Noise of -1 and 1, which takes any pixel to 0 or 1: every such patch, or `count` random ones of many.

    All images get the same one, each (n, channels * pixels).
    """
    values = images.shape[1] * patch.pixels
    is_complete = values < count.bit_length()
    for number in range(2**values if is_complete else count):
        if is_complete:
            bits = number >> torch.arange(values) & 1
        else:
            bits = torch.randint(2, (values,), generator=generator, device=generator.device)
        yield (2 * bits - 1).to(images).expand(len(images), -1)


@final
@dataclass(frozen=True, eq=False)
class Campaign:
    """An attack on a task with one patch; what is found is gathered in `record`."""

    model: nn.Module
    task: Task
    patch: Patch
    views: Views
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

        `draw` is asked once per restart for noise for all images, broken ones too, so that a restart does not
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
        pixels = self.task.images.flatten(1)
        for first in range(0, len(owner), self.batch_size):
            part = slice(first, first + self.batch_size)
            view = self.views.at(owner[part], corners[placement[part]])
            start = pixels[owner[part, None], view.cells] + starts[part]
            yield Climbers.at(owner[part], placement[part], view, start)

    def _run(self, climbers: Climbers, steps: int, leads: Tensor) -> None:
        left = climb_all(self.climb, climbers, self.record, segments_of(steps, self.check_every))
        place = (left.owner, left.placement)
        leads[place] = torch.maximum(leads[place], left.lead)
