"""From a run folder to what a page shows of it: rows from evidence, pictures from model and data."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from patchcert.data import Dataset, ImageShape, load_dataset
from patchcert.errors import DataError, RunError
from patchcert.files import sha256
from patchcert.report.evidence import read_evidence
from patchcert.report.samples import attacked_images, certificate_maps, telling_rows
from patchcert.report.summary import CertificateRows, RunSummary
from patchcert.train.run_folder import EVIDENCE, Run
from patchcert.train.spec import write_spec

CHECKED_FILES = ("spec.toml", "weights.safetensors", f"{EVIDENCE}/*.npz")


@dataclass(frozen=True)
class Pictures:
    """How many pictures a page shows, and where the images are found."""

    maps: int = 8
    attacked: int = 8
    thumbnails: int = 1000
    data_dir: Path | None = None


def summarise_run(run: Run, pictures: Pictures | None = None) -> RunSummary:
    """All that is known of a run. Without its images there are no pictures, but every number is there."""
    pictures = pictures or Pictures()
    evidence = read_evidence(run)
    summary = RunSummary(
        name=run.path.resolve().name,
        dataset=run.spec.data.name,
        model=_describe_model(run),
        threat=run.spec.threat,
        spec_text=write_spec(run.spec),
        metrics=run.metrics(),
        certificates=evidence.certificates,
        attacks=evidence.attacks,
        environment=run.environment(),
        checksums=_checksums(run),
    )
    dataset = _images(run, pictures.data_dir) if run.is_finished else None
    return summary if dataset is None else _with_pictures(summary, run, dataset, pictures)


def _with_pictures(summary: RunSummary, run: Run, dataset: Dataset, pictures: Pictures) -> RunSummary:
    rows = summary.headline
    if rows is None:
        return replace(summary, classes=dataset.classes)
    _check_images(run, rows, dataset)
    index = torch.from_numpy(rows.index)
    few = len(rows.index) <= pictures.thumbnails
    chosen = telling_rows(rows, pictures.maps)
    return replace(
        summary,
        classes=dataset.classes,
        maps=certificate_maps(run.model(), dataset.test, rows, chosen),
        attacked=attacked_images(dataset.test, rows, summary.headline_attacks, pictures.attacked),
        thumbnails=dataset.test.images[index].numpy() if few else None,
    )


def _images(run: Run, data_dir: Path | None) -> Dataset | None:
    """The data set of the run, or None where its files are not at hand."""
    spec = run.model_spec()
    try:
        return load_dataset(run.spec.data.name, data_dir, ImageShape(spec.channels, spec.height, spec.width))
    except DataError:
        return None


def _check_images(run: Run, rows: CertificateRows, dataset: Dataset) -> None:
    labels = dataset.test.labels.numpy()
    if rows.index.max() >= len(labels) or not np.array_equal(labels[rows.index], rows.label):
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
