"""A fixture for folders of tests that must not find the data of the machine they run on."""

import pytest


@pytest.fixture(autouse=True)
def no_other_data(monkeypatch, tmp_path_factory):
    monkeypatch.delenv("PATCHCERT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
