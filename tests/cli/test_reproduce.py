"""`patchcert reproduce`: a quick look from end to end, mistakes, and the page of results."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from other_processes import environment, interrupted
from patchcert.cli.app import run
from patchcert.cli.reproduce import stop_on_signals
from patchcert.papers.chiang2020.tables import table_names

ROOT = Path(__file__).parents[2]
QUICK = ("strategy-detail-5x5", "--rows", "MNIST random mlp", "--scale", "quick", "--device", "cpu")


def test_a_quick_look_trains_certifies_and_collects(capsys, tmp_path):
    place = ["--runs", str(tmp_path / "runs")]
    assert run(["reproduce", *QUICK, "--jobs", "2", *place]) == 0
    captured = capsys.readouterr()
    assert "QUICK LOOK, NOT A RESULT" in captured.out
    assert "3 rows need 3 runs (quick) on cpu" in captured.err

    assert run(["reproduce", *QUICK, *place, "--format", "json"]) == 0
    captured = capsys.readouterr()
    assert "3 already done" in captured.err
    (table,) = json.loads(captured.out)["tables"]
    assert table["quick"] is True
    for row in table["rows"]:
        assert row["status"] == "measured"
        assert [each["images"] for each in row["runs"]] == [100]
        assert row["clean"] > 40

    again = ["--from", str(tmp_path / "runs" / "results"), "--format", "csv"]
    assert run(["reproduce", *QUICK, *again]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 4
    assert all(line.endswith(",quick") for line in lines[1:])


@pytest.mark.slow
def test_defenses_and_votes_have_a_quick_look(answered, tmp_path):
    place = ["--scale", "quick", "--device", "cpu", "--jobs", "2", "--runs", str(tmp_path)]
    rows = ["--rows", "mnist 2x2 lgs", "--rows", "mnist ablation"]
    found = answered(run(["reproduce", "all", *rows, *place, "--format", "json"]))
    tables = {table["table"]: table["rows"] for table in found["tables"]}
    plain, adaptive = tables["compare-defenses"]
    assert adaptive["empirical"] <= plain["empirical"]
    assert plain["runs"][0]["defense"].startswith("LocalGradientSmoothing(window=2")
    certified = [row["certified"] for row in tables["sparse-vs-ablation"]]
    assert certified == sorted(certified, reverse=True)


def test_a_whole_table_takes_its_shape_in_a_quick_look(answered, tmp_path):
    asked = ["sparse-detail", "--scale", "quick", "--device", "cpu", "--jobs", "2", "--format", "json"]
    (table,) = answered(run(["reproduce", *asked, "--runs", str(tmp_path / "runs")]))["tables"]
    assert len(table["rows"]) == 14
    for row in table["rows"]:
        assert row["status"] == "measured"
        assert row["paper"]["certified"] is not None
        assert 0 <= row["certified"] <= row["clean"] <= 100


def test_ctrl_c_stops_cleanly_and_the_same_command_resumes(tmp_path):
    rows = ["strategy-detail-5x5", "--rows", "MNIST random(1) mlp", "--scale", "quick", "--device", "cpu"]
    command = [sys.executable, "-m", "patchcert", "reproduce", *rows, "--runs", str(tmp_path / "runs")]
    said = interrupted(command, at="running:")
    assert any("give the same command again to resume" in line for line in said)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


class Interrupting(io.RawIOBase):
    """A stream in whose midst Ctrl-C is pressed."""

    def writable(self):
        return True

    def write(self, data):
        os.kill(os.getpid(), signal.SIGINT)
        return len(data)


def test_ctrl_c_may_come_while_a_line_is_written(monkeypatch):
    monkeypatch.setattr(
        sys, "stderr", io.TextIOWrapper(io.BufferedWriter(Interrupting()), line_buffering=True)
    )
    with stop_on_signals() as stop:
        sys.stderr.write("running: a run\n")
    assert stop.is_set()


def test_without_a_table_all_are_listed(capsys, answered):
    assert run(["reproduce"]) == 0
    assert "strategy-detail-5x5     30 rows" in capsys.readouterr().out
    assert answered(run(["reproduce", "list", "--format", "json"]))["tables"][-1]["name"] == "ours"


def test_a_folder_without_runs_in_it_is_a_mistake_of_who_collects(capsys, tmp_path):
    assert run(["reproduce", "collect", "--runs", str(tmp_path), "--results", str(tmp_path / "results")]) == 2
    assert "holds no run folder that is finished and certified" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["large-model"], "there is no table named 'large-model'"),
        (["large-models", "--rows", "svhn"], "no row of large-models has the words 'svhn'"),
        (["all", "--rows", "svhn"], "no table has a row with the words 'svhn'"),
        (["large-models", "--scale", "fast"], "--scale fast is neither paper, quick nor a number above 0"),
        (["large-models", "--format", "xml"], "--format xml is unknown"),
        (["large-models", "--write", "x.txt"], "--write x.txt is no name of a Markdown file"),
        (["large-models", "--page", "x.htm"], "--page x.htm is no name of an HTML file"),
        (["large-models", "--device", "cpu"], "cifar10"),
        (["large-models", "--from", ".", "--tf32"], "--tf32 is about training, and --from trains nothing"),
        (["collect", "--runs", "nowhere"], "there is no folder nowhere"),
    ],
)
def test_mistakes_give_one_message_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["reproduce", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.fixture
def other_results(tmp_path):
    """A folder of results, none of which answers anything that is asked."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "summary.json").write_text("{}")
    return tmp_path


def test_a_quick_look_is_not_written_down(refused, other_results):
    page = str(other_results / "page.md")
    arguments = ["ours", "--scale", "quick", "--from", str(other_results), "--write", page]
    assert "a quick look is no result" in refused(run(["reproduce", *arguments]))


def test_nothing_trained_says_so_in_every_format(capsys, other_results):
    for form in ("table", "markdown", "csv", "latex"):
        assert run(["reproduce", "large-models", "--from", str(other_results), "--format", form]) == 0
        assert capsys.readouterr().out.count("not run") == 16


def test_tables_are_written_as_an_html_page(capsys, tmp_path):
    page = tmp_path / "new" / "tables.html"
    assert run(["reproduce", "all", "--from", str(ROOT / "results"), "--page", str(page)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"the page is {page}" in captured.err
    written = page.read_text(encoding="utf-8")
    assert written.count("<article ") == len(table_names())
    assert f"--from {ROOT / 'results'}" in written


def test_recounting_rows_does_not_load_what_trains_or_attacks():
    rows = ["reproduce", "strategy-detail-5x5", "--rows", "MNIST all mlp", "--from", str(ROOT / "results")]
    script = f"""
import sys
from patchcert.cli.app import run
assert run({rows!r}) == 0
print(*(name for name in sys.modules if name.startswith("patchcert")), file=sys.stderr)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100, check=True)
    loaded = done.stderr.split()
    assert "patchcert.papers.chiang2020.counting" in loaded
    assert not {name for name in loaded if name.endswith((".imagenet", ".runner", ".answering"))}
