"""Training on linear bounds, and on a mixture of bounds and an attack, at the placements that are weakest.

All placements are ranked without a gradient, as in training on all of them; linear bounds and attacks, which cost more,
look only at the weakest.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal, final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from patchcert.bounds import Interval, Network
from patchcert.bounds.linear import (
    SLOPES,
    Slope,
    adaptive,
    best_bound,
    flat,
    interval_bound,
    margin_forms,
    parallel,
)
from patchcert.errors import SpecError, at_least
from patchcert.tensors import Images, Labels, Margins, PlacementMargins
from patchcert.train.strategies.placements import (
    AllPlacements,
    Chosen,
    PlacedPatch,
    in_class_order,
    other_classes,
)
from patchcert.train.strategy import Batch, Objective, Strategy, Subject, WorstCase, logit_margins
from patchcert.windows.linear_sweep import LinearSweep, Numbers, has_one_layer, hidden_layer
from patchcert.windows.passes import Clean
from patchcert.windows.training import WeakestPlacements, search_budget

Targets = Annotated[Tensor, "n m t"]
"""For each image and each of m placements the classes that are bounded there."""

_CHOICES: dict[str, tuple[Slope, ...]] = {
    "best": SLOPES,
    "adaptive": (adaptive,),
    "flat": (flat,),
    "parallel": (parallel,),
}


@final
@dataclass(frozen=True, slots=True)
class Weakest(Strategy):
    """Margins at the weakest placements, by linear bounds or intervals, mixed with those of an attack.

    The weakest placement is one for each class, or with `placements = "image"` one for all, where the cross entropy is
    largest. Intervals of all placements say which it is or, with `candidates` above 1, which few the linear bound
    chooses from. With `search = "linear"` linear bounds with parallel lines say so, of all placements or, in each step,
    of as many as `searched` says, evenly spaced from a random one; they are quick for networks of one hidden layer, and
    others are refused. With `search = "attack"` a step of an attack says so, at as many placements and of any network:
    the patch's middle, moved to the corner that the gradient points at. It costs less, and guides where bounds are
    loose. A linear bound is the best over `slopes` of lower lines, and never below the interval's; of one hidden layer
    it is quickest with parallel ones.

    Margins to learn from are `mixture` times the bound's and, for the rest, those of an attack: `attack_steps` steps by
    the sign of the gradient, from a random patch at the weakest placement. A network that is trained on less of the
    bound keeps more accuracy and needs a tighter certificate: `IntervalBounds(model, refine="linear" or "split")`.

    Until the share `starts_at` of the epochs is done, margins are those of `all`, which cost a fraction of the time.
    """

    kind: Literal["weakest"] = "weakest"
    bound: Literal["linear", "interval"] = "linear"
    slopes: Literal["best", "adaptive", "flat", "parallel"] = "best"
    placements: Literal["class", "image"] = "class"
    search: Literal["interval", "linear", "attack"] = "interval"
    searched: int | None = None
    candidates: int = 1
    mixture: float = 1.0
    attack_steps: int = 8
    starts_at: float = 0.0

    def __post_init__(self) -> None:
        at_least(1, "searched", self.searched)
        at_least(1, "candidates", self.candidates)
        at_least(1, "attack_steps", self.attack_steps)
        if not 0 <= self.mixture <= 1:
            raise SpecError(f"mixture is {self.mixture}; expected a share of the bound, from 0 to 1")
        if not 0 <= self.starts_at <= 1:
            raise SpecError(f"starts_at is {self.starts_at}; expected a share of the epochs, from 0 to 1")
        if self.bound == "interval" and (self.candidates > 1 or self.search == "linear"):
            raise SpecError(
                f"candidates is {self.candidates} and search {self.search!r}, but intervals are trained on, which "
                "have looked at all placements",
                hint='leave both out, or set strategy.bound = "linear"',
            )
        if self.searched is not None and self.search == "interval":
            raise SpecError(
                f"searched is {self.searched}, but intervals look at all placements",
                hint='leave it out, or set strategy.search = "linear" or "attack"',
            )
        if self.search == "attack" and self.placements == "class":
            raise SpecError(
                'search is "attack", which looks for one placement of an image, and placements is "class"',
                hint='set strategy.placements = "image"',
            )

    def bind(self, subject: Subject) -> Objective:
        """The margins at the weakest placements of each image."""
        training = WeakestTraining(self, PlacedPatch.of(subject), subject.model_spec.classes)
        if self.search == "linear":
            hidden_layer(training.patch.network)
        weakest = Objective(training.patch.network, training.worst_case)
        if self.starts_at == 0:
            return weakest
        return replace(AllPlacements().bind(subject), later=weakest, later_from=self.starts_at)


class WeakestTraining:
    """The strategy at work on a network; keeps the geometry of placements between steps."""

    def __init__(self, strategy: Weakest, patch: PlacedPatch, classes: int) -> None:
        self.strategy, self.patch, self.classes = strategy, patch, classes
        self.search = WeakestPlacements(patch.threat)
        self.has_one_layer = has_one_layer(patch.network)
        self._sweeps: dict[tuple[object, ...], LinearSweep] = {}

    def worst_case(self, batch: Batch, epsilon: float | Tensor, generator: Generator) -> WorstCase:
        """The mixture of bounds and attack."""
        images, labels, mixture = batch.own_images, batch.own_labels, self.strategy.mixture
        by_interval = "interval" in (self.strategy.search, self.strategy.bound)
        clean = self.patch.clean(images, labels) if by_interval else None
        numbers = self.searched(images, generator)
        ranked = self.ranked(images, labels, epsilon, clean, numbers)
        chosen = self.choose(images, labels, ranked, epsilon, numbers)
        bounded = self.bounded(images, labels, chosen, epsilon, clean)
        if mixture == 1:
            return WorstCase(bounded)
        noise = torch.rand(batch.images.shape, generator=generator, device=generator.device)[batch.rows]
        placement = chosen if chosen.shape[1] == 1 else _placed(hardest(ranked, 1), numbers)
        box = self.patch.boxes(images, placement, epsilon)
        attacked = attacked_margins(self.patch.network, box, noise, labels, self.strategy.attack_steps)
        return WorstCase(torch.lerp(attacked, bounded, mixture), bounded=bounded)

    def searched(self, images: Images, generator: Generator) -> Numbers | None:
        """The placements that are ranked in this step, where they are not all: evenly spaced from a random one."""
        count, placements = self.strategy.searched, len(self.patch.corners(images))
        if count is None or count >= placements:
            return None
        start = torch.rand((), generator=generator, device=generator.device, dtype=torch.float64)
        steps = torch.arange(count, device=images.device, dtype=torch.float64)
        # A rounded quotient just below the count would be one too many.
        return ((steps + start) * (placements / count)).long().clamp(max=placements - 1)

    def ranked(
        self,
        images: Images,
        labels: Labels,
        epsilon: float | Tensor,
        clean: Clean | None = None,
        numbers: Numbers | None = None,
    ) -> PlacementMargins:
        """Margins without a gradient: by intervals at all placements, or by other means at those of the numbers."""
        if self.strategy.search == "interval":
            return self.search.margins(self.patch.network, images, labels, epsilon, clean)
        if self.strategy.search == "linear":
            return self._sweep(images).margins(images, labels, epsilon, numbers)
        if self.has_one_layer:
            return self._sweep(images).attacked(images, labels, epsilon, numbers)
        return self.attacked_on_images(images, labels, epsilon, numbers)

    @torch.no_grad()
    def attacked_on_images(
        self, images: Images, labels: Labels, epsilon: float | Tensor, numbers: Numbers | None = None
    ) -> PlacementMargins:
        """Margins after a step of an attack, with a whole image for each placement, whatever the network."""
        if numbers is None:
            numbers = torch.arange(len(self.patch.corners(images)), device=images.device)
        found = [self._attacked_at(images, labels, epsilon, each) for each in numbers.split(1)]
        return torch.stack(found, dim=1)

    def _attacked_at(
        self, images: Images, labels: Labels, epsilon: float | Tensor, number: Numbers
    ) -> Margins:
        """From the middle of the patch a step of any length ends in the corner that the gradient points at."""
        box = self.patch.boxes(images, number.expand(len(images), 1), epsilon)
        middle = torch.full_like(images, 0.5)
        return attacked_margins(self.patch.network, box, middle, labels, steps=1)

    def _sweep(self, images: Images) -> LinearSweep:
        key = (images.device, images.dtype, *images.shape[1:])
        if key not in self._sweeps:
            budget = search_budget(images.device)
            self._sweeps = {key: LinearSweep.of(self.patch.network, images, self.patch.threat, budget)}
        return self._sweeps[key]

    @torch.no_grad()
    def choose(
        self,
        images: Images,
        labels: Labels,
        ranked: PlacementMargins,
        epsilon: float | Tensor,
        numbers: Numbers | None = None,
    ) -> Chosen:
        """The weakest placement against each other class, in the order of `other_classes`, or the one for all."""
        others, count = other_classes(labels, self.classes), min(self.strategy.candidates, ranked.shape[1])
        if self.strategy.placements == "image":
            found = _placed(hardest(ranked, count), numbers)
            if count == 1:
                return found
            targets = others.unsqueeze(1).expand(-1, count, -1)
            margins = self.linear(images, labels, found, targets, epsilon)
            return found.gather(1, _cross_entropy(margins).argmax(dim=1, keepdim=True))
        by_class = ranked.gather(2, others.unsqueeze(1).expand(-1, ranked.shape[1], -1))
        if count == 1:
            return _placed(by_class.argmin(dim=1), numbers)
        found = _placed(by_class.topk(count, dim=1, largest=False).indices.transpose(1, 2), numbers)
        targets = others.unsqueeze(2).expand_as(found).flatten(1).unsqueeze(2)
        margins = self.linear(images, labels, found.flatten(1), targets, epsilon).reshape(found.shape)
        return found.gather(2, margins.argmin(dim=2, keepdim=True)).squeeze(2)

    def bounded(
        self,
        images: Images,
        labels: Labels,
        chosen: Chosen,
        epsilon: float | Tensor,
        clean: Clean | None = None,
    ) -> Margins:
        """Margins at the chosen placements, of which there are one for each other class, or one for all of them."""
        by_class, others = self.strategy.placements == "class", other_classes(labels, self.classes)
        if self.strategy.bound == "linear":
            targets = others.unsqueeze(2 if by_class else 1)
            margins = self.linear(images, labels, chosen, targets, epsilon)
            return in_class_order(labels, margins.flatten(1))
        if not by_class:
            return self.patch.margins(images, labels, chosen, epsilon, clean=clean)[:, 0]
        return in_class_order(labels, self.patch.margins(images, labels, chosen, epsilon, others, clean))

    def linear(
        self, images: Images, labels: Labels, chosen: Chosen, targets: Targets, epsilon: float | Tensor
    ) -> Targets:
        """Margins against the targets at each placement: linear bounds, or the interval's where that is better."""
        if self.has_one_layer and self.strategy.slopes == "parallel":
            return self._sweep(images).margins_at(images, labels, chosen, epsilon).gather(2, targets)
        return self.linear_on_images(images, labels, chosen, targets, epsilon)

    def linear_on_images(
        self, images: Images, labels: Labels, chosen: Chosen, targets: Targets, epsilon: float | Tensor
    ) -> Targets:
        """The same with a whole image for each placement, whatever the network and its slopes."""
        network, repeated = self.patch.network, labels.unsqueeze(1).expand_as(chosen).flatten()
        intervals = network.intervals(self.patch.boxes(images, chosen, epsilon))
        forms = margin_forms(repeated, targets.flatten(0, 1), self.classes, images.dtype)
        found = best_bound(network, intervals, forms, slopes=_CHOICES[self.strategy.slopes])
        found = torch.maximum(found, interval_bound(network, intervals, forms))
        return found.unflatten(0, tuple(chosen.shape))


def _placed(positions: Tensor, numbers: Numbers | None) -> Tensor:
    """The numbers of placements, from positions among those that were ranked."""
    return positions if numbers is None else numbers[positions]


def hardest(ranked: PlacementMargins, count: int) -> Chosen:
    """The placements at which an image has the largest cross entropy, the largest first."""
    return _cross_entropy(ranked).topk(count, dim=1).indices


def _cross_entropy(margins: Annotated[Tensor, "n p t"]) -> Annotated[Tensor, "n p"]:
    """Up to a function that rises: margins may have the label's own 0 among them, or not."""
    return torch.logsumexp(-margins, dim=2)


def attacked_margins(network: Network, box: Interval, noise: Images, labels: Labels, steps: int) -> Margins:
    """Margins of members of each image's box that steps by the sign of the gradient have made worse, from the noise.

    The steps add up to twice the width of the box, so that a pixel can cross it and come back.
    """
    width = box.upper - box.lower
    current = box.lower + noise.to(width.dtype) * width
    for _ in range(steps):
        with torch.enable_grad():
            given = current.detach().requires_grad_()
            loss = F.cross_entropy(network.values(given)[-1], labels, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, given)
        current = box.clamped(current + gradient.sign() * width * (2 / steps))
    return logit_margins(network.values(current.detach())[-1], labels)
