"""What `patchcert attack` is made of: the model and its images, the defense, the proofs and the evidence."""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from patchcert.attacks import (
    Attack,
    AttackResult,
    TuningTrial,
    smoothing_grid,
    tune_defense,
    watermarking_grid,
)
from patchcert.certify.intervals import certify
from patchcert.cli.progress import Report
from patchcert.cli.target import choose_images, open_data, open_target
from patchcert.data import Dataset, Split, load_dataset
from patchcert.data.files import find_imagenet
from patchcert.defenses import Defense, DigitalWatermarking, LocalGradientSmoothing
from patchcert.errors import InvalidInput
from patchcert.files import atomic_write, sha256
from patchcert.models.imagenet import load_imagenet
from patchcert.threats import Patch, SparsePixels
from patchcert.train.run_folder import Run

IMAGENET = "imagenet:"


@final
@dataclass(frozen=True, eq=False)
class Subject:
    """The model under attack, the images that it may be attacked on, and where both come from."""

    model: nn.Module
    weights: Path
    dataset: Dataset
    split: str
    images: Split
    run: Run | None = None
    trained_against: Patch | SparsePixels | None = None
    is_imagenet: bool = False


def open_subject(target: str, data: str | None, data_dir: Path | None, split: str) -> Subject:
    """What is in a run folder or a .safetensors file, or a network by name: `zoo:NAME`, `imagenet:NAME`."""
    if target.startswith(IMAGENET):
        folder = find_imagenet(data_dir)
        name = target.removeprefix(IMAGENET)
        model = load_imagenet(name, folder)
        dataset = load_dataset(data or f"folder:{folder}", data_dir)
        weights = folder / f"{name}.safetensors"
        return Subject(model, weights, dataset, split, dataset.split(split), is_imagenet=True)
    opened = open_target(target)
    dataset = open_data(opened, data, data_dir)
    images = choose_images(opened, dataset, split, None)
    return Subject(opened.model, opened.weights, dataset, split, images, opened.run, opened.threat)


def draw_images(total: int, images: int, limit: int | None, seed: int) -> Tensor:
    """Positions of the attacked images: the first ones, or a random draw that depends on the seed alone."""
    if limit is not None:
        return torch.arange(min(limit, total))
    drawn = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:images]
    return drawn.sort().values


def build_defense(name: str, settings: Sequence[str], subject: Subject, threat: Patch) -> Defense:
    """The defense `lgs` or `dw` with the given KEY=VALUE settings, the others as fit the images."""
    side = max(threat.height, threat.width)
    small: dict[str, dict[str, Any]] = {
        "lgs": {"window": 5, "overlap": 2, "threshold": 0.1, "smoothing": 2.3},
        "dw": {"window": side + 1, "fill": subject.dataset.mean},
    }
    large: dict[str, dict[str, Any]] = {
        "lgs": {"window": 15, "overlap": 5, "threshold": 0.1, "smoothing": 2.3},
        "dw": {"window": round(1.2 * side), "opening": 3, "fill": (0.485, 0.456, 0.406)},
    }
    if name not in small:
        raise InvalidInput(f"--defense {name} is unknown", hint="choose one of none, lgs, dw.")
    chosen = (large if subject.is_imagenet else small)[name] | parse_settings(name, settings)
    if name == "lgs":
        return LocalGradientSmoothing(**chosen)
    return DigitalWatermarking(subject.model, **chosen)


_KINDS = {"lgs": LocalGradientSmoothing, "dw": DigitalWatermarking}


def parse_settings(name: str, settings: Sequence[str]) -> dict[str, Any]:
    """Settings of a defense from words like `window=7`; unknown names and odd values are refused."""
    parameters = inspect.signature(_KINDS[name]).parameters
    known = {key: value.annotation for key, value in parameters.items() if key != "model"}
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in known:
            raise InvalidInput(
                f"--setting {setting}: {name} has no setting {key!r}", hint=f"it has {', '.join(known)}."
            )
        parsed[key] = _read_value(setting, value, known[key])
    return parsed


def _read_value(setting: str, value: str, kind: object) -> Any:  # noqa: ANN401 - whatever the setting takes
    try:
        if kind in (int, float):
            return int(value) if kind is int else float(value)
        if re.fullmatch(r"[\d.,\s]+", value):
            return tuple(float(part) for part in value.split(","))
    except ValueError as error:
        raise InvalidInput(f"--setting {setting} is no number", hint="write it like window=7.") from error
    return value


def tuned(
    name: str,
    attack: Attack,
    subject: Subject,
    threat: Patch,
    count: int,
    largest_drop: float,
    report: Report,
) -> TuningTrial:
    """The best setting of a defense on the last training images, which no result is about."""
    train = subject.dataset.train
    if count > len(train):
        raise InvalidInput(
            f"--tune {count}: {subject.dataset.name} has {len(train)} training images",
            hint="tune on fewer, or give the settings with --setting.",
        )
    device = next(subject.model.parameters()).device
    images = train[len(train) - count :].to(device)
    side = max(threat.height, threat.width)
    fills = (subject.dataset.mean, "ring")
    grid = smoothing_grid() if name == "lgs" else watermarking_grid(subject.model, side, fills=fills)
    model, pixels = subject.model, images.floats()
    result = tune_defense(
        attack, model, pixels, images.labels, threat, grid, largest_drop=largest_drop, progress=report
    )
    if result.best is None:
        raise InvalidInput(
            f"every setting of {name} costs more than {largest_drop} of {result.undefended_accuracy:.3f}",
            hint="allow more with --largest-drop.",
        )
    return result.best


def describe_trial(trial: TuningTrial) -> dict[str, float]:
    """What a setting reached on the images it was chosen on."""
    return {"clean_accuracy": trial.clean_accuracy, "weak_accuracy": trial.weak_accuracy}


def known_proofs(subject: Subject, threat: Patch | SparsePixels, index: Tensor) -> Tensor | None:
    """Which of the images the run's evidence says are certified; None where it does not cover them all."""
    if subject.run is None:
        return None
    weights = sha256(subject.weights)
    for name in subject.run.evidence_names():
        meta = subject.run.evidence_meta(name)
        data = meta.get("data", {})
        claim = (meta.get("kind"), meta.get("weights_sha256"), meta.get("threat"), data.get("name"))
        if claim != ("certify", weights, threat.to_dict(), subject.dataset.name):
            continue
        rows = subject.run.evidence(name)
        verdict = dict(zip(_row_index(rows).tolist(), rows["verdict"].tolist(), strict=True))
        if data.get("split") == subject.split and all(int(position) in verdict for position in index):
            return torch.tensor([bool(verdict[int(position)]) for position in index])
    return None


def _row_index(rows: Mapping[str, np.ndarray]) -> np.ndarray:
    return rows["index"] if "index" in rows else np.arange(len(rows["label"]))


def prove(
    model: nn.Module, images: Tensor, labels: Tensor, threat: Patch | SparsePixels, report: Report
) -> Tensor:
    """Which images the interval certificate proves now."""
    return certify(model, images, labels, threat, progress=report).certified


def evidence_arrays(result: AttackResult, index: Tensor, save_images: bool) -> dict[str, Any]:
    """One row per image; with images, those that were right before the attack and wrong after it."""
    arrays: dict[str, Any] = dict(result.columns(index))
    if save_images:
        kept = (result.succeeded & (result.clean_predictions == result.labels)).nonzero().flatten()
        arrays["adversarial"] = result.adversarial[kept].cpu().numpy()
        arrays["adversarial_row"] = kept.cpu().numpy()
    return arrays


def write_arrays(
    out: Path | None, run: Run | None, name: str, arrays: Mapping[str, Any], meta: Mapping[str, Any]
) -> Path | None:
    """The evidence in the named file, else in the run's folder, else nowhere."""
    if out is None:
        return None if run is None else run.write_evidence(name, arrays, meta)
    with atomic_write(out) as stream:
        np.savez_compressed(stream, meta=np.array(json.dumps(dict(meta))), **arrays)
    return out


def evidence_name(kind: str, words: Sequence[object]) -> str:
    """The same question asked twice has the same name, so that the later answer replaces the earlier."""
    parts = [re.sub(r"[^a-z0-9]+", "-", str(word).lower()).strip("-") for word in (kind, *words)]
    return "-".join(part for part in parts if part)
