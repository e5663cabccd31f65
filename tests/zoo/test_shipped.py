"""Whatever models come with the package: small enough, and what their cards say."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import patchcert as pc
from patchcert.certificates import method_named
from patchcert.data import load_dataset
from patchcert.errors import DataError
from patchcert.evidence import Certification, Selection, Subject
from patchcert.train.spec import read_spec
from patchcert.zoo import shelf
from patchcert.zoo.adding import entry_name
from patchcert.zoo.audit import whole_proof
from patchcert.zoo.recheck import differences

RESULTS = Path(__file__).parents[2] / "results"
DECISION = RESULTS.parent / "docs" / "decisions" / "0009-the-zoo-has-trimmed-models.md"
IMAGES = 200
NAMES = pc.zoo.names()


def test_all_models_together_are_small():
    zoo = shelf.shipped()
    files = [file for file in zoo.folder.rglob("*") if file.is_file()] if zoo.folder.is_dir() else []
    assert sum(file.stat().st_size for file in files) <= shelf.LARGEST
    assert {file.name for file in files} == {
        f"{name}.{kind}" for name in NAMES for kind in ("json", "safetensors")
    }


def test_unknown_names_are_answered_whatever_is_there():
    with pytest.raises(
        pc.PatchcertError, match="there is no model named 'no such model' in the zoo; known: "
    ):
        pc.load("no such model")


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_of_its_weights_and_its_specification(name, tmp_path):
    card = pc.zoo.card(name)
    model = pc.load(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == card.parameters
    file = tmp_path / "spec.toml"
    file.write_text(card.training.spec)
    spec = read_spec(file)
    assert (spec.threat, spec.data.name, spec.model.name) == (card.threat, card.data, card.model.name)
    assert entry_name(spec) == name
    assert spec.fingerprint(card.data_sha256) == card.training.run


def test_the_decision_on_trimmed_models_counts_what_cards_and_results_say():
    """Its table has every trimmed model: whole and trimmed counts, and on how many images the proofs differ."""
    stated = dict(
        re.findall(r"^\| ([a-z]\S+-\S+) (?:\|[^|]*){2}\|([^\n]*)\|$", DECISION.read_text(), re.MULTILINE)
    )
    assert set(stated) == {name for name in NAMES if pc.zoo.card(name).model.widths}
    for name, counts in stated.items():
        card = pc.zoo.card(name)
        verdicts = whole_proof(card, RESULTS).columns["certified"]
        differ = np.count_nonzero(verdicts != card.proof.certified_marks)
        assert counts.replace(",", "").split("|") == [
            f" {count} " for count in (verdicts.sum(), card.proof.certified, differ)
        ], name


CARDS = sorted((pc.zoo.card(name) for name in NAMES), key=lambda card: card.parameters)
SMALLEST = {card.proof.classifier["name"]: card for card in reversed(CARDS)}


@pytest.mark.parametrize("kind", SMALLEST)
def test_a_model_proves_again_what_its_card_says(real_data, kind):
    """The smallest model of each kind of proof, on the first test images; their proofs are compared image by image."""
    card = SMALLEST[kind]
    try:
        dataset = load_dataset(card.data, real_data)
    except DataError:
        pytest.skip(f"{card.data} is not here")
    classifier = method_named(kind).described(pc.load(card.name), card.proof.classifier)
    selection = Selection(card.data, limit=IMAGES)
    subject = Subject(classifier, card.weights_sha256, dataset, selection, torch.device("cpu"))
    assert differences(card, Certification(subject, card.threat).run()) == ()
