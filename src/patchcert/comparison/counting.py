"""Rows counted from evidence: of folders of results, of run folders, and of refined proofs of the zoo's models."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isnan
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, final

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from patchcert.certificates import method_named
from patchcert.comparison.leaderboard import NO_OUTSIDE_DATA, Cost, Counted, Row, Seeds, Source
from patchcert.comparison.words import method_words, patch_words, placement_words
from patchcert.data import class_names
from patchcert.errors import InvalidInput
from patchcert.evidence import Evidence, EvidenceFolder
from patchcert.evidence.results import Result, Results, experiment_key, last_loss
from patchcert.files import sha256
from patchcert.models import ModelSpec, build
from patchcert.models.imagenet import IMAGENET_WEIGHTS, build_imagenet
from patchcert.report.summary import read_test_evidence
from patchcert.threats import Patch
from patchcert.train.run_folder import EVIDENCE, Run
from patchcert.train.spec import Spec
from patchcert.zoo import Card, Zoo

CERTIFICATES = 10_000
"""The time of this many certificates is compared."""


@final
@dataclass(frozen=True)
class Network:
    """What is known of a network beside its proofs: where it stands, its size, and what its training took.

    Of evidence that belongs to no run nothing of it is known.
    """

    name: str
    training: str
    words: str | None = None
    model: ModelSpec | None = None
    seed: int | None = None
    loss: float | None = None
    seconds: float | None = None
    device: str | None = None

    @classmethod
    def of_result(cls, result: Result, evidence: Evidence) -> "Network":
        """That of a run among results, which have no weights: its size follows from the specification."""
        summary, spec = result.summary, result.spec
        return cls(
            name=result.path.name,
            words=_words(spec),
            model=_model_spec(spec, evidence),
            training=_training(spec),
            seed=spec.seed,
            loss=result.training_loss,
            seconds=float(summary["training_seconds"]),
            device=_shared(str(summary["device"]), summary.get("jobs", 1)),
        )

    @classmethod
    def of_card(cls, card: Card) -> "Network":
        """That of a model of a zoo."""
        training = card.training
        return cls(
            name=f"zoo:{card.name}",
            words=f"{card.model.name}{', trimmed' if card.model.widths else ''}",
            model=card.model,
            training=training.run,
            seed=tomllib.loads(training.spec)["seed"],
            loss=None,
            seconds=training.seconds,
            device=_shared(training.device, training.runs_at_once),
        )

    @classmethod
    def of_run(cls, run: Run) -> "Network":
        """That of a run folder; one that was copied from a zoo does not know what its training took."""
        return cls(
            name=run.path.name,
            words=_words(run.spec),
            model=run.model_spec(),
            training=_training(run.spec),
            seed=run.spec.seed,
            loss=last_loss(run),
            seconds=run.training_seconds or None,
            device=str(run.environment().get("device", "")),
        )


@final
@dataclass(frozen=True)
class Proof:
    """Evidence of certificates, and the network that they are about."""

    evidence: Evidence
    network: Network

    @property
    def experiment(self) -> tuple[str, str]:
        """The same for proofs of networks that differ in their seed alone."""
        return self.network.training, self.evidence.question.key

    @property
    def percent(self) -> float:
        """Certified accuracy."""
        return 100 * self.evidence.certified / self.evidence.total


def proofs_of_results(results: Results) -> tuple[Proof, ...]:
    """Certificates of all test images against the patch that a run was trained against, in results of training."""
    found = ((result, each) for result in results.all() for each in result.evidence)
    return tuple(
        Proof(each, Network.of_result(result, each))
        for result, each in found
        if each.kind == "certify"
        and each.selection.is_whole_test_set
        and each.threat == result.spec.threat
        and isinstance(each.threat, Patch)
    )


def proofs_of_run(run: Run) -> tuple[Proof, ...]:
    """All certificates of test images in a run folder."""
    found = read_test_evidence(EvidenceFolder(run.path / EVIDENCE), sha256(run.weights))
    network = Network.of_run(run)
    return tuple(Proof(each, network) for each in found if each.kind == "certify")


def proofs_of_zoo(zoo: Zoo, files: Iterable[Path]) -> tuple[Proof, ...]:
    """Certificates of all test images by weights of a zoo, in files of evidence that belong to no run."""
    cards = {card.weights_sha256: card for card in map(zoo.card, zoo.names())}
    found = []
    for file in sorted(files):
        evidence = Evidence.read(file)
        card = cards.get(evidence.weights)
        if card is None or evidence.kind != "certify" or not evidence.selection.is_whole_test_set:
            continue
        found.append(Proof(evidence, Network.of_card(card)))
    return tuple(found)


def proofs_of_imagenet(files: Iterable[Path]) -> tuple[Proof, ...]:
    """Certificates of ImageNet's images by networks that were not trained here, in files of evidence."""
    names = {weights: name for name, weights in IMAGENET_WEIGHTS.items()}
    found = (Evidence.read(file) for file in sorted(files))
    return tuple(
        Proof(
            each,
            Network(name=f"imagenet:{names[each.weights]}", training=each.weights, words=names[each.weights]),
        )
        for each in found
        if each.kind == "certify" and each.weights in names and each.selection.is_whole_test_set
    )


def proof_of_file(file: Path) -> Proof:
    """The certificates in a file of evidence; of its network no more than the sum of its weights is known."""
    evidence = Evidence.read(file)
    if evidence.kind != "certify":
        raise InvalidInput(
            f"{file} is evidence of an attack, not of certificates", hint="name one of certificates"
        )
    return Proof(evidence, Network(name=file.name, training=evidence.weights))


def count(proofs: Sequence[Proof]) -> tuple[Row, ...]:
    """A row for each training and question, of whose seeds the one of least training loss counts."""
    experiments: dict[tuple[str, str], list[Proof]] = {}
    for proof in proofs:
        experiments.setdefault(proof.experiment, []).append(proof)
    return tuple(_row(seeds) for seeds in experiments.values())


def best(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Of rows with the same data, threat and kind of proof the one with most certified images; a note says of how many.

    They are test images: what is shown is the best there is, not an estimate of what another training would give.
    """
    alike: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.data, row.threat, row.method, row.promise), []).append(row)
    return tuple(_best(same) for same in alike.values())


def _best(rows: Sequence[Row]) -> Row:
    first = max(rows, key=lambda row: row.certified)
    if len(rows) == 1:
        return first
    return replace(first, source=replace(first.source, note=f"the best of {len(rows)} trainings"))


def recounted(stated: Row, counted: Sequence[Row]) -> Row:
    """A row of a file, as `recounted` where the evidence that it names is at hand, which must count the same."""
    own = next((row for row in counted if _sum(row) is not None and _sum(row) == _sum(stated)), None)
    if own is None:
        return stated
    for name in ("data", "images", "patch", "placements", "promise", "confidence", "evidence"):
        if getattr(stated, name) != getattr(own, name):
            raise InvalidInput(
                f"the row {stated.source.title!r} states {name} as {getattr(stated, name)}, but its evidence "
                f"{own.source.title} says {getattr(own, name)}",
                hint="correct the row, or leave it out",
            )
    return replace(stated, recounted=True)


def _sum(row: Row) -> str | None:
    return None if row.evidence is None else row.evidence.sha256


def _row(seeds: Sequence[Proof]) -> Row:
    counting = min(seeds, key=_loss)
    evidence, network = counting.evidence, counting.network
    assert evidence.path is not None
    shares = [proof.percent for proof in seeds]
    parameters, multiply_adds = _sizes(network)
    passes = prediction_passes(evidence)
    return Row(
        data=evidence.selection.data,
        images=evidence.total,
        patch=patch_words(evidence),
        placements=placement_words(evidence),
        pixels="native",
        method=method_words(evidence.meta["classifier"]),
        promise=evidence.guarantee.promise,
        confidence=evidence.guarantee.confidence,
        network=network.words,
        parameters=parameters,
        outside_data=NO_OUTSIDE_DATA,
        clean=100 * evidence.correct / evidence.total,
        certified=counting.percent,
        cost=Cost(
            passes=passes,
            multiply_adds=None if passes is None or multiply_adds is None else passes * multiply_adds,
            milliseconds=evidence.prediction_milliseconds,
            certificate_seconds=evidence.meta["seconds"] * CERTIFICATES / evidence.total,
            training_seconds=network.seconds,
            device=evidence.meta["device"],
            training_device=network.device,
        ),
        seeds=None
        if network.seed is None
        else Seeds(
            count=len(seeds),
            counted=network.seed,
            mean=fmean(shares),
            spread=stdev(shares) if len(shares) > 1 else None,
        ),
        evidence=Counted(
            sha256=sha256(evidence.path),
            weights_sha256=evidence.weights,
            correct=evidence.correct,
            certified=evidence.certified,
        ),
        source=Source(kind="evidence", title=network.name),
        recounted=True,
    )


def _loss(proof: Proof) -> float:
    """Infinite where it is not on record, or is no number."""
    loss = proof.network.loss
    return inf if loss is None or isnan(loss) else loss


def prediction_passes(evidence: Evidence) -> int | None:
    """The forward passes of a prediction, by what the method says of the settings and the size of the images."""
    settings: Mapping[str, Any] = evidence.meta["classifier"]
    method = method_named(settings["name"])
    size = evidence.meta["data"].get("image")
    if method is None or size is None:
        return None
    return method.described(nn.Identity(), settings).passes(size[1], size[2])


def _sizes(network: Network) -> tuple[int, int] | tuple[None, None]:
    if network.model is not None:
        return network_size(network.model)
    return imagenet_size(network.words) if network.words in IMAGENET_WEIGHTS else (None, None)


@cache
def network_size(spec: ModelSpec) -> tuple[int, int]:
    """Parameters, and multiplications with an addition in one forward pass, of the network of a specification."""
    model = build(spec).eval()
    return _counted(model, _blank(model, spec))


@cache
def imagenet_size(name: str) -> tuple[int, int]:
    """The same of a network for ImageNet."""
    return _counted(build_imagenet(name).eval(), torch.zeros(1, 3, 224, 224))


def _counted(model: nn.Module, blank: torch.Tensor) -> tuple[int, int]:
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(blank)
    parameters = sum(each.numel() for each in model.parameters())
    return parameters, counter.get_total_flops() // 2  # a product and a sum are two of what is counted


def _blank(model: nn.Module, spec: ModelSpec) -> torch.Tensor:
    """An image as the network takes it: those of parts or ablated images have more channels than the data."""
    first = next((layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)), None)
    channels = first.in_channels if isinstance(first, nn.Conv2d) else spec.channels
    return torch.zeros(1, channels, spec.height, spec.width)


def _model_spec(spec: Spec, evidence: Evidence) -> ModelSpec:
    classes = class_names(spec.data.name)
    return spec.model.for_images(evidence.meta["data"]["image"], 10 if classes is None else len(classes))


def _shared(device: str, jobs: int) -> str:
    """A device, and that several runs were given to it at once: their training times then include waiting."""
    return f"{device}, {jobs} runs at once" if jobs > 1 else device


def _words(spec: Spec) -> str:
    """The network by name, with the settings that make it another one."""
    model = spec.model
    settings = {
        "hidden units": model.hidden,
        "filters": model.filters,
        "layers": model.depth,
        "pixels seen": model.receptive_field,
    }
    return ", ".join([model.name, *(f"{value} {name}" for name, value in settings.items() if value)])


def _training(spec: Spec) -> str:
    """The same for runs that differ in their seed alone."""
    return f"{experiment_key(spec)} {spec.schedule}"
