"""The commit of a run that was trained from a copy of a checkout."""

from patchcert.train import environment


def test_a_commit_is_known_by_the_sum_of_the_code_alone(monkeypatch):
    monkeypatch.setattr(environment, "_commit", lambda: "abc")
    assert environment.commit_of(environment.source_sha256()) == "abc"
    assert environment.commit_of("0" * 64) == ""
    assert environment.commit_of("") == ""
