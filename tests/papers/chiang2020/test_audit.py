"""The paper's numbers are frozen; tests of quoting hold the page of results to the evidence."""

import shutil
from pathlib import Path

import pytest

from patchcert.papers.chiang2020.audit import audit_paper

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "src" / "patchcert" / "papers" / "chiang2020"


@pytest.fixture
def folder(tmp_path):
    for name in ("paper.json", "authors.json"):
        shutil.copy(FOLDER / name, tmp_path)
    return tmp_path


def test_the_papers_numbers_are_the_frozen_ones():
    assert audit_paper(FOLDER) == ()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("paper.json", "51.9", "50.9"),
        ("paper.json", '"hours": 22.4', '"hours": 224.0'),
        ("paper.json", '"Guided(20)"', '"Guided(10)"'),
        ("authors.json", "53.02", "51.02"),
    ],
)
def test_an_edited_number_of_the_paper_is_noticed(folder, name, before, after):
    file = folder / name
    text = file.read_text(encoding="utf-8")
    assert before in text
    file.write_text(text.replace(before, after, 1), encoding="utf-8")
    (finding,) = audit_paper(folder)
    assert finding.path == file
    assert "not the frozen" in finding.what


def test_our_own_notes_may_change(folder):
    file = folder / "paper.json"
    file.write_text(file.read_text(encoding="utf-8").replace("The paper multiplies", "The paper multiplied"))
    assert audit_paper(folder) == ()
