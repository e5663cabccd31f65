"""The paper's numbers are frozen, and the page of results is held to the evidence."""

from pathlib import Path

import pytest

from patchcert.papers.chiang2020.audit import audit_page, audit_paper

ROOT = Path(__file__).parents[3]
PAPER = ROOT / "src" / "patchcert" / "papers" / "chiang2020" / "paper.json"


def test_the_papers_numbers_are_the_frozen_ones():
    assert audit_paper(PAPER) == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [("51.9", "50.9"), ('"hours": 22.4', '"hours": 224.0'), ('"Guided(20)"', '"Guided(10)"')],
)
def test_an_edited_number_of_the_paper_is_noticed(tmp_path, before, after):
    file, text = tmp_path / "paper.json", PAPER.read_text(encoding="utf-8")
    assert before in text
    file.write_text(text.replace(before, after, 1), encoding="utf-8")
    (finding,) = audit_paper(file)
    assert finding.path == file
    assert "not the frozen" in finding.what


def test_our_own_notes_may_change(tmp_path):
    file = tmp_path / "paper.json"
    file.write_text(PAPER.read_text(encoding="utf-8").replace("The paper multiplies", "The paper multiplied"))
    assert audit_paper(file) == ()


@pytest.mark.slow
def test_a_page_that_evidence_does_not_give_is_named(tmp_path):
    page = tmp_path / "results.md"
    page.write_text(
        (ROOT / "docs" / "results.md").read_text(encoding="utf-8").replace("| 91.3 |", "| 92.3 |", 1)
    )
    (finding,) = audit_page(page, ROOT / "results")
    assert finding.path == page
    assert "is not what the evidence gives: line" in finding.what
