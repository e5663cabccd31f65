"""The commit of a run that was trained from a copy of a checkout."""

import subprocess

from patchcert.train import environment


def test_a_commit_is_known_by_the_sum_of_the_code_alone(monkeypatch):
    monkeypatch.setattr(environment, "_commit", lambda: "abc")
    assert environment.commit_of(environment.source_sha256()) == "abc"
    assert environment.commit_of("0" * 64) == ""
    assert environment.commit_of("") == ""


def test_code_that_was_changed_since_is_of_no_commit(tmp_path):
    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(
            ["git", "-C", tmp_path, *name, *words], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    assert environment.commit_at(tmp_path) == ""
    git("init")
    code = tmp_path / "package" / "code.py"
    code.parent.mkdir()
    code.write_text("one = 1\n")
    git("add", ".")
    git("commit", "-m", "one")
    assert environment.commit_at(code.parent) == git("rev-parse", "HEAD")
    (tmp_path / "package" / "notes.txt").write_text("no code\n")
    assert environment.commit_at(code.parent) == git("rev-parse", "HEAD")
    (tmp_path / "package" / "more.py").write_text("two = 2\n")
    assert environment.commit_at(code.parent) == ""
