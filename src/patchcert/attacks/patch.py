"""The iterated sign-gradient attack on patches, with restarts and a choice of where to put them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, final, get_args

import torch
from torch import Generator, Tensor, nn

from patchcert.attacks.base import AttackedModel, AttackJob, AttackResult, Findings, judged, seeded, sure_lead
from patchcert.attacks.climbing import (
    LOSSES,
    Climbers,
    Effort,
    GradientAttack,
    Loss,
    Record,
    ascents_at_once,
    check_choice,
    segments_of,
)
from patchcert.attacks.views import ImageViews, OnCells, PerAscent, WindowViews, patch_views, put
from patchcert.bounds import precise_arithmetic
from patchcert.bounds.network import least_over_others
from patchcert.certificates import placement_margins as interval_placement_margins
from patchcert.errors import InvalidInput, UnsupportedLayer, whole_number
from patchcert.progress import Overture
from patchcert.tensors import Corners, Images, Labels
from patchcert.threats import Patch
from patchcert.threats.patch import stamp_cells

Search = Literal["random", "sweep", "certificate"]

PlacementMargins = Callable[[nn.Module, Tensor, Tensor, Patch], Tensor]
"""Lower bounds (n, placements, classes) of the label's lead, as `patchcert.placement_margins` gives them."""

PerPlacement = Annotated[Tensor, "n p"]
Noise = Annotated[Tensor, "n v"]
"""What is added to the pixels under the patch of every image, channel by channel, before an ascent begins."""


@final
@dataclass(frozen=True)
class PatchAttack(GradientAttack):
    """Fills a patch by sign-gradient steps from random starts; the first wrong answer ends it for an image.

    `search` says where the restarts go. "random": a fresh random placement each, none repeated before all
    were tried. "sweep": a few steps at every placement first, then the most promising ones in turn.
    "certificate": the placements in the order of their lower bounds, weakest first; `placement_margins`
    gives the bounds, by default those of the interval certificate.

    Before a sweep, `sweep_vertices` patches of zeros and ones are tried at every placement: all such patches if
    there are no more, otherwise random ones. They need no gradient, which helps against a model whose
    gradient says little: a defense that decides by a threshold is blind to it between two steps.

    A sweep of large images need not go everywhere: of more than `sweep_placements` it takes that many, spread evenly.

    Images and restarts share batches of `batch_size`; broken images leave them every `check_every` steps. On a CPU the
    batch of a large network runs in parts (`ascents_at_once`), from the same random starts. The cross entropy of a very
    sure model has no gradient in floating point; the margin always has one.
    """

    steps: int = 150
    step_size: float = 0.05
    restarts: int = 80
    loss: Loss = "cross-entropy"
    search: Search = "random"
    sweep_steps: int = 5
    sweep_vertices: int = 0
    sweep_placements: int | None = None
    placement_margins: PlacementMargins | None = None
    batch_size: int = 1024
    check_every: int = 25
    early_stop: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("search", self.search, get_args(Search))
        whole_number(0, "sweep_steps", self.sweep_steps)
        whole_number(0, "sweep_vertices", self.sweep_vertices)
        whole_number(1, "sweep_placements", self.sweep_placements)
        whole_number(1, "check_every", self.check_every)

    def propose(self, target: AttackedModel, job: AttackJob) -> Findings:
        """The strongest patched image met, at any placement and restart."""
        patch, images = _patch_of(job), job.images
        effort = Effort(job, Record(target, images, job.labels), self.looks(job))
        ascents = _PatchAscents(self, job, patch, patch_views(target.surrogate, images, patch), effort)
        order = self._order(target, ascents)
        ascents.spend(order, lambda: noise(images, patch, job.generator), self.restarts, self.steps)
        return ascents.findings()

    def looks(self, job: AttackJob) -> int:
        """At every placement in a sweep, and from every restart; what a certificate takes to bound is not counted."""
        patch, points = _patch_of(job), self.restarts * (self.steps + 1)
        if self.search != "sweep":
            return points
        vertices = min(self.sweep_vertices, 2 ** (job.images.shape[1] * patch.pixels))
        swept = self._swept(len(patch.placements(*job.images.shape[2:])))
        return points + (vertices + self.sweep_steps + 1) * len(swept)

    def _order(self, target: AttackedModel, ascents: "_PatchAscents") -> PerPlacement:
        """The placements of every image, in the order in which restarts take them."""
        job, placements = ascents.job, len(ascents.corners)
        if self.search == "random":
            return random_order(len(job.images), placements, job.generator).to(job.images.device)
        if self.search == "certificate":
            leads = certificate_leads(self._bounded(target, ascents), job.labels, placements)
        else:
            leads = self._swept_leads(ascents, placements)
        return leads.argsort(dim=1, descending=True, stable=True)

    def _bounded(self, target: AttackedModel, ascents: "_PatchAscents") -> Annotated[Tensor, "n p k"]:
        """The lower bounds at every placement; their time is reported as a share of the whole attack's."""
        job, work = ascents.job, (target.surrogate, ascents.job.images, ascents.job.labels, ascents.patch)
        overture = None if job.progress is None else Overture(job.progress, ascents.seconds)
        if self.placement_margins is not None:
            margins = self.placement_margins(*work)
        else:
            try:
                margins = interval_placement_margins(*work, progress=overture)
            except UnsupportedLayer as error:
                if target.surrogate in (target.judge, getattr(target.judge, "model", None)):
                    raise
                kind = type(target.judge).__name__
                raise InvalidInput(
                    f"search='certificate' goes where interval bounds are weakest, and there are none for {kind}",
                    hint="search='sweep' tries every placement; on the command line --search sweep",
                ) from error
        if overture is not None:
            overture(1, 1)
            ascents.effort.follow(overture.share)
        return margins.detach()

    def _swept_leads(self, ascents: "_PatchAscents", placements: int) -> PerPlacement:
        """The largest lead met at every placement by vertices and by a few steps."""
        images, patch, generator = ascents.job.images, ascents.patch, ascents.job.generator
        every = self._swept(placements).to(images.device).expand(len(images), -1)
        starts = [(vertex, 0) for vertex in vertices(images, patch, self.sweep_vertices, generator)]
        starts.append((noise(images, patch, generator), self.sweep_steps))
        leads = images.new_full((len(images), placements), -torch.inf)
        for start, steps in starts:
            leads = torch.maximum(
                leads, ascents.spend(every, lambda start=start: start, every.shape[1], steps)
            )
        return leads

    def _swept(self, placements: int) -> Annotated[Tensor, "_"]:
        """The numbers of the placements that a sweep goes to."""
        most = self.sweep_placements
        if most is None or placements <= most:
            return torch.arange(placements)
        return torch.arange(most) * placements // most


def _patch_of(job: AttackJob) -> Patch:
    """The threat, which must be one patch."""
    if not isinstance(job.threat, Patch):
        raise InvalidInput(
            f"PatchAttack attacks with a Patch, got {job.threat}",
            hint="use SparseAttack for SparsePixels, PatchesInTurn(PatchAttack()) for Patches",
        )
    return job.threat


@final
@dataclass(frozen=True, eq=False)
class _PatchAscents:
    """The ascents of an attack with one patch; what they find is gathered in the record of their effort."""

    attack: PatchAttack
    job: AttackJob
    patch: Patch
    views: ImageViews | WindowViews
    effort: Effort

    @cached_property
    def corners(self) -> Corners:
        """All allowed corners."""
        height, width = self.job.images.shape[2:]
        return self.patch.placements(height, width).corners.to(self.job.images.device)

    @cached_property
    def at_once(self) -> int:
        """How many of them run side by side."""
        view = self.views.at(torch.zeros_like(self.job.labels[:1]), self.corners[:1])
        point = self.job.images.flatten(1)[:1, view.cells[0]]
        return ascents_at_once(view.logits, point, self.attack.batch_size)

    def seconds(self) -> float:
        """About how long all restarts take if none succeeds, by a step that is timed once the device has warmed up."""
        images, labels = self.job.images, self.job.labels
        count = min(self.at_once, len(images) * self.attack.restarts)
        owner = torch.arange(count, device=images.device) % len(images)
        view = self.views.at(owner, self.corners[torch.zeros_like(owner)])
        point, began = images.flatten(1)[owner[:, None], view.cells], 0.0
        for _ in range(2):
            began = time.perf_counter()
            _, gradient = self.attack.gradient(view.logits, point, labels[owner])
            gradient.cpu()
        return (time.perf_counter() - began) * len(images) * self.attack.looks(self.job) / count

    def spend(
        self, order: Annotated[Tensor, "n q"], draw: Callable[[], Noise], restarts: int, steps: int
    ) -> PerPlacement:
        """Gives every open image its restarts, at the placements of `order` in turn.

        `draw` is called once per restart for noise for all images, including broken ones, so that a restart does
        not depend on how batches were cut. Returns the largest lead met at every placement.
        """
        leads = self.job.images.new_full((len(self.job.images), len(self.corners)), -torch.inf)
        for still_open, turns in self.attack.turns(self.effort.record, restarts):
            starts = torch.cat([draw()[still_open] for _ in turns])
            columns = torch.arange(turns.start, turns.stop, device=still_open.device) % order.shape[1]
            owner = still_open.repeat(len(turns))
            placement = order[owner, columns.repeat_interleave(len(still_open))]
            for rows in self.attack.parts(self.effort, owner, self.at_once, steps + 1):
                rest = self._climbed(owner[rows], placement[rows], starts[rows], steps)
                place = (rest.owner, rest.placement)
                leads[place] = torch.maximum(leads[place], rest.lead)
        return leads

    def findings(self) -> Findings:
        """The best image of every attacked image and where its patch lies."""
        record = self.effort.record
        corners = self.corners[record.placement.clamp(min=0)]
        return Findings(record.images, torch.where(record.placement[:, None] >= 0, corners, -1), record.steps)

    def _climbed(self, owner: PerAscent, placement: PerAscent, starts: OnCells, steps: int) -> Climbers:
        """One part of the ascents after their steps, without those on images that were broken."""
        view = self.views.at(owner, self.corners[placement])
        start = self.job.images.flatten(1)[owner[:, None], view.cells] + starts
        climbers = Climbers.at(owner, placement, view, start)
        return self.attack.ascend(climbers, self.effort, segments_of(steps, self.attack.check_every))


def noise(images: Images, patch: Patch, generator: Generator) -> Noise:
    """Uniform numbers in [-1, 1), on the device of the images."""
    shape = (len(images), images.shape[1] * patch.pixels)
    drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=images.dtype)
    return (2 * drawn - 1).to(images.device)


def vertices(images: Images, patch: Patch, count: int, generator: Generator) -> Iterator[Noise]:
    """Noise of -1 and 1, which takes any pixel to 0 or 1: every such patch, or `count` random ones of many.

    All images get the same one.
    """
    values = images.shape[1] * patch.pixels
    is_complete = values < count.bit_length()
    for number in range(2**values if is_complete else count):
        if is_complete:
            bits = number >> torch.arange(values) & 1
        else:
            bits = torch.randint(2, (values,), generator=generator, device=generator.device)
        yield (2 * bits - 1).to(images).expand(len(images), -1)


def random_order(images: int, placements: int, generator: Generator) -> PerPlacement:
    """All placements in an order of its own for every image, each order equally likely.

    Any number of first entries are uniform draws without replacement, so no placement is left out and none
    repeated before all have had their turn.
    """
    keys = torch.rand(images, placements, generator=generator, device=generator.device, dtype=torch.float64)
    return keys.argsort(dim=1)


def certificate_leads(margins: Annotated[Tensor, "n p k"], labels: Labels, placements: int) -> PerPlacement:
    """How far the certificate lets a wrong class lead: the least margin over them, negated."""
    if margins.ndim != 3 or margins.shape[:2] != (len(labels), placements):
        raise InvalidInput(
            f"placement margins must have the shape ({len(labels)}, {placements}, classes), "
            f"got {tuple(margins.shape)}",
            hint="give a function with the call and result of patchcert.placement_margins",
        )
    return -least_over_others(margins, labels[:, None])


@precise_arithmetic()
def reference_patch_attack(
    attack: PatchAttack,
    model: nn.Module,
    images: Images,
    labels: Labels,
    threat: Patch,
    generator: Generator | None = None,
) -> AttackResult:
    """The result of `attack`, computed one restart after the other with all images side by side.

    Its search is taken to be random. Tests hold `PatchAttack` to this slow loop, and benchmarks compare the two.
    """
    target = AttackedModel.of(model)
    target.check(images, labels)
    job = AttackJob(images, labels, threat, generator or seeded())
    clean = target.evaluate(images, labels, attack.batch_size).predictions
    right = (clean == labels).nonzero().flatten()
    found = _reference_search(attack, model, job.part(right), threat)
    return judged(target, job, Findings.unchanged(images).updated(right, found), clean, attack.batch_size)


def _reference_search(attack: PatchAttack, model: nn.Module, job: AttackJob, threat: Patch) -> Findings:
    images, labels = job.images, job.labels
    placements = threat.placements(images.shape[2], images.shape[3])
    order = random_order(len(images), len(placements), job.generator)
    best = images.clone()
    best_lead = images.new_full((len(images),), -torch.inf)
    best_corner = labels.new_full((len(images), 2), -1)
    for restart in range(attack.restarts):
        corner = placements.corners[order[:, restart % len(placements)].cpu()].to(images.device)
        box = threat.boxes(images, corner[:, None])
        lower, upper = box.lower[:, 0], box.upper[:, 0]
        cells = stamp_cells(threat, corner, images.shape[1:])
        start = put(torch.zeros_like(images), cells, noise(images, threat, job.generator))
        current = (images + start).clamp(lower, upper)
        for step in range(attack.steps + 1):
            current = current.detach().requires_grad_()
            logits = model(current)
            lead = sure_lead(logits.detach(), labels)
            better = lead > best_lead
            if attack.early_stop:
                better &= best_lead <= 0
            best = torch.where(better[:, None, None, None], current.detach(), best)
            best_lead = torch.where(better, lead, best_lead)
            best_corner = torch.where(better[:, None], corner, best_corner)
            if step < attack.steps:
                (gradient,) = torch.autograd.grad(LOSSES[attack.loss](logits, labels).sum(), current)
                current = (current + attack.step_size * gradient.sign()).clamp(lower, upper)
    return Findings(best, best_corner, labels.new_full((len(labels),), attack.restarts * attack.steps))
