"""A card that says less, or other, than the evidence of its weights is named."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from patchcert.evidence import EvidenceFolder
from patchcert.zoo import Zoo, shipped
from patchcert.zoo.audit import audit_zoo, recounted

RESULTS = Path(__file__).parents[2] / "results"
NAME = "mnist-1-pixel-mlp"


@pytest.fixture
def card(tmp_path):
    """A zoo of one model whose card is to be forged."""
    for suffix in (".json", ".safetensors"):
        shutil.copy(shipped().folder / f"{NAME}{suffix}", tmp_path)
    return tmp_path / f"{NAME}.json"


def forge(card, change):
    plain = json.loads(card.read_text())
    change(plain)
    card.write_text(json.dumps(plain))
    return [str(finding) for finding in audit_zoo(Zoo(card.parent), RESULTS)]


def test_cards_that_come_with_the_package_say_all_that_evidence_says():
    assert audit_zoo(shipped(), RESULTS) == ()


def test_a_dropped_attack_is_noticed(card):
    (found,) = forge(card, lambda plain: plain["attacks"].pop())
    assert found.startswith(f"{card}: an attack among the results is not on it")


@pytest.mark.parametrize(("key", "value"), [("withstood", 400), ("device", "another"), ("seconds", 1.0)])
def test_an_attack_that_was_counted_otherwise_is_noticed(card, key, value):
    missing, extra = forge(card, lambda plain: plain["attacks"][0].update({key: value}))
    assert "is not on it as it was counted" in missing
    assert "no evidence among the results gives its attack" in extra


def test_a_proof_of_other_rows_is_noticed(card):
    (found,) = forge(card, lambda plain: plain["proof"].update({"evidence": "0" * 64}))
    assert "no proof among the results has the SHA-256 sum 0000" in found


def test_a_card_must_be_complete(card):
    def strip(plain):
        plain["training"].update({"device": "", "seconds": 0.0})

    assert [found.rpartition("say ")[2] for found in forge(card, strip)] == [
        "the device of the training",
        "the seconds of the training",
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seconds", 1.0),
        ("device", "another"),
        ("runs_at_once", 77),
        ("versions", {"torch": "9"}),
        ("commit", "f"),
    ],
)
def test_a_card_says_of_its_training_what_the_results_say(card, key, value):
    (found,) = forge(card, lambda plain: plain["training"].update({key: value}))
    assert f"it states {key.replace('_', ' ')} of its training otherwise than the results" in found


def test_a_card_has_the_specification_of_its_run_and_no_words_of_its_own(card):
    def boast(plain):
        plain["training"]["spec"] = plain["training"]["spec"].replace("seed = ", "seed = 1")
        plain["note"] = "It certifies everything."

    spec, note = forge(card, boast)
    assert "it states spec" in spec
    assert "it states note" in note


def test_a_card_counts_the_weights_that_are_there(card):
    (found,) = forge(card, lambda plain: plain.update(parameters=7))
    assert "it states 7 parameters; its weights are " in found


def test_a_card_that_contradicts_itself_is_named(card):
    (found,) = forge(card, lambda plain: plain["proof"].update({"certified": 9999}))
    assert "the card counts 9999 images" in found


def test_a_card_is_recounted_from_the_results(card):
    forge(card, lambda plain: plain["attacks"].clear())
    zoo = Zoo(card.parent)
    assert recounted(zoo.card(NAME), RESULTS) == shipped().card(NAME)


def test_an_attack_on_another_classifier_of_the_same_weights_is_not_the_cards(card, tmp_path):
    results, zoo = tmp_path / "results", Zoo(card.parent)
    run = results / zoo.card(NAME).training.run
    shutil.copytree(RESULTS / run.name, run)
    attack = next(each for each in EvidenceFolder(run).all() if each.kind == "attack")
    voted = {"name": "RandomAblation", "retained": 45}
    replace(attack, meta={**attack.meta, "classifier": voted}).write(run / "attack-on-votes.npz")
    assert recounted(zoo.card(NAME), results) == zoo.card(NAME)
