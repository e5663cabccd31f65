"""`patchcert attack`: patches and pixels that change what a model says."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, final

import typer

import patchcert as pc
from patchcert.cli import options
from patchcert.cli.measuring import command_line, kept_with, measure
from patchcert.cli.output import print_error, print_json, progress_bar, say
from patchcert.cli.target import (
    IMAGENET,
    Target,
    choose_classifier,
    learned_method,
    open_data,
    open_target,
    select_images,
    through_camera,
)
from patchcert.cli.threads import using_threads
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from patchcert.attacks import Attack
    from patchcert.attacks.patch import Search
    from patchcert.certificates import AnyThreat
    from patchcert.data import Dataset, Split
    from patchcert.defenses import Defense
    from patchcert.evidence import Evidence, Selection, Subject

FALSE_PROOF = 1
SWEPT = 1_024
"""Placements that `--certified-only` tries on ImageNet, whose images have tens of thousands."""


def attack(
    targets: Annotated[
        list[str],
        typer.Argument(help="Run folders, .safetensors models, zoo:NAME, imagenet:NAME, or MODULE:FACTORY."),
    ],
    weights: options.Weights = None,
    normalise: options.Normalise = None,
    image_size: options.ImageSize = None,
    patch: options.Patch = None,
    shape: options.Shape = None,
    sparse: options.Sparse = None,
    placements: options.Placements = None,
    patches: options.Patches = None,
    camera: options.Camera = None,
    data: options.Data = None,
    data_dir: options.DataFolder = None,
    split: options.Split = "test",
    images: Annotated[
        int | None, options.number_option("N images, drawn at random by --seed; 400 by default.")
    ] = None,
    limit: Annotated[int | None, options.number_option("The first N images instead of a draw.")] = None,
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
    universal: Annotated[
        int | None, options.number_option("One patch for all images, learned on the last N training images.")
    ] = None,
    transform: Annotated[
        list[str] | None,
        typer.Option(
            help="The patch must work under random changes: rotation=15 degrees, scale=0.1, brightness=0.1, shift=1; "
            "repeatable."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Attack the classifier of a kind of proof, like masking or bands; by default that which the run was "
            "trained for. interval is the model itself."
        ),
    ] = None,
    defense: Annotated[str, typer.Option(help="none, lgs (smoothing) or dw (watermarking).")] = "none",
    setting: Annotated[
        list[str] | None, typer.Option(help="Setting of the defense or method, like window=7; repeatable.")
    ] = None,
    masks: options.Masks = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="The attack knows the defense; without, it does not.")
    ] = False,
    tune: Annotated[
        int | None,
        options.number_option("Choose the defense's settings on the last N training images."),
    ] = None,
    largest_drop: Annotated[
        float,
        options.number_option(
            "With --tune: clean accuracy that a defense may cost.", kind=float, least=0, most=1
        ),
    ] = 0.02,
    certified_only: Annotated[
        bool,
        typer.Option("--certified-only", help="Certified images only; exit code 1 if one breaks."),
    ] = False,
    save_images: Annotated[
        bool, typer.Option("--save-images", help="Keep the broken images in the evidence.")
    ] = False,
    batch_size: Annotated[int | None, options.number_option("Images and restarts at once, at most.")] = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    out: options.EvidenceFile = None,
) -> None:
    """Look for members of a threat that change a model's predictions.

    Accuracy under attack is an upper bound of the truth; `patchcert certify` gives lower ones. The summary is
    JSON on stdout; of several targets, a list of them with the totals. With --certified-only a broken image
    refutes its proof, and the exit code is 1. Interrupted, the same command resumes where it stopped, if evidence is
    kept.
    """
    options.check_evidence_file(out)
    for option, file in (("--out", out), ("--weights", weights)):
        if file is not None and len(targets) > 1:
            raise InvalidInput(
                f"{option} {file} is for one target, not for {len(targets)}", hint="attack them one by one."
            )
    if images is not None and limit is not None:
        raise InvalidInput("--images draws at random, --limit takes the first", hint="leave one of them out.")
    given = {
        "steps": steps,
        "step_size": step_size,
        "restarts": restarts,
        "loss": loss,
        "batch_size": batch_size,
    }
    asked = AttackOptions(
        given={name: value for name, value in given.items() if value is not None},
        search=search,
        universal=universal,
        transform=tuple(transform or ()),
        method=method,
        defense=defense,
        settings=tuple(options.with_masks(setting, masks)),
        adaptive=adaptive,
        tune=tune,
        largest_drop=largest_drop,
        certified_only=certified_only,
        seed=seed,
        save_images=save_images,
        device=options.parse_device(device),
        out=out,
    )
    drawn = None if limit is not None else images or 400
    subjects = []
    for target in targets:
        opened = open_target(target, data_dir, weights, normalise, image_size)
        resized = through_camera(opened, camera, data, data_dir)
        threat = options.parse_threat(patch, shape, sparse, None, placements, opened.threat, patches, resized)
        dataset = open_data(opened, data, data_dir)
        selection = select_images(opened, dataset, split, limit, drawn, seed)
        subjects.append(AttackedTarget(target, opened, dataset, selection, threat))
    with using_threads(threads):
        summaries = [_attack_one(subject, asked, targets) for subject in subjects]
    print_json(summaries[0] if len(summaries) == 1 else totals(summaries))
    if certified_only and any(summary["broken"] for summary in summaries):
        raise typer.Exit(FALSE_PROOF)


@final
@dataclass(frozen=True)
class AttackedTarget:
    """A target with its images and the threat that it is attacked within."""

    name: str
    target: Target
    dataset: "Dataset"
    selection: "Selection"
    threat: "AnyThreat"

    @property
    def is_imagenet(self) -> bool:
        """Whether images are large and defenses have the settings published for them."""
        return self.name.startswith(IMAGENET)


@final
@dataclass(frozen=True)
class AttackOptions:
    """What was asked of every target; `given` are settings of attacks, whose defaults depend on threat and images."""

    given: Mapping[str, Any]
    search: str | None
    universal: int | None
    transform: tuple[str, ...]
    method: str | None
    defense: str
    settings: tuple[str, ...]
    adaptive: bool
    tune: int | None
    largest_drop: float
    certified_only: bool
    seed: int
    save_images: bool
    device: "torch.device"
    out: Path | None

    def __post_init__(self) -> None:
        undefended = self.defense == "none"
        lonely = "--adaptive" if self.adaptive else "--tune" if self.tune else None
        if undefended and lonely:
            raise InvalidInput(f"{lonely} needs a defense", hint="give --defense lgs or --defense dw.")
        if self.tune and self.settings:
            raise InvalidInput("--tune chooses what --setting sets", hint="leave one of them out.")
        if self.method is not None and not undefended:
            raise InvalidInput("--method and --defense name two classifiers", hint="leave one of them out.")
        if self.certified_only and not undefended:
            raise InvalidInput(
                f"--certified-only is about the model itself, not about --defense {self.defense}",
                hint="leave one of them out.",
            )
        is_printed = self.universal is not None or self.transform
        if is_printed and self.search:
            option = "--transform" if self.universal is None else "--universal"
            raise InvalidInput(
                f"{option} goes to random placements, --search elsewhere", hint="leave it out."
            )
        if (
            self.certified_only
            and not is_printed
            and (self.search or {"loss", "step_size"} & self.given.keys())
        ):
            raise InvalidInput(
                "--certified-only tries every placement with every loss",
                hint="leave out --loss, --search and --step-size.",
            )

    def build(self, threat: "AnyThreat", is_imagenet: bool, examples: "Split | None" = None) -> "Attack":
        """The attack, with its defaults filled in; a universal patch is learned on the examples."""
        from patchcert.attacks import AdaptiveAttack, TransferAttack, strongest_attack

        is_printed = examples is not None or self.transform
        if self.certified_only and not is_printed:
            settings = self._settings(is_imagenet)
            return strongest_attack(threat, **settings, sweep_placements=SWEPT if is_imagenet else None)
        attack = (
            self._printed(threat, examples, is_imagenet)
            if is_printed
            else self.build_unaware(threat, is_imagenet)
        )
        if self.defense == "none":
            return attack
        return AdaptiveAttack(attack) if self.adaptive else TransferAttack(attack)

    def _printed(self, threat: "AnyThreat", examples: "Split | None", is_imagenet: bool) -> "Attack":
        """One patch for all images, or one for each that works under a transform."""
        from patchcert.attacks import Transform, TransformedAttack, UniversalAttack

        if not isinstance(threat, pc.Patch):
            raise InvalidInput(
                f"--universal and --transform are about one patch, not {threat}", hint="give --patch."
            )
        asked = options.parse_settings("a transform", Transform, self.transform, option="--transform")
        given = {**self._settings(is_imagenet), "transform": Transform(**asked)}
        if examples is None:
            return TransformedAttack(**given)
        return UniversalAttack(examples.floats(), examples.labels, **given)

    def build_unaware(self, threat: "AnyThreat", is_imagenet: bool) -> "Attack":
        """The attack as it would be on an undefended model."""
        from patchcert.attacks import PatchesInTurn

        given = self._settings(is_imagenet)
        if isinstance(threat, pc.SparsePixels):
            if self.search is not None:
                raise InvalidInput("--search is about patches, not --sparse", hint="leave it out.")
            return pc.SparseAttack(**given)
        if is_imagenet:
            given = {"restarts": 4, **given}
        attack = pc.PatchAttack(search=cast("Search", self.search or "random"), **given)
        return PatchesInTurn(attack) if isinstance(threat, pc.Patches) else attack

    def _settings(self, is_imagenet: bool) -> dict[str, Any]:
        from patchcert.attacks import default_batch_size

        return {"batch_size": default_batch_size(self.device, is_imagenet), **self.given}


def _attack_one(attacked: AttackedTarget, asked: AttackOptions, targets: list[str]) -> dict[str, Any]:
    """What is printed of one target; its evidence names the command without the other targets."""
    from patchcert.evidence import Attacking
    from patchcert.report.statistics import in_words, summarise

    others = tuple(target for target in targets if target != attacked.name)
    subject, tuning = _subject(attacked, asked)
    among = _certified_positions(attacked, subject) if asked.certified_only else None
    attacking = Attacking(
        subject,
        asked.build(attacked.threat, attacked.is_imagenet, _examples(attacked, asked)),
        attacked.threat,
        asked.seed,
        asked.out,
        command_line(without=others),
        among,
        asked.save_images,
        tuning,
    )
    evidence = measure(kept_with(attacked.target, attacking), attacked.target)
    if asked.certified_only:
        _say_of_proofs(attacked.name, evidence)
    say(in_words(evidence))
    return {**summarise(evidence), "target": attacked.name}


def _examples(attacked: AttackedTarget, asked: AttackOptions) -> "Split | None":
    """The images that a universal patch is learned on, none of which it is tried on."""
    if asked.universal is None:
        return None
    if attacked.selection.split != "test":
        raise InvalidInput(
            f"--universal learns on training images, and --split {attacked.selection.split} has them too",
            hint="attack the test images, on which the patch was not learned.",
        )
    return _last_training_images(attacked, asked, asked.universal, "--universal")


def _last_training_images(attacked: AttackedTarget, asked: AttackOptions, count: int, option: str) -> "Split":
    train = attacked.dataset.train
    if count > len(train):
        raise InvalidInput(
            f"{option} {count}: {attacked.dataset.name} has {len(train)} training images",
            hint="take fewer of them.",
        )
    return train[len(train) - count :].to(asked.device)


def totals(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The summaries of several targets, and their counts added up."""
    counts = ("images", "correct", "withstood", "broken", "gradient_steps")
    added = {count: sum(summary[count] for summary in summaries) for count in counts}
    return {"targets": summaries, **added}


def _say_of_proofs(target: str, evidence: "Evidence") -> None:
    """What the attack means for the proofs of the images."""
    broken = evidence.columns["index"][evidence.broken_rows].tolist()
    if broken:
        print_error(
            f"FALSE PROOF: {len(broken)} of {evidence.total} certified images of {target} were broken: {broken[:20]}",
            "the certificates are wrong; do not rely on any of them, and keep this evidence",
        )
    elif evidence.total:
        say(f"all {evidence.total} certified images withstood everything")
    else:
        say("none of the images is certified, so nothing was attacked")


def _subject(attacked: AttackedTarget, asked: AttackOptions) -> "tuple[Subject, dict[str, Any]]":
    """What is attacked: the model, behind a defense or as the classifier of a proof; and how settings were found."""
    from patchcert.evidence import Subject

    target, tuning = attacked.target, {}
    model: Any = target.model.to(asked.device)
    is_trained_for_it = asked.defense == "none" and learned_method(target)[0] != "interval"
    if asked.method is not None or is_trained_for_it:
        model = choose_classifier(target, attacked.threat, asked.method, asked.settings)
    elif asked.defense != "none":
        model, tuning = _defended(model, attacked, asked)
    elif asked.settings:
        raise InvalidInput(
            "--setting and --masks need a defense or a kind of proof",
            hint="give --defense lgs or --method masking.",
        )
    subject = Subject(model, target.weights_sha256, attacked.dataset, attacked.selection, asked.device)
    return subject, tuning


def _certified_positions(attacked: AttackedTarget, subject: "Subject") -> "Tensor":
    """Positions of the selected images that are certified, by the run's evidence or else by certifying them now."""
    from patchcert.evidence import EvidenceFolder

    positions, run = subject.positions(), attacked.target.run
    if run is not None:
        folder = EvidenceFolder(run.evidence_folder)
        known = folder.proven(
            attacked.threat,
            attacked.selection,
            subject.weights,
            positions,
            subject.describe(),
            subject.dataset.checksums,
        )
        if known is not None:
            return positions[known]
    classifier = subject.classifier
    if not isinstance(classifier, pc.Classifier):
        classifier = choose_classifier(attacked.target, attacked.threat, "interval")
    images = subject.images(positions)
    with progress_bar("certifying", "images") as report:
        found = classifier.certify(images.floats(), images.labels, attacked.threat, report)
    return positions[found.certified.cpu()]


def _defended(
    model: "nn.Module", attacked: AttackedTarget, asked: AttackOptions
) -> "tuple[nn.Module, dict[str, Any]]":
    """The model behind the defense, and what its settings reached on the images they were chosen on."""
    from patchcert.defenses import Defended

    threat = attacked.threat
    if not isinstance(threat, pc.Patch):
        raise InvalidInput(f"--defense {asked.defense} is for patches, not {threat}", hint="give --patch.")
    side = max(threat.height, threat.width)
    if asked.tune is None:
        defense, tuning = build_defense(asked.defense, asked.settings, model, attacked, side), {}
    else:
        defense, tuning = _tuned(model, attacked, asked, side)
    return Defended(defense, model).to(asked.device), tuning


def build_defense(
    name: str, settings: tuple[str, ...], model: "nn.Module", attacked: AttackedTarget, side: int
) -> "Defense":
    """The defense `lgs` or `dw` with the given KEY=VALUE settings, the others as fit the images."""
    from patchcert.defenses import DigitalWatermarking, LocalGradientSmoothing

    small: dict[str, dict[str, Any]] = {
        "lgs": {"window": 5, "overlap": 2, "threshold": 0.1, "smoothing": 2.3},
        "dw": {"window": side + 1, "fill": attacked.dataset.mean},
    }
    large: dict[str, dict[str, Any]] = {
        "lgs": {"window": 15, "overlap": 5, "threshold": 0.1, "smoothing": 2.3},
        "dw": {"window": round(1.2 * side), "opening": 3, "fill": (0.485, 0.456, 0.406)},
    }
    if name not in small:
        raise InvalidInput(f"--defense {name} is unknown", hint="choose one of none, lgs, dw.")
    usual = (large if attacked.is_imagenet else small)[name]
    if name == "lgs":
        return LocalGradientSmoothing(
            **usual | options.parse_settings(name, LocalGradientSmoothing, settings)
        )
    return DigitalWatermarking(model, **usual | options.parse_settings(name, DigitalWatermarking, settings))


def _tuned(
    model: "nn.Module", attacked: AttackedTarget, asked: AttackOptions, side: int
) -> "tuple[Defense, dict[str, Any]]":
    """The best setting of a defense on the last training images, which no result is about."""
    from patchcert.attacks import smoothing_grid, tune_defense, watermarking_grid

    dataset, count = attacked.dataset, asked.tune or 0
    images = _last_training_images(attacked, asked, count, "--tune")
    fills = (dataset.mean, "ring")
    grid = smoothing_grid() if asked.defense == "lgs" else watermarking_grid(model, side, fills=fills)
    attack = asked.build_unaware(attacked.threat, attacked.is_imagenet)
    with progress_bar("tuning", "settings") as report:
        found = tune_defense(
            attack,
            model,
            images.floats(),
            images.labels,
            attacked.threat,
            grid,
            largest_drop=asked.largest_drop,
            progress=report,
        )
    best = found.best
    if best is None:
        raise InvalidInput(
            f"every setting of {asked.defense} costs more than {asked.largest_drop} of "
            f"{found.undefended_accuracy:.3f}",
            hint="allow more with --largest-drop.",
        )
    reached = {"clean_accuracy": best.clean_accuracy, "weak_accuracy": best.weak_accuracy}
    return best.defense, {"tuning": {"images": count, "largest_drop": asked.largest_drop, **reached}}
