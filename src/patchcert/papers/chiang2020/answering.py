"""From a question about a run to its answer: the classifier and the attack that it describes, made and measured."""

import ast
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from patchcert.attacks import (
    AdaptiveAfterTransfer,
    AdaptiveAttack,
    AttackSeries,
    PatchAttack,
    SparseAttack,
    TransferAttack,
    default_batch_size,
)
from patchcert.certificates import Classifier, method_named
from patchcert.certificates.ablation import RandomAblation
from patchcert.data import Dataset
from patchcert.defenses import Defended, Defense, DigitalWatermarking, LocalGradientSmoothing
from patchcert.errors import InvalidInput
from patchcert.evidence import Attacking, Certification, Evidence, EvidenceFolder, Question, Subject
from patchcert.files import sha256
from patchcert.papers.chiang2020.recipes import CornerAttack
from patchcert.progress import Progress
from patchcert.threats import Patch, SparsePixels
from patchcert.threats.shapes import name_of
from patchcert.train.run_folder import EVIDENCE, Run

CPU_VOTES = 1_100
CUDA_IMAGES = {"cnn2_ablation": 4}
"""Images whose votes fill a batch on a GPU, where it is not one."""

_ATTACKS: Mapping[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (
        PatchAttack,
        SparseAttack,
        AttackSeries,
        TransferAttack,
        AdaptiveAttack,
        AdaptiveAfterTransfer,
        CornerAttack,
    )
}


def attack_from(described: Mapping[str, Any], batch_size: int) -> Any:  # noqa: ANN401 - an attack of whatever kind is described
    """The attack that describes itself so, except for the size of its batches."""
    kind = _ATTACKS.get(described["kind"])
    if kind is None:
        raise InvalidInput(f"no attack of the kind {described['kind']!r} can be made from its description")
    settings = {
        name: _setting(value, batch_size)
        for name, value in described.items()
        if name not in ("kind", "seed", "batch_size")
    }
    return kind(**settings, **({"batch_size": batch_size} if "batch_size" in described else {}))


def _setting(value: Any, batch_size: int) -> Any:  # noqa: ANN401 - plain JSON
    if isinstance(value, Mapping):
        return attack_from(value, batch_size)
    return tuple(attack_from(each, batch_size) for each in value) if isinstance(value, list) else value


def defense_from(described: str, model: nn.Module) -> Defense:
    """The defense that prints itself so, in front of the model."""
    call = ast.parse(described, mode="eval").body
    if not isinstance(call, ast.Call):
        raise InvalidInput(f"{described!r} is no description of a defense")
    settings = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    if ast.unparse(call.func) == DigitalWatermarking.__name__:
        return DigitalWatermarking(model, **settings)
    return LocalGradientSmoothing(**settings)


def answer(
    question: Question, run: Run, dataset: Dataset, device: torch.device, progress: Progress | None = None
) -> Evidence:
    """The evidence that answers a question about a run, which is left in its folder."""
    classifier = classifier_of(question, run, device)
    subject = Subject(classifier, sha256(run.weights), dataset, question.selection, device)
    folder, command = EvidenceFolder(run.path / EVIDENCE), command_of(question, run)
    if question.kind == "certify":
        return Certification(subject, question.threat, command=command).into(folder).run(progress)
    attack = attack_from(question.attack, default_batch_size(device))
    asked = Attacking(subject, attack, question.threat, question.attack["seed"], command=command)
    return asked.into(folder).run(progress)


def classifier_of(question: Question, run: Run, device: torch.device) -> Classifier | nn.Module:
    """The run's model as the question describes it: with a kind of proof, behind a defense, or as it is."""
    model, described = run.model(device), question.classifier
    if "defense" in described:
        return Defended(defense_from(described["defense"], model), model).to(device)
    method = method_named(described["name"])
    made = model if method is None else method.described(model, described)
    if isinstance(made, RandomAblation):
        votes = made.selection_samples + made.estimation_samples
        at_once = CUDA_IMAGES.get(run.spec.model.name, 1) * votes if device.type == "cuda" else CPU_VOTES
        return replace(made, batch_size=at_once)
    return made


def command_of(question: Question, run: Run) -> str:
    """What measures the model in a run's folder anew, wherever that lies; nothing where only `reproduce` does."""
    threat, selection = question.threat, question.selection
    words = ["patchcert", question.kind, run.path.name]
    if isinstance(threat, Patch):
        words += ["--shape", name_of(threat.stamp) or "STAMP.txt"]
    else:
        assert isinstance(threat, SparsePixels)
        words += ["--sparse", str(threat.pixels), "--bound", threat.bound]
    if question.classifier["name"] == "IntervalBounds":
        return shlex.join([*words, *([] if selection.limit is None else ["--limit", str(selection.limit)])])
    if question.attack.get("kind") != "PatchAttack":
        return ""
    drawn = {"images": selection.drawn, "seed": selection.seed}
    options = {**drawn, **{name: question.attack[name] for name in ("restarts", "steps", "search")}}
    return shlex.join(
        [*words, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    )
