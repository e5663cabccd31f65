"""Proofs by interval bounds: the model as it is, bounded over every member of the threat."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Annotated, Any, ClassVar, final

import torch
from torch import Tensor, nn

from patchcert.bounds import Rounding, precise_arithmetic, subnormals_kept, trace
from patchcert.bounds.network import least_over_others, unwrapped
from patchcert.certificates.checks import (
    bound_dtype,
    check_fit,
    check_foreign_rules,
    check_images,
    check_inputs,
    check_labels,
    check_rounding,
    check_trace,
    copy_of_type,
    has_finite_weights,
    logits_of,
    model_of_type,
    stays_finite,
    weight_dtype,
)
from patchcert.certificates.classifier import AnyThreat, Certificates, Classifier, Columns, first_row
from patchcert.certificates.refinement import (
    DEFAULT_BUDGET,
    Limits,
    Refine,
    Refined,
    Refinement,
    check_refinement,
)
from patchcert.errors import InvalidInput
from patchcert.progress import Progress
from patchcert.tensors import Images, Labels, Margins, PerImage, PlacementMargins
from patchcert.threats import Patch, Patches, SparsePixels
from patchcert.windows.passes import Clean, exact_clean_pass
from patchcert.windows.sweep import (
    PlacementSweep,
    covering_sweep,
    default_budget,
    default_image_budget,
    images_within,
    rows_within,
)

FLOAT64_BLOCK, GPU_BLOCK = 256, 2048
"""In float64 and on a GPU libraries sum in another order for other batch sizes: blocks of a proof have a fixed size."""


@final
@dataclass(frozen=True)
class IntervalBounds(Classifier):
    """Proofs by interval bounds, exact over all placements and sound under rounding; predicts as the model does.

    `dtype` is the arithmetic of the bounds (default: the model's, float32 at least); float64 is an audit with
    far less widening. `memory_budget` is in bytes; on a CPU float32 results do not depend on it, on a GPU
    libraries sum in another order for other sizes. They are proven either way. With `verdicts_only` an image
    is dropped as soon as it is decided: the same images are certified in less time, but there are no margins, worst
    placements and maps, except where that saves nothing: against sparse changes, and where placements are bounded
    one by one.

    With `refine` patches that intervals leave open are looked at again: by linear bounds ("linear"), and then by branch
    and bound ("split") on at most `budget` parts for each image. An image then ends proven, broken by a member of the
    threat, or open.
    """

    model: nn.Module
    dtype: torch.dtype | None = None
    memory_budget: int | None = None
    verdicts_only: bool = False
    refine: Refine | None = None
    budget: int | None = None
    predicts_as_its_model: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        memory = self.memory_budget
        if memory is not None and (type(memory) is not int or memory < 1):
            raise InvalidInput(
                f"memory_budget is {memory!r}; expected a positive number of bytes", hint="2 GiB are 2**31"
            )
        check_refinement(self.refine, self.budget, self.verdicts_only)

    def predict(self, images: Images, progress: Progress | None = None) -> Labels:
        """The class of the largest logit."""
        check_images(self.model, images, progress)
        with torch.no_grad(), precise_arithmetic():
            logits = logits_of(self.model, images)
        if progress is not None:
            progress(len(images), len(images))
        return logits.argmax(dim=1)

    def certify(
        self, images: Images, labels: Labels, threat: AnyThreat, progress: Progress | None = None
    ) -> Certificates:
        with torch.no_grad(), precise_arithmetic(), subnormals_kept():
            proof = _Proof(self, images, labels, threat, progress)
            is_bare = self.verdicts_only and proof.sweep is not None
            return proof.bare_verdicts() if is_bare else proof.certificates()

    def placement_margins(
        self, images: Images, labels: Labels, threat: Patch, progress: Progress | None = None
    ) -> PlacementMargins:
        """Proven margins with the patch at each of its placements; those of broken images are not refined."""
        if not isinstance(threat, Patch):
            raise InvalidInput(
                f"{threat} has no single placement", hint="use certify for threats other than one patch"
            )
        with torch.no_grad(), precise_arithmetic(), subnormals_kept():
            proof = _Proof(self, images, labels, threat, progress)
            pieces = [proof.refined(chunk).margins for chunk in proof.chunks()]
            shape = (0, len(threat.placements(*images.shape[-2:])), proof.classes)
            return torch.cat(pieces) if pieces else images.new_empty(shape)

    def limits(self, images: Images) -> Limits:
        """The layers at which refinement stops, for images of this size."""
        with torch.no_grad(), precise_arithmetic():
            dtype = bound_dtype(self.model, images, self.dtype)
            network = trace(model_of_type(self.model, dtype), images.shape[1:])
            return Limits.of(network, images[:1].to(dtype))

    def passes(self, height: int, width: int) -> int | None:
        return 1

    def describe(self) -> dict[str, Any]:
        dtype = self.dtype or torch.promote_types(weight_dtype(self.model, torch.float32), torch.float32)
        settings = {
            "memory_budget": self.memory_budget,
            "verdicts_only": self.verdicts_only or None,
            "refine": self.refine,
            "budget": (self.budget or DEFAULT_BUDGET) if self.refine == "split" else None,
        }
        given = {name: value for name, value in settings.items() if value is not None}
        return {"name": "IntervalBounds", "dtype": str(dtype).removeprefix("torch."), **given}

    @classmethod
    def described(cls, model: nn.Module, description: Mapping[str, Any]) -> "IntervalBounds":
        settings = {name: value for name, value in description.items() if name not in ("name", "dtype")}
        return cls(model, getattr(torch, description["dtype"]), **settings)

    def images_per_block(self, device: torch.device) -> int | None:
        if device.type != "cpu":
            return GPU_BLOCK
        is_fixed = self.describe()["dtype"] != "float32" or self.refine is not None
        return FLOAT64_BLOCK if is_fixed else None

    @classmethod
    def contradiction(cls, columns: Columns, meta: Mapping[str, Any]) -> str:
        """A certified image has positive margins, which only `verdicts_only` leaves out; a broken one was right, and
        its counterexample is kept."""
        settings = meta["classifier"]
        if "broken" in columns:
            row = first_row(columns["broken"] & (columns["prediction"] != columns["label"]))
            if row is not None:
                return f"row {row} is broken, but predicted wrongly without a patch"
            if "adversarial" not in columns:
                return "it names broken images, but has no counterexamples"
        elif settings.get("refine") == "split":
            return "it does not say which images are broken"
        if "margin" not in columns:
            is_bare = settings.get("verdicts_only", False) and "refine" not in settings
            return "" if is_bare else "it has no margins, which only verdicts_only leaves out"
        row = first_row(columns["certified"] & ~(columns["margin"] > 0))
        return "" if row is None else f"row {row} is certified with a margin of {columns['margin'][row]}"


class _Proof:
    """One call: checked inputs, the network in the dtype of the bounds and in float64, and the memory budget.

    `sweep` is the fast engine for the threat, None where the threat has no placements or only the dense way goes.
    Without `is_sound`, which is predicted rightly with finite logits and weights, nothing is certified.
    """

    def __init__(
        self,
        bounds: IntervalBounds,
        images: Images,
        labels: Labels,
        threat: AnyThreat,
        progress: Progress | None,
    ) -> None:
        model = unwrapped(bounds.model)
        check_inputs(model, images, labels, progress)
        check_fit(threat, images)
        dtype = bound_dtype(model, images, bounds.dtype)
        shape, exact_model = images.shape[1:], copy_of_type(model, torch.float64)
        self.network, self.audit = trace(model_of_type(model, dtype), shape), trace(exact_model, shape)
        self.logits, self.own_dtype = logits_of(bounds.model, images), weight_dtype(model, images.dtype)
        self.classes = self.logits.shape[1]
        check_labels(labels, self.classes)
        self.images, self.labels, self.threat, self.progress = images.to(dtype), labels, threat, progress
        check_foreign_rules(self.audit, self.images, threat)
        check_trace(exact_model, self.audit, self.network, self.images, threat)
        self.rounding = Rounding.outward(dtype)
        self.budget = bounds.memory_budget or default_budget(images.device)
        self.image_budget = bounds.memory_budget or default_image_budget(images.device)
        self.sweep: PlacementSweep | None = None
        if isinstance(threat, Patch) and len(images):
            self.sweep = covering_sweep(self.network, self.images, threat, self.budget)
        self.predictions = self.logits.argmax(dim=1)
        is_finite = self.logits.isfinite().all(dim=1) & has_finite_weights(model)
        if bounds.refine is not None or dtype != self.own_dtype:
            blank = images.new_zeros(1, *shape, dtype=self.own_dtype)
            is_finite &= stays_finite(trace(model_of_type(model, self.own_dtype), shape), blank)
        self.is_sound: PerImage = is_finite & (self.predictions == labels)
        self.refinement = self._refinement(bounds)

    def _refinement(self, bounds: IntervalBounds) -> Refinement | None:
        if bounds.refine is None:
            return None
        if not isinstance(self.threat, Patch):
            raise InvalidInput(
                f"refine is {bounds.refine!r}, but linear bounds exist for one patch, and the threat is {self.threat}",
                hint="leave refine out for other threats",
            )
        budget = bounds.budget or DEFAULT_BUDGET
        return Refinement(
            bounds.model, self.audit, self.network, self.threat, bounds.refine, budget, self.budget
        )

    def chunks(self) -> Iterator[slice]:
        """Slices of images that fit the budget, whose logits are checked; progress is reported before and after each.

        Intervals report within a slice too, placement by placement.
        """
        count, size = len(self.images), 1
        if count:
            size = images_within(self.network, self.images, self.threat, self.classes, self.image_budget)
        if self.progress is not None:
            self.progress(0, count)
        for start in range(0, count, size):
            stop = min(start + size, count)
            rows = slice(start, stop)
            check_rounding(self.network, self.logits[rows], self.images[rows], self.own_dtype)
            yield rows
            if self.progress is not None:
                self.progress(stop, count)

    def certificates(self) -> Certificates:
        """The certificates of all images, with margins and, for patches, with maps."""
        kinds = {Patch: self._bounded, Patches: self._bounded_several, SparsePixels: self._bounded_sparse}
        bound = kinds[type(self.threat)]
        if not len(self.images):
            return self._verdicts(slice(0), self.images.new_empty(0, self.classes))
        return Certificates.concatenated([bound(chunk) for chunk in self.chunks()])

    def bare_verdicts(self) -> Certificates:
        """The same verdicts without margins and maps."""
        from patchcert.windows.verdicts import VerdictSweep

        assert self.sweep is not None
        verdicts = VerdictSweep.of(self.sweep, self.images)
        proven = [
            verdicts.proven(self._clean_pass(chunk), self.labels[chunk], self.rounding)
            for chunk in self.chunks()
        ]
        return Certificates(torch.cat(proven) & self.is_sound, self.predictions, self.labels)

    def _bounded(self, chunk: slice) -> Certificates:
        """Some of the images over all placements; NaN counts as the weakest of all, and stays NaN."""
        assert isinstance(self.threat, Patch)
        refined, labels = self.refined(chunk), self.labels[chunk]
        margins = refined.margins
        others = least_over_others(margins, labels[:, None])
        weakest = torch.where(others.isnan(), -torch.inf, others).argmin(dim=1)
        corners = self.threat.placements(*self.images.shape[-2:]).corners.to(labels.device)
        least = margins.amin(dim=1)
        proven = (others > 0) & (self.is_sound[chunk] & least.isfinite().all(dim=1))[:, None]
        found = replace(self._verdicts(chunk, least, corners[weakest]), placements=proven)
        if self.refinement is None:
            return found
        return replace(found, broken=refined.broken, counterexamples=refined.counterexamples)

    def _bounded_several(self, chunk: slice) -> Certificates:
        """Some of the images over every set of placements, one set after the other."""
        assert isinstance(self.threat, Patches)
        sets = self.threat.corners(*self.images.shape[-2:])
        least = reduce(torch.minimum, (margins.amin(dim=1) for margins in self._dense(chunk, sets)))
        return self._verdicts(chunk, least)

    def _bounded_sparse(self, chunk: slice) -> Certificates:
        """Some of the images against sparse changes."""
        from patchcert.bounds.sparse import sparse_margins

        images, labels, threat = self.images[chunk], self.labels[chunk], self.threat
        assert isinstance(threat, SparsePixels)
        margins = sparse_margins(
            self.network, images, labels, threat.pixels, threat.bound, rounding=self.rounding
        )
        return self._verdicts(chunk, margins)

    def _verdicts(
        self, chunk: slice, margins: Margins, worst_placement: Annotated[Tensor, "n 2"] | None = None
    ) -> Certificates:
        """What is not strictly proven, NaN and infinity included, is not certified."""
        labels = self.labels[chunk]
        if worst_placement is None:
            worst_placement = labels.new_full((len(labels), 2), -1)
        own = torch.nn.functional.one_hot(labels, self.classes).bool()
        proven = ((margins > 0) | own).all(dim=1) & margins.isfinite().all(dim=1)
        return Certificates(
            certified=proven & self.is_sound[chunk],
            predictions=self.predictions[chunk],
            labels=labels,
            margins=margins,
            worst_placement=worst_placement,
        )

    def refined(self, chunk: slice) -> Refined:
        """The margins of some of the images at every placement, refined where that is asked for."""
        margins, images = self.margins(chunk), self.images[chunk]
        if self.refinement is None:
            return Refined(margins, torch.zeros_like(self.is_sound[chunk]), images)
        return self.refinement.refined(images, self.labels[chunk], margins, self.is_sound[chunk])

    def margins(self, chunk: slice) -> PlacementMargins:
        """The margins of some of the images at every placement, by intervals."""
        if self.sweep is not None:
            clean, labels, note = self._clean_pass(chunk), self.labels[chunk], self._within(chunk)
            return self.sweep.margins(clean, labels, rounding=self.rounding, progress=note)
        assert isinstance(self.threat, Patch)
        corners = self.threat.placements(*self.images.shape[-2:]).corners
        return torch.cat(list(self._dense(chunk, corners)), dim=1)

    def _within(self, chunk: slice) -> Progress | None:
        """What placements of some of the images are reported to.

        Nothing where they are only the first of the work, or a device is not yet as far as what it was told.
        """
        report, count = self.progress, len(self.images)
        if report is None or self.refinement is not None or self.images.device.type != "cpu":
            return None
        return lambda done, total: report(chunk.start + (chunk.stop - chunk.start) * done / total, count)

    def _dense(self, chunk: slice, corners: Annotated[Tensor, "p ... 2"]) -> Iterator[PlacementMargins]:
        """The margins of some of the images at all corners, or sets of corners, as many at a time as fit."""
        from patchcert.windows.dense import dense_margins

        images, labels, threat = self.images[chunk], self.labels[chunk], self.threat
        assert isinstance(threat, Patch | Patches)
        size = rows_within(self.network, images, self.budget, unfolded=True)
        done, note = 0, self._within(chunk)
        for some in corners.to(images.device).split(size):
            yield dense_margins(self.network, images, labels, threat, some, rounding=self.rounding)
            done += len(some)
            if note is not None:
                note(done, len(corners))

    def _clean_pass(self, chunk: slice) -> Clean:
        images = self.images[chunk]
        return exact_clean_pass(self.audit, images, self.labels[chunk], images.dtype)
