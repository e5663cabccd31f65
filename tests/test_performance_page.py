"""The tables of the performance page are those of the stored measurements."""

import json
import re
from pathlib import Path

from patchcert.bench.report import markdown

DOCS = Path(__file__).parents[1] / "docs"


def test_every_table_is_made_from_its_measurements():
    page = (DOCS / "performance.md").read_text()
    sources = re.findall(r"<!-- table: (\S+) -->", page)
    assert sources
    for source in sources:
        table = markdown(json.loads((DOCS / source).read_text()))
        assert f"<!-- table: {source} -->\n{table}" in page, (
            f"paste `patchcert bench --from docs/{source} --markdown`"
        )
