"""Patches that serve more than one case: on many images, or however they are turned, scaled, lit and moved.

What they show for each image is one member of the threat, so a success refutes a certificate like any other. That they
fail proves nothing, and less than an attack on each image by itself.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self, final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from patchcert.attacks.base import AttackedModel, AttackJob, Findings
from patchcert.attacks.climbing import GradientAttack, Loss, ascents_at_once
from patchcert.attacks.composite import better
from patchcert.attacks.views import put
from patchcert.certificates.checks import check_inputs
from patchcert.errors import InvalidInput, whole_number
from patchcert.tensors import Images, Labels, PerImage
from patchcert.threats import Patch, Placements, Threat
from patchcert.threats.patch import stamp_cells, stamp_offsets

Contents = Annotated[Tensor, "n c height width"]
"""What patches show, on the bounding box of the stamp; values beside the stamp are never seen."""
CornersOf = Annotated[Tensor, "n 2"]
Content = Annotated[Tensor, "1 c height width"]
Shared = Annotated[Tensor, "_ c _ _"]
"""The contents of as many patches as images, or of fewer, which images have in common in turn."""


@final
@dataclass(frozen=True)
class Transform:
    """Random changes that a patch must survive, each drawn uniformly and by itself.

    It is turned about its centre by up to `rotation` degrees either way, and made larger or smaller by a factor between
    1 - `scale` and 1 + `scale`; its values are multiplied by a factor between 1 - `brightness` and 1 + `brightness`;
    and it is moved by up to `shift` pixels up or down, left or right, where that is an allowed placement.

    Only pixels under the stamp change, whatever is drawn: where a turned or smaller patch leaves some free the image is
    seen behind it, and what would be seen beyond the stamp is cut off. So what is shown is a member of the threat.
    """

    rotation: float = 0.0
    scale: float = 0.0
    brightness: float = 0.0
    shift: int = 0

    def __post_init__(self) -> None:
        limits = {"rotation": 180.0, "scale": 0.9, "brightness": 1.0, "shift": float("inf")}
        for name, most in limits.items():
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise InvalidInput(
                    f"{name} of a transform is {value!r}; expected a number from 0 to {most:g}"
                )

    def apply(self, contents: Contents, stamp: Tensor, behind: Contents, generator: Generator) -> Contents:
        """Each patch after one random draw, in front of what lies behind it; with a gradient to the contents."""
        drawn = torch.rand(len(contents), 3, generator=generator, device=generator.device)
        turn, size, light = (2 * drawn.to(contents) - 1).unbind(dim=1)
        contents = (contents * (1 + self.brightness * light)[:, None, None, None]).clamp(0, 1)
        if not self.rotation and not self.scale:
            return contents
        grid = _grid(contents, turn * (self.rotation * torch.pi / 180), 1 + self.scale * size)
        inside = stamp.to(contents).expand(len(contents), 1, -1, -1)
        layers = torch.cat([contents * inside, inside], dim=1)
        moved = F.grid_sample(layers, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        return (moved[:, :-1] + (1 - moved[:, -1:]) * behind).clamp(0, 1)

    def moved(self, corners: CornersOf, placements: Placements, generator: Generator) -> CornersOf:
        """The corners after one random draw; where that is no allowed placement, as they were."""
        if not self.shift:
            return corners
        offset = torch.randint(
            -self.shift, self.shift + 1, corners.shape, generator=generator, device=generator.device
        )
        drawn, own = corners.cpu() + offset.cpu(), corners.cpu()
        allowed = torch.zeros(placements.rows, placements.columns, dtype=torch.bool)
        allowed[tuple(placements.corners.cpu().T)] = True
        inside = ((drawn >= 0) & (drawn < torch.tensor(allowed.shape))).all(dim=1)
        places = torch.where(inside[:, None], drawn, own)
        return torch.where(allowed[tuple(places.T)][:, None], places, own).to(corners)


def _grid(contents: Contents, angle: PerImage, factor: PerImage) -> Annotated[Tensor, "n height width 2"]:
    """Where each pixel of a patch, turned and enlarged, comes from; pixels are squares in boxes of any shape."""
    height, width = contents.shape[2:]
    cosine, sine, nothing = angle.cos() / factor, angle.sin() / factor, torch.zeros_like(angle)
    across = torch.stack([cosine, -sine * (height / width), nothing], dim=1)
    down = torch.stack([sine * (width / height), cosine, nothing], dim=1)
    return F.affine_grid(
        torch.stack([across, down], dim=1), [len(contents), 1, height, width], align_corners=False
    )


@final
@dataclass(frozen=True, eq=False)
class Printer:
    """Shows patches on images under random draws of a transform."""

    patch: Patch
    transform: Transform
    generator: Generator

    def show(self, images: Images, corners: CornersOf, contents: Shared) -> Images:
        """Each image with a patch at its corner, after a draw; where contents are fewer, they are taken in turn."""
        contents = contents.repeat(len(images) // len(contents), 1, 1, 1)
        box = Patch((self.patch.height, self.patch.width))
        around = stamp_cells(box, corners, images.shape[1:])
        behind = images.flatten(1).gather(1, around).view_as(contents)
        seen = self.transform.apply(contents, self.patch.stamp, behind, self.generator)
        rows, columns = stamp_offsets(self.patch, images.device)
        cells = stamp_cells(self.patch, corners, images.shape[1:])
        return put(images, cells, seen[:, :, rows, columns].flatten(1))

    def placements(self, images: Images) -> Placements:
        """Where the patch may be in such images."""
        return self.patch.placements(images.shape[2], images.shape[3])

    def corners(self, images: Images) -> CornersOf:
        """A random corner for each image."""
        return self.placements(images).sample((len(images),), self.generator).to(images.device)

    def moved(self, images: Images, corners: CornersOf) -> CornersOf:
        """The corners after a draw."""
        return self.transform.moved(corners, self.placements(images), self.generator)

    def noise(self, images: Images) -> Contents:
        """Random contents, one for each image."""
        shape = (len(images), images.shape[1], self.patch.height, self.patch.width)
        drawn = torch.rand(shape, generator=self.generator, device=self.generator.device, dtype=images.dtype)
        return drawn.to(images.device)


@final
class Climb:
    """The steps of printed patches on one model: what shows them, how many images run at once, and what is done.

    `looks` are all images that all steps show.
    """

    def __init__(self, model: nn.Module, printer: Printer, job: AttackJob, size: int, looks: int) -> None:
        self.model, self.printer, self.job, self.looks, self.done = model, printer, job, looks, 0
        self.at_once = ascents_at_once(model, job.images[:1], size)

    def looked(self, images: int) -> None:
        """Report that the model has looked at more images."""
        self.done += images
        self.job.report(len(self.job.images) * self.done / self.looks, len(self.job.images))


class PrintedAttack(GradientAttack):
    """What attacks with printed patches share; `trials` fresh draws are shown of each image, the strongest counts."""

    transform: Transform
    trials: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(1, "trials", self.trials)

    def exhaustive(self) -> Self:
        """The same attack: it has no early stop."""
        return self

    def printer(self, threat: Threat, generator: Generator) -> Printer:
        """What shows the patch of the threat, which must be one."""
        if not isinstance(threat, Patch):
            raise InvalidInput(
                f"{type(self).__name__} attacks with a Patch, got {threat}", hint="give patchcert.Patch(5)"
            )
        return Printer(threat, self.transform, generator)

    def climbed(
        self, climb: "Climb", contents: Shared, images: Images, labels: Labels, corners: CornersOf
    ) -> Shared:
        """The contents after one sign-gradient step on the loss of the images that show them.

        The loss is a sum over images, so that its gradient is gathered from as many of them at a time as a step allows.
        """
        with torch.enable_grad():
            point = contents.detach().requires_grad_()
            shown = climb.printer.show(images, corners, point)
        parts, size = list[Tensor](), climb.at_once
        for some, own in zip(shown.detach().split(size), labels.split(size), strict=True):
            parts.append(self.gradient(climb.model, some, own)[1])
            climb.looked(len(own))
        (gradient,) = torch.autograd.grad(shown, point, torch.cat(parts))
        return torch.add(contents, gradient.sign(), alpha=self.step_size).clamp(0, 1)

    @torch.no_grad()
    def strongest(
        self,
        target: AttackedModel,
        printer: Printer,
        job: AttackJob,
        contents: Shared,
        draw_corners: Callable[[], CornersOf],
    ) -> Findings:
        """Of fresh draws for each image the one with the largest margin."""
        best = Findings.unchanged(job.images)
        steps = torch.full_like(best.steps, self.steps * self.restarts)
        margins = job.images.new_full((len(job.images),), -torch.inf)
        for _ in range(self.trials):
            corners = draw_corners()
            images = printer.show(job.images, corners, contents)
            reached = target.evaluate(images, job.labels, self.batch_size).margins
            best = better(best, Findings(images, corners, best.steps), reached > margins)
            margins = torch.maximum(margins, reached)
        return replace(best, steps=steps)


@final
@dataclass(frozen=True, eq=False)
class UniversalAttack(PrintedAttack):
    """One patch for all images: learned on `images`, then shown on others, at random placements.

    Learning climbs the mean loss over batches of the given images, each with the patch at a random placement. Of
    `restarts` patches the one that misleads most of them counts. Attacked images should be others: success on them then
    says how well the patch does on images that it was not made for.
    """

    images: Images
    labels: Labels
    transform: Transform = Transform()
    steps: int = 300
    step_size: float = 0.02
    restarts: int = 1
    loss: Loss = "cross-entropy"
    trials: int = 1
    batch_size: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_inputs(nn.Identity(), self.images, self.labels)
        if not len(self.images):
            raise InvalidInput("a universal patch is learned on one image at least, got none")

    @property
    def needs_all_images(self) -> bool:
        """One patch is learned for all of them."""
        return True

    def propose(self, target: AttackedModel, job: AttackJob) -> Findings:
        """The learned patch on each image."""
        printer = self.printer(job.threat, job.generator)
        content = self._best(target.surrogate, printer, job)
        return self.strongest(target, printer, job, content, lambda: printer.corners(job.images))

    def learn(
        self, model: nn.Module, threat: Patch, generator: Generator
    ) -> Annotated[Tensor, "c height width"]:
        """The patch itself, on the bounding box of the stamp."""
        job = AttackJob(self.images, self.labels, threat, generator)
        return self._best(model, self.printer(threat, generator), job)[0]

    def _best(self, model: nn.Module, printer: Printer, job: AttackJob) -> Content:
        """Of all restarts the patch that misleads most of the images it is learned on."""
        images, labels = self.images.to(job.images), self.labels.to(job.labels)
        best, most = printer.noise(images[:1]), -1
        looks = self.restarts * self.steps * min(self.batch_size, len(images))
        climb = Climb(model, printer, job, self.batch_size, looks)
        for _ in range(self.restarts):
            content = printer.noise(images[:1])
            for _ in range(self.steps):
                rows = self._batch(job.generator).to(images.device)
                corners = printer.corners(images[rows])
                content = self.climbed(climb, content, images[rows], labels[rows], corners)
            misled = self._misled(model, printer, content, images, labels)
            best, most = (content, misled) if misled > most else (best, most)
        return best

    def _batch(self, generator: Generator) -> Annotated[Tensor, "b"]:
        size = min(self.batch_size, len(self.images))
        return torch.randperm(len(self.images), generator=generator, device=generator.device)[:size]

    @torch.no_grad()
    def _misled(
        self, model: nn.Module, printer: Printer, content: Content, images: Images, labels: Labels
    ) -> int:
        """How many of the images the patch misleads."""
        misled = 0
        for some, own in zip(images.split(self.batch_size), labels.split(self.batch_size), strict=True):
            answers = model(printer.show(some, printer.corners(some), content)).argmax(dim=1)
            misled += int((answers != own).sum())
        return misled

    def describe(self) -> dict[str, Any]:
        """The settings, with how many images it is learned on and a sum of them in place of the images."""
        pixels = hashlib.sha256(self.images.float().cpu().contiguous().numpy().tobytes())
        own = {"learned_on": len(self.images), "learned_on_sha256": pixels.hexdigest()}
        settings = {
            name: value for name, value in super().describe().items() if name not in ("images", "labels")
        }
        return settings | own


@final
@dataclass(frozen=True)
class TransformedAttack(PrintedAttack):
    """A patch for each image that works however it is turned, scaled, lit and moved (Athalye et al. 2018).

    It climbs the mean loss over `samples` random draws of the transform, at a random placement. Of all restarts the one
    counts that leads by most in the mean over fresh draws. What is judged is shown under one more fresh draw, so that
    accuracy under attack is that under random transforms, not under those that the patch was made for.
    """

    transform: Transform = Transform(rotation=15, scale=0.1, brightness=0.1, shift=1)
    steps: int = 100
    step_size: float = 0.05
    restarts: int = 4
    loss: Loss = "margin"
    samples: int = 8
    trials: int = 1
    batch_size: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(1, "samples", self.samples)

    def propose(self, target: AttackedModel, job: AttackJob) -> Findings:
        """The patch of each image under a fresh draw."""
        printer = self.printer(job.threat, job.generator)
        best, place = printer.noise(job.images), printer.corners(job.images)
        most = job.images.new_full((len(job.images),), -torch.inf)
        looks = self.restarts * self.steps * self.samples * len(job.images)
        climb = Climb(target.surrogate, printer, job, self.batch_size, looks)
        for _ in range(self.restarts):
            corners, contents = printer.corners(job.images), printer.noise(job.images)
            for _ in range(self.steps):
                contents = self._climbed(climb, job, corners, contents)
            lead = self._mean_lead(target, printer, job, corners, contents)
            is_better = lead > most
            best = torch.where(is_better[:, None, None, None], contents, best)
            place = torch.where(is_better[:, None], corners, place)
            most = torch.maximum(most, lead)
        return self.strongest(target, printer, job, best, lambda: printer.moved(job.images, place))

    def _climbed(self, climb: Climb, job: AttackJob, corners: CornersOf, contents: Contents) -> Contents:
        """One step for all images, as many at once as a batch holds with all their samples."""
        size, parts = max(1, self.batch_size // self.samples), []
        for start in range(0, len(contents), size):
            rows = slice(start, start + size)
            images = job.images[rows].repeat(self.samples, 1, 1, 1)
            labels = job.labels[rows].repeat(self.samples)
            places = climb.printer.moved(images, corners[rows].repeat(self.samples, 1))
            parts.append(self.climbed(climb, contents[rows], images, labels, places))
        return torch.cat(parts)

    @torch.no_grad()
    def _mean_lead(
        self, target: AttackedModel, printer: Printer, job: AttackJob, corners: CornersOf, contents: Contents
    ) -> PerImage:
        """By how much the best wrong class leads in the mean over fresh draws."""
        total = job.images.new_zeros(len(job.images))
        for _ in range(self.samples):
            images = printer.show(job.images, printer.moved(job.images, corners), contents)
            total += target.evaluate(images, job.labels, self.batch_size).margins
        return total / self.samples
