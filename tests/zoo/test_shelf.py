"""A zoo gives models whose files are those of their cards, and refuses all others."""

import errno
import json
import os
from dataclasses import replace

import pytest
import torch

import patchcert as pc
from patchcert.errors import ModelError, StorageError
from patchcert.files import sha256
from patchcert.train.run_folder import Run
from patchcert.zoo import Zoo, shelf

NAME = "mnist-mini-2x2-mlp"


def test_a_model_comes_in_eval_mode_with_the_weights_of_its_run(zoo, trained):
    model = zoo.load(NAME)
    assert not model.training
    expected = Run.open(trained).model().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_the_public_names_read_the_package_s_zoo(zoo, monkeypatch):
    monkeypatch.setattr(shelf, "shipped", lambda: zoo)
    assert pc.zoo.names() == (NAME,)
    assert pc.zoo.card(NAME) == zoo.card(NAME)
    assert len(list(pc.load(NAME).parameters())) == 4


def test_an_empty_zoo_has_no_names(tmp_path):
    zoo = Zoo(tmp_path / "nowhere")
    assert zoo.names() == ()
    assert zoo.size() == 0
    with pytest.raises(ModelError, match=r"there is no folder .*nowhere"):
        zoo.load("mnist-5x5-mlp")
    zoo.folder.mkdir()
    with pytest.raises(ModelError, match=r"nowhere holds no models with cards"):
        zoo.load("mnist-5x5-mlp")


@pytest.mark.parametrize("name", ["mnist-mini-2x2-mpl", "../zoo/mnist-mini-2x2-mlp"])
def test_unknown_names_are_answered_with_the_known_ones(zoo, name):
    with pytest.raises(ModelError, match=f"known: {NAME}") as caught:
        zoo.load(name)
    assert f"did you mean '{NAME}'?" in caught.value.hint


def test_damaged_and_missing_weights_are_refused(zoo):
    file = zoo.weights(NAME)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ModelError, match="does not have the SHA-256 sum that its card states"):
        zoo.load(NAME)
    file.unlink()
    with pytest.raises(ModelError, match="is missing"):
        zoo.load(NAME)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", "mnist-5x5-mlp", "is of 'mnist-5x5-mlp'"),
        ("threat", {"kind": "sticker"}, "unknown kind of threat 'sticker'"),
        ("proof", {}, "the proof of a card has unknown keys"),
        ("threat", "5x5", "cannot be read"),
        ("model", [1], "cannot be read"),
    ],
)
def test_cards_that_do_not_hold_together_are_refused(zoo, key, value, message):
    file = zoo.folder / f"{NAME}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ModelError, match=message):
        zoo.card(NAME)


def test_a_card_cut_short_is_refused(zoo):
    file = zoo.folder / f"{NAME}.json"
    file.write_text(file.read_text()[:100])
    with pytest.raises(ModelError, match="cannot be read"):
        zoo.card(NAME)


def test_the_zoo_does_not_grow_beyond_its_size(zoo, trained, monkeypatch):
    card, weights = zoo.card(NAME), Run.open(trained).weights
    monkeypatch.setattr(shelf, "LARGEST", zoo.size())
    zoo.put(card, weights)
    monkeypatch.setattr(shelf, "LARGEST", zoo.size() - 1)
    with pytest.raises(ModelError, match=f"with {NAME} the zoo in .* would grow to"):
        zoo.put(card, weights)


def test_a_model_is_replaced_with_its_card_or_not_at_all(zoo, another, monkeypatch):
    run, before = another(0.5), zoo.card(NAME)
    real, calls = os.fsync, []

    def full_at_the_card(number):
        calls.append(number)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(number)

    monkeypatch.setattr(os, "fsync", full_at_the_card)
    with pytest.raises(StorageError, match=f"{NAME}.json cannot be written: No space left on device"):
        zoo.put(replace(before, weights_sha256=sha256(run.weights)), run.weights)
    assert zoo.card(NAME) == before
    assert len(list(zoo.load(NAME).parameters())) == 4
    assert len(list(zoo.folder.iterdir())) == 2
