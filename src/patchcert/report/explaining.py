"""Why one image is proven or not: whatever its certificate and its kind of proof tell, in words and as a page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import patchcert
from patchcert.certificates import AnyThreat, Certificates, Classifier, IntervalBounds
from patchcert.certificates.explaining import WIDE, Width, blown_up, widths
from patchcert.certificates.masking import DoubleMasking, MaskedDetection
from patchcert.data import Split
from patchcert.errors import InvalidInput
from patchcert.files import write_text
from patchcert.report.page import (
    class_name,
    colour_stops,
    describe_classifier,
    describe_threat,
    margin_text,
    page_environment,
)
from patchcert.report.pictures import Box, CertificateMap, Pixels, behind, certificate_map, heat_map
from patchcert.threats import Patch

NARROWEST, WIDEST = 0.01, 1e6
"""Widths of bounds, against the size of values, from where bars begin to where they end."""


@dataclass(frozen=True, eq=False)
class Hidden:
    """The copy of the image behind the masks where the label leads least, of all copies that were looked at."""

    copy: Pixels
    masks: tuple[int, ...]
    lead: float
    needed: float


@dataclass(frozen=True, eq=False)
class Counterexample:
    """A member of the threat that the classifier gets wrong, what it says of it, and the box that holds all changes."""

    image: Pixels
    prediction: int
    box: Box


@dataclass(frozen=True, eq=False)
class Explanation:
    """One image with its certificate, and whatever the kind of proof tells of the reasons; the rest is left empty.

    `margins` are the label's over all other classes, the least first; `votes` those of all classes, the most first.
    """

    name: str
    image: Pixels
    classes: tuple[str, ...]
    threat: AnyThreat
    classifier: Classifier
    found: Certificates
    map: CertificateMap | None = None
    layers: tuple[Width, ...] = ()
    margins: Mapping[int, float] = field(default_factory=dict)
    votes: Mapping[int, float] = field(default_factory=dict)
    hidden: Hidden | None = None
    counterexample: Counterexample | None = None

    @property
    def label(self) -> int:
        """The class that is or is not proven."""
        return int(self.found.labels[0])

    @property
    def prediction(self) -> int:
        """What the deployed classifier says of the clean image."""
        return int(self.found.predictions[0])

    @property
    def verdict(self) -> str:
        """One of: certified, broken, not certified, wrong, abstained."""
        if bool(self.found.certified[0]):
            return "certified"
        if self.counterexample is not None:
            return "broken"
        if self.prediction == self.label:
            return "not certified"
        return "abstained" if self.prediction < 0 else "wrong"

    @property
    def wide(self) -> Width | None:
        """The layer from which on bounds say next to nothing."""
        return blown_up(list(self.layers))

    @property
    def sentences(self) -> tuple[str, ...]:
        """The reasons in words, the verdict first."""
        parts = (self._of_verdict(), self._of_map(), self._of_margins(), self._of_layers(), self._of_hidden())
        return tuple(part for part in (*parts, self._of_votes()) if part)

    def class_name(self, label: int) -> str:
        """The class as the data set calls it."""
        return class_name(self.classes, label)

    def heat(self, margins: np.ndarray) -> str:
        """The map as a picture."""
        return heat_map(margins, self.colour_limit)

    @property
    def colour_limit(self) -> float:
        """The margin at which colours are fullest."""
        margins = np.zeros(0) if self.map is None else np.abs(self.map.margins)
        return float(margins[np.isfinite(margins)].max(initial=0.0)) or 1.0

    def bar(self, width: float) -> float:
        """How much of a bar in per cent is full, on a scale where each step is ten times the one before."""
        low, high = math.log10(NARROWEST), math.log10(WIDEST)
        place = math.log10(min(max(width, NARROWEST), WIDEST))
        return 100 * (place - low) / (high - low)

    def _of_verdict(self) -> str:
        label, threat = self.class_name(self.label), describe_threat(self.threat)
        after = "" if self.counterexample is None else self.class_name(self.counterexample.prediction)
        said = {
            "certified": f"Proven ({self.found.guarantee}): it stays {label}, against {threat}.",
            "broken": f"Broken: it is {label}, but a patch was found that makes it {after}.",
            "not certified": f"Not proven, and not refuted: it is {label}, but {threat} may make it something else.",
            "wrong": f"Wrong without any attack: it is {label}, and taken for {self.class_name(self.prediction)}.",
            "abstained": f"The classifier abstains, or raises an alert, without any attack; it is {label}.",
        }
        return said[self.verdict]

    def _of_map(self) -> str:
        if self.map is None:
            return ""
        values = self.map.margins[~np.isnan(self.map.margins)]
        proven = f"{int((values > 0).sum()):,} of {len(values):,} placements are proven"
        if not self.map.has_margins:
            return f"{proven}."
        top, left = self.map.weakest.top, self.map.weakest.left
        return f"{proven}; the weakest has its top left corner at row {top}, column {left}."

    def _of_margins(self) -> str:
        if not self.margins:
            return ""
        label, least = next(iter(self.margins.items()))
        may = "stays ahead by at least" if least > 0 else "may fall behind, by bounds alone, to a margin of"
        return f"Nearest is {self.class_name(label)}: the label {may} {margin_text(least)}."

    def _of_layers(self) -> str:
        if not self.layers:
            return ""
        last = self.layers[-1]
        end = f"Bounds of the logits are {last.times} times as wide as these are large"
        if self.wide is None:
            return f"{end}; they stay narrow enough to tell something."
        return f"{end}; they stay wide (more than {WIDE:g} times) from {self.wide.name} on."

    def _of_hidden(self) -> str:
        if self.hidden is None:
            return ""
        masks, lead = self.hidden.masks, margin_text(self.hidden.lead)
        return (
            f"Behind mask{'s' * (len(masks) > 1)} {' and '.join(map(str, masks))} the label leads least; the proof "
            f"rests on a lead of {lead} of the largest score, and needs more than {self.hidden.needed:.2g}."
        )

    def _of_votes(self) -> str:
        if len(self.votes) < 2:
            return ""
        words = [
            f"{count:,.0f} votes are for {self.class_name(label)}" for label, count in self.votes.items()
        ]
        if self.found.radius is None:
            return f"{words[0]}, {words[1]}."
        return f"{words[0]}, {words[1]}; proven for {max(int(self.found.radius[0]), 0)} pixels."


def explain(
    classifier: Classifier, image: Split, threat: AnyThreat, name: str, classes: Sequence[str] = ()
) -> Explanation:
    """The explanation of one image on the classifier's device; what the kind of proof does not have is left out."""
    if len(image) != 1:
        raise InvalidInput(
            f"one image is explained at a time, got {len(image)}", hint="call it for each of them"
        )
    pixels = image.floats()
    found = classifier.certify(pixels, image.labels, threat)
    patch = threat if isinstance(threat, Patch) else None
    drawn = None if patch is None else certificate_map(classifier, image, found, patch)
    layers: tuple[Width, ...] = ()
    if isinstance(classifier, IntervalBounds) and patch is not None and drawn is not None:
        weakest = drawn.weakest
        shown = pixels.to(classifier.dtype or pixels.dtype)
        layers = tuple(widths(classifier.model, shown, patch, (weakest.top, weakest.left)))
    return Explanation(
        name=name,
        image=image.images[0].cpu().numpy(),
        classes=tuple(classes),
        threat=threat,
        classifier=classifier,
        found=found,
        map=drawn,
        layers=layers,
        margins=_margins(found),
        votes=_votes(found),
        hidden=_hidden(classifier, image, found),
        counterexample=_counterexample(classifier, image, found),
    )


def write_explanation(explanation: Explanation, path: Path, commands: Sequence[tuple[str, str]] = ()) -> Path:
    """One self-contained page, written whole or not at all; `commands` are what to try next, and why."""
    template = page_environment().get_template("explanation.html.j2")
    text = template.render(
        title=f"Why {explanation.name} is {explanation.verdict.replace('certified', 'proven')}",
        version=patchcert.__version__,
        view=explanation,
        kind=describe_classifier(explanation.classifier.describe()),
        threat=describe_threat(explanation.threat),
        commands=commands,
        ramp=colour_stops(),
        wide=WIDE,
    )
    write_text(path, text)
    return path


def _margins(found: Certificates) -> dict[int, float]:
    if found.margins is None:
        return {}
    others = dict(enumerate(found.margins[0].double().tolist()))
    del others[int(found.labels[0])]
    return dict(sorted(others.items(), key=lambda each: each[1]))


def _votes(found: Certificates) -> dict[int, float]:
    if found.ballots is None:
        return {}
    counts = enumerate(found.ballots.estimation[0].double().tolist())
    return dict(sorted(counts, key=lambda each: -each[1]))


def _hidden(classifier: Classifier, image: Split, found: Certificates) -> Hidden | None:
    if not isinstance(classifier, DoubleMasking | MaskedDetection) or found.weakest_masks is None:
        return None
    first, second = found.weakest_masks[0].tolist()
    _, height, width = image.image_size
    masks = classifier.mask_set(height, width).hidden
    copy = behind(masks[first] | masks[second], image.images[0].cpu().numpy(), classifier.fill)
    lead = -math.inf if found.lead is None else float(found.lead[0])
    return Hidden(copy, tuple(sorted({first, second})), lead, classifier.needed_lead)


def _counterexample(classifier: Classifier, image: Split, found: Certificates) -> Counterexample | None:
    if found.broken is None or found.counterexamples is None or not bool(found.broken[0]):
        return None
    member = found.counterexamples[:1]
    changed = (member[0] != image.floats()[0].to(member)).any(dim=0).nonzero()
    top, left = changed.amin(dim=0).tolist()
    bottom, right = changed.amax(dim=0).tolist()
    box = Box(top, left, bottom - top + 1, right - left + 1)
    pixels = (255 * member[0].float().clamp(0, 1)).round().to(torch.uint8).cpu().numpy()
    return Counterexample(pixels, int(classifier.predict(member)[0]), box)
