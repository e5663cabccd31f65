"""Whether cards say what evidence among the results says, all of it, of weights that are there."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from patchcert.errors import PatchcertError, RunError
from patchcert.evidence import Evidence, EvidenceFolder
from patchcert.evidence.audit import Finding
from patchcert.evidence.results import TRIMMED, Result
from patchcert.files import sha256
from patchcert.train.run_folder import SPEC
from patchcert.work import parameter_count
from patchcert.zoo.adding import NOTE, count_attack, count_proof
from patchcert.zoo.card import AttackCount, Card
from patchcert.zoo.recheck import differences, why_not_comparable
from patchcert.zoo.shelf import Zoo


def audit_zoo(zoo: Zoo, results: Path) -> tuple[Finding, ...]:
    """What is wrong with the cards of a zoo whose evidence was collected in a folder."""
    findings = []
    for name in zoo.names():
        file = zoo.folder / f"{name}.json"
        try:
            size, card = parameter_count(zoo.load(name)), zoo.card(name)
            findings += [Finding(file, what) for what in _audit_card(card, results)]
            if size != card.parameters:
                findings.append(
                    Finding(file, f"it states {card.parameters} parameters; its weights are {size}")
                )
        except PatchcertError as error:
            findings.append(Finding(file, error.message))
    return tuple(findings)


def card_evidence(card: Card, results: Path) -> tuple[Evidence, ...]:
    """The evidence of a card's very weights, within its threat and without a defense."""
    run = results / card.training.run
    found = (each for folder in (run, run / TRIMMED) for each in EvidenceFolder(folder).all())
    own = (each for each in found if each.weights == card.weights_sha256)
    return tuple(each for each in own if each.threat == card.threat and each.is_undefended)


def whole_proof(card: Card, results: Path) -> Evidence:
    """The proof of all test images by the network as it was trained, of which a trimmed model is a part."""
    found = EvidenceFolder(results / card.training.run).all()
    own = [each for each in found if each.kind == "certify" and each.threat == card.threat]
    (proof,) = (each for each in own if each.selection.is_whole_test_set)
    return proof


def recounted(card: Card, results: Path) -> Card:
    """The card with everything that is counted from evidence counted again, with all attacks on the same classifier."""
    found = card_evidence(card, results)
    proof = _proof(card, found)
    if proof is None:
        raise RunError(
            f"{results} has no proof of the weights of {card.name} with the sum that its card states",
            hint="collect the run whose model it is, then add the model again",
        )
    return replace(card, proof=count_proof(proof), attacks=_attacks(card, found, proof))


def recount(zoo: Zoo, results: Path) -> None:
    """Writes every card anew whose counts are not those of the results."""
    for name in zoo.names():
        card = zoo.card(name)
        now = recounted(card, results)
        if now != card:
            zoo.put(now, zoo.weights(name))


def _proof(card: Card, found: tuple[Evidence, ...]) -> Evidence | None:
    """The file of rows that the card names by its sum."""
    whole = (each for each in found if each.kind == "certify" and each.selection.is_whole_test_set)
    return next((each for each in whole if each.path and sha256(each.path) == card.proof.evidence), None)


def _attacks(card: Card, found: tuple[Evidence, ...], proof: Evidence) -> tuple[AttackCount, ...]:
    of_same = [each for each in found if each.kind == "attack" and each.subject == proof.subject]
    counted = [count_attack(each, proof, card.name) for each in of_same]
    return tuple(sorted(counted, key=lambda attack: (attack.certified_only, attack.evidence)))


def _audit_card(card: Card, results: Path) -> Iterator[str]:
    found = card_evidence(card, results)
    proof = _proof(card, found)
    if proof is None:
        yield f"no proof among the results has the SHA-256 sum {card.proof.evidence[:16]}..."
        return
    yield from filter(None, (why_not_comparable(card, proof), *differences(card, proof)))
    if count_proof(proof) != card.proof:
        yield "its proof is not what its evidence gives"
    counted = _attacks(card, found, proof)
    for attack in counted:
        if attack not in card.attacks:
            yield f"an attack among the results is not on it as it was counted: {_words(attack)}"
    for attack in card.attacks:
        if attack not in counted:
            yield f"no evidence among the results gives its attack: {_words(attack)}"
    yield from (f"it does not say {what}" for what in _missing(card))
    yield from _otherwise_trained(card, Result.open(results / card.training.run))


def _otherwise_trained(card: Card, result: Result) -> Iterator[str]:
    """What a card says of its training, and the summary and specification among the results do not."""
    summary, training = result.summary, card.training
    stated = {
        "spec": (training.spec, (result.path / SPEC).read_text(encoding="utf-8")),
        "seconds": (round(training.seconds, 1), summary["training_seconds"]),
        "device": (training.device, summary["device"]),
        "runs at once": (training.runs_at_once, summary.get("jobs", 1)),
        "versions": (dict(training.versions), summary["versions"]),
        "commit": (training.commit, summary["commit"]),
        "note": (card.note, NOTE.format(weights_of=training.weights_of)),
    }
    for name, (there, expected) in stated.items():
        if there and there != expected:  # what a card lacks is named already
            yield f"it states {name} of its training otherwise than the results"


def _words(attack: AttackCount) -> str:
    which = " certified" if attack.certified_only else ""
    return f"{attack.withstood} of {attack.images}{which} images withstood {attack.settings.get('kind')}"


def _missing(card: Card) -> Iterator[str]:
    """What a complete card has and this one lacks."""
    needed = {
        "on what it was attacked": card.attacks,
        "the sums of the data": card.data_sha256,
        "the device of the proof": card.proof.device,
        "the seconds of the proof": card.proof.seconds is not None,
        "the device of the training": card.training.device,
        "the seconds of the training": card.training.seconds > 0,
        "the versions of the training": card.training.versions,
        "how it was chosen": card.note,
    }
    yield from (what for what, value in needed.items() if not value)
    for each in card.attacks:
        if not (each.device and each.evidence and each.seconds):
            yield f"device, sum and seconds of the attack: {_words(each)}"
