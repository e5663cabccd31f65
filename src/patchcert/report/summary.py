"""What is known of one run: its evidence, what follows from it, and what is needed to check it again."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from patchcert.certificates import AnyThreat, Guarantee
from patchcert.data import Dataset, ImageShape, load_dataset
from patchcert.errors import DataError, InvalidInput, RunError
from patchcert.evidence import Evidence, EvidenceFolder, refuted
from patchcert.files import sha256
from patchcert.report.pictures import (
    AttackedImage,
    CertificateMap,
    MaskedImage,
    Pixels,
    attacked_images,
    certificate_maps,
    masked_images,
    masks_of,
)
from patchcert.report.statistics import Proportion
from patchcert.threats.masks import MaskSet
from patchcert.train.run_folder import EVIDENCE, Run
from patchcert.train.spec import write_spec

CHECKED_FILES = ("spec.toml", "weights.safetensors", f"{EVIDENCE}/*.npz")
ATTACKED, THUMBNAILS = 8, 1000
"""The most broken images that are drawn, and the most rows that have a thumbnail."""
BROKEN_CERTIFICATE = "certified, but the attack changed the prediction"
BROKEN_CLEAN = "counted as withstanding the attack, but wrong without any attack"


@dataclass(frozen=True)
class Contradiction:
    """One image on which two pieces of evidence contradict each other."""

    index: int
    claim: str


@dataclass(frozen=True)
class Accuracies:
    """Three accuracies on the same images; sound evidence has certified <= empirical <= clean."""

    clean: Proportion
    empirical: Proportion
    certified: Proportion


@dataclass(frozen=True, eq=False)
class RunSummary:
    """One run: how it was trained, what was proven and attacked, and what is needed to check it again.

    Thumbnails, where given, are one image (c, h, w) per row of the headline's certificates.
    """

    name: str
    dataset: str = ""
    model: str = ""
    threat: AnyThreat | None = None
    spec_text: str = ""
    metrics: Sequence[Mapping[str, object]] = ()
    certificates: Sequence[Evidence] = ()
    attacks: Sequence[Evidence] = ()
    maps: Sequence[CertificateMap] = ()
    masks: MaskSet | None = None
    masked: Sequence[MaskedImage] = ()
    attacked: Sequence[AttackedImage] = ()
    thumbnails: Pixels | None = None
    classes: Sequence[str] = ()
    environment: Mapping[str, object] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run, evidence: Iterable[Evidence]) -> "RunSummary":
        """The summary of a run with evidence on test images; without pictures."""
        found = tuple(evidence)
        return cls(
            name=run.path.resolve().name,
            dataset=run.spec.data.name,
            model=_describe_model(run),
            threat=run.spec.threat,
            spec_text=write_spec(run.spec),
            metrics=run.metrics(),
            certificates=[each for each in found if each.kind == "certify"],
            attacks=[each for each in found if each.kind == "attack"],
            environment=run.environment(),
            checksums=_checksums(run),
        )

    @cached_property
    def headline(self) -> Evidence | None:
        """The certificates that lead the page: against the threat trained against, where there are such.

        Those on the run's own data come before others, and those of more images before those of fewer. The last word
        is the alphabet's, which puts proofs in float32 before audits in float64.
        """
        return min(self.certificates, key=self._rank, default=None)

    def _rank(self, rows: Evidence) -> tuple[bool, bool, int, str]:
        is_other_data = rows.selection.data != self.dataset
        kind = json.dumps(rows.meta["classifier"], sort_keys=True)
        return rows.threat != self.threat, is_other_data, -rows.total, kind

    @property
    def guarantee(self) -> Guarantee:
        """What the headline's certificates promise."""
        return Guarantee() if self.headline is None else self.headline.guarantee

    @cached_property
    def lead(self) -> Evidence | None:
        """What the page is about: the headline, else the first undefended attack within the threat."""
        named = [each for each in self._undefended if self.threat in (None, each.threat)]
        return self.headline or next(iter(named), None)

    @cached_property
    def headline_attacks(self) -> tuple[Evidence, ...]:
        """The attacks within the threat and on the predictor and the data that the page is about."""
        lead = self.lead
        return tuple(each for each in self._undefended if lead is not None and each.subject == lead.subject)

    @property
    def _undefended(self) -> list[Evidence]:
        """The attacks with no defense in between."""
        return [each for each in self.attacks if each.is_undefended]

    @cached_property
    def withstood(self) -> dict[int, bool]:
        """By image: whether every attack of the headline failed; images not attacked are absent.

        Where patches are to be detected, an attack that raised an alert on an image that was right has failed.
        """
        outcomes: dict[int, bool] = {}
        for rows in self.headline_attacks:
            failed = rows.withstood_rows.tolist()
            for index, has_failed in zip(rows.columns["index"].tolist(), failed, strict=True):
                outcomes[index] = outcomes.get(index, True) and has_failed
        return outcomes

    @cached_property
    def sample(self) -> NDArray[np.integer]:
        """The images attacked whatever the certificate says of them, on which an accuracy may be counted."""
        fair = [rows.columns["index"] for rows in self.headline_attacks if not rows.question.certified_only]
        return np.unique(np.concatenate(fair)) if fair else np.empty(0, np.int64)

    @property
    def clean(self) -> Proportion | None:
        """Clean accuracy on the images of the headline."""
        return Proportion(self.headline.correct, self.headline.total) if self.headline else None

    @property
    def certified(self) -> Proportion | None:
        """Certified accuracy on the images of the headline."""
        return Proportion(self.headline.certified, self.headline.total) if self.headline else None

    @property
    def empirical(self) -> Proportion | None:
        """Accuracy under all attacks with the headline's threat, on the sample attacked."""
        outcomes = [self.withstood[index] for index in self.sample.tolist()]
        return Proportion.of(np.array(outcomes)) if outcomes else None

    def shares(self) -> dict[str, dict[str, Any] | None]:
        """The three accuracies in plain types; null where nothing was measured."""
        found = {"clean": self.clean, "empirical": self.empirical, "certified": self.certified}
        return {name: share and share.to_dict() for name, share in found.items()}

    @cached_property
    def on_the_same_images(self) -> Accuracies | None:
        """All three accuracies on the images of the sample that were certified too, if any."""
        rows = self.headline
        if rows is None:
            return None
        self._check_labels(rows)
        index = rows.columns["index"]
        common = np.isin(index, self.sample)
        if not common.any():
            return None
        withstood = np.array([self.withstood[image] for image in index[common].tolist()])
        return Accuracies(
            Proportion.of(rows.right_rows[common]),
            Proportion.of(withstood),
            Proportion.of(rows.columns["certified"][common]),
        )

    @cached_property
    def contradictions(self) -> tuple[Contradiction, ...]:
        """Every image on which certificates, attacks and clean predictions contradict each other.

        Where a vote predicts, its answer to a clean image may differ from batch to batch: that is no contradiction.
        """
        rows = self.headline
        if rows is None:
            return ()
        self._check_labels(rows)
        breaking = (*self.attacks, *self.certificates)
        pairs = ((proven, attacked) for proven in self.certificates for attacked in breaking)
        broken = sorted({int(image) for pair in pairs for image in refuted(*pair)})
        wrong = rows.columns["index"][rows.columns["prediction"] != rows.columns["label"]].tolist()
        unharmed = [image for image in wrong if self.withstood.get(image, False)]
        return (
            *(Contradiction(image, BROKEN_CERTIFICATE) for image in broken),
            *(Contradiction(image, BROKEN_CLEAN) for image in unharmed if self.guarantee.is_deterministic),
        )

    def _check_labels(self, rows: Evidence) -> None:
        labels = dict(zip(rows.columns["index"].tolist(), rows.columns["label"].tolist(), strict=True))
        for attack in self.headline_attacks:
            columns = attack.columns["index"].tolist(), attack.columns["label"].tolist()
            for index, label in zip(*columns, strict=True):
                if labels.get(index, label) != label:
                    raise InvalidInput(
                        f"run {self.name!r}: image {index} has label {labels[index]} in the certificates "
                        f"but {label} in the attack",
                        hint="both must come from the same data set; certify or attack the run again",
                    )


def summarise_run(run: Run, maps: int = 8, data_dir: Path | None = None) -> RunSummary:
    """All that is known of a run. Without its images there are no pictures, but every number is there."""
    weights = sha256(run.weights) if run.is_finished else ""
    summary = RunSummary.of(run, read_test_evidence(EvidenceFolder(run.path / EVIDENCE), weights))
    dataset = _images(run, summary.headline, data_dir) if run.is_finished else None
    return summary if dataset is None else _with_pictures(summary, run, dataset, maps)


def read_test_evidence(folder: EvidenceFolder, weights: str) -> tuple[Evidence, ...]:
    """The evidence on test images in a folder, refused unless gathered with the weights of that SHA-256 sum."""
    found = [each for each in folder.all() if each.selection.split == "test" and each.total]
    for each in found:
        if each.weights != weights:
            raise RunError(
                f"{each.where} was gathered with other weights than those of the run",
                hint="delete that file, or certify and attack the run again",
            )
    return tuple(found)


def _with_pictures(summary: RunSummary, run: Run, dataset: Dataset, maps: int) -> RunSummary:
    rows = summary.headline
    summary = replace(summary, classes=dataset.classes)
    if rows is None or rows.selection.data != dataset.name:
        return summary
    _check_images(run, rows, dataset)
    index = torch.from_numpy(rows.columns["index"]).long()
    return replace(
        summary,
        maps=certificate_maps(run.model(), dataset.test, rows, maps),
        masks=masks_of(rows, dataset.test),
        masked=masked_images(dataset.test, rows, maps),
        attacked=attacked_images(dataset.test, summary.headline_attacks, ATTACKED),
        thumbnails=dataset.test.images[index].numpy() if rows.total <= THUMBNAILS else None,
    )


def _images(run: Run, rows: Evidence | None, data_dir: Path | None) -> Dataset | None:
    """The data set that the rows are about, else that of the run; None where its files are not at hand."""
    size = run.model_spec().image_shape
    if rows is not None:
        size = rows.meta["data"].get("image", size)
    try:
        name = run.spec.data.name if rows is None else rows.selection.data
        return load_dataset(name, data_dir, ImageShape(*size))
    except DataError:
        return None


def _check_images(run: Run, rows: Evidence, dataset: Dataset) -> None:
    labels, index = dataset.test.labels.numpy(), rows.columns["index"]
    if index.max() >= len(labels) or not np.array_equal(labels[index], rows.columns["label"]):
        raise RunError(
            f"the evidence of {run.path} is about other images than those of {dataset.name} found here",
            hint="give the folder of the data it was gathered on with --data-dir",
        )


def _describe_model(run: Run) -> str:
    model = run.spec.model
    return model.name if model.hidden is None else f"{model.name}, {model.hidden} hidden units"


def _checksums(run: Run) -> Mapping[str, str]:
    files = [file for pattern in CHECKED_FILES for file in sorted(run.path.glob(pattern))]
    return {file.relative_to(run.path).as_posix(): sha256(file) for file in files}
