"""A disk that takes no more: every command that writes gives one message, exit code 2, and leaves nothing half written.

The limit that the system has on the size of files stands for the full disk: a write beyond it fails as well.
"""

import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from other_processes import environment
from patchcert.cli.app import run
from patchcert.data import sources
from patchcert.files import sha256

resource = pytest.importorskip("resource", reason="limits on the size of files are a matter of POSIX")

TINY = (
    "data.limit=16",
    "model.hidden=4",
    "threat.stamp=20x20",
    "optimiser.batch_size=16",
    "run.check_every=0",
)


@contextlib.contextmanager
def no_room_beyond(size):
    """Files of at most so many bytes; what is larger is cut short."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


RESULTS = str(Path(__file__).parents[2] / "results")


def tiny_training(out):
    changes = [word for change in ("data.name=mnist-mini", *TINY) for word in ("--set", change)]
    return ["train", "paper-mnist", "--scale", "0.02", *changes, "--device", "cpu", "--out", str(out)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run with certificates of all test images."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run(tiny_training(folder)) == 0
    assert run(["certify", str(folder), "--device", "cpu"]) == 0
    return folder


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A folder of published files, as MNIST in four files, whatever they hold."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    for name in sources.MNIST.published:
        (folder / name).write_bytes(name.encode() * 100)
    sums = {name: sha256(folder / name) for name in sources.MNIST.published}
    monkeypatch.setitem(sources.SOURCES, "mnist", dataclasses.replace(sources.MNIST, sums=sums))
    return folder


def commands(trained, out):
    """Command lines by name, each with the files of its own below the folder."""
    attack = ["attack", str(trained), "--images", "2", "--restarts", "1", "--steps", "1", "--device", "cpu"]
    rows = ["strategy-detail-5x5", "--rows", "MNIST all mlp"]
    return {
        "train": tiny_training(out / "run"),
        "certify": ["certify", str(trained), "--limit", "3", "--device", "cpu", "--out", str(out / "e.npz")],
        "attack": [*attack, "--out", str(out / "e.npz")],
        "join": ["join", str(trained), str(trained), "--out", str(out / "joined.safetensors")],
        "trim": ["trim", str(trained), "--device", "cpu", "--out", str(out / "new" / "run")],
        "report": ["report", str(trained), "--out", str(out / "page.html")],
        "explain": ["explain", str(trained), "3", "--device", "cpu", "--out", str(out / "page.html")],
        "demo": ["demo", "--quick", "--out", str(out / "demo")],
        "zoo copy": ["zoo", "copy", "mnist-5x5-mlp", "--out", str(out / "new" / "run")],
        "zoo add": ["zoo", "add", str(trained), "--zoo", str(out / "zoo")],
        "reproduce --write": ["reproduce", *rows, "--from", RESULTS, "--write", str(out / "page.md")],
        "reproduce --page": ["reproduce", *rows, "--from", RESULTS, "--page", str(out / "page.html")],
        "reproduce": ["reproduce", *rows, "--scale", "quick", "--device", "cpu", "--runs", str(out)],
        "data fetch": [
            "data",
            "fetch",
            "mnist",
            "--data-dir",
            str(out),
            "--mirror",
            str(out.parent / "mirror"),
        ],
    }


def left_in(folder):
    """Files that were written, by what they are called; a lock is no result."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return sorted(str(path.relative_to(folder)) for path in files)


REPEATED = (
    "train",
    "certify",
    "attack",
    "join",
    "trim",
    "report",
    "zoo copy",
    "zoo add",
    "reproduce --write",
)


@pytest.mark.parametrize("name", commands(Path(), Path()))
def test_without_any_room_there_is_one_message_and_no_file(name, trained, mirror, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    command = commands(trained, out)[name]
    with no_room_beyond(0):
        assert run(command) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (error,) = [line for line in said.err.splitlines() if line.startswith("error:")]
    assert error.endswith("cannot be written: File too large")
    assert str(out) in error
    assert left_in(out) == []
    if name in REPEATED:
        assert run(command) == 0


@pytest.mark.parametrize("name", ["zoo copy", "trim"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_that_is_half_full_is_emptied_so_that_the_command_can_be_given_again(
    name, is_there, trained, tmp_path
):
    """There is room for the specification, not for the weights."""
    command, folder = commands(trained, tmp_path)[name], tmp_path / "new" / "run"
    if is_there:
        folder.mkdir(parents=True)
    with no_room_beyond(3000):
        assert run(command) == 2
    assert list(tmp_path.rglob("*")) == ([folder.parent, folder] if is_there else [])
    assert run(command) == 0
    assert (folder / "weights.safetensors").is_file()


def test_training_that_finds_no_room_for_its_state_resumes(tmp_path, capsys):
    command = tiny_training(tmp_path / "run")
    with no_room_beyond(5000):
        assert run(command) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    assert run([*command, "--resume"]) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device of a full disk is a matter of Linux")
@pytest.mark.parametrize("arguments", [["zoo", "list"], ["zoo", "spec", "mnist-5x5-mlp"]])
def test_an_output_that_is_full_is_said_without_a_traceback(arguments):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "patchcert", *arguments],
            stdout=full,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        [
            "error: the output cannot be written: No space left on device",
            "hint: free some space there, or write to another disk.",
        ],
    )
