"""One self-contained page about one or several models: no network, no library, no number typed by hand."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

import patchcert
from patchcert.certificates import AnyThreat
from patchcert.errors import InvalidInput
from patchcert.evidence import Evidence
from patchcert.files import write_text
from patchcert.report.charts import Chart, sizes_chart, training_curves
from patchcert.report.pictures import (
    PROVEN,
    UNPROVEN,
    Pixels,
    behind,
    colour_limit,
    data_address,
    heat_map,
    sprite,
)
from patchcert.report.statistics import Proportion
from patchcert.report.summary import ModelSummary
from patchcert.report.tables import NOT_MEASURED, percent
from patchcert.threats import Patch, Patches, SparsePixels, shapes, threat_from_dict
from patchcert.threats.masks import MaskSet

NOT_STATED = "not stated"
KEEP_PICTURES = "Pictures are kept by `patchcert attack` with --save-images."
OTHER_ATTACKS = "The attacks at hand are on other data or another classifier, or within another threat."
CONTRADICTIONS_SHOWN = 20
STATIC_ROWS = 12
MASKS_DRAWN = 256
"""The most masks that a page draws, each over an image."""
SPRITE_COLUMNS = 40
VERDICTS = ("certified", "not certified", "wrong", "abstained")
OUTCOMES = ("withstood", "broken", "wrong already", "not attacked")


def write_report(summaries: Sequence[ModelSummary], path: Path) -> Path:
    """One self-contained page about the models, side by side where there are several, written whole or not at all.

    Evidence that contradicts itself is shown in red. The same evidence gives the same page.
    """
    if not summaries:
        raise InvalidInput(
            "a report needs at least one model, got none", hint="name a run folder or a file of evidence"
        )
    views = [ModelView(summary, f"model-{position}") for position, summary in enumerate(summaries)]
    template = page_environment().get_template("report.html.j2")
    text = template.render(
        title=summaries[0].name if len(summaries) == 1 else f"{len(summaries)} models compared",
        version=patchcert.__version__,
        views=views,
        differing=differing(views),
        has_contradictions=any(summary.contradictions for summary in summaries),
        contradictions_shown=CONTRADICTIONS_SHOWN,
        ramp=colour_stops(),
    )
    write_text(path, text)
    return path


def page_environment(*packages: str) -> jinja2.Environment:
    """Where pages get their templates: from this package, and from others that have some of their own.

    Text is escaped, and a name that is not given is an error.
    """
    loaders = [jinja2.PackageLoader(package) for package in (*packages, "patchcert.report")]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"data_address": data_address, "margin": margin_text, "sprite": sprite}
    environment.globals |= {
        "lead_sentence": lead_sentence,
        "training_curves": training_curves,
        "flatten": flatten,
    }
    return environment


def describe_threat(threat: AnyThreat) -> str:
    """What the attacker may do, in a few words."""
    if isinstance(threat, Patch):
        return f"one {shapes.describe(threat.stamp)} patch, {threat.rule}"
    if isinstance(threat, Patches):
        return f"{threat.count} {shapes.describe(threat.patch.stamp)} patches at once, {threat.patch.rule}"
    return f"any {_pixels(threat.pixels)}"


def describe_classifier(description: Mapping[str, object]) -> str:
    """The kind of classifier, and its settings."""
    settings = [_setting(key.replace("_", " "), value) for key, value in description.items() if key != "name"]
    return ", ".join([str(description.get("name", NOT_STATED)), *settings])


def _setting(name: str, value: object) -> str:
    """A setting of a classifier in words."""
    if isinstance(value, bool):
        return name if value else f"not {name}"
    if value is None:
        return f"no {name}"
    if isinstance(value, Mapping):
        return f"{name} {describe_threat(threat_from_dict(value))}"
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


def lead_sentence(summary: ModelSummary) -> str:
    """The main result as one sentence that claims no more than was proven."""
    rows, proven = summary.headline, summary.certified
    if rows is None or proven is None:
        return f"Certified accuracy: {NOT_MEASURED}."
    guarantee = summary.guarantee
    sure = "" if guarantee.is_deterministic else f", with {guarantee.confidence:.4g} confidence for each,"
    unnoticed = "" if guarantee.promise == "recovery" else " without an alert"
    return (
        f"For {proven.successes:,} of {proven.total:,} test images ({percent(proven.value)}) "
        f"it is proven{sure} that {_freedom(rows.threat)} can change the prediction{unnoticed}, "
        "whatever the changed pixels show."
    )


def margin_text(margin: float) -> str:
    """A margin with its sign, to two digits that count, so that a narrow proof is not shown as a tie."""
    if not math.isfinite(margin):
        return "not finite"
    text = f"{margin:+.2g}" if abs(margin) < 0.1 else f"{margin:+.2f}"
    return text.replace("-", "\N{MINUS SIGN}") if margin < 0 else text


def flatten(values: Mapping[str, object], prefix: str = "") -> tuple[tuple[str, str], ...]:
    """Nested tables as rows of dotted name and text."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows.extend(flatten(value, f"{prefix}{key}."))
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            rows.append((f"{prefix}{key}", text))
    return tuple(rows)


@dataclass(frozen=True)
class Accuracy:
    """An accuracy with its words; the share is None where it was not measured."""

    label: str
    meaning: str
    style: str
    share: Proportion | None

    @property
    def text(self) -> str:
        """The share in per cent, or that there is none."""
        return NOT_MEASURED if self.share is None else percent(self.share.value)

    @property
    def interval(self) -> str:
        """The ends of the 95 % interval."""
        if self.share is None:
            return ""
        low, high = self.share.interval
        return f"{100 * low:.1f} to {percent(high)}"

    @property
    def count(self) -> str:
        """The images counted."""
        return "" if self.share is None else f"{self.share.successes:,} of {self.share.total:,}"


def accuracies(
    clean: Proportion | None, empirical: Proportion | None, certified: Proportion | None, is_detected: bool
) -> tuple[Accuracy, ...]:
    """The three accuracies of a model, from the largest to the smallest; if patches are detected, alerts suffice."""
    right = "right, or an alert is raised," if is_detected else "right"
    return (
        Accuracy("Clean", "right when nobody interferes", "plain", clean),
        Accuracy("Empirical", f"{right} under every attack tried", "soft", empirical),
        Accuracy("Certified", f"proven {right} under every attack possible", "accent", certified),
    )


@dataclass(frozen=True, eq=False)
class ModelView:
    """What the template shows of a model beside its own values; what was not measured is said to be so."""

    summary: ModelSummary
    anchor: str

    @property
    def threat(self) -> AnyThreat | None:
        """What the numbers are proven or attacked against."""
        return self.summary.lead.threat if self.summary.lead else self.summary.threat

    @property
    def data(self) -> str:
        """The data set that the numbers are counted on."""
        return self.summary.lead.selection.data if self.summary.lead else self.summary.dataset

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """What the numbers are about."""
        summary, lead = self.summary, self.summary.lead
        facts = {
            "Threat": describe_threat(self.threat) if self.threat else "",
            "Model": summary.model,
            "Data": self.data,
            "Classifier": describe_classifier(lead.meta["classifier"]) if lead else "",
            "Guarantee": str(summary.guarantee) if summary.headline else "",
        }
        return tuple((name, value or NOT_STATED) for name, value in facts.items())

    @property
    def numbers(self) -> tuple[Accuracy, ...]:
        """Accuracies, each on all images that it was measured on."""
        return self._accuracies(self.summary.clean, self.summary.empirical, self.summary.certified)

    @property
    def same_images(self) -> tuple[Accuracy, ...]:
        """Accuracies on the same images: those certified and attacked, or those certified where none is both."""
        summary, found = self.summary, self.summary.on_the_same_images
        if found is not None:
            return self._accuracies(found.clean, found.empirical, found.certified)
        return (
            self.numbers
            if summary.headline is None
            else self._accuracies(summary.clean, None, summary.certified)
        )

    def _accuracies(self, *shares: Proportion | None) -> tuple[Accuracy, ...]:
        return accuracies(*shares, is_detected=self.summary.guarantee.promise == "detection")

    @property
    def same_images_note(self) -> str:
        """Which images the accuracies above are counted on."""
        found, rows = self.summary.on_the_same_images, self.summary.headline
        if found is not None:
            return (
                f"All three are counted on the same {found.clean.total:,} images, those that were both certified and "
                "attacked. The truth for this model lies between what is proven and what the attack left standing."
            )
        if rows is not None:
            return f"Counted on the {rows.total:,} images that were certified; none of them was attacked."
        return "Nothing was certified."

    @property
    def more_images(self) -> tuple[Accuracy, ...]:
        """Accuracies on all images that they were measured on, where some of these are not among the same images."""
        same = [number.share for number in self.same_images]
        if [number.share for number in self.numbers] == same:
            return ()
        return tuple(number for number in self.numbers if number.share is not None)

    @property
    def sizes(self) -> Chart | None:
        """What is proven against patches of several sizes, in the same way as the headline."""
        rows = self.summary.headline
        if rows is None:
            return None
        kind = rows.meta["classifier"], rows.selection.data
        alike = [
            each
            for each in self.summary.certificates
            if (each.meta["classifier"], each.selection.data) == kind
        ]
        return sizes_chart(alike)

    @property
    def has_margins(self) -> bool:
        """Whether maps show margins, and not only what is proven."""
        return any(each.has_margins for each in self.summary.maps)

    @property
    def masks(self) -> tuple[Pixels, ...]:
        """The first image behind each of the masks, where these are few enough to be drawn."""
        masks, rows = self.summary.masks, self.summary.headline
        if masks is None or rows is None or not self.summary.masked or len(masks) > MASKS_DRAWN:
            return ()
        image = self.summary.masked[0].image
        return tuple(behind(hidden, image, rows.meta["classifier"]["fill"]) for hidden in masks.hidden)

    @property
    def mask_columns(self) -> int:
        """In how many columns the masks are drawn: in those of their set, where they fill all of its rows."""
        masks = self.summary.headline.meta["classifier"]["masks"] if self.summary.headline else 1
        columns = masks if isinstance(masks, int) else masks[1]
        drawn = len(self.masks)
        return columns if drawn % columns == 0 else math.ceil(math.sqrt(drawn))

    @property
    def colour_limit(self) -> float:
        """The margin at which the colours of all maps are fullest."""
        return colour_limit(self.summary.maps)

    def heat(self, margins: np.ndarray) -> str:
        """A map of margins as a picture, under the one scale of all maps."""
        return heat_map(margins, self.colour_limit)

    def class_name(self, label: int) -> str:
        """The class as the data set calls it, else its number; a classifier that abstains says so."""
        return class_name(self.summary.classes, label)

    @property
    def attack_note(self) -> str:
        """What became of the images that were attacked."""
        summary, found, same = self.summary, self.summary.empirical, self.summary.on_the_same_images
        if found is None:
            elsewhere = "" if not summary.attacks or summary.headline_attacks else f" {OTHER_ATTACKS}"
            return f"Accuracy under attack: {NOT_MEASURED}.{elsewhere}"
        wrong = found.total - found.successes
        attacked = f"{found.total:,} images attacked"
        if same is None or same.clean.total != found.total:
            return f"Of {attacked}, {wrong:,} ended with a wrong prediction."
        already = same.clean.total - same.clean.successes
        counts = f"{attacked}: {already:,} wrong already, {wrong - already:,} broken, {found.successes:,} not broken."
        return counts if summary.attacked or wrong == already else f"{counts} {KEEP_PICTURES}"

    @property
    def commands(self) -> tuple[tuple[str, str], ...]:
        """What measures everything again."""
        rows = [*self.summary.certificates, *self.summary.attacks]
        return tuple(
            (f"{each.kind}: {describe_threat(each.threat)}", each.meta.get("command") or NOT_STATED)
            for each in rows
        )

    @property
    def table(self) -> "ImageTable | None":
        """Every image."""
        return image_table(self.summary, self.summary.headline) if self.summary.headline else None


def differing(views: Sequence[ModelView]) -> str:
    """What models must share to be compared, as far as they do not: the threat, the data, and the images certified."""
    found = [rows for view in views if (rows := view.summary.headline) is not None]
    questions = {
        "the threat": [view.threat for view in views],
        "the data": [view.data for view in views],
        "the images": [rows.columns["index"].tolist() for rows in found],
    }
    names = [name for name, asked in questions.items() if any(each != asked[0] for each in asked)]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def class_name(classes: Sequence[str], label: int) -> str:
    """The class as the data set calls it, else its number; a classifier that abstains says so."""
    if label < 0:
        return "abstained"
    return classes[label] if label < len(classes) else str(label)


@dataclass(frozen=True)
class ImageTable:
    """All images as columns of plain numbers for the page's script; the first few as text for those without."""

    columns: Mapping[str, str]
    data: Mapping[str, object]
    rows: tuple[tuple[str, ...], ...]


def image_table(summary: ModelSummary, rows: Evidence) -> ImageTable:
    """The table of all images of the headline's certificates, with a column for everything that they have."""
    values, few = _image_values(summary, rows), range(min(STATIC_ROWS, rows.total))
    shown = {key: name for key, name in _HEADINGS.items() if key in values}
    words = {"classes": list(summary.classes), "verdicts": VERDICTS, "outcomes": OUTCOMES}
    drawn = {"boxes": boxes(summary.masks), "spriteColumns": SPRITE_COLUMNS}
    static = tuple(tuple(_cell(key, values, at, summary.classes) for key in shown) for at in few)
    return ImageTable(shown, {**values, **words, **drawn}, static)


def boxes(masks: MaskSet | None) -> list[list[int]]:
    """Top, left, height and width of each mask; nothing unless all are rectangles."""
    found = []
    for hidden in () if masks is None else masks.hidden:
        rows, columns = (hidden.any(dim=axis).nonzero()[:, 0] for axis in (1, 0))
        (top, bottom), (left, right) = ((int(line[0]), int(line[-1]) + 1) for line in (rows, columns))
        if not bool(hidden[top:bottom, left:right].all()):
            return []
        found.append([top, left, bottom - top, right - left])
    return found


_HEADINGS = {
    "index": "Image",
    "label": "Label",
    "prediction": "Prediction",
    "verdict": "Verdict",
    "margin": "Least margin",
    "lead": "Least lead",
    "top": "Weakest at",
    "masks": "Weakest masks",
    "radius": "Radius in pixels",
    "votes": "Votes",
    "outcome": "Attack",
}


def _image_values(summary: ModelSummary, rows: Evidence) -> dict[str, list[Any]]:
    """The values of all images, by the columns that the certificates have."""
    columns = rows.columns
    values = {
        key: columns[key].tolist() for key in ("index", "label", "prediction", "radius") if key in columns
    }
    values |= {"verdict": _verdicts(rows), "outcome": _outcomes(summary, rows)}
    for key in ("margin", "lead"):
        if key in columns:
            found = columns[key].tolist()
            values[key] = [float(f"{value:.4g}") if math.isfinite(value) else None for value in found]
    if "first_mask" in columns:
        pairs = zip(columns["first_mask"].tolist(), columns["second_mask"].tolist(), strict=True)
        values["masks"] = [", ".join(map(str, sorted(set(pair)))) for pair in pairs]
    if "worst_top" in columns and (columns["worst_top"] >= 0).any():
        values |= {"top": columns["worst_top"].tolist(), "left": columns["worst_left"].tolist()}
    if "votes" in columns:
        selected = columns["selected"].astype(np.int64)[:, None]
        values["votes"] = np.take_along_axis(columns["votes"], selected, axis=1)[:, 0].tolist()
    return values


def _verdicts(rows: Evidence) -> list[int]:
    """Positions among `VERDICTS`."""
    prediction, label = rows.columns["prediction"], rows.columns["label"]
    failed = np.where(prediction == label, 1, np.where(prediction < 0, 3, 2))
    return np.where(rows.columns["certified"], 0, failed).tolist()


def _outcomes(summary: ModelSummary, rows: Evidence) -> list[int]:
    """Positions among `OUTCOMES`."""
    held = [summary.withstood.get(index) for index in rows.columns["index"].tolist()]
    return [
        3 if unharmed is None else 0 if unharmed else 1 if is_right else 2
        for unharmed, is_right in zip(held, rows.right_rows.tolist(), strict=True)
    ]


def _cell(key: str, values: Mapping[str, list[Any]], at: int, classes: Sequence[str]) -> str:
    value = values[key][at]
    if key in ("label", "prediction"):
        return class_name(classes, value)
    if key in ("verdict", "outcome"):
        return (VERDICTS if key == "verdict" else OUTCOMES)[value]
    if key in ("margin", "lead"):
        return margin_text(math.nan if value is None else value)
    if key == "top":
        return f"{value}, {values['left'][at]}" if value >= 0 else ""
    return str(value)


def _freedom(threat: AnyThreat) -> str:
    if isinstance(threat, SparsePixels):
        return f"no change of {_pixels(threat.pixels)}, wherever they lie,"
    one = threat.patch if isinstance(threat, Patches) else threat
    word, verb = ("patch", "it is") if one is threat else ("patches at once", "they are")
    count = f"{threat.count} " if isinstance(threat, Patches) else ""
    where = f"wherever {verb} placed" if str(one.rule) == "everywhere" else f"placed {one.rule}"
    return f"no {count}{shapes.describe(one.stamp)} {word}, {where},"


def _pixels(count: int) -> str:
    return f"{count} pixel{'s' if count != 1 else ''}"


def colour_stops() -> str:
    """The stops of a colour scale over both ramps, with a jump where they meet, at a margin of zero."""
    stops = []
    for ramp, start in ((UNPROVEN, 0.0), (PROVEN, 50.0)):
        step = 50.0 / (len(ramp) - 1)
        stops += [f"rgb{colour} {start + step * at:.1f}%" for at, colour in enumerate(ramp)]
    return ", ".join(stops)
