import re

from patchcert.cli.output import progress_bar


def test_without_a_terminal_only_the_last_line_is_written(capsys):
    with progress_bar("counting", "sheep") as report:
        for done in range(1, 4):
            report(done, 3)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"counting: 3 sheep in \d+\.\d s\n", shown.err)


def test_on_a_terminal_a_bar_is_drawn(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("counting", "sheep") as report:
        report(1, 0)
        report(3, 3)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "3/3" in shown.err
