"""What follows from evidence rows: headline, sample and contradictions."""

from dataclasses import replace

import numpy as np
import pytest

from patchcert.errors import InvalidInput
from patchcert.report.statistics import BROKEN_CERTIFICATE, WRONG_CERTIFIED, Proportion
from patchcert.report.summary import RunSummary
from patchcert.threats import Patch


def test_the_headline_is_about_the_threat_trained_against(run):
    rows = run.certificates[0]
    other = replace(rows, threat=Patch(3))
    assert replace(run, certificates=(other, rows)).headline is rows
    assert replace(run, certificates=(other,)).headline is other


def test_nothing_is_known_of_an_empty_run():
    run = RunSummary("empty")
    assert (run.clean, run.empirical, run.certified, run.bracket) == (None, None, None, None)
    assert run.violations == ()


def test_the_accuracies_on_the_same_images(run):
    assert run.bracket is not None
    assert run.bracket.clean == Proportion(18, 20)
    assert run.bracket.empirical == Proportion(14, 20)
    assert run.bracket.certified == Proportion(14, 20)
    assert run.violations == ()


def test_several_attacks_count_together(run):
    first = run.attacks[0]
    second = replace(first, succeeded=first.index == 24)
    assert replace(run, attacks=(first, second)).empirical == Proportion(13, 20)


def test_an_attack_within_another_threat_is_no_evidence_here(run):
    other = replace(run.attacks[0], threat=Patch(5))
    assert replace(run, attacks=(other,)).empirical is None


def test_an_attack_on_certified_images_alone_refutes_but_counts_for_no_accuracy(run):
    attack = run.attacks[0]
    chosen = replace(attack, certified_only=True, succeeded=attack.index == 6)
    alone = replace(run, attacks=(chosen,))
    assert alone.empirical is None
    assert alone.bracket is None
    assert [(found.index, found.claim) for found in alone.violations][:1] == [(6, BROKEN_CERTIFICATE)]
    both = replace(run, attacks=(attack, chosen))
    assert both.empirical == Proportion(13, 20)


def test_a_certified_image_that_is_wrong_is_found_without_any_attack(run):
    rows = run.certificates[0]
    false_proof = replace(rows, certified=rows.certified | (rows.index == 39))
    found = replace(run, certificates=(false_proof,), attacks=()).violations
    assert [(violation.index, violation.claim) for violation in found] == [(39, WRONG_CERTIFIED)]


def test_evidence_of_other_images_is_refused(run):
    attack = run.attacks[0]
    other = replace(run, attacks=(replace(attack, label=(attack.label + 1) % 10),))
    with pytest.raises(InvalidInput, match="image 0 has label 0 in the certificates but 1 in the attack"):
        _ = other.bracket


@pytest.mark.parametrize("keep", [slice(0), slice(3)])
def test_columns_of_unequal_length_are_refused(run, keep):
    rows = run.certificates[0]
    with pytest.raises(InvalidInput, match="the columns of certificates must be equally long"):
        replace(rows, margin=rows.margin[keep])


def test_an_image_counted_from_the_end_is_refused(run):
    rows = run.certificates[0]
    with pytest.raises(InvalidInput, match="the rows of certificates name image -1"):
        replace(rows, index=rows.index - 1)


def test_an_image_named_twice_is_refused(run):
    rows = run.certificates[0]
    with pytest.raises(InvalidInput, match="the rows of certificates name an image twice"):
        replace(rows, index=np.zeros_like(rows.index))


def test_evidence_without_rows_is_refused(run):
    rows = run.certificates[0]
    names = ("index", "label", "prediction", "certified", "margin", "top", "left")
    nothing = {name: getattr(rows, name)[:0] for name in names}
    with pytest.raises(InvalidInput, match="the rows of certificates are empty"):
        replace(rows, **nothing)
