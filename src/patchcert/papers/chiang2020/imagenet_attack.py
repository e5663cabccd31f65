"""A piece of the ImageNet table carried out: network and images from local files, evidence image by image."""

import hashlib
import json
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Generator, Tensor, nn

from patchcert.attacks import AttackJob, PatchAttack
from patchcert.data import Dataset, Split, load_dataset
from patchcert.data.files import find_imagenet
from patchcert.data.folder import FolderSplit
from patchcert.defenses import Defended
from patchcert.errors import DataError
from patchcert.files import atomic_write, sha256
from patchcert.models.imagenet import load_imagenet
from patchcert.papers.chiang2020.attacking import drawn_images
from patchcert.papers.chiang2020.imagenet_corners import CornerExperiment, CornerRow, Tell, imagenet_defense
from patchcert.papers.chiang2020.imagenet_plan import CornerPlan, Piece, file_of
from patchcert.papers.chiang2020.imagenet_results import SUMMARY, CornerResult
from patchcert.train.environment import describe_environment
from patchcert.train.run_folder import ENVIRONMENT, write_text

ON_GPU, ON_CPU = 1200, 32
"""Ascents at once. More than 1,200 would make single tensors of ResNet-50 larger than 2 GiB."""
BYTES_PER_ASCENT = 2**26
CHECK_EVERY = 10


@final
@dataclass(frozen=True, eq=False)
class Material:
    """The network and the images of a plan as they lie in a folder, and the sums of their files."""

    folder: Path
    network: str
    dataset: Dataset
    index: Tensor
    weights_sha256: str

    @classmethod
    def of(cls, plan: CornerPlan, data_dir: Path | None) -> "Material":
        """What the plan is about; images are read only to be summed. Refused where there are too few."""
        folder = find_imagenet(data_dir)
        weights = folder / f"{plan.network}.safetensors"
        if not weights.is_file():
            raise DataError(f"the weights {weights} are missing", hint=f"put {weights.name} into {folder}")
        dataset = load_dataset(f"folder:{folder}")
        if len(dataset.test) < plan.images:
            raise DataError(
                f"{folder} holds {len(dataset.test)} images, but {plan.images} are to be attacked",
                hint="add validation images to labels.csv and images/",
            )
        index = drawn_images(len(dataset.test), plan.images, plan.seed)
        sums = {"labels.csv": sha256(folder / "labels.csv"), "images": _sum_of_images(dataset, index)}
        return cls(
            folder, plan.network, replace(dataset, name="imagenet", checksums=sums), index, sha256(weights)
        )

    def fingerprint(self, plan: CornerPlan) -> str:
        """The name of the plan's results on this material."""
        return plan.fingerprint(self.weights_sha256, self.dataset.checksums)

    def model(self, device: torch.device) -> nn.Module:
        """The network in float32."""
        return load_imagenet(self.network, self.folder).to(device)

    @cached_property
    def split(self) -> Split:
        """The attacked images, decoded."""
        return self.dataset.test[self.index].to("cpu")


def _sum_of_images(dataset: Dataset, index: Tensor) -> str:
    """One sum over the names and bytes of the attacked images, in their order."""
    split = dataset.test
    assert isinstance(split, FolderSplit)
    total = hashlib.sha256()
    for number in index.tolist():
        path = split.paths[number]
        total.update(f"{path.name} {sha256(path)}\n".encode())
    return total.hexdigest()


def planned_experiment(plan: CornerPlan, device: torch.device) -> CornerExperiment:
    """The plan's attack, with as many ascents at once as the device has room for."""
    at_once = ON_CPU
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        at_once = max(min(ON_GPU, int(0.8 * memory) // BYTES_PER_ASCENT), 4)
    attack = PatchAttack(
        plan.steps, plan.step_size, plan.restarts, batch_size=at_once, check_every=CHECK_EVERY
    )
    return CornerExperiment(attack, judged_at_once=max(at_once // 4, 1), reduced=device.type == "cuda")


def attack_piece(
    piece: Piece, material: Material, device: torch.device, results: Path, tell: Tell
) -> CornerResult:
    """Attack as planned; the evidence of a defense is in the folder of results as soon as it is there."""
    plan, experiment, model = piece.plan, planned_experiment(piece.plan, device), material.model(device)
    split, result = material.split.to(device), CornerResult(results / material.fingerprint(plan))
    job = AttackJob(split.floats(), split.labels, plan.threat, Generator(device).manual_seed(plan.seed))
    clock = Clock()
    transferred = experiment.transferred(model, job, tell)
    spent = clock.lap()
    for name in piece.defenses:
        again = replace(job, generator=Generator(device).manual_seed(plan.seed))
        rows = experiment.rows(name, model, again, transferred, tell)
        seconds = (spent, spent + clock.lap())
        facts = _facts(plan, material, experiment, device)
        for row, taken in zip(rows, seconds, strict=True):
            meta = facts | _cell_facts(row, experiment, model) | {"seconds": round(taken, 3)}
            _write_cell(result.path / file_of(row), row, material.index, meta)
        result = CornerResult(result.path)
        write_text(result.path / ENVIRONMENT, json.dumps(facts["environment"], indent=2) + "\n")
        write_text(result.path / SUMMARY, json.dumps(result.summary(), indent=2) + "\n")
    return result


class Clock:
    """Counts the seconds from one lap to the next."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def lap(self) -> float:
        """The seconds since the last one."""
        now = time.perf_counter()
        passed, self._began = now - self._began, now
        return passed


def _write_cell(path: Path, row: CornerRow, index: Tensor, meta: dict[str, Any]) -> None:
    columns: dict[str, Any] = {
        **row.result.columns(index),
        "undefended": row.undefended.cpu().numpy(),
        "undefended_after": row.undefended_after.cpu().numpy(),
    }
    for name in ("index", "label", "prediction", "prediction_after", "top", "left", "undefended"):
        columns[name] = columns[name].astype(np.int32)
    with atomic_write(path) as stream:
        np.savez_compressed(stream, **columns, meta=np.array(json.dumps(meta)))  # pyright: ignore[reportArgumentType]


def _facts(
    plan: CornerPlan, material: Material, experiment: CornerExperiment, device: torch.device
) -> dict[str, Any]:
    environment = describe_environment(device, material.dataset, processes=1)
    attack = experiment.attack
    return {
        "kind": "attack-corners",
        "plan": plan.to_dict(),
        "network": plan.network,
        "threat": plan.threat.to_dict(),
        "weights_sha256": material.weights_sha256,
        "data": {
            "name": "imagenet",
            "split": "validation",
            "images": len(material.index),
            "sha256": dict(material.dataset.checksums),
        },
        "settings": {
            "ascent": "bfloat16" if experiment.reduced else "float32",
            "judged": "float32",
            "batch_size": attack.batch_size,
            "check_every": attack.check_every,
        },
        "device": environment["device"],
        "versions": environment["versions"],
        "source_sha256": environment["source_sha256"],
        "environment": environment,
    }


def _cell_facts(row: CornerRow, experiment: CornerExperiment, model: nn.Module) -> dict[str, Any]:
    """What is true of this cell alone: its defense, and the stages of its attack."""
    defense = imagenet_defense(row.defense, model, row.patch)
    stages = ["undefended network, cross-entropy, to the largest margin"]
    if row.adaptive:
        names = [surrogate.__name__ for surrogate in reversed(defense.surrogates())]
        attacks = experiment.attacks(Defended(defense, model))
        stages += [
            f"{name}, {attack.loss}" for name, (attack, _) in zip([*names, names[0]], attacks, strict=True)
        ]
    return {
        "defense": f"{type(defense).__name__}({defense.extra_repr()})",
        "defense_name": row.defense,
        "adaptive": row.adaptive,
        "stages": stages,
    }
