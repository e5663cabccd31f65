"""The ImageNet experiment of Chiang et al. (2020): patches in the corners against two defenses, on local files."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from patchcert.attacks import AttackedModel, AttackJob, AttackResult, FastCopy, Findings, PatchAttack
from patchcert.attacks.base import judged
from patchcert.attacks.composite import Attempt, strongest
from patchcert.bounds import precise_arithmetic
from patchcert.data import Dataset, load_dataset
from patchcert.data.files import find_imagenet
from patchcert.data.folder import FolderSplit
from patchcert.defenses import Defended
from patchcert.errors import DataError
from patchcert.evidence import EvidenceFolder, Question, Selection, Subject
from patchcert.files import sha256, write_text
from patchcert.models.imagenet import load_imagenet
from patchcert.papers.chiang2020.answering import attack_from, defense_from
from patchcert.papers.chiang2020.networks import network_name, with_seed
from patchcert.papers.chiang2020.recipes import IMAGENET, CornerAttack, recipe
from patchcert.papers.chiang2020.runner import Assignment
from patchcert.papers.chiang2020.tables import Entry
from patchcert.train.environment import describe_environment
from patchcert.train.run_folder import ENVIRONMENT

Tell = Callable[[str], None]
ON_GPU, ON_CPU = 1200, 32
"""Ascents at once. More than 1,200 would make single tensors of ResNet-50 larger than 2 GiB."""
BYTES_PER_ASCENT = 2**26


@final
@dataclass(frozen=True, eq=False)
class CornerRow:
    """One cell of the table: the outcome of an attack on a defense, image by image."""

    adaptive: bool
    result: AttackResult
    undefended: Tensor
    """The undefended model's predictions on the clean images."""
    undefended_after: Tensor
    """The undefended model's predictions on the attacked images."""


@final
@dataclass(frozen=True)
class CornerExperiment:
    """Weak and adaptive attacks with patches in the four corners.

    The weak attack does not know of the defense: it runs to its end on the undefended model, and its surest
    patch is shown to each defense. The adaptive one starts from these patches and climbs on every surrogate of
    the defense, last on the first of them once more by the margin; an image is spared once it is broken.

    Ascents follow a fast copy of the network, in bfloat16 on a GPU. Whatever counts is said by the network itself in
    float32, `judged_at_once` images at a time: clean predictions, successes before an image is given up, and
    the results.
    """

    attack: PatchAttack
    judged_at_once: int
    reduced: bool
    """Whether the fast copy computes in bfloat16."""

    @precise_arithmetic()
    def transferred(self, model: nn.Module, job: AttackJob, tell: Tell | None = None) -> Findings:
        """The surest patch for the undefended model, in one of the corners.

        `tell` hears before every pass of the fast copy what it is for, and may raise to end the attack.
        """
        AttackedModel.of(model).check(job.images, job.labels)
        copy = self._copy(model, "weak attack", tell)
        attack = replace(self.attack.exhaustive(), check_every=max(self.attack.steps, 1))
        return attack.propose(AttackedModel(copy, model, self.judged_at_once), job)

    @precise_arithmetic()
    def rows(
        self,
        defense: str,
        model: nn.Module,
        job: AttackJob,
        transferred: Findings,
        tell: Tell | None = None,
    ) -> tuple[CornerRow, CornerRow]:
        """The weak and the adaptive attack on a defense, by its description, from what the undefended model gave."""
        at_once = self.judged_at_once
        defended = Defended(defense_from(defense, model), model).to(job.images.device)
        target = AttackedModel(defended, defended, at_once)
        clean = target.evaluate(job.images, job.labels, at_once).predictions
        weak = judged(target, job, transferred, clean, at_once)
        copy = self._copy(model, f"adaptive attack on {defense.partition('(')[0]}", tell)
        imitated = Defended(defense_from(defense, copy), copy).to(job.images.device)
        found = self._adapted(target, imitated, job, transferred, clean)
        adaptive = judged(target, job, found, clean, at_once)
        return self._row(model, job, weak, False), self._row(model, job, adaptive, True)

    def attacks(self, defended: Defended) -> list[tuple[PatchAttack, nn.Module]]:
        """What the adaptive attack tries, and on which surrogate: the most passable one first, and last again."""
        first, *rest = reversed(defended.surrogates())
        by_margin = replace(self.attack, loss="margin")
        return [*((self.attack, each) for each in (first, *rest)), (by_margin, first)]

    def _copy(self, model: nn.Module, purpose: str, tell: Tell | None) -> FastCopy:
        """A fast copy of the network that announces the purpose of each of its passes."""
        copy = FastCopy(model, self.reduced)
        if tell is not None:
            copy.register_forward_pre_hook(lambda module, inputs: tell(purpose))
        return copy

    def _adapted(
        self, target: AttackedModel, imitated: Defended, job: AttackJob, transferred: Findings, clean: Tensor
    ) -> Findings:
        """The strongest images for the defended model; those wrong by themselves stay unchanged."""
        right = (clean == job.labels).nonzero().flatten()
        attempts = [
            Attempt(attack, replace(target, surrogate=surrogate))
            for attack, surrogate in self.attacks(imitated)
        ]
        found = strongest(target, attempts, job.part(right), transferred.part(right), self.judged_at_once)
        return Findings.unchanged(job.images).updated(right, found)

    def _row(self, model: nn.Module, job: AttackJob, result: AttackResult, adaptive: bool) -> CornerRow:
        before, after = (
            AttackedModel.of(model).evaluate(images, job.labels, self.judged_at_once).predictions
            for images in (job.images, result.adversarial)
        )
        return CornerRow(adaptive, result, before, after)


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
    """Attacks each defense asked about, plainly and adaptively; its evidence is written as soon as it is there.

    The questions are about one size of patch, so that all attacks share the patches for the undefended network.
    """
    first = questions[0]
    material = Material.of(network, first.selection, data_dir)
    environment = describe_environment(device, material.dataset, processes=1)
    write_text(kept.path.parent / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
    missing = [each for each in questions if kept.find(each, material.weights_sha256) is None]
    if not missing:
        return
    model, experiment = load_imagenet(network, material.folder).to(device), planned_experiment(first, device)
    subject = Subject(model, material.weights_sha256, material.dataset, first.selection, device)
    images, began = subject.images(subject.positions()), time.perf_counter()
    job = AttackJob(images.floats(), images.labels, first.threat, _generator(first, device))
    transferred = experiment.transferred(model, job, tell)
    shared = time.perf_counter() - began
    for defense in dict.fromkeys(str(each.classifier["defense"]) for each in missing):
        again, began = replace(job, generator=_generator(first, device)), time.perf_counter()
        rows = experiment.rows(defense, model, again, transferred, tell)
        seconds = shared, shared + time.perf_counter() - began
        for row, taken in zip(rows, seconds, strict=True):
            asked = _question(first, defense, experiment, row.adaptive)
            facts = {
                "network": network,
                "settings": {"ascent": "bfloat16" if experiment.reduced else "float32", "judged": "float32"},
                "source_sha256": environment["source_sha256"],
                "seconds": round(taken, 3),
            }
            subject.evidence(asked, _columns(row, subject), facts).write(kept.file(asked))


def planned_experiment(question: Question, device: torch.device) -> CornerExperiment:
    """The attack that a question describes, with as many ascents at once as the device has room for."""
    at_once = ON_CPU
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        at_once = max(min(ON_GPU, int(0.8 * memory) // BYTES_PER_ASCENT), 4)
    attack = attack_from(question.attack, at_once).attack
    return CornerExperiment(attack, judged_at_once=max(at_once // 4, 1), reduced=device.type == "cuda")


def _question(first: Question, defense: str, experiment: CornerExperiment, adaptive: bool) -> Question:
    attack = {**CornerAttack(experiment.attack, adaptive).describe(), "seed": first.selection.seed}
    return replace(first, classifier={"name": "Defended", "defense": defense}, attack=attack)


def _columns(row: CornerRow, subject: Subject) -> dict[str, NDArray[Any]]:
    """The rows of evidence, with the answers of the undefended network to the same images."""
    own = {"undefended": row.undefended, "undefended_after": row.undefended_after}
    found = {
        **row.result.columns(subject.positions()),
        **{name: each.cpu().numpy() for name, each in own.items()},
    }
    wide = ("succeeded", "margin", "steps")
    return {name: each if name in wide else each.astype(np.int32) for name, each in found.items()}


def _generator(question: Question, device: torch.device) -> Generator:
    return Generator(device).manual_seed(question.selection.seed)
