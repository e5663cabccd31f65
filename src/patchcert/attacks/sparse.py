"""The attack on a few pixels anywhere: choose those of largest first-order gain, climb, choose again."""

import itertools
from dataclasses import dataclass
from typing import Annotated, final

import torch
from torch import Tensor, nn

from patchcert.attacks.base import AttackedModel, AttackJob, Findings
from patchcert.attacks.climbing import Climbers, Effort, GradientAttack, Loss, Record, ascents_at_once
from patchcert.attacks.views import AscentImages, ImageView, PerAscent, put
from patchcert.errors import InvalidInput, whole_number
from patchcert.tensors import Images, Labels
from patchcert.threats import SparsePixels


@final
@dataclass(frozen=True)
class SparseAttack(GradientAttack):
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
        super().__post_init__()
        whole_number(1, "selections", self.selections)

    def propose(self, target: AttackedModel, job: AttackJob) -> Findings:
        """The strongest image met with no more changed pixels than the threat allows."""
        threat, images = job.threat, job.images
        if not isinstance(threat, SparsePixels):
            raise InvalidInput(
                f"SparseAttack attacks with SparsePixels, got {threat}", hint="use PatchAttack for a Patch"
            )
        effort = Effort(job, Record(target, images, job.labels), self.looks(job))
        at_once = ascents_at_once(target.surrogate, images[:1], self.batch_size)
        for still_open, turns in self.turns(effort.record, self.restarts):
            starts = torch.cat(
                [(threat.sample(images, job.generator) if turn else images)[still_open] for turn in turns]
            )
            owner = still_open.repeat(len(turns))
            for rows in self.parts(effort, owner, at_once, self._looks_of_ascent):
                self._climb(effort, threat, owner[rows], starts[rows])
        record = effort.record
        return Findings(record.images, Findings.unchanged(images).placement, record.steps)

    def looks(self, job: AttackJob) -> int:
        """From every restart."""
        return self.restarts * self._looks_of_ascent

    @property
    def _looks_of_ascent(self) -> int:
        """Its steps, and before and after each selection one more."""
        return self.steps + 2 * self.selections

    def _climb(self, effort: Effort, threat: SparsePixels, owner: PerAscent, current: AscentImages) -> None:
        """One ascent per owner: choose pixels, climb, choose again from where the climb ended."""
        record = effort.record
        model = record.target.surrogate
        for steps in self._shares():
            _, gradient = self.gradient(model, current, record.labels[owner])
            effort.look(len(owner))
            climbers = freed(model, owner, record.clean[owner], current, gradient, threat)
            climbers = self.ascend(climbers, effort, [steps] if steps else [])
            if not len(climbers):
                return
            owner = climbers.owner
            current = put(record.clean[owner], climbers.view.cells, climbers.current)

    def _shares(self) -> list[int]:
        """How many steps follow each selection; together all of them."""
        ends = [number * self.steps // self.selections for number in range(self.selections + 1)]
        return [end - start for start, end in itertools.pairwise(ends)]


def freed(
    model: nn.Module, owner: Labels, clean: Images, current: Images, gradient: Images, threat: SparsePixels
) -> Climbers:
    """Ascents on newly chosen pixels: changed ones stay, new ones jump to the end that the gradient points to."""
    cells = chosen_cells(gradient, clean, threat)
    jumped = torch.where(current != clean, current, (gradient > 0).to(clean.dtype))
    view = ImageView(model, clean, cells)
    return Climbers.at(owner, torch.full_like(owner, -1), view, jumped.flatten(1).gather(1, cells))


def chosen_cells(gradient: Images, clean: Images, threat: SparsePixels) -> Annotated[Tensor, "n v"]:
    """The cells of the pixels, or the channel values, whose free choice gains most to first order."""
    gains = torch.maximum(gradient * (1 - clean), -gradient * clean)
    if threat.unit != "pixel":
        flat = gains.flatten(1)
        return flat.topk(min(threat.pixels, flat.shape[1]), dim=1).indices
    flat = gains.sum(dim=1).flatten(1)
    pixels = flat.topk(min(threat.pixels, flat.shape[1]), dim=1).indices
    channels = torch.arange(clean.shape[1], device=clean.device) * flat.shape[1]
    return (pixels[:, None] + channels[:, None]).flatten(1)
