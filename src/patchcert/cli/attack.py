"""`patchcert attack`: patches and pixels that change what a model says."""

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcert.cli.options import (
    DataFolderOption,
    DataOption,
    PatchOption,
    PlacementsOption,
    ShapeOption,
    SparseOption,
    SplitOption,
)
from patchcert.cli.output import print_error, print_json, say
from patchcert.cli.parsing import parse_device, parse_threat
from patchcert.cli.progress import progress_bar
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from patchcert.attacks import AttackResult
    from patchcert.cli.attack_choice import AttackChoice
    from patchcert.cli.attack_steps import Subject
    from patchcert.threats import Patch, SparsePixels

FALSE_PROOF = 1


def attack(
    target: Annotated[
        str, typer.Argument(help="A run folder, a .safetensors model, zoo:NAME or imagenet:NAME.")
    ],
    patch: PatchOption = None,
    shape: ShapeOption = None,
    sparse: SparseOption = None,
    placements: PlacementsOption = None,
    data: DataOption = None,
    data_dir: DataFolderOption = None,
    split: SplitOption = "test",
    images: Annotated[int, typer.Option(min=1, help="So many images, drawn at random by --seed.")] = 400,
    limit: Annotated[int | None, typer.Option(min=1, help="The first N images instead of a draw.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draw of images and of the attack.")] = 0,
    steps: Annotated[int, typer.Option(help="Gradient steps per restart.")] = 150,
    step_size: Annotated[float | None, typer.Option(help="Length of a step; 0.05, sparse 0.1.")] = None,
    restarts: Annotated[
        int | None, typer.Option(help="Starts per image; 80, sparse and --certified-only 20, ImageNet 4.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="cross-entropy or margin; sparse: margin.")] = None,
    search: Annotated[
        str | None, typer.Option(help="Where restarts go: random (default), sweep or certificate.")
    ] = None,
    defense: Annotated[str, typer.Option(help="none, lgs (smoothing) or dw (watermarking).")] = "none",
    setting: Annotated[
        list[str] | None, typer.Option(help="Setting of the defense, like window=7; repeatable.")
    ] = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="The attack knows the defense; without, it does not.")
    ] = False,
    tune: Annotated[
        int | None,
        typer.Option(min=1, help="Choose the defense's settings on the last N training images."),
    ] = None,
    largest_drop: Annotated[
        float, typer.Option(min=0, max=1, help="With --tune: clean accuracy that a defense may cost.")
    ] = 0.02,
    certified_only: Annotated[
        bool,
        typer.Option("--certified-only", help="Certified images only; exit code 1 if one breaks."),
    ] = False,
    save_images: Annotated[
        bool, typer.Option("--save-images", help="Keep the broken images in the evidence.")
    ] = False,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images and restarts at once.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write one row of evidence per image; a run folder keeps its own."),
    ] = None,
) -> None:
    """Look for members of a threat that change a model's predictions.

    Accuracy under attack is an upper bound of the truth; `patchcert certify` gives lower ones. The summary is
    JSON on stdout. With --certified-only a broken image refutes its proof, and the exit code is 1.
    """
    from patchcert.cli.attack_choice import AttackChoice
    from patchcert.cli.attack_steps import draw_images, open_subject

    _check_output(out)
    choice = AttackChoice(
        steps,
        step_size,
        restarts,
        loss,
        search,
        defense,
        tuple(setting or ()),
        adaptive,
        tune,
        largest_drop,
        certified_only,
        batch_size,
    )
    subject = open_subject(target, data, data_dir, split)
    threat = parse_threat(patch, shape, sparse, None, placements, subject.trained_against)
    place = parse_device(device)
    index = draw_images(len(subject.images), images, limit, seed)
    started = time.perf_counter()
    result, index, extra = _carry_out(choice, subject, threat, place, index, seed)
    meta = {
        "kind": choice.kind,
        "command": shlex.join(["patchcert", *sys.argv[1:]]),
        "threat": threat.to_dict(),
        **extra,
        "seed": seed,
        "seconds": round(time.perf_counter() - started, 3),
        **_provenance(subject, place, images, limit),
    }
    words = [threat, *_name_words(choice, images, limit, seed)]
    evidence = _keep(result, index, subject, out, words, meta, save_images)
    print_json({**summarise(result), **meta, "evidence": None if evidence is None else str(evidence)})
    _report_false_proofs(result, index, choice)


def summarise(result: "AttackResult") -> dict[str, Any]:
    """Counts and shares, with the exact 95 % intervals of the latter; null where nothing was attacked."""
    from patchcert.report.statistics import clopper_pearson

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


def _carry_out(
    choice: "AttackChoice",
    subject: "Subject",
    threat: "Patch | SparsePixels",
    place: "torch.device",
    index: "torch.Tensor",
    seed: int,
) -> "tuple[AttackResult, torch.Tensor, dict[str, Any]]":
    """The result, the positions of the images it is about, and what the evidence should say of it."""
    import torch

    from patchcert.cli.attack_choice import describe_attack

    attack = choice.build(threat, subject.is_imagenet, place)
    subject.model.to(place)
    if choice.certified_only:
        index = index[_proven(subject, threat, index, place)]
    model, extra = _defended(choice, subject, threat, place)
    chosen = subject.images[index].to(place)
    say(f"attacking {len(index)} {subject.split} images of {subject.dataset.name} with {threat} on {place}")
    generator = torch.Generator().manual_seed(seed)
    with progress_bar("attacking", "restarts") as report:
        result = attack.run(model, chosen.floats(), chosen.labels, threat, generator, report)
    return (
        result,
        index,
        {"settings": describe_attack(attack), "certified_only": choice.certified_only, **extra},
    )


def _proven(
    subject: "Subject", threat: "Patch | SparsePixels", index: "torch.Tensor", place: "torch.device"
) -> "torch.Tensor":
    """Which of the images are certified, from the run's evidence or else by certifying them now."""
    from patchcert.cli.attack_steps import known_proofs, prove

    known = known_proofs(subject, threat, index)
    if known is not None:
        return known
    chosen = subject.images[index].to(place)
    with progress_bar("certifying", "images") as report:
        return prove(subject.model, chosen.floats(), chosen.labels, threat, report).cpu()


def _defended(
    choice: "AttackChoice", subject: "Subject", threat: "Patch | SparsePixels", place: "torch.device"
) -> "tuple[torch.nn.Module, dict[str, Any]]":
    from patchcert.cli.attack_steps import build_defense, describe_trial, tuned
    from patchcert.defenses import Defended
    from patchcert.threats import Patch

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


def _name_words(choice: "AttackChoice", images: int, limit: int | None, seed: int) -> list[object]:
    drawn = f"{images}-seed-{seed}" if limit is None else f"first-{limit}"
    if choice.certified_only:
        return ["certified-only", drawn]
    knowing = "adaptive" if choice.adaptive else ""
    tuned = "" if choice.tune is None else f"tuned-{choice.tune}"
    given = (choice.loss, choice.search, choice.restarts, choice.steps)
    defense = "" if choice.defense == "none" else choice.defense
    return [
        defense,
        *choice.settings,
        tuned,
        knowing,
        drawn,
        *("" if word is None else word for word in given),
    ]


def _provenance(subject: "Subject", place: "torch.device", images: int, limit: int | None) -> dict[str, Any]:
    import torch

    from patchcert import __version__
    from patchcert.experiments.environment import device_name
    from patchcert.files import sha256

    data = {"name": subject.dataset.name, "split": subject.split, "images": images, "limit": limit}
    return {
        "weights_sha256": sha256(subject.weights),
        "data": {**data, "sha256": dict(subject.dataset.checksums)},
        "device": device_name(place),
        "versions": {"patchcert": __version__, "torch": torch.__version__},
    }


def _keep(
    result: "AttackResult",
    index: "torch.Tensor",
    subject: "Subject",
    out: Path | None,
    words: list[object],
    meta: dict[str, Any],
    save_images: bool,
) -> Path | None:
    from patchcert.cli.attack_steps import evidence_arrays, evidence_name, write_arrays

    arrays = evidence_arrays(result, index, save_images)
    return write_arrays(out, subject.run, evidence_name(str(meta["kind"]), words), arrays, meta)


def _report_false_proofs(result: "AttackResult", index: "torch.Tensor", choice: "AttackChoice") -> None:
    if not choice.certified_only:
        return
    broken = index[result.succeeded.cpu()].tolist()
    if broken:
        print_error(
            f"FALSE PROOF: {len(broken)} of {len(index)} certified images were broken: {broken[:20]}",
            "the certificates are wrong; do not rely on any of them, and keep this evidence",
        )
        raise typer.Exit(FALSE_PROOF)
    withstood = f"all {len(index)} certified images withstood everything"
    say(withstood if len(index) else "none of the images is certified, so nothing was attacked")


def _check_output(path: Path | None) -> None:
    """Found out before the work, not after it."""
    if path is not None and (path.suffix != ".npz" or path.is_dir()):
        raise InvalidInput(f"--out {path} is no name of an evidence file", hint="end it with .npz.")
