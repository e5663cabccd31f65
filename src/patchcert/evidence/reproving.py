"""Proofs and attacks done again on a few random images, with weights that are at hand: what no forged file survives."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from patchcert.attacks import Attack, PatchAttack, PatchesInTurn, SparseAttack
from patchcert.certificates import ABSTAINED, AnyThreat, Certificates, Classifier, method_named
from patchcert.data import Dataset, Split
from patchcert.errors import PatchcertError
from patchcert.evidence.audit import Finding
from patchcert.evidence.record import Evidence
from patchcert.threats import Patch, Patches

STEPS, RESTARTS = 20, 8
CLOSE = 1e-3
"""Margins of two machines, relative to the larger one or to 1: rounding is paid for with less than 3e-4 of the largest
margin on either (docs/concepts/certificates.md), a forged margin differs by more or changes nothing that counts."""


COARSE_SHARE = 0.05
"""Arithmetic of fewer digits than float32 rounds otherwise on every kind of device: up to this share of images, and one
image at least, may then have another prediction or verdict. Certified images are attacked whatever the arithmetic."""


@final
@dataclass(frozen=True)
class AtHand:
    """A model whose weights are at hand, by the sum of its file; `name` is how messages call it."""

    name: str
    weights_sha256: str
    load: Callable[[], nn.Module]


@final
@dataclass(frozen=True)
class Reproof:
    """What was asked of a model again: on how many images, and what came out otherwise than its evidence says."""

    model: str
    path: Path
    images: int
    findings: tuple[Finding, ...]


def provable(results: Path, beside: Sequence[Path] = ()) -> Mapping[str, Sequence[Evidence]]:
    """By the sum of their weights, the certificates among results, and in files beside them, that are deterministic:
    those can be proven again."""
    found: dict[str, list[Evidence]] = {}
    others = (file for file in beside if file.suffix == ".npz")
    for file in (*sorted(results.rglob("certify-*.npz")), *others):
        try:
            evidence = Evidence.read(file)
        except PatchcertError:
            continue  # the audit of the file names it
        classifier = evidence.meta["classifier"]
        is_known = method_named(classifier["name"]) is not None and evidence.kind == "certify"
        if is_known and evidence.guarantee.is_deterministic:
            found.setdefault(evidence.weights, []).append(evidence)
    return found


def reprove(
    at_hand: AtHand,
    evidence: Evidence,
    dataset: Dataset,
    count: int,
    generator: Generator,
    device: torch.device,
) -> Reproof:
    """Certifies random images of a file of evidence again, attacks the certified ones, and compares row by row."""
    assert evidence.path is not None
    model = at_hand.load().to(device)
    rows = torch.randperm(evidence.total, generator=generator)[:count].sort().values
    index = torch.from_numpy(evidence.columns["index"].astype(np.int64))[rows]
    images = dataset.split(evidence.selection.split)[index].to(device)
    description = evidence.meta["classifier"]
    method = method_named(description["name"])
    assert method is not None
    classifier = method.described(model, description)
    proven = classifier.certify(images.floats(), images.labels, evidence.threat)
    stated = {
        name: column[rows.numpy()]
        for name, column in evidence.columns.items()
        if len(column) == evidence.total
    }
    differ = list(_disagreements(stated, proven))
    is_coarse = description.get("precision", "float32") != "float32"
    if is_coarse and _differing_images(stated, proven) <= max(1, COARSE_SHARE * len(rows)):
        differ = [what for what in differ if ": label is stated" in what]
    messages = [
        *differ,
        *_broken(classifier, images, stated, evidence.threat, generator),
        *_unbroken(classifier, images, index, evidence),
    ]
    findings = tuple(Finding(evidence.path, f"{what} by {at_hand.name}") for what in messages)
    return Reproof(at_hand.name, evidence.path, len(rows), findings)


def _disagreements(stated: dict[str, NDArray[Any]], proven: Certificates) -> Iterator[str]:
    """Labels, predictions, verdicts and margins that are others now."""
    now = {"label": proven.labels, "prediction": proven.predictions, "certified": proven.certified}
    for name, values in now.items():
        there, here = stated[name], values.cpu().numpy()
        for row in np.flatnonzero(there != here):
            yield f"image {stated['index'][row]}: {name} is stated as {there[row]}, but is {here[row]}"
    if "margin" not in stated or proven.least_margin is None or proven.broken is not None:
        return  # where parts were split, other margins may prove the same
    there, here = stated["margin"], proven.least_margin.cpu().numpy()
    apart = np.abs(there - here) > CLOSE * np.maximum(1.0, np.maximum(np.abs(there), np.abs(here)))
    for row in np.flatnonzero(apart):
        yield f"image {stated['index'][row]}: margin is stated as {there[row]:.6g}, but is {here[row]:.6g}"


def _differing_images(stated: dict[str, NDArray[Any]], proven: Certificates) -> int:
    """How many images have another prediction or verdict now."""
    predictions, certified = proven.predictions.cpu().numpy(), proven.certified.cpu().numpy()
    return int(np.count_nonzero((stated["prediction"] != predictions) | (stated["certified"] != certified)))


def _broken(
    classifier: Classifier,
    images: Split,
    stated: dict[str, NDArray[Any]],
    threat: AnyThreat,
    generator: Generator,
) -> Iterator[str]:
    """Images that are called certified and that an attack breaks; an alert breaks no promise of detection."""
    chosen = np.flatnonzero(stated["certified"])
    if not chosen.size:
        return
    some = images[torch.from_numpy(chosen).to(images.labels.device)]
    attacked = classifier.model if classifier.predicts_as_its_model else classifier
    result = _attack(threat, classifier.predicts_as_its_model).run(
        attacked, some.floats(), some.labels, threat, generator
    )
    is_alert = (result.predictions == ABSTAINED) & (classifier.promise == "detection")
    for row in chosen[(result.succeeded & ~is_alert).cpu().numpy()]:
        yield f"image {stated['index'][row]}: certified, but broken by an attack"


def _unbroken(classifier: Classifier, images: Split, index: Tensor, evidence: Evidence) -> Iterator[str]:
    """Counterexamples that are no members of the threat, or that the classifier gets right."""
    kept = evidence.adversarial()
    rows = torch.tensor([row for row, image in enumerate(index.tolist()) if image in kept], dtype=torch.long)
    if not len(rows):
        return
    clean = images[rows.to(images.labels.device)]
    shown = np.stack([kept[image] for image in index[rows].tolist()])
    changed = torch.from_numpy(shown).to(clean.images.device)
    is_member = evidence.threat.contains(clean.floats(), changed)
    is_wrong = classifier.predict(changed) != clean.labels
    for image in index[rows][~(is_member & is_wrong).cpu()].tolist():
        yield f"image {image}: its counterexample is none"


def _attack(threat: AnyThreat, is_bounded: bool) -> Attack:
    """Where interval certificates are weakest first, if it is these that are attacked."""
    if isinstance(threat, Patch):
        return PatchAttack(STEPS, restarts=RESTARTS, search="certificate" if is_bounded else "random")
    if isinstance(threat, Patches):
        return PatchesInTurn(PatchAttack(STEPS, restarts=RESTARTS))
    return SparseAttack(STEPS, restarts=RESTARTS, selections=RESTARTS)
