"""What is known of one model: evidence, what follows from it, and what is needed to check it again."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

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
    PlacedImage,
    attacked_images,
    certificate_maps,
    masked_images,
    masks_of,
    placed_images,
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
class ModelSummary:
    """One model: what was proven and attacked, what is needed to check it again, and of a run how it was trained.

    Thumbnails, where given, are one image (c, h, w) per row of the headline's certificates; `no_pictures` says why
    there are none where the images are not at hand.
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
    placed: Sequence[PlacedImage] = ()
    masks: MaskSet | None = None
    masked: Sequence[MaskedImage] = ()
    attacked: Sequence[AttackedImage] = ()
    thumbnails: Pixels | None = None
    classes: Sequence[str] = ()
    no_pictures: str = ""
    environment: Mapping[str, object] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run, evidence: Iterable[Evidence]) -> "ModelSummary":
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

    @classmethod
    def of_files(cls, files: Sequence[Evidence]) -> "ModelSummary":
        """The summary of evidence that belongs to no run; without pictures."""
        first = files[0]
        return cls(
            name=_name(files),
            dataset=first.selection.data,
            model=f"weights {first.weights[:12]}",
            certificates=[each for each in files if each.kind == "certify"],
            attacks=[each for each in files if each.kind == "attack"],
            environment={each.where: _machine(each) for each in files},
            checksums={"weights": first.weights, **_sums(files)},
        )

    @property
    def has_run(self) -> bool:
        """Whether a run folder tells how the model was trained; else there is nothing but evidence."""
        return bool(self.spec_text)

    @cached_property
    def headline(self) -> Evidence | None:
        """The certificates that lead the page: those named first; of a run, those against the threat trained against.

        Those on a run's own data come before others, and those of more images before those of fewer. The last word
        is the alphabet's, which puts proofs in float32 before audits in float64.
        """
        ranked = sorted(self.certificates, key=self._rank) if self.has_run else self.certificates
        return next(iter(ranked), None)

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
                        f"{self.name}: image {index} has label {labels[index]} in the certificates "
                        f"but {label} in the attack",
                        hint="both must come from the same data set; certify or attack the model again",
                    )


@final
@dataclass(frozen=True)
class Source:
    """What a summary is made of: a run folder, files of evidence that belong to one model, or both."""

    run: Run | None = None
    files: tuple[Evidence, ...] = ()

    def __post_init__(self) -> None:
        """The files are about test images of one data set."""
        for each in self.files:
            _check_fit(each, self.files[0])

    @property
    def paths(self) -> tuple[Path, ...]:
        """What a user has named."""
        folders = () if self.run is None else (self.run.path,)
        return (*folders, *(each.path for each in self.files if each.path))

    def summary(self) -> ModelSummary:
        """All that is known of the model without its images."""
        if self.run is None:
            return ModelSummary.of_files(self.files)
        folder = EvidenceFolder(self.run.path / EVIDENCE)
        own = read_test_evidence(folder, weights_of(self.run))
        summary = ModelSummary.of(self.run, _distinct((*own, *self.files)))
        return replace(summary, checksums={**summary.checksums, **_sums(self.files)})

    def images(self, rows: Evidence, data_dir: Path | None) -> Dataset:
        """The data set that the rows are about."""
        size = rows.meta["data"].get("image")
        if size is None and self.run is not None:
            size = self.run.model_spec().image_shape
        return load_dataset(rows.selection.data, data_dir, None if size is None else ImageShape(*size))


def sources_of(runs: Sequence[Run], files: Sequence[Evidence]) -> tuple[Source, ...]:
    """A source for each run, with the evidence of its weights, and one for each other model that has evidence."""
    of_weights: dict[str, list[Evidence]] = {}
    for each in _distinct(files):
        of_weights.setdefault(each.weights, []).append(each)
    of_runs = [(run, weights_of(run)) for run in runs]
    others = of_weights.keys() - {weights for _, weights in of_runs}
    return (
        *(Source(run, tuple(of_weights.get(weights, ()))) for run, weights in of_runs),
        *(Source(None, tuple(found)) for weights, found in of_weights.items() if weights in others),
    )


def weights_of(run: Run) -> str:
    """The SHA-256 sum of a run's weights; empty while it has none."""
    return sha256(run.weights) if run.is_finished else ""


def summarise(source: Source, maps: int = 8, data_dir: Path | None = None) -> ModelSummary:
    """All that is known of a model. Without its images there are no pictures, but every number is there."""
    summary = source.summary()
    if summary.lead is None:
        return summary
    try:
        dataset = source.images(summary.lead, data_dir)
    except DataError as error:
        return replace(summary, no_pictures=str(error))
    return _with_pictures(summary, source.run, dataset, maps)


def _distinct(found: Iterable[Evidence]) -> tuple[Evidence, ...]:
    """Every file once, however often it was named."""
    return tuple({each.path and each.path.resolve(): each for each in found}.values())


def _check_fit(each: Evidence, first: Evidence) -> None:
    """Refuses evidence that cannot stand beside the first of the same weights."""
    data, others = each.selection, first.selection
    if data.split != "test":
        raise InvalidInput(
            f"{each.where} is about {data.split} images of {data.data}; expected test images",
            hint="a page is about test images: measure on them, with --split test.",
        )
    if data.data != others.data:
        raise InvalidInput(
            f"{each.where} is about images of {data.data}, but {first.where}, of the same weights, about {others.data}",
            hint="make a page of each.",
        )
    if not each.is_of_data(first.meta["data"].get("sha256")):
        raise InvalidInput(
            f"{each.where} and {first.where} are about {data.data} in files of different SHA-256 sums",
            hint="gather both on the same files, or make a page of each.",
        )


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


def _with_pictures(summary: ModelSummary, run: Run | None, dataset: Dataset, maps: int) -> ModelSummary:
    """The summary with pictures of the images; certificate maps take the weights, which only a run has."""
    rows, attacks, images = summary.headline, summary.headline_attacks, dataset.test
    for each in (*attacks, *([] if rows is None else [rows])):
        _check_images(each, dataset)
    summary = replace(summary, classes=dataset.classes, attacked=attacked_images(images, attacks, ATTACKED))
    if rows is None:
        return summary
    index = torch.from_numpy(rows.columns["index"]).long()
    drawn = [] if run is None else certificate_maps(run.model(), images, rows, maps)
    return replace(
        summary,
        maps=drawn,
        placed=[] if drawn else placed_images(images, rows, maps),
        masks=masks_of(rows, images),
        masked=masked_images(images, rows, maps),
        thumbnails=images.images[index].numpy() if rows.total <= THUMBNAILS else None,
    )


def _check_images(rows: Evidence, dataset: Dataset) -> None:
    labels, index = dataset.test.labels.numpy(), rows.columns["index"]
    if index.max(initial=-1) >= len(labels) or not np.array_equal(labels[index], rows.columns["label"]):
        raise RunError(
            f"{rows.where} is about other images than those of {dataset.name} found here",
            hint="give the folder of the data it was gathered on with --data-dir",
        )


def _name(files: Sequence[Evidence]) -> str:
    """The first two files, and how many there are beside them."""
    few, more = ", ".join(each.where for each in files[:2]), len(files) - 2
    return f"{few} and {more} more" if more > 0 else few


def _machine(rows: Evidence) -> Mapping[str, object]:
    """Where, and with what, evidence was gathered."""
    return {name: rows.meta[name] for name in ("device", "versions") if name in rows.meta}


def _sums(files: Iterable[Evidence]) -> Mapping[str, str]:
    return {each.where: sha256(each.path) for each in files if each.path}


def _describe_model(run: Run) -> str:
    model = run.spec.model
    return model.name if model.hidden is None else f"{model.name}, {model.hidden} hidden units"


def _checksums(run: Run) -> Mapping[str, str]:
    files = [file for pattern in CHECKED_FILES for file in sorted(run.path.glob(pattern))]
    return {file.relative_to(run.path).as_posix(): sha256(file) for file in files}
