"""What the documents show can be run as it stands."""

import os
import re
from pathlib import Path

import pytest

from patchcert.models import registry

ROOT = Path(__file__).parents[1]
NEEDS_OWN_FILES = ("folder:~/photos",)


def examples():
    for path in [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]:
        for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)):
            if not any(text in code for text in NEEDS_OWN_FILES):
                yield pytest.param(code, id=f"{path.name}-{number}")


@pytest.mark.parametrize("code", list(examples()))
def test_examples_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_builders", dict(registry._builders))
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_links_lead_somewhere():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert os.path.exists(path.parent / target), f"{path.name} links to {target}"
