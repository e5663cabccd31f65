"""The attack on a few pixels anywhere: choose those of largest first-order gain, climb, choose again."""

import itertools
from dataclasses import dataclass, replace
from typing import Self, final

import torch
from torch import Generator, Tensor, nn

from patchcert.attacks.base import Attack, Findings, Task
from patchcert.attacks.climbing import LOSSES, Climb, Climbers, Loss, Record, climb_all
from patchcert.attacks.settings import check_ascent
from patchcert.attacks.views import ImageView, put
from patchcert.errors import InvalidInput
from patchcert.threats import SparsePixels


@final
@dataclass(frozen=True)
class SparseAttack(Attack):
    """Changes the pixels whose full change would raise the loss most by its gradient, and climbs on them.

    The choice is made anew `selections` times, from the gradient where the last climb ended; `steps`
    sign-gradient steps are shared between them. The first restart begins at the clean image, the others at
    random members of the threat.
    """

    steps: int = 100
    step_size: float = 0.1
    restarts: int = 20
    loss: Loss = "margin"
    selections: int = 10
    batch_size: int = 1024
    early_stop: bool = True

    def __post_init__(self) -> None:
        check_ascent(self.steps, self.step_size, self.restarts, self.loss, self.batch_size)
        if self.selections < 1:
            raise InvalidInput(
                f"a sparse attack chooses its pixels at least once, got selections={self.selections}",
                hint="10 is usual",
            )

    def exhaustive(self) -> Self:
        """The same attack, which does not stop at the first success but goes on to the largest margin."""
        return replace(self, early_stop=False)

    def propose(self, model: nn.Module, task: Task) -> Findings:
        """The strongest image met with so few changed pixels."""
        threat, images = task.threat, task.images
        if not isinstance(threat, SparsePixels):
            raise InvalidInput(
                f"SparseAttack attacks with SparsePixels, got {threat}", hint="use PatchAttack for a Patch"
            )
        record = Record(model, images, task.labels)
        done = 0
        while done < self.restarts and len(chosen := record.open(self.early_stop)):
            group = min(max(self.batch_size // len(chosen), 1), self.restarts - done)
            starts = [_start(done + turn, images, threat, task.generator)[chosen] for turn in range(group)]
            owners = chosen.repeat(group).split(self.batch_size)
            for owner, start in zip(owners, torch.cat(starts).split(self.batch_size), strict=True):
                self._climb(model, task, threat, owner, start, record)
            done += group
            task.tell(done, self.restarts)
        return Findings(record.images, Findings.unchanged(images).placement, record.steps)

    def _climb(
        self,
        model: nn.Module,
        task: Task,
        threat: SparsePixels,
        owner: Tensor,
        current: Tensor,
        record: Record,
    ) -> None:
        """One ascent per owner: choose pixels, climb, choose again from where the climb ended."""
        climb = Climb(self.loss, self.step_size, self.early_stop)
        for steps in self._shares():
            gradient = self._gradient(model, current, task.labels[owner])
            climbers = freed(model, owner, task.images[owner], current, gradient, threat)
            climbers = climb_all(climb, climbers, record, [steps] if steps else [])
            if not len(climbers):
                return
            owner = climbers.owner
            current = put(task.images[owner], climbers.view.cells, climbers.current)

    def _shares(self) -> list[int]:
        """How many steps follow each selection; together all of them."""
        ends = [number * self.steps // self.selections for number in range(self.selections + 1)]
        return [end - start for start, end in itertools.pairwise(ends)]

    def _gradient(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            point = images.detach().requires_grad_()
            loss = LOSSES[self.loss](model(point), labels).sum()
            return torch.autograd.grad(loss, point)[0]


def _start(restart: int, images: Tensor, threat: SparsePixels, generator: Generator) -> Tensor:
    return images if restart == 0 else threat.sample(images, generator)


def freed(
    model: nn.Module, owner: Tensor, clean: Tensor, current: Tensor, gradient: Tensor, threat: SparsePixels
) -> Climbers:
    """Ascents on newly chosen pixels: changed ones stay, new ones jump to the end the gradient points to."""
    cells = chosen_cells(gradient, clean, threat)
    jumped = torch.where(current != clean, current, (gradient > 0).to(clean.dtype))
    view = ImageView(model, clean, cells)
    return Climbers.at(owner, torch.full_like(owner, -1), view, jumped.flatten(1).gather(1, cells))


def chosen_cells(gradient: Tensor, clean: Tensor, threat: SparsePixels) -> Tensor:
    """The cells (n, v) of the pixels, or the channel values, whose free choice gains most to first order."""
    gains = torch.maximum(gradient * (1 - clean), -gradient * clean)
    if threat.unit != "pixel":
        flat = gains.flatten(1)
        return flat.topk(min(threat.pixels, flat.shape[1]), dim=1).indices
    flat = gains.sum(dim=1).flatten(1)
    pixels = flat.topk(min(threat.pixels, flat.shape[1]), dim=1).indices
    channels = torch.arange(clean.shape[1], device=clean.device) * flat.shape[1]
    return (pixels[:, None] + channels[:, None]).flatten(1)
