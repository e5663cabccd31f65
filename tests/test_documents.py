"""What the documents show can be run as it stands."""

import importlib.util
import json
import os
import re
import shlex
import struct
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import typer

import lightning_stand_in
import patchcert as pc
from patchcert.certificates import method_named
from patchcert.cli.app import create_app
from patchcert.cli.target import METHODS
from patchcert.models import registry
from scripts import load_script

ROOT = Path(__file__).parents[1]
NEEDS_OWN_FILES = ("folder:~/photos",)
LOOPS = ("for step, (images, labels)", "lightning.Trainer(")
TUTORIAL = ROOT / "docs" / "guides" / "tutorial.md"


def examples():
    pages = (
        page for folder in ("concepts", "guides") for page in sorted((ROOT / "docs" / folder).glob("*.md"))
    )
    for path in [ROOT / "README.md", *(page for page in pages if page != TUTORIAL)]:
        for number, code in enumerate(blocks_of(path)):
            if not any(text in code for text in (*NEEDS_OWN_FILES, *LOOPS)) and code != FIRST:
                yield pytest.param(code, id=f"{path.name}-{number}")


def blocks_of(path):
    """All Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)


FIRST = blocks_of(ROOT / "README.md")[0]
"""The example that has a test of its own."""


@pytest.mark.parametrize("code", list(examples()))
def test_examples_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_builders", dict(registry._builders))
    exec(compile(code, "example", "exec"), {"__name__": "example"})


@pytest.fixture
def _lightning(monkeypatch):
    """Lightning, or where it is not installed a module that does what the examples need of it."""
    if importlib.util.find_spec("lightning") is None:
        monkeypatch.setitem(sys.modules, "lightning", lightning_stand_in)


@pytest.mark.usefixtures("_lightning")
@pytest.mark.parametrize("kind", LOOPS)
def test_loops_of_one_s_own_train_for_certificates(kind, monkeypatch):
    """Few digits would be proven of a network that was trained in the ordinary way."""
    (code,) = [each for each in blocks_of(ROOT / "docs" / "guides" / "your-own-model.md") if kind in each]
    names, found = {"__name__": "example"}, []
    for name in ("certify", "certify_loader"):
        own = getattr(pc, name)
        monkeypatch.setattr(pc, name, lambda *given, own=own, **named: found.append(own(*given, **named)))
    torch.manual_seed(0)
    exec(compile(code, "example", "exec"), names)
    assert found[0].certified_accuracy > 0.3


def test_the_notebook_is_its_page_and_prints_what_the_page_says(capsys):
    text = TUTORIAL.read_text()
    notebook = TUTORIAL.with_suffix(".ipynb").read_text()
    assert notebook == load_script("notebook").as_text(text), "run `python docs/making/notebook.py`"
    names = {"__name__": "__main__"}
    for cell in json.loads(notebook)["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "cell", "exec"), names)
    printed = [line for line in capsys.readouterr().out.splitlines() if set(line) - set("#.")]
    promised = "".join(re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)).splitlines()
    assert [re.sub(r"\d+", "N", line) for line in printed] == [re.sub(r"\d+", "N", line) for line in promised]
    assert printed[:2] == promised[:2]  # a stored model, and nothing that is drawn


def test_pictures_are_those_that_are_drawn(tmp_path):
    load_script("pictures").draw(tmp_path)
    drawn, stored = (
        {each.name: size(each) for each in folder.glob("*.png")} for folder in (tmp_path, PICTURES)
    )
    assert drawn == stored, "run `python docs/making/pictures.py`"


PICTURES = ROOT / "docs" / "pictures"


def size(png):
    """Width and height, which stand in the first chunk."""
    return struct.unpack(">II", png.read_bytes()[16:24])


def test_every_page_is_in_the_navigation_once():
    """Decisions are listed when the site is built."""
    nav = re.findall(r"[:-] (\S+\.md)(?: #.*)?$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    listed = [page for page in pages if not page.startswith("decisions/")]
    assert sorted(nav) == sorted([*listed, "overview.md", "contributing.md"])


def test_every_page_is_on_the_map():
    index = (ROOT / "docs" / "index.md").read_text()
    linked = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]*)\)", index)}
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert pages - linked == {"index.md"}


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs" / "reference.md").read_text()
    described = {name.split(".")[0] for name in re.findall(r"^::: patchcert\.(\S+)$", text, re.M)}
    assert described >= set(pc.__all__)


def test_nothing_in_the_site_is_loaded_from_elsewhere():
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings
    assert "http" not in settings
    for page in (ROOT / "docs").rglob("*.md"):
        assert not re.search(r"!\[[^\]]*\]\(https?:|<(?:img|script|link|iframe)\b", page.read_text()), (
            page.name
        )


def test_the_first_example_prints_what_the_readme_says(capsys):
    text = (ROOT / "README.md").read_text()
    exec(compile(FIRST, "example", "exec"), {"__name__": "example"})
    right, proven = re.findall(r"\d+\.\d%", capsys.readouterr().out)
    assert f"{right} are right and {proven} proven" in text


def test_links_lead_somewhere():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target, place in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", path.read_text()):
            page = path.parent / target if target else path
            assert os.path.exists(page), f"{path.name} links to {target}"
            assert not place or place in headings(page), f"{path.name} links to {target}#{place}"


def headings(page):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*/*.md"))]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_commands_have_the_options_that_documents_give_them(page):
    for words in commands_in(page.read_text()):
        group = typer.main.get_command(create_app(words))
        command = group.commands[words[0]]
        if words[0] in ("data", "zoo"):
            command = command.commands[words[1]]
        known = {name for parameter in command.params for name in parameter.opts}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= known, f"{page.name}: patchcert {' '.join(words)}"


def commands_in(text):
    """The words after `patchcert` of every command in a block or in a line of text."""
    lines = [
        line for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()
    ]
    lines += re.findall(r"`(patchcert [^`]*)`", text)
    for line in lines:
        found = re.search(r"(?:^|-m )patchcert (?:--import \S+ )?([a-z].*)", line.partition(" #")[0])
        if found and "|" not in found[1]:
            yield shlex.split(found[1].partition(";")[0].replace("...", ""))


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_modules_that_documents_name_exist(page):
    for name in set(re.findall(r"`([\w/]+\.py)`", page.read_text())) - {"my_models.py"}:
        assert (ROOT / name).exists() or any((ROOT / "src").rglob(name)), f"{page.name} names {name}"


@pytest.mark.parametrize("method", ["masking", "ablation", "bands", "blocks", "local-votes"])
def test_the_table_of_methods_has_all_settings(method):
    text = (ROOT / "docs" / "guides" / "command-line.md").read_text()
    (row,) = re.findall(rf"^\| `{method}` \|.*$", text, re.M)
    settings = {field.name for field in fields(method_named(METHODS[method]))} - {
        "model",
        "threat",
        "with_map",
    }
    assert settings <= set(re.findall(r"\w+", row))


def test_the_guide_to_training_lists_the_presets_that_there_are():
    text = (ROOT / "docs" / "guides" / "train.md").read_text()
    listed = re.search(r"Presets are (.*?)\. A run folder", text, re.DOTALL)
    presets = {file.stem for file in (ROOT / "src" / "patchcert" / "train" / "presets").glob("*.toml")}
    assert listed is not None
    assert set(re.findall(r"`([^`]+)`", listed[1])) == presets
