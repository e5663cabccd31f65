import re
import shlex

import pytest
import typer

from patchcert.cli.app import COMMANDS, create_app, run
from patchcert.cli.examples import EXAMPLES, PANELS


def commands():
    """Every command by the words that call it, those below `data` and `zoo` included."""
    found = {}
    for name in COMMANDS:
        command = typer.main.get_command(create_app([name])).commands[name]
        found[name] = command
        found |= {f"{name} {below}": each for below, each in getattr(command, "commands", {}).items()}
    return found


KNOWN = commands()


def examples(name):
    return [line for line in EXAMPLES if f"{line} ".startswith(f"patchcert {name} ")]


def test_every_example_can_be_read():
    for line in EXAMPLES:
        words = shlex.split(line)[1:]
        command = KNOWN.get(" ".join(words[:2])) or KNOWN[words[0]]
        options = {option for parameter in command.params for option in parameter.opts}
        given = {word for word in words if word[:2] == "--"}
        needed = {each.opts[0] for each in command.params if each.required and each.opts[0][:2] == "--"}
        assert needed <= given <= options, line


@pytest.mark.parametrize("name", KNOWN)
def test_help_ends_with_two_examples_and_speaks_of_no_ranges(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert run([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    first, second, *_ = examples(name)
    assert all(line in shown.partition("Examples:")[2] for line in (first, second))
    assert not re.search(r"range|x>=|<=x", shown)


def test_options_that_belong_together_have_a_panel(capsys):
    assert run(["certify", "--help"]) == 0
    shown = capsys.readouterr().out
    panels = dict(re.findall(r"╭─ (\w+) ─+╮\n(.*?)╰", shown, re.DOTALL))
    assert list(panels) == ["Arguments", "Options", "Model", "Threat", "Images", "Proof"]
    assert "--patch" in panels["Threat"]
    assert "--limit" in panels["Images"]
    assert "--method" in panels["Proof"]


def test_panels_name_options_that_there_are():
    names = {parameter.name for command in KNOWN.values() for parameter in command.params}
    assert {name for panel in PANELS.values() for name in panel.split()} <= names
