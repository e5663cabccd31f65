import hashlib
import stat

import pytest

from patchcert.files import atomic_write, sha256


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
