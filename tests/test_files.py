import errno
import hashlib
import os
import re
import stat
from pathlib import Path

import pytest

from patchcert.errors import StorageError
from patchcert.files import (
    STORAGE_ERRORS,
    atomic_write,
    copy_file,
    new_folder,
    sha256,
    write_text,
    write_together,
)


def test_a_file_appears_whole(tmp_path):
    path = tmp_path / "new" / "file"
    with atomic_write(path) as stream:
        stream.write(b"one ")
        assert not path.exists()
        stream.write(b"two")
    assert path.read_bytes() == b"one two"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def interrupted_write():
        with atomic_write(path) as stream:
            stream.write(b"new")
            raise error

    with pytest.raises(error):
        interrupted_write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_others_may_read_it_as_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    with atomic_write(tmp_path / "atomic") as stream:
        stream.write(b"x")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "atomic")}
    assert len(modes) == 1


def test_the_sum_is_sha256(tmp_path):
    (tmp_path / "file").write_bytes(b"patch")
    assert sha256(tmp_path / "file") == hashlib.sha256(b"patch").hexdigest()


def fail_with(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", STORAGE_ERRORS)
def test_a_full_disk_is_one_error_that_names_the_file(tmp_path, monkeypatch, number):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fail_with(number))
    with pytest.raises(StorageError, match=f"{path} cannot be written: {os.strerror(number)}"):
        write_text(path, "new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_whatever_the_system_refuses_is_named(tmp_path, monkeypatch, step):
    monkeypatch.setattr(os, step, fail_with(errno.EACCES))
    with pytest.raises(
        StorageError, match="file cannot be written: Permission denied\nhint: name a file in a folder"
    ):
        write_text(tmp_path / "file", "new")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_a_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (Path("."), tmp_path):
        with pytest.raises(StorageError, match=f"{re.escape(str(path))} cannot be written: "):
            write_text(path, "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file/page cannot be written: (Not a directory|File exists)"):
        write_text(tmp_path / "file" / "page", "new")


def test_errors_of_other_things_in_the_block_stay_what_they_are(tmp_path):
    """A connection that ends while a download is written says nothing of the file."""

    def download():
        with atomic_write(tmp_path / "file"):
            raise ConnectionResetError(errno.ECONNRESET, "gone")

    with pytest.raises(ConnectionResetError):
        download()
    with pytest.raises(FileNotFoundError):
        copy_file(tmp_path / "absent", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_files_are_written_together_or_not_at_all(tmp_path, monkeypatch):
    files = {tmp_path / name: name.encode() for name in ("one", "two", "three")}
    for path in files:
        path.write_bytes(b"old")
    real, calls = os.fsync, []

    def third_fails(number):
        calls.append(number)
        return real(number) if len(calls) < 3 else fail_with(errno.ENOSPC)()

    monkeypatch.setattr(os, "fsync", third_fails)
    with pytest.raises(StorageError, match="three cannot be written: No space left on device"):
        write_together(files)
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == [b"old"] * 3
    monkeypatch.setattr(os, "fsync", real)
    write_together(files)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_new_folder_is_as_it_was_after_an_error(tmp_path, error):
    def fill(folder):
        with new_folder(folder):
            write_text(folder / "below" / "file", "x")
            write_text(folder / "file", "x")
            raise error

    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "new" / "folder"):
        with pytest.raises(error):
            fill(folder)
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]
