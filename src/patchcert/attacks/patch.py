"""The iterated sign-gradient attack on patches, with restarts and a choice of where to put them."""

from dataclasses import dataclass, replace
from typing import Literal, Self, final, get_args

import torch
from torch import Tensor, nn

from patchcert.attacks.base import Attack, Findings, Task
from patchcert.attacks.campaign import Campaign, noise, vertices
from patchcert.attacks.climbing import Climb, Loss, Record
from patchcert.attacks.placement_search import (
    PlacementMargins,
    certificate_leads,
    random_order,
    weakest_first,
)
from patchcert.attacks.settings import check_ascent, check_choice
from patchcert.attacks.windows import patch_views
from patchcert.certificates import placement_margins as interval_placement_margins
from patchcert.errors import InvalidInput
from patchcert.threats import Patch

Search = Literal["random", "sweep", "certificate"]


@final
@dataclass(frozen=True)
class PatchAttack(Attack):
    """Fills a patch by sign-gradient steps from random starts; the first wrong answer ends it for an image.

    `search` says where the restarts go. "random": a fresh random placement each, none repeated before all
    were tried. "sweep": a few steps at every placement first, then the most promising ones in turn.
    "certificate": the placements in the order of their lower bounds, weakest first; `placement_margins`
    gives the bounds, by default those of the interval certificate.

    Before a sweep, `sweep_vertices` patches of zeros and ones are tried at every placement, all of them where
    there are no more, else as many random ones. They need no gradient, which helps against a model whose
    gradient says little: a defense that decides by a threshold is blind to it between two steps.

    Images and restarts share batches of `batch_size`; broken images leave them every `check_every` steps. The
    cross entropy of a very sure model has no gradient in floating point; the margin always has one.
    """

    steps: int = 150
    step_size: float = 0.05
    restarts: int = 80
    loss: Loss = "cross-entropy"
    search: Search = "random"
    sweep_steps: int = 5
    sweep_vertices: int = 0
    placement_margins: PlacementMargins | None = None
    batch_size: int = 1024
    check_every: int = 25
    early_stop: bool = True

    def __post_init__(self) -> None:
        check_ascent(self.steps, self.step_size, self.restarts, self.loss, self.batch_size)
        check_choice("search", self.search, get_args(Search))
        if self.sweep_steps < 0 or self.sweep_vertices < 0 or self.check_every < 1:
            raise InvalidInput(
                "an attack needs sweep_steps >= 0, sweep_vertices >= 0 and check_every >= 1, got "
                f"sweep_steps={self.sweep_steps}, sweep_vertices={self.sweep_vertices} and "
                f"check_every={self.check_every}",
                hint="5, 0 and 25 are usual",
            )

    def exhaustive(self) -> Self:
        """The same attack, which does not stop at the first success but goes on to the largest margin."""
        return replace(self, early_stop=False)

    def propose(self, model: nn.Module, task: Task) -> Findings:
        """The strongest patched image met, at any placement and restart."""
        patch = task.threat
        if not isinstance(patch, Patch):
            raise InvalidInput(
                f"PatchAttack attacks with a Patch, got {patch}", hint="use SparseAttack for SparsePixels"
            )
        climb = Climb(self.loss, self.step_size, self.early_stop)
        record = Record(model, task.images, task.labels)
        views = patch_views(model, task.images, patch)
        campaign = Campaign(model, task, patch, views, climb, self.batch_size, self.check_every, record)
        order = self._order(campaign)
        campaign.spend(order, lambda: noise(task.images, patch, task.generator), self.restarts, self.steps)
        return campaign.findings()

    def _order(self, campaign: Campaign) -> Tensor:
        """The placements (n, p) of every image, in the order in which restarts take them."""
        task, placements = campaign.task, len(campaign.corners)
        images, labels = task.images, task.labels
        if self.search == "random":
            return random_order(len(images), placements, task.generator).to(images.device)
        if self.search == "certificate":
            bounds = self.placement_margins or interval_placement_margins
            margins = bounds(campaign.model, images, labels, campaign.patch)
            return weakest_first(certificate_leads(margins.detach(), labels, placements))
        return weakest_first(self._swept_leads(campaign, placements))

    def _swept_leads(self, campaign: Campaign, placements: int) -> Tensor:
        """The largest lead (n, p) met at every placement by vertices and by a few steps."""
        images, patch, generator = campaign.task.images, campaign.patch, campaign.task.generator
        every = torch.arange(placements, device=images.device).expand(len(images), -1)
        starts = [
            (corner_noise, 0) for corner_noise in vertices(images, patch, self.sweep_vertices, generator)
        ]
        starts.append((noise(images, patch, generator), self.sweep_steps))
        leads = images.new_full((len(images), placements), -torch.inf)
        for start, steps in starts:
            leads = torch.maximum(leads, campaign.spend(every, lambda start=start: start, placements, steps))
        return leads
