"""One target of `patchcert attack`, from its name to its evidence."""

import shlex
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from patchcert.attacks import AttackResult
from patchcert.cli.attack_choice import AttackChoice
from patchcert.cli.attack_steps import (
    Subject,
    build_defense,
    describe_trial,
    draw_images,
    evidence_arrays,
    evidence_name,
    known_proofs,
    open_subject,
    prove,
    tuned,
    write_arrays,
)
from patchcert.cli.options import USUAL_STEPS
from patchcert.cli.output import say
from patchcert.cli.parsing import parse_threat
from patchcert.cli.progress import progress_bar
from patchcert.defenses import Defended
from patchcert.errors import InvalidInput
from patchcert.files import sha256
from patchcert.report.statistics import clopper_pearson
from patchcert.threats import Patch, SparsePixels
from patchcert.train.environment import describe_machine


@final
@dataclass(frozen=True)
class Order:
    """What is asked of every target; `threat` are the options for it, of which a run folder needs none."""

    choice: AttackChoice
    threat: tuple[str | None, str | None, int | None, str | None]
    data: str | None
    data_dir: Path | None
    split: str
    images: int
    limit: int | None
    seed: int
    save_images: bool
    device: torch.device
    out: Path | None


@final
@dataclass(frozen=True)
class Outcome:
    """What is printed of a target, and the positions of its images that are wrong after the attack."""

    target: str
    summary: dict[str, Any]
    broken: list[int]


def carry_out_all(order: Order, targets: Sequence[str]) -> Iterator[Outcome]:
    """The targets one after the other, once all of them could be opened."""
    subjects = [open_subject(target, order.data, order.data_dir, order.split) for target in targets]
    for target, subject in zip(targets, subjects, strict=True):
        yield carry_out(order, target, subject, set(targets) - {target})


def carry_out(order: Order, target: str, subject: Subject, others: Collection[str]) -> Outcome:
    """Attack one target and keep its evidence, which names the command without the other targets."""
    patch, shape, sparse, placements = order.threat
    threat = parse_threat(patch, shape, sparse, None, placements, subject.trained_against)
    index = draw_images(len(subject.images), order.images, order.limit, order.seed)
    started, provenance = time.perf_counter(), _provenance(order, subject)
    result, index, extra = _attack(order, subject, threat, index)
    meta = {
        "kind": order.choice.kind,
        "command": shlex.join(["patchcert", *(word for word in sys.argv[1:] if word not in others)]),
        "threat": threat.to_dict(),
        **extra,
        "seed": order.seed,
        "seconds": round(time.perf_counter() - started, 3),
        **provenance,
    }
    name = evidence_name(order.choice.kind, [threat, *_name_words(order, subject)])
    arrays = evidence_arrays(result, index, order.save_images)
    evidence = write_arrays(order.out, subject.run, name, arrays, meta)
    kept = {"target": target, "evidence": None if evidence is None else str(evidence)}
    return Outcome(target, {**summarise(result), **meta, **kept}, index[result.succeeded.cpu()].tolist())


def summarise(result: AttackResult) -> dict[str, Any]:
    """Counts and shares, with the exact 95 % intervals of the latter; null where nothing was attacked."""

    total = len(result.labels)
    right = int((result.clean_predictions == result.labels).sum())
    withstood = int((~result.succeeded).sum())
    return {
        "images": total,
        "correct": right,
        "withstood": withstood,
        "broken": int((result.succeeded & (result.clean_predictions == result.labels)).sum()),
        "clean_accuracy": right / total if total else None,
        "clean_interval": list(clopper_pearson(right, total)) if total else None,
        "attacked_accuracy": withstood / total if total else None,
        "attacked_interval": list(clopper_pearson(withstood, total)) if total else None,
        "gradient_steps": int(result.steps.sum()),
    }


def _attack(
    order: Order, subject: Subject, threat: Patch | SparsePixels, index: Tensor
) -> tuple[AttackResult, Tensor, dict[str, Any]]:
    """The result, the positions of the images it is about, and what the evidence should say of it."""
    choice, place = order.choice, order.device
    attack = choice.build(threat, subject.is_imagenet, place)
    subject.model.to(place)
    if choice.certified_only:
        index = index[_proven(subject, threat, index, place)]
    model, extra = _defended(choice, subject, threat, place)
    chosen = subject.images[index].to(place)
    say(f"attacking {len(index)} {subject.split} images of {subject.dataset.name} with {threat} on {place}")
    generator = torch.Generator().manual_seed(order.seed)
    try:
        with progress_bar("attacking", "rounds") as report:
            result = attack.run(model, chosen.floats(), chosen.labels, threat, generator, report)
    except KeyboardInterrupt:
        say("the attack was not finished, and nothing of it is kept")
        raise
    facts = {"settings": attack.describe(), "certified_only": choice.certified_only, **extra}
    return result, index, facts


def _proven(subject: Subject, threat: Patch | SparsePixels, index: Tensor, place: torch.device) -> Tensor:
    """Which of the images are certified, from the run's evidence or else by certifying them now."""
    known = known_proofs(subject, threat, index)
    if known is not None:
        return known
    chosen = subject.images[index].to(place)
    with progress_bar("certifying", "images") as report:
        return prove(subject.model, chosen.floats(), chosen.labels, threat, report).cpu()


def _defended(
    choice: AttackChoice, subject: Subject, threat: Patch | SparsePixels, place: torch.device
) -> tuple[nn.Module, dict[str, Any]]:
    if choice.defense == "none":
        return subject.model, {"defense": None}
    if not isinstance(threat, Patch):
        raise InvalidInput(f"--defense {choice.defense} is for patches, not {threat}", hint="give --patch.")
    tuning: dict[str, Any] | None = None
    defense = build_defense(choice.defense, choice.settings, subject, threat)
    if choice.tune is not None:
        attack = choice.inner(threat, subject.is_imagenet, place)
        with progress_bar("tuning", "settings") as report:
            best = tuned(choice.defense, attack, subject, threat, choice.tune, choice.largest_drop, report)
        defense = best.defense
        tuning = {"images": choice.tune, "largest_drop": choice.largest_drop, **describe_trial(best)}
    described = f"{type(defense).__name__}({defense.extra_repr()})"
    extra = {"defense": described, "adaptive": choice.adaptive, "tuning": tuning}
    return Defended(defense, subject.model).to(place), extra


def _name_words(order: Order, subject: Subject) -> list[object]:
    """All that makes the question another one; what is as usual is left out."""
    choice, own = order.choice, None if subject.run is None else subject.run.spec.data.name
    other_data = "" if subject.dataset.name == own else subject.dataset.name
    other_split = "" if order.split == "test" else order.split
    images = [other_data, other_split, _drawn(order)]
    step_size = "" if choice.step_size is None else f"step-{choice.step_size}"
    restarts = "" if choice.restarts is None else choice.restarts
    if choice.certified_only:
        return ["certified-only", *images, restarts, "" if choice.steps == USUAL_STEPS else choice.steps]
    return [
        "" if choice.defense == "none" else choice.defense,
        *choice.settings,
        "" if choice.tune is None else f"tuned-{choice.tune}-{choice.largest_drop}",
        "adaptive" if choice.adaptive else "",
        *images,
        *(choice.loss or "", choice.search or "", restarts, choice.steps, step_size),
    ]


def _drawn(order: Order) -> str:
    if order.limit is None:
        return f"{order.images}-seed-{order.seed}"
    return f"first-{order.limit}" + (f"-seed-{order.seed}" if order.seed else "")


def _provenance(order: Order, subject: Subject) -> dict[str, Any]:
    data = {
        "name": subject.dataset.name,
        "split": subject.split,
        "images": order.images,
        "limit": order.limit,
        "sha256": dict(subject.dataset.checksums),
    }
    return {
        "weights_sha256": sha256(subject.weights),
        "data": data,
        **describe_machine(order.device),
    }
