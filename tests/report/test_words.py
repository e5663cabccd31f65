"""Sentences claim what was proven, and no more."""

from dataclasses import replace

import pytest

from patchcert.report.words import class_name, describe_threat, lead_sentence, margin_text
from patchcert.threats import Patch, SparsePixels


@pytest.mark.parametrize(
    ("threat", "words"),
    [
        (Patch(5), "one 5x5 square patch, everywhere"),
        (Patch(5, placements="corners"), "one 5x5 square patch, corners"),
        (SparsePixels(1), "any 1 pixel"),
        (SparsePixels(4), "any 4 pixels"),
    ],
)
def test_threats_in_words(threat, words):
    assert describe_threat(threat) == words


def test_a_proof_for_some_placements_is_not_called_a_proof_for_all(run):
    rows = replace(run.certificates[0], threat=Patch(2, placements=[(0, 0)]))
    sentence = lead_sentence(replace(run, certificates=(rows,)))
    assert "wherever" not in sentence
    assert "placed at (0, 0)," in sentence


@pytest.mark.parametrize(
    ("margin", "text"),
    [(1.234, "+1.23"), (-0.5, "-0.50"), (0.0031, "+0.0031"), (-1e-7, "-1e-07"), (float("nan"), "not finite")],
)
def test_narrow_margins_are_not_shown_as_ties(margin, text):
    assert margin_text(margin) == text


def test_labels_without_a_name_are_numbers():
    assert [class_name(("cat",), label) for label in (0, 1, -1)] == ["cat", "1", "-1"]
