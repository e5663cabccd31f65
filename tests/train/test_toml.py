"""TOML text says what the tables hold; how mistakes are named is tested on specifications."""

import tomllib
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from patchcert.train.toml import parse_value, to_table, to_toml, without_defaults


@given(
    st.recursive(
        st.text() | st.integers() | st.floats(allow_nan=False) | st.booleans(), st.lists, max_leaves=5
    )
)
def test_toml_text_reads_back_to_the_same_values(value):
    table = {"a": value, "b": {"c": {"d": value}}, "e": {}}
    assert tomllib.loads(to_toml(table)) == table


@dataclass(frozen=True)
class Settings:
    kind: str = "a"
    count: int = 1
    limit: int | None = None
    sizes: tuple[int, ...] = (2,)


def test_tables_leave_out_none_and_fingerprints_leave_out_defaults_except_the_kind():
    assert to_table(Settings()) == {"kind": "a", "count": 1, "sizes": [2]}
    assert without_defaults(Settings()) == {"kind": "a"}
    assert without_defaults(Settings(limit=3)) == {"kind": "a", "limit": 3}


def test_a_value_is_read_as_toml_where_it_is_some():
    assert [parse_value(text) for text in ("3", "[1, 2]", "true", "5x5", "a = 1\nb = 2")] == [
        3,
        [1, 2],
        True,
        "5x5",
        "a = 1\nb = 2",
    ]
