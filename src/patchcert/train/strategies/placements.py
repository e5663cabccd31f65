"""Training against some or all placements of a patch: every one, random ones, or those a U-net points at."""

from dataclasses import dataclass
from typing import Annotated, Literal, final

import torch
from torch import Generator, Tensor, nn

from patchcert.bounds import Interval, Network
from patchcert.errors import at_least
from patchcert.models import Normalize
from patchcert.tensors import Corners, Images, Labels, Margins
from patchcert.threats import Patch
from patchcert.train.batch_norms import trainable_network
from patchcert.train.strategy import Batch, Objective, Strategy, Subject, WorstCase, derived_seed
from patchcert.train.unet import build_unet
from patchcert.windows.passes import Clean
from patchcert.windows.training import DifferentiablePlacements, WeakestPlacements, covering_placements

Chosen = Annotated[Tensor, "n m"]
"""For each image m numbers of placements, as the threat counts them."""


@final
@dataclass(frozen=True, slots=True)
class AllPlacements(Strategy):
    """Every placement of the patch, for every image, in every step, at the memory of a handful.

    The gradient of a minimum flows only through the placements that attain it, at most one for each class. So
    all placements are swept without a gradient, and only the weakest one of each class is passed with one.
    """

    kind: Literal["all"] = "all"

    def bind(self, subject: Subject) -> Objective:
        """The least margin per class over all placements."""
        patch = PlacedPatch.of(subject)
        search = WeakestPlacements(patch.threat)

        def worst_case(batch: Batch, epsilon: float | Tensor, generator: Generator) -> WorstCase:
            return WorstCase(least_margins(patch, search, batch.own_images, batch.own_labels, epsilon))

        return Objective(patch.network, worst_case)


def least_margins(
    patch: "PlacedPatch", search: WeakestPlacements, images: Images, labels: Labels, epsilon: float | Tensor
) -> Margins:
    """The least margin per class over all placements, with the gradient of the placement that attains it."""
    clean = patch.clean(images, labels)
    weakest = search.find(patch.network, images, labels, epsilon, clean)
    classes = other_classes(labels, weakest.shape[1])
    margins = patch.margins(images, labels, weakest.gather(1, classes), epsilon, classes, clean)
    return in_class_order(labels, margins)


@final
@dataclass(frozen=True, slots=True)
class RandomPlacements(Strategy):
    """A few placements per image and step, drawn uniformly with replacement (Chiang et al. 2020)."""

    kind: Literal["random"] = "random"
    placements: int = 10

    def __post_init__(self) -> None:
        at_least(1, "placements", self.placements)

    def bind(self, subject: Subject) -> Objective:
        """The least margin per class over the placements drawn for each image."""
        patch = PlacedPatch.of(subject)

        def worst_case(batch: Batch, epsilon: float | Tensor, generator: Generator) -> WorstCase:
            drawn = patch.draw(batch, self.placements, generator)
            return WorstCase(patch.margins(batch.own_images, batch.own_labels, drawn, epsilon).amin(dim=1))

        return Objective(patch.network, worst_case)


@final
@dataclass(frozen=True, slots=True)
class GuidedPlacements(Strategy):
    """For each class, distinct placements drawn from softmax(-inverse_temperature * margin guessed by a U-net).

    The U-net maps images to a guess (n, classes, H, W) whose entry [j, top, left] is the margin of class j with
    the patch's top-left corner there. It sees no label, and learns from the margins at the placements it drew. Its
    width is 6 for grey images and 10 for others unless it is given.
    """

    kind: Literal["guided"] = "guided"
    per_class: int = 1
    width: int | None = None
    inverse_temperature: float = 1.0

    def __post_init__(self) -> None:
        at_least(1, "per_class", self.per_class)
        at_least(1, "width", self.width)

    def bind(self, subject: Subject) -> Objective:
        """Guided by a new U-net, whose weights depend on the subject's seed alone."""
        spec = subject.model_spec
        width = self.width or (6 if spec.channels == 1 else 10)
        normalise = Normalize(spec.mean, spec.std) if spec.normalises else None
        generator = Generator().manual_seed(derived_seed(subject.seed, "helper"))
        unet = build_unet(spec.channels, spec.classes, width, generator, normalise)
        return self.guided_by(unet.to(subject.device).train(), PlacedPatch.of(subject))

    def guided_by(self, helper: nn.Module, patch: "PlacedPatch") -> Objective:
        """The least margin per class over the placements drawn, and the squared error of guesses there."""

        def worst_case(batch: Batch, epsilon: float | Tensor, generator: Generator) -> WorstCase:
            corners = patch.corners(batch.images)
            places = corners[:, 0] * batch.images.shape[3] + corners[:, 1]
            guesses = helper(batch.images).flatten(2).index_select(2, places)
            chosen = self.draw(guesses.detach(), generator)[batch.rows]
            margins = patch.margins(batch.own_images, batch.own_labels, chosen, epsilon)
            guessed = guesses[batch.rows].gather(2, chosen.unsqueeze(1).expand(-1, guesses.shape[1], -1))
            errors = (guessed.transpose(1, 2) - margins.detach()).square()
            return WorstCase(margins.amin(dim=1), errors.mean(dim=(1, 2)).sum() / len(batch))

        return Objective(patch.network, worst_case, helper)

    def draw(self, guesses: Annotated[Tensor, "n k p"], generator: Generator) -> Chosen:
        """`per_class` placements for each class, one class after the other, distinct within each class.

        The largest entries of log-probability plus Gumbel noise are a draw without replacement.
        """
        noise = torch.empty(guesses.shape, dtype=guesses.dtype, device=generator.device)
        gumbel = -noise.exponential_(generator=generator).clamp(min=torch.finfo(noise.dtype).tiny).log()
        count = min(self.per_class, guesses.shape[2])
        scores = gumbel - self.inverse_temperature * guesses
        return (scores.argmax(dim=2) if count == 1 else scores.topk(count, dim=2).indices).flatten(1)


class PlacedPatch:
    """Worst-case margins of a network over a few placements per image: the differentiable half of every strategy.

    Windows and corners stay on the device of the images, so that later steps do not wait for it. `dtype` is that
    of the windows, by default the images'; fewer digits are faster, and only training may have them.
    """

    def __init__(self, network: Network, threat: Patch, dtype: torch.dtype | None = None) -> None:
        self.network = network
        self.threat = threat
        self.dtype = dtype
        self._corners: dict[tuple[object, ...], Corners] = {}
        self._windows: dict[tuple[object, ...], DifferentiablePlacements | None] = {}

    @staticmethod
    def of(subject: Subject) -> "PlacedPatch":
        """The subject's patch on its model."""
        threat, network = subject.patch, trainable_network(subject.model, subject.model_spec)
        return PlacedPatch(network, threat, subject.windows)

    def corners(self, images: Images) -> Corners:
        """All allowed corners, copied to the device once."""
        key = (images.device, *images.shape[2:])
        if key not in self._corners:
            placements = self.threat.placements(images.shape[2], images.shape[3])
            self._corners[key] = placements.corners.to(images.device)
        return self._corners[key]

    def draw(self, batch: Batch, count: int, generator: Generator) -> Chosen:
        """Random placements for the images of this process, among draws for the whole batch."""
        allowed, shape = len(self.corners(batch.images)), (len(batch), count)
        return torch.randint(allowed, shape, generator=generator, device=generator.device)[batch.rows]

    def clean(self, images: Images, labels: Labels) -> Clean | None:
        """The clean pass, with a gradient, for all that windows are asked in one step; None where there are none."""
        windows = self._cover(images)
        return None if windows is None else windows.clean(images, labels, self.dtype)

    def margins(
        self,
        images: Images,
        labels: Labels,
        chosen: Chosen,
        epsilon: float | Tensor,
        classes: Annotated[Tensor, "n m"] | None = None,
        clean: Clean | None = None,
    ) -> Annotated[Tensor, "n m k"] | Annotated[Tensor, "n m"]:
        """The margins at the chosen placements; with `classes` each against the one class given for it."""
        windows, corners = self._cover(images), self.corners(images)[chosen]
        if windows is not None:
            return windows.margins(images, labels, corners, epsilon, classes, self.dtype, clean)
        margins = self.dense_margins(images, labels, chosen, epsilon)
        return margins if classes is None else margins.gather(2, classes.unsqueeze(2)).squeeze(2)

    def dense_margins(
        self, images: Images, labels: Labels, chosen: Chosen, epsilon: float | Tensor
    ) -> Annotated[Tensor, "n m k"]:
        """The same margins the slow, obvious way: one whole image per placement."""
        repeated = labels.unsqueeze(1).expand_as(chosen).flatten()
        margins = self.network.margins(self.boxes(images, chosen, epsilon), repeated)
        return margins.unflatten(0, tuple(chosen.shape))

    def boxes(self, images: Images, chosen: Chosen, epsilon: float | Tensor) -> Interval:
        """Whole images with the patch at the chosen placements; those of an image are together."""
        return self.threat.boxes(images, self.corners(images)[chosen], epsilon).flatten(0, 1)

    def _cover(self, images: Images) -> DifferentiablePlacements | None:
        key = (images.device, images.dtype, *images.shape[1:])
        if key not in self._windows:
            self._windows = {key: covering_placements(self.network, images, self.threat)}
        return self._windows[key]


def other_classes(labels: Labels, classes: int) -> Annotated[Tensor, "n _"]:
    """The classes, one fewer than all, that are not the image's label; `in_class_order` puts them in order."""
    steps = torch.arange(1, classes, device=labels.device)
    return (labels.unsqueeze(1) + steps) % classes


def in_class_order(labels: Labels, margins: Annotated[Tensor, "n _"]) -> Margins:
    """Margins against every class, 0 at the label, from those against `other_classes`."""
    own = torch.zeros_like(margins[:, :1])
    numbers = torch.arange(margins.shape[1] + 1, device=labels.device)
    order = (numbers - labels.unsqueeze(1) - 1) % len(numbers)
    return torch.cat([margins, own], dim=1).gather(1, order)
