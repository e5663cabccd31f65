import dataclasses
import gzip
import hashlib
import json
import struct

import pytest

from patchcert.cli.app import run
from patchcert.data import sources


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A folder with a tiny MNIST as it would be published; the sums are those of its files."""
    folder, sums = tmp_path / "published", {}
    folder.mkdir()
    for name in sources.MNIST.files:
        shape = (4, 3, 3) if "images" in name else (4,)
        content = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(
            4 * 3 * 3 if "images" in name else 4
        )
        packed = gzip.compress(content, mtime=0)
        (folder / f"{name}.gz").write_bytes(packed)
        sums[f"{name}.gz"] = hashlib.sha256(packed).hexdigest()
    monkeypatch.setitem(sources.SOURCES, "mnist", dataclasses.replace(sources.MNIST, sums=sums))
    return folder


def test_list_says_what_is_there(answered, published):
    rows = {row["name"]: row for row in answered(run(["data", "list", "--data-dir", str(published)]))["data"]}
    assert rows["mnist-mini"]["available"]
    assert rows["mnist"] == {"name": "mnist", "available": True, "where": str(published)}
    assert rows["cifar10"] == {"name": "cifar10", "available": False, "where": None}


def test_fetch_then_verify(capsys, tmp_path, published, answered):
    target = tmp_path / "data"
    assert run(["data", "fetch", "mnist", "--data-dir", str(target), "--mirror", published.as_uri()]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"name": "mnist", "folder": str(target / "mnist")}
    whole = sum(path.stat().st_size for path in published.iterdir())
    assert f"fetching mnist: {whole} bytes" in shown.err
    verified = answered(run(["data", "verify", "mnist", "--data-dir", str(target)]))
    assert (verified["train"], verified["test"]) == (4, 4)
    assert all(file["verified"] for file in verified["files"])


def test_fetch_fills_the_cache_by_default(answered, published):
    found = answered(run(["data", "fetch", "mnist", "--mirror", published.as_uri()]))
    assert found["folder"].endswith("/patchcert/mnist")


def test_verify_finds_damage(capsys, published):
    (published / "t10k-labels-idx1-ubyte.gz").write_bytes(b"broken")
    assert run(["data", "verify", "mnist", "--data-dir", str(published)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "t10k-labels-idx1-ubyte.gz is damaged" in shown.err
    assert (
        "hint: delete it and run `patchcert data fetch mnist`, with the same --data-dir if you gave one."
        in shown.err
    )


def test_a_dead_mirror_gives_the_url_and_the_place_for_the_file(capsys, tmp_path):
    arguments = ["data", "fetch", "cifar10", "--data-dir", str(tmp_path), "--mirror", "http://127.0.0.1:9/"]
    assert run(arguments) == 2
    shown = capsys.readouterr().err
    assert "http://127.0.0.1:9/cifar-10-binary.tar.gz" in shown
    assert f"put it at {tmp_path / 'cifar-10-binary.tar.gz'}" in shown


@pytest.mark.parametrize("command", ["fetch", "verify"])
def test_the_embedded_set_needs_neither(refused, command):
    assert "mnist-mini ships with the package" in refused(run(["data", command, "mnist-mini"]))


@pytest.mark.parametrize("command", ["fetch", "verify"])
def test_folders_have_no_published_sums(capsys, command):
    assert run(["data", command, "folder:photos"]) == 2
    shown = capsys.readouterr().err
    assert "folder:photos is a folder of yours" in shown
    assert "hint: its sums are written down with every training and all evidence" in shown
