"""`patchcert reproduce`: a quick look from end to end, mistakes, and the page of results."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import patchcert
from patchcert.cli import reproduce_steps
from patchcert.cli.app import run
from patchcert.cli.reproduce_steps import stop_on_signals
from patchcert.errors import InvalidInput
from patchcert.papers.chiang2020.pack import unpack
from patchcert.papers.chiang2020.tables import table_names

ROOT = Path(__file__).parents[2]
QUICK = ("strategy-detail-5x5", "--rows", "MNIST random mlp", "--scale", "quick", "--device", "cpu")


def test_a_quick_look_trains_certifies_collects_and_packs(capsys, tmp_path):
    place = ["--runs", str(tmp_path / "runs"), "--pack", str(tmp_path / "all.tar"), "--pack-weights"]
    assert run(["reproduce", *QUICK, "--jobs", "2", *place]) == 0
    captured = capsys.readouterr()
    assert "QUICK LOOK, NOT A RESULT" in captured.out
    assert "3 rows need 3 runs (quick) on cpu" in captured.err
    assert "packed 3 results and 3 runs" in captured.err

    elsewhere = ["--runs", str(tmp_path / "other"), "--unpack", str(tmp_path / "all.tar"), "--format", "json"]
    assert run(["reproduce", *QUICK, *elsewhere]) == 0
    captured = capsys.readouterr()
    assert "3 already done" in captured.err
    (table,) = json.loads(captured.out)["tables"]
    assert table["quick"] is True
    for row in table["rows"]:
        assert row["status"] == "measured"
        assert [each["images"] for each in row["runs"]] == [100]
        assert row["clean"] > 40

    again = ["--from", str(tmp_path / "other" / "results"), "--format", "csv"]
    assert run(["reproduce", *QUICK, *again]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 4
    assert all(line.endswith(",quick") for line in lines[1:])


def test_a_whole_table_takes_its_shape_in_a_quick_look(capsys, tmp_path):
    asked = ["sparse-detail", "--scale", "quick", "--device", "cpu", "--jobs", "2", "--format", "json"]
    assert run(["reproduce", *asked, "--runs", str(tmp_path / "runs")]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert len(table["rows"]) == 14
    for row in table["rows"]:
        assert row["status"] == "measured"
        assert row["paper"]["certified"] is not None
        assert 0 <= row["certified"] <= row["clean"] <= 100


def test_settings_of_defenses_are_tried_on_all_runs_before_one_is_attacked(monkeypatch, tmp_path):
    asked = []

    class Watched(reproduce_steps.Runner):
        def run(self, tasks):
            asked.append({task.name: [attack.defense for attack in task.due_attacks] for task in tasks})
            return {task.name: "done" for task in tasks}

    monkeypatch.setattr(reproduce_steps, "Runner", Watched)
    place = ["--scale", "quick", "--device", "cpu", "--runs", str(tmp_path)]
    assert run(["reproduce", "compare-defenses", "--rows", "mnist 2x2", *place]) == 0
    tried, everything = asked
    assert len(tried) == 2
    assert len(everything) == 4
    assert all(defenses == [""] for defenses in tried.values())
    assert all(everything[name] == ["", "lgs", "lgs"] for name in tried)


def test_ctrl_c_stops_in_order_and_the_same_command_goes_on(tmp_path):
    rows = ["strategy-detail-5x5", "--rows", "MNIST random(1) mlp", "--scale", "quick", "--device", "cpu"]
    command = [sys.executable, "-m", "patchcert", "reproduce", *rows, "--runs", str(tmp_path / "runs")]
    source = str(Path(patchcert.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stderr=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("running:"):
                process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert any("give the same command again to go on" in line for line in said)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
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
    assert stop.is_given


def test_packed_files_cannot_leave_their_folder(tmp_path):
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        tar.add(__file__, "results/a/../../../escaped")
    with pytest.raises(InvalidInput, match="leads out of its folder"):
        unpack(tmp_path / "bad.tar", tmp_path / "in" / "results", tmp_path / "in" / "runs")
    assert not (tmp_path / "escaped").exists()


def test_without_a_table_all_are_listed(capsys):
    assert run(["reproduce"]) == 0
    assert "strategy-detail-5x5     30 rows" in capsys.readouterr().out
    assert run(["reproduce", "list", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"][-1]["name"] == "ours"


def test_a_folder_without_runs_in_it_collects_nothing_and_says_so(capsys, tmp_path):
    assert run(["reproduce", "collect", "--runs", str(tmp_path), "--results", str(tmp_path / "results")]) == 0
    assert "holds no run folder that is finished and certified" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["large-model"], "there is no table named 'large-model'"),
        (["large-models", "--rows", "svhn"], "no row of large-models has the words 'svhn'"),
        (["all", "--rows", "svhn"], "no table has a row with the words 'svhn'"),
        (["large-models", "--scale", "fast"], "--scale fast is neither paper, quick nor a number above 0"),
        (["large-models", "--format", "xml"], "--format xml is unknown"),
        (["large-models", "--pack", "x.zip"], "--pack x.zip is no name of a tar file"),
        (["large-models", "--unpack", "none.tar"], "there is no none.tar"),
        (["large-models", "--write", "x.txt"], "--write x.txt is no name of a Markdown file"),
        (["large-models", "--page", "x.htm"], "--page x.htm is no name of an HTML file"),
        (["large-models", "--device", "cpu"], "cifar10"),
        (["large-models", "--from", "nowhere"], "there is no folder nowhere"),
        (["large-models", "--from", ".", "--tf32"], "--tf32 is about training, and --from trains nothing"),
        (["large-models", "--pack-runs"], "--pack-runs says what --pack packs, which is not given"),
        (["collect", "--runs", "nowhere"], "there is no folder nowhere"),
    ],
)
def test_mistakes_give_one_message_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["reproduce", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_a_quick_look_is_not_written_down(capsys, tmp_path):
    arguments = ["ours", "--scale", "quick", "--from", str(tmp_path), "--write", str(tmp_path / "page.md")]
    assert run(["reproduce", *arguments]) == 2
    assert "a quick look is no result" in capsys.readouterr().err


def test_nothing_trained_says_so_in_every_format(capsys, tmp_path):
    for form in ("table", "markdown", "csv", "latex"):
        assert run(["reproduce", "large-models", "--from", str(tmp_path), "--format", form]) == 0
        assert capsys.readouterr().out.count("not run") == 16


def test_the_page_of_results_is_what_the_evidence_says(tmp_path):
    page = tmp_path / "results.md"
    assert run(["reproduce", "all", "--from", str(ROOT / "results"), "--write", str(page)]) == 0
    assert page.read_text() == (ROOT / "docs" / "results.md").read_text(), (
        "docs/results.md is out of date: patchcert reproduce all --from results --write docs/results.md"
    )


def test_tables_are_written_as_an_html_page(capsys, tmp_path):
    page = tmp_path / "new" / "tables.html"
    assert run(["reproduce", "all", "--from", str(ROOT / "results"), "--page", str(page)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"the page is {page}" in captured.err
    written = page.read_text(encoding="utf-8")
    assert written.count("<article ") == len(table_names())
    assert f"--from {ROOT / 'results'}" in written
