"""Leaderboard files: what is written is read again, and what contradicts itself is refused."""

import json
from dataclasses import fields, replace

import pytest

from patchcert.comparison.leaderboard import (
    Cost,
    Counted,
    Row,
    Seeds,
    Source,
    parse_rows,
    published_rows,
    read_rows,
    write_rows,
)
from patchcert.comparison.schema import leaderboard_schema
from patchcert.errors import DataError, InvalidInput
from patchcert.papers.chiang2020.tables import find_table, table_names

OURS = Row(
    data="mnist",
    images=200,
    patch="5x5",
    pixels="native",
    method="intervals",
    promise="recovery",
    outside_data="none",
    certified=60.5,
    source=Source(kind="evidence", title="run"),
    confidence=0.95,
    network="mlp",
    parameters=100,
    clean=90.0,
    cost=Cost(passes=1, milliseconds=0.5, device="cpu"),
    seeds=Seeds(count=2, mean=60.0, counted=2019, spread=0.5),
    evidence=Counted(sha256="a" * 64, weights_sha256="b" * 64, correct=180, certified=121),
)


def text_of(**changes):
    """A file with our row, changed."""
    row = {**OURS.to_dict(), **changes}
    return json.dumps({"format": "patchcert-leaderboard", "version": 1, "rows": [row]})


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = (OURS, *published_rows())
    write_rows(rows, tmp_path / "rows.json")
    assert read_rows(tmp_path / "rows.json") == rows


def test_no_file_can_say_that_its_rows_were_counted_here(tmp_path):
    write_rows([replace(OURS, recounted=True)], tmp_path / "rows.json")
    assert read_rows(tmp_path / "rows.json") == (OURS,)
    with pytest.raises(InvalidInput, match=r"rows\[0\] has the unknown key 'recounted'"):
        parse_rows(text_of(recounted=True), "x")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"certified": 95.0},
            r"others.json: rows\[0\]: certified is 95.0, more than clean, 90.0 \(1 more mis",
        ),
        (
            {"certified": 61.0},
            r"rows\[0\]: certified is 61.0, but its evidence counts 121 of 200, which is 60.5",
        ),
        ({"clean": 91.0}, r"rows\[0\]: clean is 91.0, but its evidence counts 180 of 200"),
        ({"source": {"kind": "published", "title": "x"}}, r"the source is of kind 'published' with evidence"),
        ({"seeds": {"count": 1, "mean": 99.0}}, r"certified is 60.5, but its only seed has 99.0"),
        (
            {"evidence": {**OURS.to_dict()["evidence"], "correct": 10**400}},
            r"its evidence counts 121 certified and 10+ right of 200",
        ),
        ({"certified": 10**400}, r"rows\[0\].certified must be at most 100"),
        ({"images": "all"}, r'others.json: rows\[0\].images must be an integer, got "all"'),
    ],
)
def test_a_row_that_cannot_be_is_refused_by_place(changes, what):
    with pytest.raises(InvalidInput, match=what) as refused:
        parse_rows(text_of(**changes), "others.json")
    assert "docs/comparison.md" in refused.value.hint


def test_a_row_without_evidence_is_not_counted_from_any():
    plain = OURS.to_dict()
    del plain["evidence"]
    document = {"format": "patchcert-leaderboard", "version": 1, "rows": [plain]}
    with pytest.raises(InvalidInput, match="the source is of kind 'evidence' without evidence"):
        parse_rows(json.dumps(document), "others.json")


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text("{")
    with pytest.raises(InvalidInput, match="cut.json is no JSON"):
        read_rows(tmp_path / "cut.json")
    with pytest.raises(InvalidInput, match="deep.json is no JSON"):
        parse_rows("[" * 10**6, "deep.json")


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Row, "row"), (Cost, "cost"), (Seeds, "seeds"), (Counted, "evidence"), (Source, "source")],
)
def test_the_schema_has_the_fields_of_the_values(kind, name):
    own = {each.name for each in fields(kind)} - {"recounted"}
    assert own == leaderboard_schema()["$defs"][name]["properties"].keys()


def test_published_rows_of_the_paper_are_those_of_its_tables():
    entries = [entry for name in table_names() for entry in find_table(name).matching([], on_request=True)]
    stated = {(each.dataset, each.threat_words, each.clean, each.certified) for each in entries}
    rows = [row for row in published_rows() if row.source.title.startswith("Chiang")]
    assert len(rows) == 4
    for row in rows:
        assert (row.data, row.patch, row.clean, row.certified) in stated


def test_published_rows_name_their_sources_and_none_is_called_counted():
    for row in published_rows():
        assert row.source.link
        assert row.source.kind in ("published", "unconfirmed")
        assert not row.recounted
    assert not next(row for row in published_rows() if row.pixels == "upscaled").is_like_ours
