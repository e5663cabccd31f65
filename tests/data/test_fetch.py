import functools
import gzip
import http.server
import threading
from pathlib import Path

import pytest

from patchcert.data.fetch import fetch
from patchcert.data.files import load_source
from patchcert.errors import DataError


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def mirror(tmp_path):
    """A web server on this machine and the folder it serves."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def names(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_files_are_fetched_checked_and_then_found(tmp_path, mirror, write_mnist, mnist_source):
    folder, url = mirror
    write_mnist(folder)
    seen = []
    target = fetch(mnist_source, tmp_path / "data", url, lambda *step: seen.append(step))
    assert target == tmp_path / "data" / "mnist"
    assert len(load_source(mnist_source, tmp_path / "data").train) == 20
    assert names(target) == sorted([*mnist_source.published, "SHA256SUMS"])
    assert {name for name, done, total in seen if done == total > 0} == set(mnist_source.published)


@pytest.mark.parametrize("name", [Path.as_uri, str])
def test_a_folder_is_a_mirror_too(tmp_path, write_mnist, mnist_source, name):
    write_mnist(tmp_path / "stick")
    fetch(mnist_source, tmp_path / "data", name(tmp_path / "stick"))
    assert len(load_source(mnist_source, tmp_path / "data").test) == 10


def test_what_is_intact_is_not_fetched_again(tmp_path, write_mnist, mnist_source):
    folder = write_mnist(tmp_path / "mnist")
    assert fetch(mnist_source, tmp_path, "http://127.0.0.1:9/never-asked") == folder


def test_only_the_damaged_file_is_replaced(tmp_path, write_mnist, mnist_source):
    folder = write_mnist(tmp_path / "mnist")
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(b"broken")
    stick = write_mnist(tmp_path / "stick")
    for name in mnist_source.published:
        if name != "train-labels-idx1-ubyte.gz":
            (stick / name).unlink()
    fetch(mnist_source, tmp_path, stick.as_uri())
    assert len(load_source(mnist_source, tmp_path).train) == 20


def test_a_wrong_sum_leaves_nothing_behind(tmp_path, mirror, write_mnist, mnist_source):
    folder, url = mirror
    write_mnist(folder)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(
        DataError, match=f"could not be fetched from {url}train-images.*the SHA-256 of what came is"
    ):
        fetch(mnist_source, tmp_path / "data", url)
    assert names(tmp_path / "data") == []


def test_a_mirror_without_the_file_is_named_with_the_way_out(tmp_path, mirror, mnist_source):
    _, url = mirror
    with pytest.raises(DataError, match=rf"{url}train-images-idx3-ubyte.gz \(HTTP 404") as caught:
        fetch(mnist_source, tmp_path / "data", url)
    by_hand = tmp_path / "data" / "mnist" / "train-images-idx3-ubyte.gz"
    assert caught.value.hint.startswith(f"download it by hand and put it at {by_hand}")


def test_no_network_gives_one_clear_error(tmp_path, cifar10_source):
    with pytest.raises(DataError, match=r"http://127.0.0.1:9/cifar-10-binary.tar.gz \(.*refused") as caught:
        fetch(cifar10_source, tmp_path, "http://127.0.0.1:9")
    assert str(tmp_path / "cifar-10-binary.tar.gz") in caught.value.hint
    assert names(tmp_path) == []


def test_the_next_mirror_is_tried(tmp_path, mirror, write_mnist, mnist_source):
    import dataclasses

    folder, url = mirror
    write_mnist(folder)
    source = dataclasses.replace(mnist_source, mirrors=("http://127.0.0.1:9/", url))
    fetch(source, tmp_path / "data")
    assert len(load_source(source, tmp_path / "data").train) == 20


def test_an_archive_is_unpacked_and_its_sums_recorded(tmp_path, mirror, cifar100_archive, cifar100_source):
    folder, url = mirror
    (folder / "cifar-100-binary.tar.gz").write_bytes(cifar100_archive)
    target = fetch(cifar100_source, tmp_path / "data", url)
    assert names(tmp_path / "data") == ["SHA256SUMS", "fine_label_names.txt", "test.bin", "train.bin"]
    assert len(load_source(cifar100_source, tmp_path / "data").train) == 4
    (target / "test.bin").write_bytes(bytes(2 * 3074))
    with pytest.raises(DataError, match=r"test.bin is damaged"):
        load_source(cifar100_source, tmp_path / "data")


def test_a_cut_download_is_noticed(tmp_path, mirror, cifar10_archive, cifar10_source, monkeypatch):
    def shorter(self, *arguments):
        self.wfile.write(cifar10_archive[:1000])

    folder, url = mirror
    (folder / "cifar-10-binary.tar.gz").write_bytes(cifar10_archive)
    monkeypatch.setattr(QuietHandler, "copyfile", shorter)
    with pytest.raises(DataError, match=f"ended after 1000 of {len(cifar10_archive)} bytes"):
        fetch(cifar10_source, tmp_path / "data", url)
    assert names(tmp_path / "data") == []
