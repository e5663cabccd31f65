import os
import subprocess
import sys
import types

import pytest
import torch

from patchcert import __version__
from patchcert.cli import app
from patchcert.cli.app import run
from patchcert.cli.output import detail, say
from patchcert.errors import InvalidInput
from patchcert.models import registry


@pytest.fixture
def command(monkeypatch):
    """Makes a function the command `probe`."""

    def install(function):
        module = types.ModuleType("patchcert.cli.probe")
        module.probe = function
        monkeypatch.setitem(sys.modules, "patchcert.cli.probe", module)
        monkeypatch.setattr(app, "COMMANDS", {"probe": "A probe."})

    return install


def raising(error):
    """A command that only raises the error."""

    def probe():
        raise error

    return probe


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 246.00 MiB.\nmore"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        MemoryError("16 GiB"),
    ],
)
def test_too_little_memory_is_no_false_proof(capsys, command, error):
    command(raising(error))
    assert run(["probe"]) == 2
    said = capsys.readouterr().err
    assert f"error: memory does not suffice: {str(error).splitlines()[0]}\n" in said
    assert "--batch-size" in said


def test_a_bug_is_no_false_proof(capsys, command):
    command(raising(ZeroDivisionError("one by none")))
    with pytest.raises(SystemExit) as ended:
        app.main(["probe"])
    assert ended.value.code == 70
    assert "ZeroDivisionError: one by none" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(capsys, option):
    assert run([option]) == 0
    assert capsys.readouterr().out == f"patchcert {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(capsys, arguments):
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in ("certify", "data"))


def test_every_command_can_be_loaded(capsys):
    for name in app.COMMANDS:
        assert run([name, "--help"]) == 0
        assert capsys.readouterr().out


def test_a_module_of_ones_own_is_imported_first(capsys, tmp_path, monkeypatch, refused):
    (tmp_path / "own_models.py").write_text(
        "from torch import nn\n"
        "from patchcert.models import architecture\n"
        "@architecture('own')\n"
        "def own(spec):\n"
        "    pixels = spec.channels * spec.height * spec.width\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, spec.classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_builders", dict(registry._builders))
    changes = ("data.name=mnist-mini", "data.limit=32", "model.name=own", "schedule.epochs=1")
    settings = [word for change in changes for word in ("--set", change)]
    train = ["train", "paper-mnist", *settings, "--out", "run"]
    assert "on the command line in a module that --import names" in refused(run(train))
    assert run(["--import", "own_models", *train]) == 0
    assert run(["--import", "own_models", "certify", "run", "--limit", "3"]) == 0
    assert run(["--import", "absent_models", *train]) == 2
    assert "--import absent_models: No module named 'absent_models'" in capsys.readouterr().err


def test_help_breaks_lines_where_the_window_ends_only(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert run(["certify", "--help"]) == 0
    assert "JSON on stdout. A proof of zoo:NAME is compared" in capsys.readouterr().out


def test_help_does_not_wait_for_torch():
    code = "import sys; from patchcert.cli.app import run; run(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "patchcert", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"patchcert {__version__}\n")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            InvalidInput("the image is [bold]upside down[/bold]", hint="turn it."),
            2,
            "error: the image is [bold]upside down[/bold]\nhint: turn it.\n",
        ),
        (InvalidInput("no"), 2, "error: no\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_what_ends_a_command_is_said_in_a_line_or_two(capsys, command, error, code, said):
    command(raising(error))
    assert run(["probe"]) == code
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", said)


@pytest.mark.parametrize(
    "arguments", [["probe", "--no-such-option"], ["probe", "extra"], ["nonsense"], ["--bad"]]
)
def test_usage_errors_exit_with_2_and_point_to_help(capsys, command, arguments):
    command(lambda: None)
    assert run(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ")
    assert lines[-1].startswith("hint: run `patchcert")


def test_a_path_that_cannot_be_used_is_named(capsys, command, tmp_path):
    (tmp_path / "file").touch()

    def probe():
        (tmp_path / "file" / "page.html").write_text("")

    command(probe)
    assert run(["probe"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {tmp_path}/file/page.html cannot be used: Not a directory",
        "hint: name another file or folder.",
    ]


@pytest.mark.parametrize("error", [OSError("out of order"), ZeroDivisionError("by a bug")])
def test_a_bug_and_an_error_of_the_system_without_a_path_are_not_hidden(command, error):
    command(raising(error))
    with pytest.raises(type(error), match=str(error)):
        run(["probe"])


def test_main_exits_with_the_code(command):
    command(lambda: None)
    with pytest.raises(SystemExit) as caught:
        app.main(["probe"])
    assert caught.value.code == 0


def test_no_color_is_respected(monkeypatch, capsys, command):
    command(raising(InvalidInput("no", hint="yes")))
    monkeypatch.setenv("FORCE_COLOR", "1")
    run(["probe"])
    assert "\x1b[" in capsys.readouterr().err
    monkeypatch.setenv("NO_COLOR", "1")
    run(["probe"])
    assert "\x1b[3" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("broken_by_value", "raise ValueError('boom')", "ValueError: boom"),
        ("broken_by_words", "def f(:", "SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_a_mistake_and_no_traceback(
    refused, tmp_path, monkeypatch, name, content, message
):
    (tmp_path / f"{name}.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    assert f"--import {name}: the module raised {message}" in refused(run(["--import", name, "zoo", "list"]))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("option", "expected"), [("-q", ""), ("--quiet", ""), ("-v", "usual\nmore\n"), (None, "usual\n")]
)
def test_quiet_and_verbose_stand_before_or_behind_the_command(capsys, command, before, option, expected):
    def probe(number: int = 1):
        say("usual")
        detail("more")

    command(probe)
    given = [] if option is None else [option]
    assert run([*given, "probe"] if before else ["probe", "--number", "2", *given]) == 0
    assert capsys.readouterr().err == expected
    say("usual")
    assert capsys.readouterr().err == "usual\n"


def test_errors_are_said_to_those_who_want_quiet(capsys, command):
    command(raising(InvalidInput("no")))
    assert run(["probe", "-q"]) == 2
    assert capsys.readouterr().err == "error: no\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("patchcert ce", "certify"),
        ("patchcert certify --pl", "--placements"),
        ("patchcert zoo s", "show\nspec"),
    ],
)
def test_a_shell_completes_commands_and_their_options(words, expected):
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_PATCHCERT_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-m", "patchcert"], capture_output=True, text=True, env={**os.environ, **asked}
    )
    assert done.stdout.strip() == expected
