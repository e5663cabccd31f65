"""Certificates: per image a proof that no member of a threat changes the prediction, or "not proven"."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor, nn

from patchcert.bounds import Network, Rounding, precise_arithmetic, subnormals_kept, trace
from patchcert.certify.checks import (
    bound_dtype,
    check_fit,
    check_inputs,
    check_logits,
    check_trace,
    copy_of_type,
    has_finite_weights,
    logits_of,
    model_of_type,
)
from patchcert.errors import InvalidInput
from patchcert.progress import Progress
from patchcert.threats import Patch, SparsePixels
from patchcert.windows.clean import exact_clean_pass
from patchcert.windows.dense import dense_margins
from patchcert.windows.memory import default_budget, default_image_budget, images_within, rows_within
from patchcert.windows.sweep import PlacementSweep, covering_sweep
from patchcert.windows.verdicts import VerdictSweep


@dataclass(frozen=True, slots=True, repr=False)
class Certificates:
    """One row per image. `certified` is proven: no member of the threat changes the prediction away from the
    label.

    `margins` are proven lower bounds, in exact arithmetic, of logit[label] - logit[class] over the threat,
    rounded down; 0 at the label. `worst_placement` is the (top, left) where the least of them lies, (-1, -1)
    for threats without placements. An image is certified only if its prediction is the label and all other
    margins are positive.
    """

    certified: Tensor
    margins: Tensor
    worst_placement: Tensor
    predictions: Tensor
    labels: Tensor

    def __repr__(self) -> str:
        right = int((self.predictions == self.labels).sum())
        return (
            f"Certificates({len(self.labels)} images, {right} right, {int(self.certified.sum())} certified)"
        )

    @property
    def clean_accuracy(self) -> float:
        return _share(self.predictions == self.labels)

    @property
    def certified_accuracy(self) -> float:
        return _share(self.certified)

    @property
    def least_margin(self) -> Tensor:
        """The least margin (n,) over the other classes."""
        own = self.labels.unsqueeze(1)
        return self.margins.scatter(1, own, torch.inf).amin(dim=1)


def _share(flags: Tensor) -> float:
    return float(flags.double().mean()) if len(flags) else float("nan")


class Certifier(Protocol):
    """Anything that proves predictions: bounds, smoothing, masking, votes."""

    def certify(
        self, model: nn.Module, images: Tensor, labels: Tensor, threat: Patch | SparsePixels
    ) -> Certificates:
        """Certificates for the images under the threat."""
        ...


@final
@dataclass(frozen=True, slots=True)
class IntervalCertifier:
    """Proofs by interval bounds, exact over all placements and sound under rounding.

    `dtype` is the arithmetic of the bounds (default: the model's, float32 at least); float64 is an audit with
    far less widening. `memory_budget` is in bytes; on a CPU float32 results do not depend on it, on a GPU
    libraries sum in another order for other sizes. They are proven either way. With `verdicts_only` an image
    is let go as soon as it is decided: the same images are certified in less time, but no margins and
    placements are given: they are NaN and (-1, -1). Where that saves nothing, against sparse changes and where
    placements are bounded one by one, they are given all the same.
    """

    dtype: torch.dtype | None = None
    memory_budget: int | None = None
    progress: Progress | None = None
    verdicts_only: bool = False

    def __post_init__(self) -> None:
        budget = self.memory_budget
        if budget is not None and (not isinstance(budget, int) or budget < 1):
            raise InvalidInput(
                f"memory_budget is {budget!r}; expected a positive number of bytes", hint="2 GiB are 2**31"
            )

    def certify(
        self, model: nn.Module, images: Tensor, labels: Tensor, threat: Patch | SparsePixels
    ) -> Certificates:
        """Certificates for the images under the threat."""
        with torch.no_grad(), precise_arithmetic(), subnormals_kept():
            task = _Task.of(self, model, images, labels, threat)
            if task.verdicts is not None:
                return task.bare_verdicts(torch.cat([task.proven(chunk) for chunk in task.chunks()]))
            return task.certificates([task.least(chunk) for chunk in task.chunks()])

    def placement_margins(self, model: nn.Module, images: Tensor, labels: Tensor, threat: Patch) -> Tensor:
        """The whole certificate map: margins (n, placements, classes)."""
        if not isinstance(threat, Patch):
            raise InvalidInput(
                f"{threat} has no placements", hint="use certify for threats without placements"
            )
        with torch.no_grad(), precise_arithmetic(), subnormals_kept():
            task = _Task.of(self, model, images, labels, threat)
            pieces = [task.margins(chunk) for chunk in task.chunks()]
            shape = (0, len(threat.placements(*images.shape[-2:])), task.classes)
            return torch.cat(pieces) if pieces else images.new_empty(shape)


def certify(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    threat: Patch | SparsePixels,
    *,
    dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
    progress: Progress | None = None,
    verdicts_only: bool = False,
) -> Certificates:
    """Proves, image by image, that no member of the threat changes the prediction away from the label.

    The model takes images (n, c, h, w) in [0, 1] to logits. The keywords are those of `IntervalCertifier`; `progress`
    is called with how many images are done, and how many there are.
    """
    certifier = IntervalCertifier(dtype, memory_budget, progress, verdicts_only)
    return certifier.certify(model, images, labels, threat)


def placement_margins(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    threat: Patch,
    *,
    dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Proven margins (n, placements, classes) with the patch at each of its placements."""
    return IntervalCertifier(dtype, memory_budget, progress).placement_margins(model, images, labels, threat)


@dataclass(frozen=True, slots=True)
class _Task:
    """One call: checked inputs, the network in the dtype of the bounds and in float64, and the memory budget.

    `sweep` is the fast engine for the threat, None where the threat has no placements or only the dense way
    goes.
    """

    network: Network
    audit: Network
    threat: Patch | SparsePixels
    sweep: PlacementSweep | None
    verdicts: VerdictSweep | None
    images: Tensor
    labels: Tensor
    predictions: Tensor
    is_finite: Tensor
    classes: int
    budget: int
    image_budget: int
    progress: Progress | None

    @staticmethod
    def of(
        certifier: IntervalCertifier,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        threat: Patch | SparsePixels,
    ) -> "_Task":
        check_inputs(model, images, labels)
        check_fit(threat, images)
        dtype = bound_dtype(model, images, certifier.dtype)
        network, twin = trace(model_of_type(model, dtype)), copy_of_type(model, torch.float64)
        audit = trace(twin)
        budget = certifier.memory_budget or default_budget(images.device)
        logits = logits_of(model, images)
        check_logits(logits, images, labels)
        converted = images.to(dtype)
        check_trace(twin, audit, network, converted, threat)
        sweep, verdicts = None, None
        if isinstance(threat, Patch) and len(images):
            if certifier.verdicts_only:
                verdicts = VerdictSweep.of(network, converted, threat, budget)
            else:
                sweep = covering_sweep(network, converted, threat, budget)
        return _Task(
            network=network,
            audit=audit,
            threat=threat,
            sweep=sweep,
            verdicts=verdicts,
            images=converted,
            labels=labels,
            predictions=logits.argmax(dim=1) if len(logits) else labels.new_empty(0),
            is_finite=logits.isfinite().all(dim=1) & has_finite_weights(model),
            classes=logits.shape[1],
            budget=budget,
            image_budget=certifier.memory_budget or default_image_budget(images.device),
            progress=certifier.progress,
        )

    @property
    def rounding(self) -> Rounding:
        return Rounding.outward(self.images.dtype)

    def chunks(self) -> Iterator[slice]:
        """Slices of images that fit the budget; progress is told after each."""
        count = len(self.images)
        size = (
            images_within(self.network, self.images, self.threat, self.classes, self.image_budget)
            if count
            else 1
        )
        for start in range(0, count, size):
            stop = min(start + size, count)
            yield slice(start, stop)
            if self.progress is not None:
                self.progress(stop, count)

    def least(self, chunk: slice) -> "_Least":
        """The least margins of some of the images over the whole threat."""
        images, labels, threat = self.images[chunk], self.labels[chunk], self.threat
        if isinstance(threat, SparsePixels):
            margins = self.network.sparse_margins(
                images, labels, threat.pixels, threat.bound, rounding=self.rounding
            )
            return _Least(margins, torch.full_like(labels, -1))
        return _Least.of(self.margins(chunk), labels)

    def margins(self, chunk: slice) -> Tensor:
        """The margins of some of the images at every placement."""
        images, labels, threat = self.images[chunk], self.labels[chunk], self.threat
        assert isinstance(threat, Patch)
        if self.sweep is None:
            return self._dense_margins(images, labels, threat)
        clean = exact_clean_pass(self.audit, images, labels, images.dtype)
        return self.sweep.margins(clean, labels, rounding=self.rounding)

    def _dense_margins(self, images: Tensor, labels: Tensor, threat: Patch) -> Tensor:
        corners = threat.placements(images.shape[-2], images.shape[-1]).corners.to(images.device)
        size = rows_within(self.network, images, self.budget, len(images), unfolded=True)
        parts = [
            dense_margins(self.network, images, labels, threat, chosen, rounding=self.rounding)
            for chosen in corners.split(size)
        ]
        return torch.cat(parts, dim=1)

    def proven(self, chunk: slice) -> Tensor:
        """Which of some of the images are proven at every placement."""
        assert self.verdicts is not None
        images, labels = self.images[chunk], self.labels[chunk]
        clean = exact_clean_pass(self.audit, images, labels, images.dtype)
        return self.verdicts.proven(clean, labels, self.rounding)

    def bare_verdicts(self, proven: Tensor) -> Certificates:
        """Certificates without margins."""
        margins = self.images.new_full((len(self.labels), self.classes), torch.nan)
        certified = proven & (self.predictions == self.labels) & self.is_finite
        nowhere = self.labels.new_full((len(self.labels), 2), -1)
        return Certificates(certified, margins, nowhere, self.predictions, self.labels)

    def certificates(self, pieces: list["_Least"]) -> Certificates:
        """The verdicts; what is not strictly proven, NaN and infinity included, is not certified."""
        empty = self.images.new_empty(0, self.classes)
        margins = torch.cat([piece.margins for piece in pieces]) if pieces else empty
        own = torch.nn.functional.one_hot(self.labels, self.classes).bool()
        proven = ((margins > 0) | own).all(dim=1) & margins.isfinite().all(dim=1)
        certified = proven & (self.predictions == self.labels) & self.is_finite
        return Certificates(certified, margins, self._worst(pieces), self.predictions, self.labels)

    def _worst(self, pieces: list["_Least"]) -> Tensor:
        if not pieces or isinstance(self.threat, SparsePixels):
            return self.labels.new_full((len(self.labels), 2), -1)
        corners = self.threat.placements(self.images.shape[-2], self.images.shape[-1]).corners
        return corners.to(self.labels.device)[torch.cat([piece.weakest for piece in pieces])]


@dataclass(frozen=True, slots=True)
class _Least:
    """Margins (n, classes), each the least over all placements, and per image the weakest placement."""

    margins: Tensor
    weakest: Tensor

    @staticmethod
    def of(margins: Tensor, labels: Tensor) -> "_Least":
        """NaN counts as the weakest of all, and stays NaN."""
        own = labels[:, None, None].expand(-1, margins.shape[1], 1)
        others = margins.scatter(2, own, torch.inf).amin(dim=2)
        return _Least(margins.amin(dim=1), torch.where(others.isnan(), -torch.inf, others).argmin(dim=1))
