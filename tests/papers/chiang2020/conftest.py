"""No test of the paper's tables finds the data of the machine it runs on."""

import pytest


@pytest.fixture(autouse=True)
def _no_other_data(monkeypatch, tmp_path_factory):
    monkeypatch.delenv("PATCHCERT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
