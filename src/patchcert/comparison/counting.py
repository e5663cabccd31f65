"""Rows counted from evidence: of folders of results, of run folders, and of refined proofs of the zoo's models."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, final

import torch
from torch import nn

from patchcert.certificates import AnyThreat, IntervalBounds, method_named
from patchcert.comparison.leaderboard import EVERYWHERE, NO_OUTSIDE_DATA, Cost, Counted, Row, Seeds, Source
from patchcert.data import class_names
from patchcert.errors import InvalidInput
from patchcert.evidence import Evidence, EvidenceFolder
from patchcert.evidence.results import (
    Result,
    Results,
    comparable_loss,
    last_loss,
    recipe_key,
    shared_device,
)
from patchcert.files import sha256
from patchcert.models import ModelSpec, build
from patchcert.models.imagenet import IMAGENET_WEIGHTS, build_imagenet
from patchcert.report.summary import read_test_evidence
from patchcert.threats import Patch, shapes
from patchcert.train.run_folder import EVIDENCE, Run
from patchcert.train.spec import Spec
from patchcert.work import multiply_adds, parameter_count
from patchcert.zoo import Card, Zoo

Settings = Mapping[str, Any]
CERTIFICATES = 10_000
"""The time of this many certificates is compared."""


@final
@dataclass(frozen=True)
class Network:
    """What is known of a network beside its proofs: where it stands, its size, and what its training took.

    Of evidence that belongs to no run nothing of it is known, and of training that began with the weights of other
    networks not how long it took with theirs.
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
        spec = result.spec
        return cls(
            name=result.path.name,
            words=_words(spec),
            model=_model_spec(spec, evidence),
            training=recipe_key(spec),
            seed=spec.seed,
            loss=result.training_loss,
            seconds=result.training_seconds if spec.model.weights is None else None,
            device=result.device,
        )

    @classmethod
    def of_card(cls, card: Card) -> "Network":
        training = card.training
        return cls(
            name=f"zoo:{card.name}",
            words=f"{card.model.name}{', trimmed' if card.model.widths else ''}",
            model=card.model,
            training=training.run,
            seed=tomllib.loads(training.spec)["seed"],
            seconds=training.seconds,
            device=shared_device(training.device, training.runs_at_once),
        )

    @classmethod
    def of_run(cls, run: Run) -> "Network":
        """One that was copied from a zoo does not know what its training took."""
        return cls(
            name=run.path.name,
            words=_words(run.spec),
            model=run.model_spec(),
            training=recipe_key(run.spec),
            seed=run.spec.seed,
            loss=last_loss(run),
            seconds=(run.training_seconds or None) if run.spec.model.weights is None else None,
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
        return 100 * self.evidence.certified / self.evidence.total


def proofs_of_results(results: Results) -> tuple[Proof, ...]:
    """Certificates of all test images against patches, in results of training.

    By bounds only against squares and what a run was trained against: how training against squares carries over to
    other shapes is a question of the paper's.
    """
    found = ((result, each) for result in results.all() for each in result.evidence)
    return tuple(
        Proof(each, Network.of_result(result, each))
        for result, each in found
        if each.kind == "certify"
        and each.selection.is_whole_test_set
        and isinstance(each.threat, Patch)
        and (
            each.meta["classifier"]["name"] != IntervalBounds.__name__
            or each.threat in (result.spec.threat, Patch(each.threat.height))
        )
    )


def proofs_of_run(run: Run) -> tuple[Proof, ...]:
    """All certificates of test images in a run folder."""
    found = read_test_evidence(EvidenceFolder(run.path / EVIDENCE), sha256(run.weights))
    network = Network.of_run(run)
    return tuple(Proof(each, network) for each in found if each.kind == "certify")


def proofs_of_zoo(zoo: Zoo, files: Iterable[Path]) -> tuple[Proof, ...]:
    """Certificates of all test images by weights of a zoo, in files of evidence that belong to no run."""
    networks = {card.weights_sha256: Network.of_card(card) for card in map(zoo.card, zoo.names())}
    return _whole_proofs(files, networks)


def proofs_of_imagenet(files: Iterable[Path]) -> tuple[Proof, ...]:
    """Certificates of ImageNet's images by networks that were not trained here, in files of evidence."""
    networks = {
        weights: Network(name=f"imagenet:{name}", training=weights, words=name)
        for name, weights in IMAGENET_WEIGHTS.items()
    }
    return _whole_proofs(files, networks)


def _whole_proofs(files: Iterable[Path], networks: Mapping[str, Network]) -> tuple[Proof, ...]:
    """Certificates of all test images by one of the networks, which are found by the sums of their weights."""
    found = (Evidence.read(file) for file in sorted(files))
    return tuple(
        Proof(each, networks[each.weights])
        for each in found
        if each.kind == "certify" and each.weights in networks and each.selection.is_whole_test_set
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
    named = None if stated.evidence is None else stated.evidence.sha256
    own = next((row for row in counted if row.evidence is not None and row.evidence.sha256 == named), None)
    if own is None:
        return stated
    for name in ("data", "images", "patch", "placements", "method", "promise", "confidence", "evidence"):
        _refuse_other(stated, own, name, getattr(stated, name), getattr(own, name))
    for name in ("passes", "milliseconds", "certificate_seconds", "device"):
        there, here = getattr(stated.cost, name), getattr(own.cost, name)
        if there is not None:
            _refuse_other(stated, own, name, there, here)
    return replace(stated, recounted=True)


def _refuse_other(stated: Row, own: Row, name: str, there: object, here: object) -> None:
    if there != here:
        raise InvalidInput(
            f"the row {stated.source.title!r} states {name} as {there}, but its evidence {own.source.title} says "
            f"{'nothing of it' if here is None else here}",
            hint="correct the row, or leave it out",
        )


def _row(seeds: Sequence[Proof]) -> Row:
    counting = min(seeds, key=lambda proof: comparable_loss(proof.network.loss))
    evidence, network = counting.evidence, counting.network
    assert evidence.path is not None
    shares = [proof.percent for proof in seeds]
    parameters, one_pass = _sizes(network)
    passes = prediction_passes(evidence)
    return Row(
        data=evidence.selection.data,
        images=evidence.total,
        patch=_patch_words(evidence.threat),
        placements=str(evidence.threat.rule) if isinstance(evidence.threat, Patch) else EVERYWHERE,
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
            multiply_adds=None if passes is None or one_pass is None else passes * one_pass,
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


def prediction_passes(evidence: Evidence) -> int | None:
    """The forward passes of a prediction, by what the method says of the settings and the size of the images."""
    settings: Settings = evidence.meta["classifier"]
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
    return parameter_count(model), multiply_adds(model, blank)


def _blank(model: nn.Module, spec: ModelSpec) -> torch.Tensor:
    """An image as the network takes it: those of parts or ablated images have more channels than the data."""
    first = next((layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)), None)
    channels = first.in_channels if isinstance(first, nn.Conv2d) else spec.channels
    return torch.zeros(1, channels, spec.height, spec.width)


def _model_spec(spec: Spec, evidence: Evidence) -> ModelSpec:
    classes = class_names(spec.data.name)
    return spec.model.for_images(evidence.meta["data"]["image"], 10 if classes is None else len(classes))


def _words(spec: Spec) -> str:
    """The network by name, with the settings that make it another one."""
    model = spec.model
    settings = {
        "hidden units": model.hidden,
        "filters": model.filters,
        "layers": model.depth,
        "pixels seen": model.receptive_field,
        "members": model.members,
    }
    return ", ".join([model.name, *(f"{value} {name}" for name, value in settings.items() if value)])


def _patch_words(threat: AnyThreat) -> str:
    """The shape of the patch: height and width of a rectangle, else in words."""
    if not isinstance(threat, Patch):
        return str(threat)
    return f"{threat.height}x{threat.width}" if threat.is_solid else shapes.describe(threat.stamp)


def method_words(settings: Settings) -> str:
    """The kind of proof and what decides its cost: rows with the same words differ in their network at most."""
    name = settings["name"]
    words = _METHODS[name](settings) if name in _METHODS else name
    precision = settings.get("precision", "float32")
    return words if precision == "float32" else f"{words}, {precision}"


def _masks(kind: str, settings: Settings) -> str:
    masks = settings["masks"]
    rows, columns = masks if isinstance(masks, list) else (masks, masks)
    more = [f"of {settings['patches']} patches"] if settings.get("patches", 1) > 1 else []
    more += (
        ["mirrored" if settings.get("doubt") is None else "mirrored in doubt"]
        if settings.get("mirrored")
        else []
    )
    return ", ".join([kind, f"{rows}x{columns} masks", *more])


def _parts(words: str, settings: Settings) -> str:
    words = f"{words} at every {settings['stride']}" if settings.get("stride", 1) > 1 else words
    return f"{words}, {_aggregated(settings)}" if "aggregation" in settings else words


def _aggregated(settings: Settings) -> str:
    return settings["aggregation"].replace("-", " ")


_REFINED = {None: "intervals", "linear": "intervals and linear bounds", "split": "intervals, refined"}
_BANDS = {"column": "columns", "row": "rows", "both": "columns and of as many rows"}
_METHODS: Mapping[str, Callable[[Settings], str]] = {
    "IntervalBounds": lambda how: _REFINED[how.get("refine")],
    "DoubleMasking": lambda how: _masks("masking", how),
    "MaskedDetection": lambda how: _masks("detection", how),
    "BandVotes": lambda how: _parts(f"bands of {how['width']} {_BANDS[how['orientation']]}", how),
    "BlockVotes": lambda how: _parts(f"blocks of {how['size']}x{how['size']}", how),
    "LocalVotes": lambda how: f"local votes, {_aggregated(how)}{', mirrored' if how.get('mirrored') else ''}",
    "RandomAblation": lambda how: f"random ablation, {how['retained']} pixels kept",
}
