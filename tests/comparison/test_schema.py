"""The validator says what is wrong, where, and checks every keyword of the schema it is given."""

import copy

import pytest

from patchcert.comparison.schema import leaderboard_schema, mistakes
from patchcert.errors import InvalidInput

ROW = {
    "data": "cifar10",
    "images": 10000,
    "patch": "5x5",
    "pixels": "native",
    "method": "bands",
    "promise": "recovery",
    "outside_data": "none",
    "certified": 60.0,
    "source": {"kind": "published", "title": "Somebody"},
}
DOCUMENT = {"format": "patchcert-leaderboard", "version": 1, "rows": [ROW, copy.deepcopy(ROW)]}


def with_value(path, value):
    """The document with something else at a path."""
    made = copy.deepcopy(DOCUMENT)
    place = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return made


def test_a_document_as_the_schema_says_has_no_mistake():
    assert list(mistakes(DOCUMENT, leaderboard_schema())) == []


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ([], "the document must be an object, got []"),
        ({"format": "patchcert-leaderboard", "version": 1}, "the document lacks 'rows'"),
        (with_value(("version",), 2), "version must be one of 1, got 2"),
        (with_value(("version",), True), "version must be one of 1, got true"),
        (with_value(("rows",), {}), "rows must be an array, got {}"),
        (with_value(("rows", 1, "certified"), "60%"), 'rows[1].certified must be a number, got "60%"'),
        (with_value(("rows", 0, "certified"), 101), "rows[0].certified must be at most 100, got 101"),
        (with_value(("rows", 0, "certified"), float("nan")), "rows[0].certified must be a number, got NaN"),
        (with_value(("rows", 0, "images"), 0), "rows[0].images must be at least 1, got 0"),
        (with_value(("rows", 0, "images"), True), "rows[0].images must be an integer, got true"),
        (
            with_value(("rows", 0, "pixels"), "big"),
            'rows[0].pixels must be one of native, upscaled, got "big"',
        ),
        (with_value(("rows", 0, "confidence"), 0), "rows[0].confidence must be above 0, got 0"),
        (
            with_value(("rows", 0, "data"), ""),
            'rows[0].data must be a text of a length of at least 1, got ""',
        ),
        (
            with_value(("rows", 0, "source", "link"), "ftp://x"),
            'rows[0].source.link must be a text like ^https://, got "ftp://x"',
        ),
        (with_value(("rows", 0, "source"), {"kind": "published"}), "rows[0].source lacks 'title'"),
        (
            with_value(("rows", 0, "cost"), {"seconds": 1}),
            "rows[0].cost has the unknown key 'seconds'; its keys are passes, multiply_adds",
        ),
    ],
)
def test_a_mistake_says_where_it_is_what_is_expected_and_what_came(document, what):
    found = list(mistakes(document, leaderboard_schema()))
    assert len(found) == 1
    assert found[0].startswith(what)


def test_all_mistakes_are_named():
    document = with_value(("rows", 0, "certified"), -1)
    document["rows"][1].pop("method")
    assert len(list(mistakes(document, leaderboard_schema()))) == 2


def test_a_keyword_that_is_not_checked_is_refused():
    with pytest.raises(InvalidInput, match="the schema has the keyword 'oneOf', which is not checked here"):
        list(mistakes(1, {"oneOf": []}))
