"""Figures in documents are those that their queries give, and none is typed."""

import json
import shutil
from pathlib import Path

import pytest

from patchcert.errors import InvalidInput
from patchcert.papers.chiang2020.quoting import (
    Sources,
    audit_document,
    audit_documents,
    audit_page,
    audit_paper,
    audit_published,
    shown,
    typed_figures,
    updated,
)

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "src" / "patchcert" / "papers" / "chiang2020"


@pytest.fixture(scope="module")
def sources():
    return Sources(ROOT, ROOT / "results")


@pytest.fixture
def forged(sources, tmp_path):
    """A checkout of documents and measurements to be forged, with the results and cards as they are."""
    (tmp_path / "results").mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "src" / "patchcert" / "zoo").mkdir(parents=True)
    (tmp_path / "src" / "patchcert" / "zoo" / "entries").symlink_to(sources.zoo.folder)
    (tmp_path / "trials").symlink_to(ROOT / "trials")
    made = Sources(tmp_path, sources.results)
    vars(made).update(views=sources.views, page=sources.page)
    return made


def alter(sources, name, before, after):
    page = sources.root / name
    text = page.read_text()
    assert before in text
    page.write_text(text.replace(before, after, 1))
    return [each.what for each in audit_document(page, sources)]


def test_the_documents_say_what_the_evidence_gives(sources):
    assert [str(finding) for finding in audit_documents(sources)] == []


@pytest.mark.parametrize(
    ("name", "before", "after", "what"),
    [
        ("README.md", "68.92<!--", "69.92<!--", "69.92, but 68.92 is what 'row ours 5x5 certified' gives"),
        ("README.md", "+0.66<!--", "+1.66<!--", "+1.66, but +0.66 is what 'compare loss mean' gives"),
        (
            "README.md",
            "68.92<!--= row ours 5x5 certified -->",
            "69.92",
            "has '69.92 %', which no query gives",
        ),
        ("README.md", "96.0% are right", "97.0% are right", "has '97.0%', which no query gives"),
        ("docs/guides/zoo.md", "52<!--", "5<!--", "5, but 52 is what"),
        ("docs/guides/train.md", "17.8<!--", "27.8<!--", "27.8, but 17.8 is what"),
        (
            "docs/guides/train.md",
            "| 93.8 | 76.0 |",
            "| 93.8 | 86.0 |",
            "the table 'trials masked-cifar10-5x5' gives is another",
        ),
        (
            "docs/performance.md",
            "| 52.0x |",
            "| 152.0x |",
            "the table 'bench docs/performance/h200.json' gives is another",
        ),
        ("docs/decisions/0007-a-short-ramp-for-cnn4.md", "88.08<!--", "8.08<!--", "8.08, but 88.08 is what"),
        (
            "docs/decisions/0009-the-zoo-has-trimmed-models.md",
            "| 5,293 |",
            "| 5,393 |",
            "the table 'trimmed' gives is another",
        ),
    ],
)
def test_altered_figures_are_noticed(forged, name, before, after, what):
    (found,) = alter(forged, name, before, after)
    assert what in found


@pytest.mark.parametrize(
    ("name", "before", "after", "what"),
    [
        (
            "results/README.md",
            "# Evidence\n",
            "99 % are proven.\n",
            "line 1 has '99 %', which no query gives",
        ),
        ("CONTRIBUTING.md", "# Contributing\n", "9,999 are proven.\n", "line 1 has '9,999 are proven'"),
        ("CHANGELOG.md", "### Added\n", "- 99.9 % by masks.\n", "has '99.9 %', which no query gives"),
    ],
)
def test_figures_are_typed_nowhere_else_either(forged, name, before, after, what):
    assert forged.root / name in (*forged.documents, *forged.never_written)
    (found,) = alter(forged, name, before, after)
    assert what in found


@pytest.mark.parametrize(
    ("cells", "what"),
    [
        (
            ["It certifies\n99 images."],
            "cell 1 (docs/making/notebook.py makes it anew): line 1 has 'certifies 99'",
        ),
        (["```", "99 %", "```"], "cell 2 (docs/making/notebook.py makes it anew): line 1 has '99 %'"),
        (
            ["99.92<!--= row ours 5x5 certified --> %"],
            "99.92, but 68.92 is what 'row ours 5x5 certified' gives",
        ),
    ],
)
def test_the_text_of_a_notebook_is_read_cell_by_cell(forged, cells, what):
    page = forged.root / "docs" / "guides" / "tutorial.ipynb"
    assert list(audit_document(page, forged)) == []
    text = [{"cell_type": "markdown", "source": cell.splitlines(keepends=True)} for cell in cells]
    page.write_text(json.dumps({"cells": [*text, {"cell_type": "code", "source": ["share = 99.9  # %"]}]}))
    (found,) = audit_document(page, forged)
    assert what in found.what


def test_a_history_and_notebooks_are_not_written(forged):
    assert {page.name for page in forged.never_written} == {"CHANGELOG.md", "tutorial.ipynb"}
    assert not {*forged.never_written} & {*forged.documents}


def test_a_stored_measurement_and_its_table_are_held_to_each_other(forged):
    file = forged.root / "docs" / "measurements" / "short-ramp.json"
    file.write_text(file.read_text().replace("44.3", "54.3"))
    (found,) = audit_document(forged.root / "docs" / "decisions" / "0007-a-short-ramp-for-cnn4.md", forged)
    assert found.what == "the table 'stored docs/measurements/short-ramp.json' gives is another"


def test_an_altered_page_of_results_is_noticed(forged):
    page = forged.root / "docs" / "results.md"
    page.write_text(page.read_text().replace("| 91.3 |", "| 92.3 |", 1))
    (found,) = audit_page(page, forged.page)
    assert found.what.startswith("is not what the evidence gives: line ")


def test_what_was_altered_is_made_again(forged):
    page = forged.root / "README.md"
    before = page.read_text()
    page.write_text(before.replace("68.92<!--", "1.00<!--").replace("+0.66<!--", "+5.00<!--"))
    assert updated(page.read_text(), forged) == before
    performance = (forged.root / "docs" / "performance.md").read_text()
    assert updated(performance.replace("52.0x", "99.0x"), forged) == performance


@pytest.mark.parametrize(
    ("query", "value"),
    [
        ("row large-models 'cifar 2x2 all cnn5w' certified", 52.92),
        ("row large-models 'cifar 2x2 all cnn5w' seconds / 60", 19.82),
        ("run 02fe3563fc47b749 certified", 11.35),
        ("run 2f6638f95f26f5f6 certified '25x1 line'", 27.54),
        ("run b28716365827e76c mean", (60.76 + 60.69 + 60.39) / 3),
        ("run cd50fe1e72720725 spread '2x2 square'", 0.115),
        ("run 5d80627705ab1ae2 seeds", 3),
        ("run c229aae437870b75 seeds", 1),
        ("epoch 94223c7eec79c84b 12", 0.67),
        ("run a8c9528c646fcb8f seeds", 4),
        ("run a8c9528c646fcb8f seeds '2x2 square'", 3),  # one of the four was not certified against it
        ("superseded 22526a400f41b9e1 certified", 67.80),
        ("superseded 46902b72277c3492 certified", 17.75),
        ("superseded 46902b72277c3492 loss", 1.93),
        ("compare loss above", 11),
        ("compare first above", 7),
        ("compare mean above", 5),
        ("card cifar10-2x2-cnn5w proof.certified", 5293),
        ("json docs/performance/h200.json cases.0.placements", 576),
        ("authors 'cifar guided(20)' certified", 53.02),
        ("parameters cnn5w / 1e6", 17.19),
    ],
)
def test_queries(sources, query, value):
    assert sources.figure(query) == pytest.approx(value, abs=0.005)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("rows ours 2x2 certified", "begins with no kind of figure"),
        ("row ours 2x2", "wrong number of words"),
        ("row ours 2x2 robust", "a row has no 'robust'"),
        ("row ours mnist certified", "2 rows of ours have the words 'mnist'; expected one"),
        ("row theirs 2x2 certified", "there is no table 'theirs'"),
        ("row large-models 'cifar 5x5 guided(20) cnn5w' spread", "gives no number"),
        ("run 0000000000000000 certified", "there is no run"),
        ("run c229aae437870b75 spread", "gives no number"),
        ("run 2f6638f95f26f5f6 certified '5x1 line'", "has 0 proofs against Patch\\(5x1 line, everywhere\\)"),
        ("superseded 0000000000000000 certified", "no superseded run"),
        ("compare luck above", "rows are not compared by 'luck'"),
        ("json docs/performance/h200.json cases.99.placements", "there is nothing at '99'"),
        ("card mnist-5x5-mlp proof.certified / 68.99", "divides by 68.99, which is no unit"),
        ("authors cifar certified", "lines of authors.json have the words"),
    ],
)
def test_mistaken_queries_are_refused_by_name(sources, query, message):
    with pytest.raises(InvalidInput, match=message):
        sources.figure(query)


def test_a_query_that_gives_nothing_is_a_finding(forged):
    (found,) = alter(forged, "README.md", "row ours 5x5 certified", "row ours 9x9 certified")
    assert found.startswith("the query 'row ours 9x9 certified' gives nothing: 0 rows of ours")


@pytest.mark.parametrize(
    ("value", "like", "text"),
    [
        (94.1, "1.00", "94.10"),
        (1994, "1", "1,994"),
        (0.66, "+1.0", "+0.7"),
        (-0.04, "+1.00", "-0.04"),
        (19.8, "20", "20"),
    ],
)
def test_figures_keep_their_decimals(value, like, text):
    assert shown(value, like) == text


@pytest.mark.parametrize(
    "text",
    [
        "it proves 52.9 %",
        "97% are right",
        "81.8x faster",
        "takes 20 minutes",
        "11 of 18 rows",
        "9,410 images are certified",
        "a loss of 1.93",
        "68 percent of them",
        "a 17-point gain",
        "12 ms each",
        "68\u00d7 faster",
        "it certifies 6,892 images",
        "**68** %",
        "68&nbsp;%",
        "1 in 3 images",
        "99 of them",
        "99\n% of them",
        "99 &#37; are right",
        "99 \\% are right",
        "it certifies\n6,892 images",
    ],
)
def test_typed_results_are_found(text):
    assert len(list(typed_figures(f"Words.\n{text}\n"))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "`0.05` is a setting",
        "```bash\npatchcert train --scale 0.1   # 52.9 %\n```",
        "see [decision 6](docs/0006-x.md#1.2)",
        "52.9<!--= row ours 2x2 certified --> % are proven",
        "<!-- table: trimmed -->\n| 52.9 % |\n<!-- end of table -->",
        "5x5 patches of 2 pixels in 100 epochs",
    ],
)
def test_code_markers_and_sizes_are_no_typed_results(text):
    assert list(typed_figures(text)) == []


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
        ("paper.json", "ends at chance (11.35 on MNIST)", "ends at chance (31.35 on MNIST)"),
        ("paper.json", "Any K pixels, anywhere.", "Any 2 K pixels, anywhere."),
        ("authors.json", "53.02", "51.02"),
    ],
)
def test_an_edited_number_or_note_of_the_paper_is_noticed(folder, name, before, after):
    file = folder / name
    text = file.read_text(encoding="utf-8")
    assert before in text
    file.write_text(text.replace(before, after, 1), encoding="utf-8")
    (finding,) = audit_paper(folder)
    assert finding.path == file
    assert "not the frozen" in finding.what


def test_layout_may_change(folder):
    file = folder / "paper.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")), indent=3))
    assert audit_paper(folder) == ()


def test_an_edited_number_of_what_others_published_is_noticed(tmp_path):
    source = ROOT / "src" / "patchcert" / "comparison" / "published.json"
    assert audit_published(source) == ()
    file = tmp_path / source.name
    for found, forged in (("61.97", "51.97"), ('"pixels": "native"', '"pixels": "upscaled"')):
        file.write_text(source.read_text().replace(found, forged, 1))
        (finding,) = audit_published(file)
        assert "not the frozen" in finding.what
    file.write_text(source.read_text().replace("abstract, rounded", "abstract; ours has 99.9 %", 1))
    (finding,) = audit_published(file)
    assert finding.what == "a note has '99.9 %', but results stand in rows, which are frozen"
    file.write_text(source.read_text().replace("61.97", "99.97", 1))
    assert "more than clean" in audit_published(file)[0].what


def test_a_figure_may_not_come_from_a_file_that_nobody_listed(sources):
    with pytest.raises(InvalidInput, match="README.md is no measurement that the manifest lists"):
        sources.figure("json README.md cases.0.ratio")


def test_of_several_proofs_against_one_patch_that_which_most_seeds_have_is_quoted(sources):
    """One seed was also certified behind finer masks."""
    finer = "results/3d0c3e70adf90ed2/certify-patch-5x5-square-everywhere-2e8e99f8736e67f3.npz"
    texts = [f"<!--= run 3d0c3e70adf90ed2 {what} -->" for what in ("certified", "mean", "seeds")]
    found = [updated(f"0.00{text}", sources).partition("<")[0] for text in texts]
    assert found == ["67.49", "68.02", "3.00"]
    assert updated(f"0<!--= evidence {finer} certified -->", sources).startswith("7,256<")
    mean = updated("0.00<!--= run 9689492d79ba2c68 mean -->", sources)  # a fourth seed has other proofs
    assert mean.startswith("75.52<")
    with pytest.raises(InvalidInput, match="has 3 proofs against .* that as many seeds have; expected one"):
        sources.figure("run 53902237f23e7a80 certified")
