"""Attacks on ImageNet carried out: network and images from local files, patches in the corners, two defenses."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Generator

from patchcert.attacks import Task, evidence_columns
from patchcert.attacks.imagenet_corners import CornerExperiment, CornerRow, DefenseName, Tell, find_imagenet
from patchcert.data import Dataset, load_dataset
from patchcert.data.folder import FolderSplit
from patchcert.defenses import Defended
from patchcert.errors import DataError
from patchcert.evidence import EvidenceFolder, Question, Selection, Subject
from patchcert.files import sha256
from patchcert.models.imagenet import load_imagenet
from patchcert.papers.chiang2020.answering import attack_from, defense_from
from patchcert.papers.chiang2020.networks import network_name, with_seed
from patchcert.papers.chiang2020.planning import Assignment
from patchcert.papers.chiang2020.recipes import IMAGENET, CornerAttack, recipe
from patchcert.papers.chiang2020.tables import Entry
from patchcert.train.environment import describe_environment
from patchcert.train.run_folder import ENVIRONMENT, write_text

ON_GPU, ON_CPU = 1200, 32
"""Ascents at once. More than 1,200 would make single tensors of ResNet-50 larger than 2 GiB."""
BYTES_PER_ASCENT = 2**26


@final
@dataclass(frozen=True, eq=False)
class Material:
    """A network and the images to attack it on, as they lie in a folder, and the sums of their files."""

    network: str
    folder: Path
    dataset: Dataset
    weights_sha256: str

    @classmethod
    def of(cls, network: str, selection: Selection, data_dir: Path | None) -> "Material":
        """What is to be attacked; images are read only to be summed. Refused where there are too few."""
        folder = find_imagenet(data_dir)
        weights = folder / f"{network}.safetensors"
        if not weights.is_file():
            raise DataError(f"the weights {weights} are missing", hint=f"put {weights.name} into {folder}")
        dataset, wanted = load_dataset(f"folder:{folder}"), selection.drawn or 0
        if len(dataset.test) < wanted:
            raise DataError(
                f"{folder} holds {len(dataset.test)} images, but {wanted} are to be attacked",
                hint="add validation images to labels.csv and images/",
            )
        sums = {"labels.csv": sha256(folder / "labels.csv"), "images": _sum_of_images(dataset, selection)}
        return cls(network, folder, replace(dataset, name=IMAGENET, checksums=sums), sha256(weights))

    def name(self, question: Question) -> str:
        """The name of the results of attacks on this material."""
        return network_name(self.network, question, self.weights_sha256, self.dataset.checksums)


def _sum_of_images(dataset: Dataset, selection: Selection) -> str:
    """One sum over the names and bytes of the attacked images, in their order."""
    split = dataset.test
    assert isinstance(split, FolderSplit)
    total = hashlib.sha256()
    for number in selection.positions(len(split)).tolist():
        path = split.paths[number]
        total.update(f"{path.name} {sha256(path)}\n".encode())
    return total.hexdigest()


def plan_networks(entries: Sequence[Entry], seeds: int, data_dir: Path | None) -> tuple[Assignment, ...]:
    """One assignment for each network and size of patch behind the rows; refused where files are missing."""
    planned: dict[str, Assignment] = {}
    materials: dict[tuple[str, Selection], Material] = {}
    for entry in entries:
        made = recipe(entry)
        for seed in range(seeds if made.network else 0):
            assert made.attack is not None
            question = with_seed(made.attack, seed)
            key = made.network, question.selection
            if key not in materials:
                materials[key] = Material.of(*key, data_dir)
            name = materials[key].name(question)
            label = f"{IMAGENET} {made.network} {entry.patch}{f' seed {seed}' if seed else ''}"
            found = planned.get(name, Assignment(name, label, (), network=made.network))
            planned[name] = replace(found, questions=(*found.questions, question))
    return tuple(planned.values())


def answer_corners(
    network: str,
    questions: Sequence[Question],
    kept: EvidenceFolder,
    device: torch.device,
    data_dir: Path | None,
    tell: Tell,
) -> None:
    """Attacks each defense that is asked about, plainly and adaptively; its evidence is written as soon as it is there."""
    material = Material.of(network, questions[0].selection, data_dir)
    environment = describe_environment(device, material.dataset, processes=1)
    write_text(kept.path.parent / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
    missing = [each for each in questions if kept.find(each, material.weights_sha256) is None]
    if missing:
        _Corners(material, missing[0], kept, device, tell).attack(
            dict.fromkeys(str(each.classifier["defense"]) for each in missing)
        )


@final
class _Corners:
    """The attacks on one network with one size of patch, which share the patches for the undefended network."""

    def __init__(
        self, material: Material, question: Question, kept: EvidenceFolder, device: torch.device, tell: Tell
    ) -> None:
        self.material, self.question, self.kept, self.device, self.tell = (
            material,
            question,
            kept,
            device,
            tell,
        )
        self.experiment = planned_experiment(question, device)
        self.model = load_imagenet(material.network, material.folder).to(device)

    def attack(self, defenses: Sequence[str] | dict[str, None]) -> None:
        """Leaves the evidence of both attacks on each of the defenses."""
        selection = self.question.selection
        subject = Subject(
            self.model, self.material.weights_sha256, self.material.dataset, selection, self.device
        )
        images = subject.images(subject.positions())
        seed, began = selection.seed, time.perf_counter()
        task = Task(
            images.floats(), images.labels, self.question.threat, Generator(self.device).manual_seed(seed)
        )
        transferred = self.experiment.transferred(self.model, task, self.tell)
        shared = time.perf_counter() - began
        for defense in defenses:
            began = time.perf_counter()
            again = replace(task, generator=Generator(self.device).manual_seed(seed))
            name: DefenseName = "lgs" if defense.startswith("LocalGradient") else "dw"
            rows = self.experiment.rows(name, self.model, again, transferred, self.tell)
            whole = shared + time.perf_counter() - began
            for row, seconds in zip(rows, (shared, whole), strict=True):
                self._write(subject, defense, row, seconds)

    def _write(self, subject: Subject, defense: str, row: CornerRow, seconds: float) -> None:
        attack = CornerAttack(self.experiment.attack, row.adaptive).describe()
        question = replace(
            self.question,
            classifier={"name": "Defended", "defense": defense},
            attack={**attack, "seed": self.question.selection.seed},
        )
        columns: dict[str, Any] = {
            **evidence_columns(row.result, subject.positions()),
            "undefended": row.undefended.cpu().numpy(),
            "undefended_after": row.undefended_after.cpu().numpy(),
        }
        for name in ("index", "label", "prediction", "prediction_after", "top", "left", "undefended"):
            columns[name] = columns[name].astype(np.int32)
        subject.evidence(question, columns, self._facts(defense, row.adaptive, seconds)).write(
            self.kept.file(question)
        )

    def _facts(self, defense: str, adaptive: bool, seconds: float) -> dict[str, Any]:
        environment = json.loads((self.kept.path.parent / ENVIRONMENT).read_text(encoding="utf-8"))
        ascent = "bfloat16" if self.experiment.reduced else "float32"
        return {
            "network": self.material.network,
            "stages": _stages(
                self.experiment, Defended(defense_from(defense, self.model), self.model), adaptive
            ),
            "settings": {"ascent": ascent, "judged": "float32"},
            "source_sha256": environment["source_sha256"],
            "command": f"patchcert reproduce break-imagenet --rows {self.question.threat.height}x{self.question.threat.width}",
            "seconds": round(seconds, 3),
        }


def planned_experiment(question: Question, device: torch.device) -> CornerExperiment:
    """The attack that a question describes, with as many ascents at once as the device has room for."""
    at_once = ON_CPU
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        at_once = max(min(ON_GPU, int(0.8 * memory) // BYTES_PER_ASCENT), 4)
    attack = attack_from(question.attack, at_once).attack
    return CornerExperiment(attack, judged_at_once=max(at_once // 4, 1), reduced=device.type == "cuda")


def _stages(experiment: CornerExperiment, defended: Defended, adaptive: bool) -> list[str]:
    """The climbs of an attack, in words."""
    stages = ["undefended network, cross-entropy, to the largest margin"]
    if adaptive:
        names = [surrogate.__name__ for surrogate in reversed(defended.defense.surrogates())]
        attacks = experiment.attacks(defended)
        stages += [
            f"{name}, {attack.attack.loss}" for name, attack in zip([*names, names[0]], attacks, strict=True)
        ]
    return stages
